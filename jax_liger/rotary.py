"""Rotary position embedding: check the arguments, choose the implementation, run it."""

import jax

from jax_liger.arguments import as_arrays, described
from liger_ops import backend_pallas
from liger_ops.rope import xla as rope_xla
from liger_ops.rope.check import check_arguments as check_rope

if backend_pallas.plgpu is not None:
    from liger_ops.rope import pallas_kernel as rope_pallas


def rope(
    q: jax.Array,
    k: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    layout: str = "half",
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Rotary position embedding of queries and keys, both in one kernel.

        y = x * cos + rotate(x) * sin       in the first R features x of every head

    Args:
        q: (B, T, N, H), float32, bfloat16 or float16 (float64 by the XLA version only).
        k: (B, T, K, H), of any of these dtypes and any number of heads.
        cos: (T, R), or (1, T, R), or (B, T, R) for rows with positions of their own; of any of
            these dtypes. R is even and at most H; features beyond R stay as they are.
        sin: as cos.
        layout: which features are a pair. "half", as in LLaMA: i and i + R / 2, and
            rotate(x) = (-x_2, x_1) of the halves of x; cos is cat(f, f) for the R / 2 cosines f.
            "interleaved", as in GPT-J, Cohere and GLM: 2 i and 2 i + 1, and rotate(x) has -x_2i+1
            and x_2i there; cos is repeat(f, 2). Both entries of a pair are used as they stand.
        implementation: "pallas", "xla", or None for the kernel on a supported GPU and XLA
            elsewhere.

    Returns:
        q and k rotated, each in its own shape and dtype. Differentiable any number of times; only
        cos and sin are kept for it, and q and k too where cos or sin asks for a gradient.

    Numerics: float32 from reading to writing, with one rounding at the end.

    Raises:
        TypeError, ValueError: for an argument that does not fit, naming it and both values.
        RuntimeError: if the implementation asked for by name cannot run here, with the reason.

    Source: Su et al. (2021), arXiv:2104.09864.
    """
    q, k, cos, sin = as_arrays(q, k, cos, sin)
    check_rope(*map(described, (q, k, cos, sin)), layout)  # type: ignore[arg-type]
    if backend_pallas.choose(implementation, "rope", q, k, cos, sin) == "pallas":
        return rope_pallas.rope(q, k, cos, sin, layout)
    return rope_xla.rope(q, k, cos, sin, layout)
