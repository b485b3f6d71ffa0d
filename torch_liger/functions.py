"""The public functions: check the arguments, choose the implementation, run it."""

import torch

from liger_ops import backend_triton
from liger_ops.rms_norm import eager as rms_norm_eager
from liger_ops.rms_norm.check import CASTING_MODES
from liger_ops.rms_norm.check import check_arguments as check_rms_norm
from liger_ops.swiglu import check as swiglu_check
from liger_ops.swiglu import eager as swiglu_eager

if backend_triton.triton is not None:
    from liger_ops.rms_norm import triton_kernel as rms_norm_triton
    from liger_ops.swiglu import triton_kernel as swiglu_triton


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


def swiglu(
    gate: torch.Tensor, up: torch.Tensor | None = None, *, implementation: str | None = None
) -> torch.Tensor:
    """The gated activation of LLaMA's feed-forward layers.

        y = gate * sigmoid(gate) * up

    Args:
        gate: (..., F), float32, bfloat16 or float16 (float64 by the eager version only). Without
            `up`, (..., 2 F): gate in the first half of the last dimension and up in the second, as
            a fused projection puts them out; it is read where it lies, without being split.
        up: (..., F), of any of these dtypes.
        implementation: "triton", "eager", or None for the kernel on a supported GPU and eager
            elsewhere.

    Returns:
        (..., F), contiguous, in the promoted dtype of gate and up. Differentiable any number of
        times; gate and up are all that is kept for it, and neither is written to.

    Numerics: float32 from reading to writing, with one rounding at the end.

    Raises:
        TypeError, ValueError: for an argument that does not fit, naming it and both values.
        RuntimeError: if the implementation asked for by name cannot run here, with the reason.

    Source: Shazeer (2020), arXiv:2002.05202.
    """
    return _gated("swiglu", gate, up, "silu", implementation)


def geglu(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    approximate: str = "tanh",
    implementation: str | None = None,
) -> torch.Tensor:
    """The gated activation of Gemma's feed-forward layers.

        y = gelu(gate) * up

    Args:
        approximate: "tanh" for gate * (1 + tanh(sqrt(2 / pi) (gate + 0.044715 gate^3))) / 2, or
            "none" for gate times the normal distribution's cumulative function.
        The others are those of `swiglu`.

    Returns, numerics, errors: as `swiglu`.

    Source: Shazeer (2020), arXiv:2002.05202; Hendrycks and Gimpel (2016), arXiv:1606.08415.
    """
    return _gated("geglu", gate, up, swiglu_check.activation_of(approximate), implementation)


def _check(x, weight, residual, eps, casting_mode):
    # What is right is seen quickly; what is not is looked at again for the error's words.
    if (
        x.dtype in _DTYPE_NAMES
        and eps >= 0.0
        and casting_mode in CASTING_MODES
        and (weight is None or (_fits(weight, x) and weight.shape == x.shape[-1:]))
        and (residual is None or (_fits(residual, x) and residual.shape == x.shape))
        and x.shape
    ):
        return
    described = (_described(tensor) for tensor in (x, weight, residual))
    check_rms_norm(*described, eps, casting_mode)  # type: ignore[call-arg]
    for name, tensor in (("weight", weight), ("residual", residual)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} must be on x's device, {x.device}; got {tensor.device}")


def _fits(tensor: torch.Tensor, x: torch.Tensor) -> bool:
    return tensor.dtype in _DTYPE_NAMES and tensor.device == x.device


def _described(tensor: torch.Tensor | None) -> tuple[torch.Size, str] | None:
    if tensor is None:
        return None
    return tensor.shape, _DTYPE_NAMES.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")


_DTYPE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
}


def _gated(op, gate, up, activation, implementation):
    swiglu_check.check_arguments(_described(gate), _described(up))  # type: ignore[arg-type]
    if up is not None and up.device != gate.device:
        raise ValueError(f"up must be on gate's device, {gate.device}; got {up.device}")
    if backend_triton.choose(implementation, op, gate, up) == "triton":
        return swiglu_triton.gated(gate, up, activation)
    return swiglu_eager.gated(gate, up, activation)
