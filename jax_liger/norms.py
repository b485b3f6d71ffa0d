"""The normalisations: check the arguments, choose the implementation, run it."""

from typing import Any

import jax

from jax_liger.arguments import as_arrays, described
from liger_ops import backend_pallas
from liger_ops.layer_norm import xla as layer_norm_xla
from liger_ops.layer_norm.check import check_arguments as check_layer_norm
from liger_ops.rms_norm import xla as rms_norm_xla
from liger_ops.rms_norm.check import check_arguments as check_rms_norm

if backend_pallas.plgpu is not None:
    from liger_ops.layer_norm import pallas_kernel as layer_norm_pallas
    from liger_ops.rms_norm import pallas_kernel as rms_norm_pallas


def rms_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    implementation: str | None = None,
) -> jax.Array:
    """Root-mean-square normalisation over the last dimension.

        y = (weight + offset) * x / sqrt(mean(x^2) + eps)

    Args:
        x: (..., D), float32, bfloat16 or float16 (float64 by the XLA version only).
        weight: (D,), of any of these dtypes, or None to leave the normalised value unscaled.
        eps: added to the mean square; at least 0.
        offset: added to the weight; 1.0 for Gemma, whose weights are stored around 0.
        casting_mode: where values are rounded.
            "llama": the normalised value is cast to x's dtype, then multiplied by the weight, as
            Hugging Face's LLaMA, Mistral and Qwen do; the result has the promoted dtype of both.
            "gemma": everything in float32 and one cast to x's dtype at the end.
            "none": everything in float32 and one cast to the promoted dtype of x and weight, as
            Flax's own RMSNorm does.
        implementation: "pallas", "xla", or None for the kernel on a supported GPU and XLA
            elsewhere.

    Returns:
        (..., D). Differentiable in x and weight, any number of times; a weight that asks for no
        gradient costs no work for one.

    Numerics: mean, scale and the weight's gradient over all rows are float32 whatever the dtypes.

    Raises:
        TypeError, ValueError: for an argument that does not fit, naming it and both values.
        RuntimeError: if the implementation asked for by name cannot run here, with the reason.

    Source: Zhang and Sennrich (2019), arXiv:1910.07467.
    """
    x, weight, _ = _checked(x, weight, None, eps, casting_mode)
    if backend_pallas.choose(implementation, "rms_norm", x, weight) == "pallas":
        return rms_norm_pallas.rms_norm(x, weight, eps, offset, casting_mode)
    return rms_norm_xla.rms_norm(x, weight, eps, offset, casting_mode)


def fused_add_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Adds the residual stream, then normalises the sum: one reading where two would be.

        new_residual = x + residual
        normed = rms_norm(new_residual, weight)

    Args:
        x: (..., D), what the last sublayer put out.
        residual: (..., D), the residual stream before it.
        The others are those of `rms_norm`.

    Returns:
        normed and new_residual, both (..., D). The sum is rounded to the promoted dtype of x and
        residual before it is normalised, as in a model that adds first.

    Numerics, errors and source: as `rms_norm`.
    """
    x, weight, residual = _checked(x, weight, residual, eps, casting_mode)
    assert residual is not None
    if backend_pallas.choose(implementation, "fused_add_rms_norm", x, residual, weight) == "pallas":
        return rms_norm_pallas.fused_add_rms_norm(x, residual, weight, eps, offset, casting_mode)
    return rms_norm_xla.fused_add_rms_norm(x, residual, weight, eps, offset, casting_mode)


def layer_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    eps: float = 1e-5,
    implementation: str | None = None,
) -> jax.Array:
    """Layer normalisation over the last dimension.

        y = weight * (x - mean(x)) / sqrt(var(x) + eps) + bias

    Args:
        x: (..., D), float32, bfloat16 or float16 (float64 by the XLA version only).
        weight: (D,), of any of these dtypes, or None to leave the normalised value unscaled.
        bias: (D,), of any of these dtypes, or None to add nothing.
        eps: added to the variance; at least 0.
        implementation: "pallas", "xla", or None for the kernel on a supported GPU and XLA
            elsewhere.

    Returns:
        (..., D), in the promoted dtype of x, weight and bias. Differentiable in all three, any
        number of times; what asks for no gradient costs no work for one. x, weight and two
        float32 numbers a row are kept for it.

    Numerics: float32 from reading to writing, with one rounding at the end; the parameters'
    gradients are summed over all rows in float32. The variance is the mean square of x less its
    mean, so a large common offset does not cancel it.

    Raises:
        TypeError, ValueError: for an argument that does not fit, naming it and both values.
        RuntimeError: if the implementation asked for by name cannot run here, with the reason.

    Source: Ba, Kiros and Hinton (2016), arXiv:1607.06450.
    """
    return layer_norm_to(x, weight, bias, eps, implementation, None)


def layer_norm_to(x, weight, bias, eps, implementation, dtype: Any) -> jax.Array:
    """layer_norm with its one rounding straight to `dtype`, as Flax's modules can ask for."""
    x, weight, bias = as_arrays(x, weight, bias)
    check_layer_norm(*map(described, (x, weight, bias)), eps)  # type: ignore[call-arg]
    if dtype is None:
        dtype = layer_norm_xla.promoted_dtype(x, weight, bias)
    y = jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(dtype))
    if backend_pallas.choose(implementation, "layer_norm", x, weight, bias, y) == "pallas":
        return layer_norm_pallas.layer_norm(x, weight, bias, eps, y.dtype)
    return layer_norm_xla.layer_norm(x, weight, bias, eps, y.dtype)


def _checked(x, weight, residual, eps, casting_mode):
    x, weight, residual = as_arrays(x, weight, residual)
    check_rms_norm(*map(described, (x, weight, residual)), eps, casting_mode)  # type: ignore[call-arg]
    return x, weight, residual
