"""Flax linen modules. Parameter names and stock arguments are Flax's own, so checkpoints load."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from jax_liger import activations, norms
from jax_liger.flax_options import check_no_mask, check_stock_options


class RMSNorm(linen.RMSNorm):
    """`flax.linen.RMSNorm` by the fused kernel, with the parameter `scale` of shape (D,).

    Attributes:
        epsilon, dtype, param_dtype, use_scale, scale_init, ...: Flax's own. Statistics over other
            than the last axis, or across devices, are refused.
        offset, casting_mode, implementation: those of `jax_liger.rms_norm`. The default casting
            mode rounds as Flax's own module does; "llama" rounds as Hugging Face's LLaMA.
    """

    offset: float = 0.0
    casting_mode: str = "none"
    implementation: str | None = None

    @linen.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalises x (..., D) over its last axis."""
        check_stock_options(self)
        check_no_mask(mask)
        return rms_norm_of(self, x, self.offset, self.casting_mode, self.implementation)


class LayerNorm(linen.LayerNorm):
    """`flax.linen.LayerNorm` by the fused kernel, with the parameters `scale` and `bias` (D,).

    Attributes:
        epsilon, dtype, param_dtype, use_bias, use_scale, bias_init, scale_init, ...: Flax's own.
            Statistics over other than the last axis, or across devices, are refused. They are
            always float32, and the variance that of x less its mean, whatever
            force_float32_reductions and use_fast_variance say.
        implementation: that of `jax_liger.layer_norm`.
    """

    implementation: str | None = None

    @linen.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalises x (..., D) over its last axis."""
        check_stock_options(self)
        check_no_mask(mask)
        return layer_norm_of(self, x, self.implementation)


def rms_norm_of(
    module: linen.RMSNorm,
    x: jax.Array,
    offset: float,
    casting_mode: str,
    implementation: str | None,
) -> jax.Array:
    """What a stock module's call computes, by the kernel; in the module's own scope."""
    scale = None
    if module.use_scale:
        scale = module.param("scale", module.scale_init, (x.shape[-1],), module.param_dtype)
    if casting_mode == "none" and module.dtype == x.dtype:
        casting_mode = "gemma"  # the same single rounding, straight to x's dtype
    elif casting_mode == "none" and module.dtype is not None:
        # The result's dtype is the promoted one of x and scale: no narrower than what is asked
        # for, to be rounded once.
        if scale is None:
            scale, offset = jnp.ones((x.shape[-1],), module.dtype), 0.0
        scale = scale.astype(jnp.promote_types(scale.dtype, module.dtype))
    y = norms.rms_norm(
        x,
        scale,
        eps=module.epsilon,
        offset=offset,
        casting_mode=casting_mode,
        implementation=implementation,
    )
    return y if module.dtype is None else y.astype(module.dtype)


def layer_norm_of(module: linen.LayerNorm, x: jax.Array, implementation: str | None) -> jax.Array:
    """What a stock module's call computes, by the kernel; in the module's own scope."""
    scale = bias = None
    if module.use_scale:
        scale = module.param("scale", module.scale_init, (x.shape[-1],), module.param_dtype)
    if module.use_bias:
        bias = module.param("bias", module.bias_init, (x.shape[-1],), module.param_dtype)
    return norms.layer_norm_to(x, scale, bias, module.epsilon, implementation, module.dtype)


class SwiGLUMLP(linen.Module):
    """The feed-forward layer of LLaMA, Mistral and Qwen, its activation by the fused kernel.

        y = down_proj(silu(gate_proj(x)) * up_proj(x))

    The three layers are `flax.linen.Dense`: `gate_proj` and `up_proj` with kernels of shape (D, F),
    `down_proj` with a kernel of shape (F, D).

    Attributes:
        intermediate_size: F. D is the size of the input's last axis.
        use_bias, dtype, param_dtype, precision, kernel_init, bias_init: those of
            `flax.linen.Dense`, for all three.
        implementation: that of `jax_liger.swiglu`.
    """

    intermediate_size: int
    use_bias: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Callable[..., Any] = linen.initializers.lecun_normal()
    bias_init: Callable[..., Any] = linen.initializers.zeros_init()
    implementation: str | None = None

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (..., D) to (..., D)."""
        gate = self._dense(self.intermediate_size, "gate_proj")(x)
        up = self._dense(self.intermediate_size, "up_proj")(x)
        return self._dense(x.shape[-1], "down_proj")(self._activate(gate, up))

    def _dense(self, features: int, name: str) -> linen.Dense:
        return linen.Dense(
            features,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            name=name,
        )

    def _activate(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return activations.swiglu(gate, up, implementation=self.implementation)


class GeGLUMLP(SwiGLUMLP):
    """The feed-forward layer of Gemma, its activation by the fused kernel.

        y = down_proj(gelu(gate_proj(x)) * up_proj(x))

    Attributes:
        approximate, implementation: those of `jax_liger.geglu`.
        The others are those of `SwiGLUMLP`.
    """

    approximate: str = "tanh"

    def _activate(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return activations.geglu(
            gate, up, approximate=self.approximate, implementation=self.implementation
        )
