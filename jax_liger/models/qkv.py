"""A layer's first norm, its projections and the rotation as one kernel, where that may be."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_liger.attention import is_fused, rms_norm_linear_rope
from jax_liger.models.basics import scale_of
from jax_liger.nnx import RMSNorm
from liger_ops.rms_norm_linear_rope.check import Heads


def fused_heads(
    attention: Any,
    norm: RMSNorm | None,
    x: jax.Array,
    angles: tuple[jax.Array, jax.Array] | None,
) -> tuple[jax.Array, jax.Array, jax.Array] | None:
    """Queries (B, T, N, H), keys and values (B, T, K, H) of the residual stream x (B, T, D).

    None where the layer has to be computed step by step: where it rotates nothing, a projection is
    more than its kernel and bias (an adapter, say), devices have heads of their own, or the one
    kernel is not the implementation that the config asks for.
    """
    config = attention.config
    names = ("qkv_proj",) if config.fused_projections else ("q_proj", "k_proj", "v_proj")
    layers = [getattr(attention, name) for name in names]
    if norm is None or angles is None or _heads_are_split() or not all(map(_is_plain, layers)):
        return None
    heads = Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    own = (None, None)
    if config.family.qk_norm == "head":
        own = scale_of(attention.q_norm), scale_of(attention.k_norm)
    dtype = jnp.dtype(config.dtype)
    # Before the weights are put together.
    weight = jax.ShapeDtypeStruct((x.shape[-1], heads.columns), dtype)
    given = (x, scale_of(norm), weight, None, *own, *angles)
    if not is_fused(given, heads, 1, config.implementation):
        return None
    kernels = [layer.kernel[...].astype(dtype) for layer in layers]
    biases = [layer.bias[...].astype(dtype) for layer in layers if layer.bias is not None]
    return rms_norm_linear_rope(
        x,
        scale_of(norm),
        kernels[0] if len(kernels) == 1 else jnp.concatenate(kernels, axis=1),
        *angles,
        num_heads=heads.q,
        num_kv_heads=heads.kv,
        head_dim=heads.size,
        bias=jnp.concatenate(biases) if biases else None,
        q_norm_weight=own[0],
        k_norm_weight=own[1],
        eps=norm.epsilon,
        offset=norm.offset,
        casting_mode=norm.casting_mode,
        out_axis=1,
        implementation=config.implementation,
    )


def _is_plain(layer: Any) -> bool:
    return type(layer) is nnx.Linear and layer.dot_general is jax.lax.dot_general


def _heads_are_split() -> bool:
    """Whether a mesh is in scope on which columns of the projections are on several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    return dict(mesh.shape).get("tensor", 1) > 1
