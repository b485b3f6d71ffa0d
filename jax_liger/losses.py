"""The losses: check the arguments, choose the implementation, run it."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_liger import vocab_parallel
from jax_liger.arguments import as_arrays, described
from liger_ops import backend_pallas
from liger_ops.cross_entropy import reduce
from liger_ops.cross_entropy import xla as cross_entropy_xla
from liger_ops.cross_entropy.check import check_arguments as check_cross_entropy
from liger_ops.fused_linear_cross_entropy import xla as fused_linear_xla
from liger_ops.fused_linear_cross_entropy.check import check_arguments as check_fused_linear
from liger_ops.fused_linear_cross_entropy.check import check_temperature

if backend_pallas.plgpu is not None:
    from liger_ops.cross_entropy import pallas_kernel as cross_entropy_pallas
    from liger_ops.fused_linear_cross_entropy import pallas_kernel as fused_linear_pallas


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
    metrics = reduce.metrics(predicted, classes) if return_metrics else None
    return _with_extras(loss, z, metrics, return_z_loss)


def fused_linear_cross_entropy(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    bias: jax.Array | None = None,
    logit_scale: float = 1.0,
    accum_dtype: Any = "float32",
    vocab_axis: int = 0,
    vocab_mesh_axis: str | tuple[str, ...] | None = None,
    memory: str | int = "fast",
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
    """Cross-entropy of a language model's head, without holding the logits of all tokens.

        logits = logit_scale * hidden weight^T + bias
        loss = cross_entropy(logits, labels)

    Args:
        hidden: (..., D), float32, bfloat16 or float16 (float64 by the XLA version only).
        weight: (V, D), as a tied embedding lies in memory, or (D, V), as a Flax Dense layer's
            kernel does; `vocab_axis` says which. No transposed copy is made. Where its dtype is not
            that of hidden, both are promoted, and each gets its gradient in its own.
        labels: (...), of an integer dtype. One that is neither a class nor `ignore_index` makes
            its token's loss and gradient NaN, and reads nothing out of bounds.
        bias: (V,), float32, bfloat16 or float16; added in float32.
        logit_scale: what the product is multiplied by, in float32.
        accum_dtype: "float32" or "bfloat16" (or the jnp dtypes): in what the gradient of weight is
            summed where that takes several products. bfloat16 needs less memory and loses what is
            small beside the sum; weights of another dtype than bfloat16 are summed in float32.
        vocab_axis: the dimension of weight that the classes are: 0 or 1.
        vocab_mesh_axis: the axis of a mesh, or axes, over whose devices the classes are split
            evenly. Only a few numbers a token cross them, and the sum of hidden's gradient. Under
            shard_map each device gives its own classes of weight, bias and class_weight, the same
            hidden and the same labels, which count the classes of all; with check_vma=False a
            gradient taken inside is, as that of any psum, the one of all devices' losses together.
            Under jit, with `jax.set_mesh`, all are global arrays, and this has them split so; None
            leaves the kernel to split them as they are.
        memory: "fast"; "least", which computes the logits once more and keeps no float32 sum; or
            the bytes that may be used beside the inputs and the gradients.
        ignore_index: tokens with this label count for nothing and get zeros as gradient.
        class_weight: (V,), a constant: it gets no gradient. None is 1 for every class.
        label_smoothing: the part of the target that is spread over all classes, in [0, 1].
        softcap: c of c tanh(x / c), as Gemma 2 caps its logits.
        z_loss: the coefficient of the squared log-partition, which keeps it near 0.
        reduction: "mean", "sum" or "none"; see `cross_entropy`.
        num_items: what the mean divides by instead, a number or a scalar array: the number of
            supervised tokens in all batches whose gradients are accumulated.
        return_z_loss, return_metrics: also return these.
        implementation: "pallas", "xla", or None for the kernel on a supported GPU and XLA
            elsewhere. "xla" holds the logits of all tokens.

    Returns:
        loss, float32: a scalar, or of the labels' shape where reduction is "none". With
        return_z_loss and return_metrics a tuple of the loss and, in this order, z_loss and
        `Metrics`, as `cross_entropy` has them, of which neither carries a gradient.
        Differentiable in hidden, weight and bias, any number of times (second derivatives hold the
        logits).

    Numerics: the products are in the inputs' dtype with sums in float32, and the logits and their
    gradient are rounded to that dtype; all between is float32. Products of float32 have the
    precision of `jax.default_matmul_precision`. Each gradient is rounded once; where the forward
    makes hidden's, of a mean or a sum, an upstream gradient that is no power of two rounds it a
    second time.

    Raises:
        TypeError, ValueError: for an argument that does not fit, naming it and both values.
        RuntimeError: if the implementation asked for by name cannot run here, with the reason.

    Source: Wijmans et al. (2024), arXiv:2411.09009; Hsu et al. (2024), arXiv:2410.10989.
    """
    hidden, weight, labels, bias, class_weight, items = as_arrays(
        hidden, weight, labels, bias, class_weight, num_items
    )
    accum_dtype = jnp.dtype(accum_dtype).name
    check_fused_linear(
        described(hidden),  # type: ignore[arg-type]
        described(weight),  # type: ignore[arg-type]
        described(labels),  # type: ignore[arg-type]
        described(bias),
        described(class_weight),
        label_smoothing,
        softcap,
        z_loss,
        reduction,
        items is not None,
        accum_dtype,
        memory,
        vocab_axis,
    )
    class_weight, items = jax.tree.map(jax.lax.stop_gradient, (class_weight, items))
    split = vocab_parallel.Split.of(vocab_mesh_axis, weight, vocab_axis)
    vocab = split.vocab(weight, vocab_axis)
    hidden, labels = split.whole_rows(hidden), split.whole_rows(labels)
    classes = cross_entropy_xla.as_classes(labels, vocab, ignore_index)
    chosen = backend_pallas.choose(
        implementation, "fused_linear_cross_entropy", hidden, weight, bias, class_weight
    )
    dtype = jnp.promote_types(hidden.dtype, weight.dtype)
    hidden, weight = hidden.astype(dtype), weight.astype(dtype)
    if chosen == "pallas":
        loss, z, predicted = fused_linear_pallas.fused_linear_cross_entropy(
            hidden, weight, classes, bias, class_weight, items, logit_scale, vocab_axis,
            accum_dtype, memory, label_smoothing, softcap, z_loss, reduction, return_metrics,
            split.axes, split.manual,
        )  # fmt: skip
    elif split.axes:
        loss, z, predicted = vocab_parallel.plain(
            split, hidden, weight, classes, bias, class_weight, items, logit_scale, vocab_axis,
            label_smoothing, softcap, z_loss, reduction,
        )  # fmt: skip
    else:
        logits = fused_linear_xla.logits_of(hidden, weight, bias, logit_scale, vocab_axis)
        ce, z = cross_entropy_xla.token_losses(
            logits, classes, class_weight, label_smoothing, softcap, z_loss
        )
        predicted = cross_entropy_xla.predict(logits, softcap)  # dead code unless it is returned
        loss, z = reduce.reduce(ce, z, classes, class_weight, items, reduction)
    metrics = reduce.metrics(predicted, classes) if return_metrics else None
    return _with_extras(loss, jax.lax.stop_gradient(z), metrics, return_z_loss)


def per_token_logps(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    bias: jax.Array | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    accum_dtype: Any = "float32",
    vocab_axis: int = 0,
    vocab_mesh_axis: str | tuple[str, ...] | None = None,
    memory: str | int = "fast",
    implementation: str | None = None,
) -> jax.Array:
    """The log-probability of every label under a language model's head, without holding the logits.

        logits = logit_scale * hidden weight^T + bias
        l = softcap * tanh(logits / softcap)        (or the logits themselves)
        log_softmax(l / temperature)[label]

    Args:
        temperature: what the capped logits are divided by, above 0.
        hidden, weight, labels and all others: as in `fused_linear_cross_entropy`.

    Returns:
        (...), float32: 0 where the label is `ignore_index`, NaN where it is no class.
        Differentiable in hidden, weight and bias, any number of times.

    Numerics: as in `fused_linear_cross_entropy` with reduction "none", of which this is the
    negative.

    Raises:
        TypeError, ValueError: for an argument that does not fit, naming it and both values.
        RuntimeError: if the implementation asked for by name cannot run here, with the reason.
    """
    check_temperature(temperature)
    if bias is not None and temperature != 1.0:
        bias = jnp.asarray(bias)
        bias = bias.astype(jnp.promote_types(bias.dtype, jnp.float32)) / temperature
    return -fused_linear_cross_entropy(
        hidden,
        weight,
        labels,
        bias=bias,
        logit_scale=logit_scale / temperature,
        softcap=None if softcap is None else softcap / temperature,
        ignore_index=ignore_index,
        accum_dtype=accum_dtype,
        vocab_axis=vocab_axis,
        vocab_mesh_axis=vocab_mesh_axis,
        memory=memory,
        reduction="none",
        implementation=implementation,
    )


def _with_extras(loss: jax.Array, z: jax.Array, metrics: Any, z_asked: bool) -> Any:
    """The loss, or a tuple of it and what else was asked for."""
    extras: list[Any] = [z] if z_asked else []
    extras += [] if metrics is None else [metrics]
    return (loss, *extras) if extras else loss
