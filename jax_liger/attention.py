"""What attention reads: check the arguments, choose the implementation, run it."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_liger.arguments import as_arrays, described
from liger_ops import backend_pallas
from liger_ops.rms_norm_linear_rope import rule, xla
from liger_ops.rms_norm_linear_rope.check import Heads, Norm, check_arguments

if backend_pallas.plgpu is not None:
    from liger_ops.rms_norm_linear_rope import pallas_kernel


def rms_norm_linear_rope(
    x: jax.Array,
    norm_weight: jax.Array | None,
    qkv_weight: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    bias: jax.Array | None = None,
    q_norm_weight: jax.Array | None = None,
    k_norm_weight: jax.Array | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    out_axis: int = 0,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What a layer does before its attention, in one kernel: norm, projection, rotation.

        q, k, v = split(rms_norm(x, norm_weight) @ qkv_weight.T + bias)
        q, k = rope(rms_norm(q, q_norm_weight), rms_norm(k, k_norm_weight), cos, sin)

    Args:
        x: (B, T, D), float32, bfloat16 or float16 (float64 by the XLA version only).
        norm_weight: (D,), of any of these dtypes, or None to leave the normed x unscaled.
        qkv_weight: ((N + 2 K) H, D), or with out_axis=1 (D, (N + 2 K) H), of any of these dtypes:
            the columns of q's N heads, then those of k's K heads, then those of v's. Taken as it
            lies, but for heads that are not rotated whole, for which out_axis=1 is turned round
            first. Where its dtype and x's differ the product is in the promoted one.
        cos, sin: (T, R), (1, T, R) or (B, T, R), of any of these dtypes, for heads whose halves
            are rotated against each other, as in `rope` with layout "half". Features beyond R stay
            as they are.
        num_heads, num_kv_heads, head_dim: N, K and H.
        bias: ((N + 2 K) H,), of any of these dtypes.
        q_norm_weight, k_norm_weight: (H,), of any of these dtypes: norms of every head of q and of
            k before the rotation, as in Qwen3. None for no such norm.
        eps, offset, casting_mode: as in `rms_norm`, for the norms of the heads too. The fused
            kernel, which rounds in another order, takes the casting mode for its backward alone.
        out_axis: the axis of qkv_weight on which the heads' columns lie, as a linear layer of
            PyTorch (0) or of Flax (1) has them.
        implementation: "pallas" for the one kernel; "composed" for the kernels of `rms_norm` and
            `rope` around XLA's product; "xla"; or None for "pallas" where it was measured to be
            faster on this GPU, "composed" elsewhere on a GPU, and XLA on a CPU.

    Returns:
        q (B, T, N, H), k (B, T, K, H) and v (B, T, K, H), in the product's dtype. Differentiable
        any number of times; what asks for no gradient costs no work for one. The fused kernel keeps
        the arguments and nothing else for it: the normed x is computed again, and with norms of
        heads the part of the product that they see.

    Numerics: the fused kernel multiplies x, or the weight, by norm_weight and rounds it once, and
        keeps all else in float32 until q, k and v are rounded. The weight's gradient is summed over
        all rows in float32. Products of float32 follow jax_default_matmul_precision: TF32 unless
        it is "highest".

    Raises:
        TypeError, ValueError: for an argument that does not fit, naming it and both values.
        RuntimeError: if the implementation asked for by name cannot run here, with the reason.

    Source: Zhang and Sennrich (2019), arXiv:1910.07467; Su et al. (2021), arXiv:2104.09864.
    """
    x, norm_weight, qkv_weight, cos, sin, bias, q_norm_weight, k_norm_weight = as_arrays(
        x, norm_weight, qkv_weight, cos, sin, bias, q_norm_weight, k_norm_weight
    )
    heads, norm = Heads(num_heads, num_kv_heads, head_dim), Norm(eps, offset, casting_mode)
    others = (norm_weight, qkv_weight, cos, sin, bias, q_norm_weight, k_norm_weight)
    check_arguments(
        *map(described, (x, *others)),  # type: ignore[arg-type]
        heads=heads,
        norm=norm,
        out_axis=out_axis,
    )
    chosen = backend_pallas.choose(
        implementation, "rms_norm_linear_rope", x, *others, also=("composed",)
    )
    qkv_weight = qkv_weight.astype(jnp.promote_types(x.dtype, qkv_weight.dtype))
    given = (x, norm_weight, qkv_weight, bias, q_norm_weight, k_norm_weight, cos, sin)
    if chosen == "xla":
        return xla.rms_norm_linear_rope(*given, heads, norm, out_axis)
    config = None
    if implementation is None:
        found = choice_for(given, heads, out_axis)
        chosen, config = "pallas" if found.fused else "composed", found.config
    settings = {"heads": heads, "norm": norm, "out_axis": out_axis}
    if chosen == "composed":
        return pallas_kernel.composed(*given, **settings)
    return pallas_kernel.rms_norm_linear_rope(*given, **settings, config=config)


def choice_for(given: Sequence[Any], heads: Heads, out_axis: int) -> rule.Choice:
    """What the rule says of arguments in the kernels' order, of which shapes and dtypes count."""
    x, _, weight = given[:3]
    return rule.choose(
        backend_pallas.device_name(), "pallas", math.prod(x.shape[:2]), x.shape[2], heads,
        dtype=weight.dtype.name, as_measured=rule.is_as_measured(given, heads, out_axis),
        trained=None,
    )  # fmt: skip


def is_fused(given: Sequence[Any], heads: Heads, out_axis: int, implementation: str | None) -> bool:
    """Whether the one kernel is what `rms_norm_linear_rope` would run for arguments in the kernels'
    order; the weight and the bias may be shapes with dtypes.
    """
    chosen = backend_pallas.choose(
        implementation, "rms_norm_linear_rope", *given, also=("composed",)
    )
    if implementation is None and chosen == "pallas":
        return choice_for(given, heads, out_axis).fused
    return chosen == "pallas"
