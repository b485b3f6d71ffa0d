"""The normalisations: check the arguments, choose the implementation, run it."""

import torch

from liger_ops import backend_triton
from liger_ops.layer_norm import eager as layer_norm_eager
from liger_ops.layer_norm.check import check_arguments as check_layer_norm
from liger_ops.rms_norm import eager as rms_norm_eager
from liger_ops.rms_norm.check import CASTING_MODES
from liger_ops.rms_norm.check import check_arguments as check_rms_norm
from torch_liger.arguments import DTYPE_NAMES, check_device, described

if backend_triton.triton is not None:
    from liger_ops.layer_norm import triton_kernel as layer_norm_triton
    from liger_ops.rms_norm import triton_kernel as rms_norm_triton


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    implementation: str | None = None,
) -> torch.Tensor:
    """Root-mean-square normalisation over the last dimension.

        y = (weight + offset) * x / sqrt(mean(x^2) + eps)

    Args:
        x: (..., D), float32, bfloat16 or float16 (float64 by the eager version only). Any strides;
            rows that no view can flatten are copied.
        weight: (D,), of any of these dtypes, or None to leave the normalised value unscaled.
        eps: added to the mean square; at least 0.
        offset: added to the weight; 1.0 for Gemma, whose weights are stored around 0.
        casting_mode: where values are rounded.
            "llama": the normalised value is cast to x's dtype, then multiplied by the weight, as
            Hugging Face's LLaMA, Mistral and Qwen do; the result has the promoted dtype of both.
            "gemma": everything in float32 and one cast to x's dtype at the end.
            "none": everything in float32 and one cast to the promoted dtype of x and weight, as
            Flax's own RMSNorm does.
        implementation: "triton", "eager", or None for the kernel on a supported GPU and eager
            elsewhere.

    Returns:
        (..., D), contiguous. Differentiable in x and weight, any number of times; a weight that
        asks for no gradient costs no work for one. No argument is written to.

    Numerics: mean, scale and the weight's gradient over all rows are float32 whatever the dtypes.

    Raises:
        TypeError, ValueError: for an argument that does not fit, naming it and both values.
        RuntimeError: if the implementation asked for by name cannot run here, with the reason.

    Source: Zhang and Sennrich (2019), arXiv:1910.07467.
    """
    _check(x, weight, None, eps, casting_mode)
    if backend_triton.choose(implementation, "rms_norm", x, weight) == "triton":
        return rms_norm_triton.rms_norm(x, weight, eps, offset, casting_mode)
    return rms_norm_eager.rms_norm(x, weight, eps, offset, casting_mode)


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
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
    _check(x, weight, residual, eps, casting_mode)
    if backend_triton.choose(implementation, "fused_add_rms_norm", x, residual, weight) == "triton":
        return rms_norm_triton.fused_add_rms_norm(x, residual, weight, eps, offset, casting_mode)
    return rms_norm_eager.fused_add_rms_norm(x, residual, weight, eps, offset, casting_mode)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    implementation: str | None = None,
) -> torch.Tensor:
    """Layer normalisation over the last dimension.

        y = weight * (x - mean(x)) / sqrt(var(x) + eps) + bias

    Args:
        x: (..., D), float32, bfloat16 or float16 (float64 by the eager version only). Any strides;
            rows that no view can flatten are copied.
        weight: (D,), of any of these dtypes, or None to leave the normalised value unscaled.
        bias: (D,), of any of these dtypes, or None to add nothing.
        eps: added to the variance; at least 0.
        implementation: "triton", "eager", or None for the kernel on a supported GPU and eager
            elsewhere.

    Returns:
        (..., D), contiguous, in the promoted dtype of x, weight and bias. Differentiable in all
        three, any number of times; what asks for no gradient costs no work for one. x, weight
        and two float32 numbers a row are kept for it, and no argument is written to.

    Numerics: float32 from reading to writing, with one rounding at the end; the parameters'
    gradients are summed over all rows in float32. The variance is the mean square of x less its
    mean, so a large common offset does not cancel it.

    Raises:
        TypeError, ValueError: for an argument that does not fit, naming it and both values.
        RuntimeError: if the implementation asked for by name cannot run here, with the reason.

    Source: Ba, Kiros and Hinton (2016), arXiv:1607.06450.
    """
    # What is right is seen quickly; what is not is looked at again for the error's words.
    if not (
        x.dtype in DTYPE_NAMES
        and eps >= 0.0
        and x.shape
        and all(p is None or (_fits(p, x) and p.shape == x.shape[-1:]) for p in (weight, bias))
    ):
        check_layer_norm(described(x), described(weight), described(bias), eps)  # type: ignore[arg-type]
        check_device("weight", weight, "x", x)
        check_device("bias", bias, "x", x)
    if backend_triton.choose(implementation, "layer_norm", x, weight, bias) == "triton":
        return layer_norm_triton.layer_norm(x, weight, bias, eps)
    return layer_norm_eager.layer_norm(x, weight, bias, eps)


def _check(x, weight, residual, eps, casting_mode):
    # What is right is seen quickly; what is not is looked at again for the error's words.
    if (
        x.dtype in DTYPE_NAMES
        and eps >= 0.0
        and casting_mode in CASTING_MODES
        and (weight is None or (_fits(weight, x) and weight.shape == x.shape[-1:]))
        and (residual is None or (_fits(residual, x) and residual.shape == x.shape))
        and x.shape
    ):
        return
    check_rms_norm(*map(described, (x, weight, residual)), eps, casting_mode)  # type: ignore[call-arg]
    for name, tensor in (("weight", weight), ("residual", residual)):
        check_device(name, tensor, "x", x)


def _fits(tensor: torch.Tensor, x: torch.Tensor) -> bool:
    return tensor.dtype in DTYPE_NAMES and tensor.device == x.device
