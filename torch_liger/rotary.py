"""Rotary position embedding: check the arguments, choose the implementation, run it."""

import torch

from liger_ops import backend_triton
from liger_ops.rope import eager as rope_eager
from liger_ops.rope.check import check_arguments as check_rope
from torch_liger.arguments import check_device, described

if backend_triton.triton is not None:
    from liger_ops.rope import triton_kernel as rope_triton


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    layout: str = "half",
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding of queries and keys, both in one kernel.

        y = x * cos + rotate(x) * sin       in the first R features x of every head

    Args:
        q: (B, T, N, H), of any strides, float32, bfloat16 or float16 (float64 by the eager version
            only).
        k: (B, T, K, H), of any of these dtypes and any number of heads.
        cos: (T, R), or (1, T, R), or (B, T, R) for rows with positions of their own; of any of
            these dtypes. R is even and at most H; features beyond R stay as they are.
        sin: as cos.
        layout: which features are a pair. "half", as in LLaMA: i and i + R / 2, and
            rotate(x) = (-x_2, x_1) of the halves of x; cos is cat(f, f) for the R / 2 cosines f.
            "interleaved", as in GPT-J, Cohere and GLM: 2 i and 2 i + 1, and rotate(x) has -x_2i+1
            and x_2i there; cos is repeat_interleave(f, 2). Both entries of a pair are used as they
            stand.
        implementation: "triton", "eager", or None for the kernel on a supported GPU and eager
            elsewhere.

    Returns:
        q and k rotated, each in its own shape and dtype, and in its own order in memory: one that
        lies as (B, N, T, H) and came by transpose(1, 2) goes back by it for nothing. Neither shares
        memory with the arguments. Differentiable any number of times; only cos and sin are kept for
        it, and q and k too where cos or sin asks for a gradient.

    Numerics: float32 from reading to writing, with one rounding at the end.

    Raises:
        TypeError, ValueError: for an argument that does not fit, naming it and both values.
        RuntimeError: if the implementation asked for by name cannot run here, with the reason.

    Source: Su et al. (2021), arXiv:2104.09864.
    """
    check_rope(*map(described, (q, k, cos, sin)), layout)  # type: ignore[arg-type]
    for name, tensor in (("k", k), ("cos", cos), ("sin", sin)):
        check_device(name, tensor, "q", q)
    if backend_triton.choose(implementation, "rope", q, k, cos, sin) == "triton":
        return rope_triton.rope(q, k, cos, sin, layout)
    return rope_eager.rope(q, k, cos, sin, layout)
