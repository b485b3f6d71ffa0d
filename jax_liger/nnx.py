"""Flax nnx modules. Parameter names and stock arguments are Flax's own, so checkpoints load."""

from typing import Any

import jax
from flax import nnx

from jax_liger import activations, norms
from jax_liger.flax_options import check_no_mask, check_stock_options
from liger_ops.swiglu.check import activation_of


class RMSNorm(nnx.RMSNorm):
    """`flax.nnx.RMSNorm` by the fused kernel, with the parameter `scale` of shape (D,).

    Args:
        num_features, epsilon, dtype, param_dtype, use_scale, scale_init, rngs, ...: Flax's own.
            Statistics over other than the last axis, or across devices, are refused.
        offset, casting_mode, implementation: those of `jax_liger.rms_norm`. The default casting
            mode rounds as Flax's own module does; "llama" rounds as Hugging Face's LLaMA.
    """

    def __init__(
        self,
        num_features: int,
        *,
        offset: float = 0.0,
        casting_mode: str = "none",
        implementation: str | None = None,
        **stock: Any,
    ):
        super().__init__(num_features, **stock)
        check_stock_options(self)
        self.offset = offset
        self.casting_mode = casting_mode
        self.implementation = implementation

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Normalises x (..., D) over its last axis."""
        check_no_mask(mask)
        scale = None if self.scale is None else self.scale[...]
        if self.casting_mode == "none" or self.dtype is not None:
            x, scale = self.promote_dtype((x, scale), dtype=self.dtype)
        return norms.rms_norm(
            x,
            scale,
            eps=self.epsilon,
            offset=self.offset,
            casting_mode=self.casting_mode,
            implementation=self.implementation,
        )


class LayerNorm(nnx.LayerNorm):
    """`flax.nnx.LayerNorm` by the fused kernel, with the parameters `scale` and `bias` (D,).

    Args:
        num_features, epsilon, dtype, param_dtype, use_bias, use_scale, bias_init, scale_init,
            rngs, ...: Flax's own. Statistics over other than the last axis, or across devices, are
            refused. The variance is always that of x less its mean, whatever use_fast_variance
            says.
        implementation: that of `jax_liger.layer_norm`.
    """

    def __init__(self, num_features: int, *, implementation: str | None = None, **stock: Any):
        super().__init__(num_features, **stock)
        check_stock_options(self)
        self.implementation = implementation

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalises x (..., D) over its last axis."""
        check_no_mask(mask)
        scale = None if self.scale is None else self.scale[...]
        bias = None if self.bias is None else self.bias[...]
        x, scale, bias = self.promote_dtype((x, scale, bias), dtype=self.dtype)
        return norms.layer_norm(
            x, scale, bias, eps=self.epsilon, implementation=self.implementation
        )


class SwiGLUMLP(nnx.Module):
    """The feed-forward layer of LLaMA, Mistral and Qwen, its activation by the fused kernel.

        y = down_proj(silu(gate_proj(x)) * up_proj(x))

    The three layers are `flax.nnx.Linear`: `gate_proj.kernel` and `up_proj.kernel` of shape (D, F),
    `down_proj.kernel` of shape (F, D). They are called as modules, so others may stand in for them,
    such as `flax.nnx.LoRALinear`.

    Args:
        hidden_size: D.
        intermediate_size: F.
        use_bias: whether the three layers have biases.
        dtype, param_dtype, kernel_init, precision, ...: those of `flax.nnx.Linear`, for all three.
        implementation: that of `jax_liger.swiglu`.
        rngs: the keys for the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        use_bias: bool = False,
        implementation: str | None = None,
        rngs: nnx.Rngs,
        **linear: Any,
    ):
        settings = {"use_bias": use_bias, "rngs": rngs, **linear}
        self.gate_proj = nnx.Linear(hidden_size, intermediate_size, **settings)
        self.up_proj = nnx.Linear(hidden_size, intermediate_size, **settings)
        self.down_proj = nnx.Linear(intermediate_size, hidden_size, **settings)
        self.implementation = implementation

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (..., D) to (..., D)."""
        return self.down_proj(self._activate(self.gate_proj(x), self.up_proj(x)))

    def _activate(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return activations.swiglu(gate, up, implementation=self.implementation)


class GeGLUMLP(SwiGLUMLP):
    """The feed-forward layer of Gemma, its activation by the fused kernel.

        y = down_proj(gelu(gate_proj(x)) * up_proj(x))

    Args:
        approximate, implementation: those of `jax_liger.geglu`.
        The others are those of `SwiGLUMLP`.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        approximate: str = "tanh",
        **settings: Any,
    ):
        activation_of(approximate)  # raises for one that there is not
        super().__init__(hidden_size, intermediate_size, **settings)
        self.approximate = approximate

    def _activate(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return activations.geglu(
            gate, up, approximate=self.approximate, implementation=self.implementation
        )
