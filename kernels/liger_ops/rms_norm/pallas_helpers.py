"""What every Pallas kernel of RMSNorm does with the weight and with the casting mode."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from liger_ops.backend_pallas import load


@dataclass(frozen=True)
class Settings:
    eps: float
    offset: float
    casting_mode: str
    interpret: bool


def round_as_llama(n: jax.Array, dtype: Any, settings: Settings) -> jax.Array:
    """Hugging Face's LLaMA casts the normalised value down before it multiplies by the weight."""
    return n.astype(dtype).astype(jnp.float32) if settings.casting_mode == "llama" else n


def load_scale(
    weight_ref: Any, cols: jax.Array, mask: jax.Array | None, settings: Settings
) -> jax.Array:
    """weight + offset, or 1 without a weight, float32, of the shape of cols."""
    if weight_ref is None:
        return jnp.ones(cols.shape, jnp.float32)
    weight = load(weight_ref, cols, mask=mask, eviction_policy="evict_last")
    return weight.astype(jnp.float32) + settings.offset
