"""What fused_linear_cross_entropy and per_token_logps accept, said once for both frameworks."""

from liger_ops.checking import Described, check_dtype, listed
from liger_ops.cross_entropy.check import check_arguments as check_cross_entropy

SUM_DTYPES = ("float32", "bfloat16")


def check_arguments(
    hidden: Described,
    weight: Described,
    labels: Described,
    bias: Described | None,
    class_weight: Described | None,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    reduction: str,
    num_items_given: bool,
    accum_dtype: str,
    memory: str | int,
    vocab_axis: int = 0,
) -> None:
    """Raises ValueError or TypeError, naming the argument and both values."""
    check_dtype("hidden", hidden)
    check_dtype("weight", weight)
    if not hidden[0]:
        raise ValueError("hidden must have at least one dimension, (..., D); got shape ()")
    if vocab_axis not in (0, 1):
        raise ValueError(f"vocab_axis must be one of 0, 1; got {vocab_axis}")
    shape, dim = tuple(weight[0]), hidden[0][-1]
    if len(shape) != 2 or shape[1 - vocab_axis] != dim or shape[vocab_axis] == 0:
        wanted = "(V, D)" if vocab_axis == 0 else "(D, V)"
        empty = "; an empty weight is what a sharded parameter looks like outside its module"
        raise ValueError(
            f"weight must have shape {wanted} with D = {dim}, the last dimension of hidden "
            f"{tuple(hidden[0])}; got {shape}{empty if 0 in shape else ''}"
        )
    vocab = shape[vocab_axis]
    check_dtype("bias", bias)
    if bias is not None and tuple(bias[0]) != (vocab,):
        raise ValueError(
            f"bias must have shape (V,) with V = {vocab} of weight {shape}; got {tuple(bias[0])}"
        )
    if tuple(labels[0]) != tuple(hidden[0][:-1]):
        raise ValueError(
            f"labels must have the shape of hidden {tuple(hidden[0])} without its last dimension; "
            f"got {tuple(labels[0])}"
        )
    logits = ((*hidden[0][:-1], vocab), hidden[1])
    check_cross_entropy(
        logits, labels, class_weight, label_smoothing, softcap, z_loss, reduction, num_items_given
    )
    if accum_dtype not in SUM_DTYPES:
        raise ValueError(f"accum_dtype must be one of {listed(SUM_DTYPES)}; got {accum_dtype!r}")
    if memory not in ("fast", "least") and not (isinstance(memory, int) and memory > 0):
        raise ValueError(f"memory must be 'fast', 'least' or a number of bytes; got {memory!r}")


def check_temperature(temperature: float) -> None:
    if not temperature > 0.0:
        raise ValueError(f"temperature must be above 0; got {temperature}")
