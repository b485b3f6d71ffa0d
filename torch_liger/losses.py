"""The losses: check the arguments, choose the implementation, run it."""

from typing import Any

import torch

from liger_ops import backend_triton
from liger_ops.cross_entropy import eager as cross_entropy_eager
from liger_ops.cross_entropy.check import check_arguments as check_cross_entropy
from torch_liger.arguments import check_device, described

if backend_triton.triton is not None:
    from liger_ops.cross_entropy import triton_kernel as cross_entropy_triton


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
    extras = [torch.zeros_like(loss) if z is None else z] if return_z_loss else []
    extras += [metrics] if return_metrics else []
    return (loss, *extras) if extras else loss


def _on(device: torch.device, count: int | float | torch.Tensor) -> torch.Tensor:
    """A scalar there, without waiting for the device."""
    if isinstance(count, torch.Tensor):
        return count.detach().reshape(()).to(device, non_blocking=True)
    return torch.full((), count, dtype=torch.float32, device=device)
