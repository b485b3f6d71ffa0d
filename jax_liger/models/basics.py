"""What the decoder's modules are made of: linear layers, norms and the gated activation."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_liger.activations import geglu, swiglu
from jax_liger.models.config import Config
from jax_liger.nnx import RMSNorm
from jax_liger.norms import fused_add_rms_norm


def linear(
    config: Config, inputs: int, outputs: int, *, use_bias: bool = False, rngs: nnx.Rngs
) -> nnx.Linear:
    """y = x kernel + bias, with `kernel` (inputs, outputs)."""
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=use_bias,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        kernel_init=nnx.initializers.normal(config.initializer_range),
        rngs=rngs,
    )


def norm(config: Config, size: int, *, rngs: nnx.Rngs) -> RMSNorm:
    """The family's RMSNorm, with `scale` (size,)."""
    family = config.family
    # In the mode "gemma" a float32 weight is used as such, and the result has x's dtype.
    dtype = None if family.norm_casting_mode == "gemma" else config.dtype
    return RMSNorm(
        size,
        epsilon=config.rms_norm_eps,
        dtype=dtype,
        param_dtype=config.param_dtype,
        scale_init=nnx.initializers.constant(1.0 - family.norm_offset),
        offset=family.norm_offset,
        casting_mode=family.norm_casting_mode,
        implementation=config.implementation,
        rngs=rngs,
    )


def add_and_norm(norm: RMSNorm, x: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
    """norm(x + residual) and the sum, in one kernel."""
    return fused_add_rms_norm(
        x,
        residual,
        scale_of(norm),
        eps=norm.epsilon,
        offset=norm.offset,
        casting_mode=norm.casting_mode,
        implementation=norm.implementation,
    )


def scale_of(norm: RMSNorm) -> jax.Array:
    """The norm's weight as it is used."""
    assert norm.scale is not None
    scale = norm.scale[...]
    return scale if norm.dtype is None else scale.astype(norm.dtype)


def times(x: jax.Array, factor: float) -> jax.Array:
    """x times a number in float32, rounded once."""
    if factor == 1.0:
        return x
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def down_projected(mlp: Any, *gate_up: jax.Array, rows_of: tuple[jax.Array, ...] = ()) -> jax.Array:
    """down_proj(act(gate) * up) of a feed-forward part, and of experts with their rows.

    With remat="activation" the backward has gate and up alone, and act(gate) * up is made again.
    """

    def run(mlp: Any, gate_up: tuple[jax.Array, ...]) -> jax.Array:
        return mlp.down_proj(gated_activation(mlp.config)(*gate_up), *rows_of)

    return (nnx.remat(run) if mlp.config.remat == "activation" else run)(mlp, gate_up)


def gated_activation(config: Config) -> Callable[..., jax.Array]:
    """act(gate) * up: of (gate, up), or of both in one array with gate in its first half."""
    if config.activation == "silu":
        return lambda *gate_up: swiglu(*gate_up, implementation=config.implementation)
    approximate = "tanh" if config.activation == "gelu_tanh" else "none"
    return lambda *gate_up: geglu(
        *gate_up, approximate=approximate, implementation=config.implementation
    )
