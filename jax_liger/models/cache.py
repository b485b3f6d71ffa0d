"""Keys and values of the tokens so far, in slots of a fixed number, so that shapes never change."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jax_liger.models.config import Config


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values, (B, S, K, H), and how many slots are filled."""

    keys: jax.Array
    values: jax.Array
    filled: jax.Array

    def append(self, k: jax.Array, v: jax.Array) -> "LayerCache":
        """Writes k and v (B, T, K, H) into the next T slots."""
        start = (jnp.int32(0), self.filled, jnp.int32(0), jnp.int32(0))
        keys = jax.lax.dynamic_update_slice(self.keys, k.astype(self.keys.dtype), start)
        values = jax.lax.dynamic_update_slice(self.values, v.astype(self.values.dtype), start)
        return replace(self, keys=keys, values=values)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """All layers' keys and values; a pytree of S slots a row, of which `filled` are in use."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    segment_ids: jax.Array  # (B, S), 0 for padding and for what is still empty
    filled: jax.Array  # (), int32

    @staticmethod
    def empty(config: Config, batch: int, size: int) -> "Cache":
        """Room for `size` tokens in each of `batch` rows."""
        shape = (batch, size, config.num_key_value_heads, config.head_dim)

        def each() -> tuple[jax.Array, ...]:
            return tuple(jnp.zeros(shape, config.dtype) for _ in config.layers)

        segments, filled = jnp.zeros((batch, size), jnp.int32), jnp.zeros((), jnp.int32)
        return Cache(each(), each(), segments, filled)

    @property
    def size(self) -> int:
        """S."""
        return self.segment_ids.shape[1]

    def layer(self, i: int) -> LayerCache:
        """Of layer i."""
        return LayerCache(self.keys[i], self.values[i], self.filled)

    def with_segments(self, segment_ids: jax.Array | None, batch: int, length: int) -> "Cache":
        """Notes the documents of the next tokens; None: they are of document 1, as one text."""
        if segment_ids is None:
            segment_ids = jnp.ones((batch, length), jnp.int32)
        segments = jax.lax.dynamic_update_slice(
            self.segment_ids, segment_ids.astype(jnp.int32), (jnp.int32(0), self.filled)
        )
        return replace(self, segment_ids=segments)

    def positions(self, length: int) -> jax.Array:
        """(B, T): how many slots of the same document are before each of the next tokens."""
        queries, slots, own = self._next(length)
        return (own & (slots < queries)).sum(-1, dtype=jnp.int32)

    def mask(self, window: int | None, length: int) -> jax.Array:
        """(B, 1, T, S): which slots each of the next tokens sees."""
        queries, slots, own = self._next(length)
        seen = own & (slots <= queries)
        if window is not None:
            seen = seen & (slots > queries - window)
        return seen[:, None]

    def _next(self, length: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Slots of the next tokens (T, 1), all slots (S,), and whether their documents agree."""
        queries = self.filled + jnp.arange(length, dtype=jnp.int32)[:, None]
        slots = jnp.arange(self.size, dtype=jnp.int32)
        asking = jax.lax.dynamic_slice_in_dim(self.segment_ids, self.filled, length, 1)
        return queries, slots, asking[:, :, None] == self.segment_ids[:, None, :]

    def advance(self, layers: Sequence[LayerCache], length: int) -> "Cache":
        """With what the layers have written."""
        return replace(
            self,
            keys=tuple(layer.keys for layer in layers),
            values=tuple(layer.values for layer in layers),
            filled=self.filled + jnp.int32(length),
        )
