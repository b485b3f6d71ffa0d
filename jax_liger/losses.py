"""The losses: check the arguments, choose the implementation, run it."""

from typing import Any

import jax

from jax_liger.arguments import as_arrays, described
from liger_ops import backend_pallas
from liger_ops.cross_entropy import reduce
from liger_ops.cross_entropy import xla as cross_entropy_xla
from liger_ops.cross_entropy.check import check_arguments as check_cross_entropy

if backend_pallas.plgpu is not None:
    from liger_ops.cross_entropy import pallas_kernel as cross_entropy_pallas


def cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    *,
    ignore_index: int = -100,
    class_weight: jax.Array | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    num_items: int | jax.Array | None = None,
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
        logits: (..., V), float32, bfloat16 or float16 (float64 by the XLA version only).
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
        num_items: what the mean divides by instead, a number or a scalar array: the number of
            supervised tokens in all batches whose gradients are accumulated.
        return_z_loss, return_metrics: also return these.
        implementation: "pallas", "xla", or None for the kernel on a supported GPU and XLA
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
    logits, labels, class_weight, items = as_arrays(logits, labels, class_weight, num_items)
    check_cross_entropy(
        described(logits),  # type: ignore[arg-type]
        described(labels),  # type: ignore[arg-type]
        described(class_weight),
        label_smoothing,
        softcap,
        z_loss,
        reduction,
        items is not None,
    )
    class_weight = jax.tree.map(jax.lax.stop_gradient, class_weight)
    classes = cross_entropy_xla.as_classes(labels, logits.shape[-1], ignore_index)
    settings = (label_smoothing, softcap, z_loss)
    if backend_pallas.choose(implementation, "cross_entropy", logits, class_weight) == "pallas":
        ce, z, predicted = cross_entropy_pallas.token_losses(
            logits, classes, class_weight, *settings, return_metrics
        )
    else:
        ce, z = cross_entropy_xla.token_losses(logits, classes, class_weight, *settings)
        predicted = cross_entropy_xla.predict(logits, softcap)  # dead code unless it is returned
    loss, z = reduce.reduce(ce, z, classes, class_weight, items, reduction)
    extras: list[Any] = [z] if return_z_loss else []
    if return_metrics:
        extras.append(reduce.metrics(predicted, classes))
    return (loss, *extras) if extras else loss
