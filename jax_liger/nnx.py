"""Flax nnx modules. Parameter names and stock arguments are Flax's own, so checkpoints load."""

from typing import Any

import jax
from flax import nnx

from jax_liger import norms
from jax_liger.flax_options import check_stock_options


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
        if mask is not None:
            raise ValueError(f"mask must be None; got an array of shape {mask.shape}")
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
