"""The decoder of the LLaMA family, in Flax nnx: one model, whose config says how families differ.

Read it from below: `CausalLM` is a `Model` and a head, a `Model` is an embedding and `Block`s, and
a `Block` is `Attention` and an `MLP` (or the experts of `moe.py`), each with its norms. Modules and
parameters bear the names that they have in Hugging Face's checkpoints, so that a checkpoint's key
is a path into the model: `model.layers.0.self_attn.q_proj.kernel`.

The layers are a list and not stacked for a scan: they differ within a model (windows, rotations,
experts), each keeps a checkpoint's and an adapter's names, and what a layer saves for the backward
is not copied into and out of stacks. The price is small: for a training step of 32 layers the CPU's
compiler takes about twice the time that it takes for 4.

Dims: B batch, T time, S slots of keys and values, D model, F feed-forward, N heads, K kv heads,
H head size, R rotated features of a head, V vocab.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_liger.angles import rope_angles
from jax_liger.models.attention import attention, attention_mask
from jax_liger.models.basics import add_and_norm, down_projected, linear, norm, times
from jax_liger.models.cache import Cache, LayerCache
from jax_liger.models.config import Config, Layer
from jax_liger.models.mesh import lookup, split_rows
from jax_liger.models.moe import Balance, MixtureOfExperts
from jax_liger.models.qkv import fused_heads
from jax_liger.rotary import rope
from liger_ops.fused_linear_cross_entropy.xla import logits_of


class Attention(nnx.Module):
    """Grouped-query attention over x (B, T, D)."""

    def __init__(self, config: Config, layer: Layer, *, rngs: nnx.Rngs):
        self.config, self.layer = config, layer
        D, H = config.hidden_size, config.head_dim
        N, K = config.num_attention_heads, config.num_key_value_heads
        if config.fused_projections:
            self.qkv_proj = linear(config, D, (N + 2 * K) * H, use_bias=config.qkv_bias, rngs=rngs)
        else:
            self.q_proj = linear(config, D, N * H, use_bias=config.qkv_bias, rngs=rngs)
            self.k_proj = linear(config, D, K * H, use_bias=config.qkv_bias, rngs=rngs)
            self.v_proj = linear(config, D, K * H, use_bias=config.qkv_bias, rngs=rngs)
        self.o_proj = linear(config, N * H, D, use_bias=config.o_bias, rngs=rngs)
        if config.family.qk_norm == "head":
            self.q_norm, self.k_norm = norm(config, H, rngs=rngs), norm(config, H, rngs=rngs)
        elif config.family.qk_norm == "width":
            self.q_norm = norm(config, N * H, rngs=rngs)
            self.k_norm = norm(config, K * H, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        angles: tuple[jax.Array, jax.Array] | None,
        mask: jax.Array | None,
        cache: LayerCache | None,
        heads: tuple[jax.Array, jax.Array, jax.Array] | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """(B, T, D), and the cache with this call's keys and values.

        angles: cos and sin, (T, R) or (B, T, R); None where nothing is rotated. mask: (B, 1, T, S),
        True where a query may see a key; without a cache it adds to causality and the window.
        heads: queries, keys and values if they are computed already; only x's shape counts then.
        """
        config, (B, T, _) = self.config, x.shape
        q, k, v = heads or self._heads(x, angles)
        if cache is not None:
            cache = cache.append(k, v)
            k, v = cache.keys, cache.values
        out = attention(
            *(q, k, v, mask),
            is_causal=cache is None,
            window=self.layer.window if cache is None else None,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            backend=config.attention,
        )
        return self.o_proj(out.reshape(B, T, -1)), cache

    def _heads(
        self, x: jax.Array, angles: tuple[jax.Array, jax.Array] | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries (B, T, N, H), keys and values (B, T, K, H), rotated."""
        config, (B, T, _) = self.config, x.shape
        q, k, v = self._project(x)
        if config.family.qk_norm == "width":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.reshape(B, T, -1, config.head_dim) for y in (q, k, v))
        if config.family.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if angles is not None:
            q, k = rope(q, k, *angles, implementation=config.implementation)
        return q, k, v

    def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries (B, T, N H), keys and values (B, T, K H)."""
        config = self.config
        if not config.fused_projections:
            return self.q_proj(x), self.k_proj(x), self.v_proj(x)
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        q, k, v = jnp.split(self.qkv_proj(x), (queries, queries + keys), -1)
        return q, k, v


class MLP(nnx.Module):
    """down_proj(act(gate_proj(x)) * up_proj(x))."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        D, F, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        if config.fused_projections:
            self.gate_up_proj = linear(config, D, 2 * F, use_bias=bias, rngs=rngs)
        else:
            self.gate_proj = linear(config, D, F, use_bias=bias, rngs=rngs)
            self.up_proj = linear(config, D, F, use_bias=bias, rngs=rngs)
        self.down_proj = linear(config, F, D, use_bias=bias, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (B, T, D) to (B, T, D)."""
        if self.config.fused_projections:
            return down_projected(self, self.gate_up_proj(x))
        return down_projected(self, self.gate_proj(x), self.up_proj(x))


class Block(nnx.Module):
    """Attention and the feed-forward part, each added to the residual stream.

    Families have norms before them, after them, or both; `config.family.norms` has their names.
    """

    def __init__(self, config: Config, layer: Layer, *, rngs: nnx.Rngs):
        self.config = config
        for name in config.family.norms:
            if name is not None:
                setattr(self, name, norm(config, config.hidden_size, rngs=rngs))
        self.self_attn = Attention(config, layer, rngs=rngs)
        self.mlp = (MixtureOfExperts if layer.experts else MLP)(config, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        angles: tuple[jax.Array, jax.Array] | None,
        mask: jax.Array | None,
        cache: LayerCache | None,
        counted: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache | None, Balance | None]:
        """The residual stream (B, T, D) after this layer, the cache, and the experts' balance.

        The first arguments are those of Attention, and `counted` is that of MixtureOfExperts.
        """
        before_attention, after_attention, before_mlp, after_mlp = (
            getattr(self, name) if name else None for name in self.config.family.norms
        )

        fused = self.config.fused_qkv and fused_heads(self.self_attn, before_attention, x, angles)
        if fused:
            h, cache = self.self_attn(x, angles, mask, cache, fused)
        else:
            h = before_attention(x) if before_attention else x
            h, cache = self.self_attn(h, angles, mask, cache)
        h = after_attention(h) if after_attention else h
        h = times(h, self.config.residual_multiplier)

        if before_mlp:
            h, x = add_and_norm(before_mlp, h, x)
        else:
            h = x = x + h
        balance = None
        if isinstance(self.mlp, MixtureOfExperts):
            h, balance = self.mlp(h, counted)
        else:
            h = self.mlp(h)
        h = after_mlp(h) if after_mlp else h
        return split_rows(x + times(h, self.config.residual_multiplier)), cache, balance


def _dots(primitive: Any, *args: Any, **params: Any) -> bool:
    return "ragged_dot" in primitive.name or (
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *args, **params)
    )


def _dots_and_attention(primitive: Any, *args: Any, **params: Any) -> bool:
    # cuDNN's attention is one primitive, whose results are all that its backward needs to have.
    return "dot_product_attention" in primitive.name or _dots(primitive, *args, **params)


_SAVEABLE = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": _dots,
    "cheap": _dots_and_attention,
}


class Model(nnx.Module):
    """Token ids to the last hidden state, normalised."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        self.embed_tokens = nnx.Embed(
            config.vocab_size,
            config.hidden_size,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            embedding_init=nnx.initializers.normal(config.initializer_range),
            rngs=rngs,
        )
        self.layers = nnx.List([Block(config, layer, rngs=rngs) for layer in config.layers])
        self.norm = norm(config, config.hidden_size, rngs=rngs)

    def __call__(
        self,
        input_ids: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """The hidden state (B, T, D) and the cache; the arguments are those of CausalLM."""
        hidden, cache, _ = self.balanced(input_ids, positions, segment_ids, cache)
        return hidden, cache

    def balanced(
        self,
        input_ids: jax.Array,
        positions: jax.Array | None,
        segment_ids: jax.Array | None,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Cache | None, Balance | None]:
        """The hidden state, the cache, and the balance of all layers with experts together.

        Padding, of segment 0, is no part of the balance. It is None where no layer has experts.
        """
        config, (B, T) = self.config, input_ids.shape
        if cache is not None:
            cache = cache.with_segments(segment_ids, B, T)
        if positions is None and cache is not None:
            positions = cache.positions(T)
        elif positions is None:
            positions = positions_of(segment_ids, T)
        seq_len = config.max_length or (T if cache is None else cache.size)

        # What layers share is computed once for each kind of them.
        angles = {
            kind: rope_angles(positions, config.frequencies(kind, seq_len))
            for kind in {layer.layer_type for layer in config.layers if layer.rope}
        }
        if cache is not None:
            masks = {w: cache.mask(w, T) for w in {layer.window for layer in config.layers}}
        else:
            masks = dict.fromkeys(
                {layer.window for layer in config.layers}, attention_mask(segment_ids)
            )

        x = self._embed(input_ids)
        run: Callable[..., Any] = Block.__call__
        if config.remat in _SAVEABLE and cache is None:
            run = nnx.remat(run, policy=_SAVEABLE[config.remat])
        counted = None if segment_ids is None else segment_ids != 0
        written, balances = [], []
        for i, (layer, block) in enumerate(zip(config.layers, self.layers, strict=True)):
            turn = angles[layer.layer_type] if layer.rope else None
            x, kv, balance = run(
                block, x, turn, masks[layer.window], cache and cache.layer(i), counted
            )
            written.append(kv)
            balances += [balance] if balance is not None else []
        balance = jax.tree.map(lambda *of: sum(of), *balances) if balances else None
        return self.norm(x), cache and cache.advance(written, T), balance

    def _embed(self, input_ids: jax.Array) -> jax.Array:
        x = lookup(self.embed_tokens, input_ids)
        factor = self.config.embedding_multiplier
        if self.config.family.scaled_embedding:  # Gemma rounds it to the dtype: sqrt(3072) is 55.5
            factor = float(np.asarray(factor, x.dtype))
        return split_rows(times(x, factor))


class CausalLM(nnx.Module):
    """A decoder with its head: token ids (B, T) to logits (B, T, V).

    Args:
        config: a `Config`.
        rngs: the keys for the parameters. `from_pretrained` makes a model without drawing any.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        self.model = Model(config, rngs=rngs)
        self.lm_head = nnx.data(None)  # a tied head reads the embedding table
        if not config.tie_word_embeddings:
            self.lm_head = linear(config, config.hidden_size, config.vocab_size, rngs=rngs)

    def __call__(
        self,
        input_ids: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        cache: Cache | None = None,
    ) -> Any:
        """Predicts the next token at every position.

        Args:
            input_ids: (B, T), integers below V.
            positions: (T,) or (B, T), for the rotary embedding; None counts from 0 in every row,
                in every document where there are segment_ids, and goes on behind a cache.
            segment_ids: (B, T), integers: which document a token belongs to, where several are
                packed in a row; a token sees those of its own. 0 is padding. Documents lie in one
                piece each, and two that touch have different numbers.
            cache: keys and values of what came before, of `Cache.empty`.

        Returns:
            logits (B, T, V) in the config's dtype; with a cache, (logits, cache).
        """
        hidden, cache = self.model(
            input_ids,
            positions=positions,
            segment_ids=segment_ids,
            cache=cache,
        )
        logits = self.logits(hidden)
        return logits if cache is None else (logits, cache)

    def head(self) -> tuple[jax.Array, int]:
        """The head's weight in the compute dtype, and its axis of classes: (V, D), 0 if tied."""
        if self.lm_head is None:
            return self.model.embed_tokens.embedding[...].astype(self.config.dtype), 0
        return self.lm_head.kernel[...].astype(self.config.dtype), 1

    def logits(self, hidden: jax.Array) -> jax.Array:
        """(B, T, D) to (B, T, V), scaled and capped as the config says."""
        weight, vocab_axis = self.head()
        logits = logits_of(hidden, weight, None, self.config.logit_scale, vocab_axis)
        cap = self.config.final_softcap
        if cap is not None:
            logits = cap * jnp.tanh(logits.astype(jnp.float32) / cap)
        return logits.astype(hidden.dtype)


def positions_of(segment_ids: jax.Array | None, length: int) -> jax.Array:
    """Positions (T,) from 0; or (B, T), each within its document."""
    steps = jnp.arange(length, dtype=jnp.int32)
    if segment_ids is None:
        return steps
    begins = jnp.diff(segment_ids, prepend=segment_ids[:, :1] - 1) != 0
    return steps - jax.lax.cummax(jnp.where(begins, steps, 0), axis=1)
