"""What cross_entropy accepts and what it returns beside the loss, said once for both frameworks."""

from typing import Any, NamedTuple

from liger_ops.checking import Described, check_dtype, listed

REDUCTIONS = ("mean", "sum", "none")


class Metrics(NamedTuple):
    """What `return_metrics=True` gives.

    Attributes:
        token_accuracy: float32 scalar, the fraction of supervised tokens whose largest logit is the
            label's; 0 where none is supervised.
        predicted_tokens: of the labels' shape, the class with the largest logit, the first of
            equals; -1 where the label is ignore_index.
    """

    token_accuracy: Any
    predicted_tokens: Any


def check_arguments(
    logits: Described,
    labels: Described,
    class_weight: Described | None,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    reduction: str,
    num_items_given: bool,
) -> None:
    """Raises ValueError or TypeError, naming the argument and both values."""
    check_dtype("logits", logits)
    if not logits[0] or logits[0][-1] == 0:
        raise ValueError(f"logits must be (..., V) with V of at least 1; got {tuple(logits[0])}")
    if not labels[1].startswith(("int", "uint")):
        raise TypeError(f"labels must have an integer dtype; got {labels[1]}")
    if tuple(labels[0]) != tuple(logits[0][:-1]):
        raise ValueError(
            f"labels must have the shape of logits {tuple(logits[0])} without its last dimension; "
            f"got {tuple(labels[0])}"
        )
    check_dtype("class_weight", class_weight)
    if class_weight is not None and tuple(class_weight[0]) != (logits[0][-1],):
        raise ValueError(
            f"class_weight must have shape (V,) with V = {logits[0][-1]}, the last dimension of "
            f"logits {tuple(logits[0])}; got {tuple(class_weight[0])}"
        )
    check_settings(label_smoothing, softcap, z_loss, reduction, num_items_given)


def check_settings(
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    reduction: str,
    num_items_given: bool,
) -> None:
    """The part that needs no logits."""
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1]; got {label_smoothing}")
    if softcap is not None and not softcap > 0.0:
        raise ValueError(f"softcap must be None or above 0; got {softcap}")
    if not z_loss >= 0.0:
        raise ValueError(f"z_loss must be at least 0; got {z_loss}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {listed(REDUCTIONS)}; got {reduction!r}")
    if num_items_given and reduction != "mean":
        raise ValueError(
            f"num_items takes the place of the mean's count, so reduction must be 'mean'; got "
            f"{reduction!r}"
        )
