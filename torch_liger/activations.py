"""The gated activations: check the arguments, choose the implementation, run it."""

import torch

from liger_ops import backend_triton
from liger_ops.swiglu import check as swiglu_check
from liger_ops.swiglu import eager as swiglu_eager
from torch_liger.arguments import check_device, described

if backend_triton.triton is not None:
    from liger_ops.swiglu import triton_kernel as swiglu_triton
    from liger_ops.swiglu import triton_linear


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


def gated_linear(
    gate: torch.Tensor,
    up: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    implementation: str | None = None,
) -> torch.Tensor:
    """The second half of a LLaMA's feed-forward layer, without keeping what is between its steps.

        y = (act(gate) * up) weight^T + bias

    Args:
        gate, up: (..., F), float32, bfloat16 or float16 (float64 by the eager version only).
        weight: (D, F), of any of these dtypes, as `torch.nn.Linear` holds it.
        bias: (D,), likewise, or None.
        activation: "silu", "gelu_tanh" or "gelu".
        implementation: "triton", "eager", or None for the kernel on a supported GPU and eager
            elsewhere.

    Returns:
        (..., D), as `torch.nn.functional.linear(swiglu(gate, up), weight, bias)`, bit for bit.
        Differentiable any number of times; gate, up and weight are kept for it, and the activation,
        (..., F), is computed again: a pass over memory instead of a third of a layer's largest
        tensors. Where the dtypes differ, and under autocast, it is kept.

    Raises:
        TypeError, ValueError: for an argument that does not fit, naming it and both values.
        RuntimeError: if the implementation asked for by name cannot run here, with the reason.
    """
    if activation not in ("silu", "gelu_tanh", "gelu"):
        raise ValueError(f"activation must be 'silu', 'gelu_tanh' or 'gelu'; got {activation!r}")
    swiglu_check.check_arguments(described(gate), described(up))  # type: ignore[arg-type]
    for name, tensor in (("up", up), ("weight", weight), ("bias", bias)):
        check_device(name, tensor, "gate", gate)
    chosen = backend_triton.choose(implementation, "gated_linear", gate, up, weight, bias)
    given = [tensor for tensor in (gate, up, weight, bias) if tensor is not None]
    alike = len({tensor.dtype for tensor in given}) == 1
    if chosen == "triton" and alike and not torch.is_autocast_enabled(gate.device.type):
        return triton_linear.gated_linear(gate, up, weight, bias, activation)
    run = swiglu_triton if chosen == "triton" else swiglu_eager
    return torch.nn.functional.linear(run.gated(gate, up, activation), weight, bias)


def _gated(op, gate, up, activation, implementation):
    swiglu_check.check_arguments(described(gate), described(up))  # type: ignore[arg-type]
    check_device("up", up, "gate", gate)
    if backend_triton.choose(implementation, op, gate, up) == "triton":
        return swiglu_triton.gated(gate, up, activation)
    return swiglu_eager.gated(gate, up, activation)
