"""The losses: check the arguments, choose the implementation, run it."""

import functools
from typing import Any

import torch

from liger_ops import backend_triton
from liger_ops.cross_entropy import eager as cross_entropy_eager
from liger_ops.cross_entropy.check import check_arguments as check_cross_entropy
from liger_ops.fused_linear_cross_entropy import eager as linear_eager
from liger_ops.fused_linear_cross_entropy import eager_vocab as vocab_eager
from liger_ops.fused_linear_cross_entropy.check import check_arguments as check_linear
from liger_ops.fused_linear_cross_entropy.check import check_temperature
from torch_liger import vocab_parallel
from torch_liger.arguments import check_device, described

if backend_triton.triton is not None:
    from liger_ops.cross_entropy import triton_kernel as cross_entropy_triton
    from liger_ops.cross_entropy.triton_launch import Settings
    from liger_ops.fused_linear_cross_entropy import triton_kernel as linear_triton
    from liger_ops.fused_linear_cross_entropy import triton_vocab as vocab_triton


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    class_weight: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    num_items: int | torch.Tensor | None = None,
    return_z_loss: bool = False,
    return_metrics: bool = False,
    implementation: str | None = None,
) -> Any:
    """Cross-entropy between logits and the labels' classes.

        l = softcap * tanh(logits / softcap)        (or the logits themselves)
        a = logsumexp(l)
        loss of a token = (1 - label_smoothing) * w[label] * (a - l[label])
                          + label_smoothing / V * sum_j w[j] * (a - l[j])
                          + z_loss * a^2

    Args:
        logits: (..., V), float32, bfloat16 or float16 (float64 by the eager version only). Never
            written to.
        labels: (...), of an integer dtype. One that is neither a class nor `ignore_index` makes
            its token's loss and gradient NaN, and reads nothing out of bounds.
        ignore_index: tokens with this label count for nothing and get zeros as gradient.
        class_weight: w, (V,), a constant: it gets no gradient. None is 1 for every class.
        label_smoothing: the part of the target that is spread over all classes, in [0, 1].
        softcap: c of c tanh(x / c), as Gemma 2 caps its logits.
        z_loss: the coefficient of the squared log-partition, which keeps it near 0.
        reduction: "mean", "sum" or "none". The mean divides the first two terms by the sum of
            w[label] over the tokens that count, and the third by their number. Where no token
            counts the loss is 0, with zeros as gradient.
        num_items: what the mean divides by instead, a number or a tensor of one on any device: the
            number of supervised tokens in all batches whose gradients are accumulated.
        return_z_loss, return_metrics: also return these.
        implementation: "triton", "eager", or None for the kernel on a supported GPU and eager
            elsewhere.

    Returns:
        loss, float32: a scalar, or of the labels' shape where reduction is "none". With
        return_z_loss and return_metrics a tuple of the loss and, in this order, z_loss (the third
        term, reduced as the loss and contained in it) and `Metrics`: token_accuracy over the
        supervised tokens, and predicted_tokens (...) with -1 where the label is ignored.
        Differentiable in the logits, any number of times.

    Numerics: float32 from reading to writing; the gradient is rounded once, to the logits' dtype.

    Raises:
        TypeError, ValueError: for an argument that does not fit, naming it and both values.
        RuntimeError: if the implementation asked for by name cannot run here, with the reason.

    Source: Szegedy et al. (2015), arXiv:1512.00567; de Brebisson and Vincent (2015),
    arXiv:1511.05042; Gemma 2 (2024), arXiv:2408.00118.
    """
    check_cross_entropy(
        described(logits),  # type: ignore[arg-type]
        described(labels),  # type: ignore[arg-type]
        described(class_weight),
        label_smoothing,
        softcap,
        z_loss,
        reduction,
        num_items is not None,
    )
    check_device("labels", labels, "logits", logits)
    check_device("class_weight", class_weight, "logits", logits)
    items = None if num_items is None else _on(logits.device, num_items)
    chosen = backend_triton.choose(implementation, "cross_entropy", logits, class_weight)
    run = cross_entropy_triton if chosen == "triton" else cross_entropy_eager
    loss, z, metrics = run.cross_entropy(
        logits, labels, class_weight, items, ignore_index, label_smoothing, softcap, z_loss,
        reduction, return_metrics,
    )  # fmt: skip
    return _with_extras(loss, z, metrics, return_z_loss)


def fused_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    accum_dtype: torch.dtype = torch.float32,
    memory: str | int = "fast",
    ignore_index: int = -100,
    class_weight: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    num_items: int | torch.Tensor | None = None,
    return_z_loss: bool = False,
    return_metrics: bool = False,
    process_group: Any = None,
    implementation: str | None = None,
) -> Any:
    """The language model's head and its cross-entropy, without ever holding all logits.

        loss = cross_entropy(logit_scale * (hidden @ weight.T) + bias, labels)

    Args:
        hidden: (..., D), float32, bfloat16 or float16 (float64 by the eager version only).
        weight: (V, D), of any of these dtypes. Where the two differ, and under autocast, they are
            cast as a linear layer casts them, and each gradient comes back in its own dtype.
        labels: (...), of an integer dtype.
        bias: (V,), of any of these dtypes.
        logit_scale: multiplies the product, as Cohere's and Granite's heads do.
        accum_dtype: in which the weight's gradient is summed over parts of the rows: float32, or
            bfloat16, which needs no memory of its own and loses the sum's last digits.
        memory: "fast"; "least", which computes the logits twice; or the bytes that may be used
            beside the inputs and the gradients. `liger_ops.fused_linear_cross_entropy.cases.Plan`
            says what each comes to.
        process_group: of the processes over which the classes are split evenly: each gives its own
            classes, in the order of the ranks, of weight, bias and class_weight, the same hidden
            and the same labels, which count the classes of all. Only a few numbers a token cross
            processes, and in the backward the sum of hidden's gradient. A weight that is a DTensor,
            Shard(0) over one dimension of its mesh, says the same without this argument, and may be
            split unevenly; bias and class_weight may then be split as it is or whole. For weights
            of FSDP see `torch_liger.vocab_parallel.as_forward_of`.
        The others are those of `cross_entropy`.

    Returns:
        As `cross_entropy`. Differentiable in hidden, weight and bias, any number of times; what
        asks for no gradient costs no work for one. z_loss and metrics are for reading: they carry
        no gradient.

    Numerics: logits are rounded to the dtype of hidden and weight, once, and the same numbers give
        the loss and its gradient; all else is float32, and each gradient is rounded once more as it
        is written. Products of float32 follow torch.backends.cuda.matmul.

    Raises:
        TypeError, ValueError: for an argument that does not fit, naming it and both values.
        RuntimeError: if the implementation asked for by name cannot run here, with the reason.

    Source: Wijmans et al. (2024), arXiv:2411.09009; Hsu et al. (2024), arXiv:2410.10989.
    """
    given = vocab_parallel.Given(hidden, weight, labels, bias, class_weight)
    shard = None
    if process_group is not None or vocab_parallel.is_dtensor(weight):
        given, shard = vocab_parallel.split(given, process_group)
    hidden, weight, labels, bias, class_weight = given
    check_linear(
        described(hidden),  # type: ignore[arg-type]
        described(weight),  # type: ignore[arg-type]
        described(labels),  # type: ignore[arg-type]
        described(bias),
        described(class_weight),
        label_smoothing,
        softcap,
        z_loss,
        reduction,
        num_items is not None,
        str(accum_dtype).removeprefix("torch."),
        memory,
    )
    for name, tensor in (
        ("weight", weight), ("labels", labels), ("bias", bias), ("class_weight", class_weight),
    ):  # fmt: skip
        check_device(name, tensor, "hidden", hidden)
    items = None if num_items is None else _on(hidden.device, num_items)
    hidden, weight = _as_linear_casts(hidden, weight)
    chosen = backend_triton.choose(
        implementation, "fused_linear_cross_entropy", hidden, weight, bias, class_weight
    )
    if chosen == "triton":
        settings = Settings(
            ignore_index, label_smoothing, softcap, z_loss, reduction, return_metrics, logit_scale
        )
        inputs = (hidden, weight, labels, bias, class_weight, items)
        options = (settings, accum_dtype, memory)
        if shard is None:
            loss, z, metrics = linear_triton.fused_linear_cross_entropy(*inputs, *options)
        else:
            loss, z, metrics = vocab_triton.fused_linear_cross_entropy(*inputs, *options, shard)
    else:
        inputs = (
            hidden, weight, labels, bias, logit_scale, class_weight, items, ignore_index,
            label_smoothing, softcap, z_loss, reduction, return_metrics,
        )  # fmt: skip
        if shard is None:
            loss, z, metrics = linear_eager.fused_linear_cross_entropy(*inputs)
        else:
            loss, z, metrics = vocab_eager.fused_linear_cross_entropy(*inputs, shard)
    return _with_extras(loss, z, metrics, return_z_loss)


def per_token_logps(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    accum_dtype: torch.dtype = torch.float32,
    memory: str | int = "fast",
    process_group: Any = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """The label's log-probability for every token, what preference losses are made of.

        l = softcap * tanh((logit_scale * (hidden @ weight.T) + bias) / softcap) / temperature
        log p = l[label] - logsumexp(l)

    Args:
        temperature: divides the logits, after the soft cap; above 0.
        The others are those of `fused_linear_cross_entropy`.

    Returns:
        (...), float32; 0 where the label is ignore_index. Differentiable as
        `fused_linear_cross_entropy`, in any weighting of the tokens.

    Numerics, errors and source: as `fused_linear_cross_entropy`.
    """
    check_temperature(temperature)
    return -fused_linear_cross_entropy(
        hidden,
        weight,
        labels,
        # c / T tanh((x / T) / (c / T)) is c tanh(x / c) / T.
        bias=None if bias is None else bias / temperature,
        logit_scale=logit_scale / temperature,
        softcap=None if softcap is None else softcap / temperature,
        ignore_index=ignore_index,
        reduction="none",
        accum_dtype=accum_dtype,
        memory=memory,
        process_group=process_group,
        implementation=implementation,
    )


def _with_extras(loss: torch.Tensor, z: torch.Tensor | None, metrics: Any, z_asked: bool) -> Any:
    """The loss, or a tuple of it and what else was asked for."""
    extras = [torch.zeros_like(loss) if z is None else z] if z_asked else []
    extras += [] if metrics is None else [metrics]
    return (loss, *extras) if extras else loss


def _as_linear_casts(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """To autocast's dtype where it is on, and else to the promoted one, as tensors of one dtype."""
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
    return tuple(t.to(dtype) for t in tensors)


def _on(device: torch.device, count: int | float | torch.Tensor) -> torch.Tensor:
    """A scalar there, without waiting for the device."""
    if isinstance(count, torch.Tensor):
        return count.detach().reshape(()).to(device, non_blocking=True)
    return torch.full((), count, dtype=torch.float32, device=device)
