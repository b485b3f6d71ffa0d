"""The gated activations: check the arguments, choose the implementation, run it."""

import jax

from jax_liger.arguments import as_arrays, described
from liger_ops import backend_pallas
from liger_ops.swiglu import check as swiglu_check
from liger_ops.swiglu import xla as swiglu_xla

if backend_pallas.plgpu is not None:
    from liger_ops.swiglu import pallas_kernel as swiglu_pallas


def swiglu(
    gate: jax.Array, up: jax.Array | None = None, *, implementation: str | None = None
) -> jax.Array:
    """The gated activation of LLaMA's feed-forward layers.

        y = gate * sigmoid(gate) * up

    Args:
        gate: (..., F), float32, bfloat16 or float16 (float64 by the XLA version only). Without
            `up`, (..., 2 F): gate in the first half of the last dimension and up in the second, as
            a fused projection puts them out; it is read where it lies, without being split.
        up: (..., F), of any of these dtypes.
        implementation: "pallas", "xla", or None for the kernel on a supported GPU and XLA
            elsewhere.

    Returns:
        (..., F), in the promoted dtype of gate and up. Differentiable any number of times;
        gate and up are all that is kept for it, and neither is written to.

    Numerics: float32 from reading to writing, with one rounding at the end.

    Raises:
        TypeError, ValueError: for an argument that does not fit, naming it and both values.
        RuntimeError: if the implementation asked for by name cannot run here, with the reason.

    Source: Shazeer (2020), arXiv:2002.05202.
    """
    return _gated("swiglu", gate, up, "silu", implementation)


def geglu(
    gate: jax.Array,
    up: jax.Array | None = None,
    *,
    approximate: str = "tanh",
    implementation: str | None = None,
) -> jax.Array:
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


def _gated(op, gate, up, activation, implementation):
    gate, up = as_arrays(gate, up)
    swiglu_check.check_arguments(*map(described, (gate, up)))  # type: ignore[arg-type]
    if backend_pallas.choose(implementation, op, gate, up) == "pallas":
        return swiglu_pallas.gated(gate, up, activation)
    return swiglu_xla.gated(gate, up, activation)
