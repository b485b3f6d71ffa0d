"""Flax linen modules. Parameter names and stock arguments are Flax's own, so checkpoints load."""

import jax
from flax import linen

from jax_liger import norms
from jax_liger.flax_options import check_stock_options


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
        if mask is not None:
            raise ValueError(f"mask must be None; got an array of shape {mask.shape}")
        scale = None
        if self.use_scale:
            scale = self.param("scale", self.scale_init, (x.shape[-1],), self.param_dtype)
        casting_mode = self.casting_mode
        if casting_mode == "none" and self.dtype == x.dtype:
            casting_mode = "gemma"  # the same single rounding, straight to x's dtype
        y = norms.rms_norm(
            x,
            scale,
            eps=self.epsilon,
            offset=self.offset,
            casting_mode=casting_mode,
            implementation=self.implementation,
        )
        return y if self.dtype is None else y.astype(self.dtype)
