"""Generation with a cache of keys and values, compiled once for each pair of lengths."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_liger.models.cache import Cache
from jax_liger.models.decoder import CausalLM


def generate(
    model: CausalLM,
    input_ids: jax.Array,
    *,
    max_new_tokens: int,
    attention_mask: jax.Array | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    key: jax.Array | None = None,
    eos_token_id: int | tuple[int, ...] | None = None,
    pad_token_id: int = 0,
) -> jax.Array:
    """Continues every row of token ids.

    Args:
        model: the model.
        input_ids: (B, T). Shorter prompts are padded on the left.
        max_new_tokens: how many tokens to add at most.
        attention_mask: (B, T), 0 where input_ids is padding; None if it is nowhere.
        temperature: 0 takes the likeliest token; else the logits are divided by it and drawn from.
        top_k: draw from the k likeliest only.
        key: of jax.random, needed where tokens are drawn.
        eos_token_id: the token or tokens after which a row ends; None to go on to the end.
        pad_token_id: what follows where a row has ended.

    Returns:
        (B, T + max_new_tokens), the prompts and what follows them.

    Raises:
        ValueError: for an argument that does not fit, naming it and its value.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1; got {max_new_tokens}")
    if not temperature >= 0.0:
        raise ValueError(f"temperature must be at least 0; got {temperature}")
    if temperature > 0.0 and key is None:
        raise ValueError(f"key must be given to draw with temperature={temperature}; got None")
    ends = (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id or ())
    return _generate(
        *(model, jnp.asarray(input_ids), attention_mask),
        jax.random.key(0) if key is None else key,
        jnp.float32(temperature),
        max_new_tokens=max_new_tokens,
        greedy=temperature == 0.0,
        top_k=top_k,
        ends=ends,
        pad_token_id=pad_token_id,
    )


@functools.partial(
    jax.jit,
    static_argnames=("max_new_tokens", "greedy", "top_k", "ends", "pad_token_id"),
)
def _generate(
    model: CausalLM,
    input_ids: jax.Array,
    attention_mask: jax.Array | None,
    key: jax.Array,
    temperature: jax.Array,
    *,
    max_new_tokens: int,
    greedy: bool,
    top_k: int | None,
    ends: tuple[int, ...],
    pad_token_id: int,
) -> jax.Array:
    B, T = input_ids.shape
    cache = Cache.empty(model.config, B, T + max_new_tokens)

    def choose(hidden: jax.Array, step: jax.Array) -> jax.Array:
        logits = model.logits(hidden)[:, -1].astype(jnp.float32)  # (B, V)
        if greedy:
            return logits.argmax(-1)
        if top_k is not None:
            least = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][:, -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        return jax.random.categorical(jax.random.fold_in(key, step), logits / temperature)

    def ended(token: jax.Array) -> jax.Array:
        return jnp.isin(token, jnp.asarray(ends, token.dtype)) if ends else jnp.zeros(B, bool)

    hidden, cache = model.model(input_ids, segment_ids=attention_mask, cache=cache)
    first = choose(hidden[:, -1:], jnp.int32(0)).astype(input_ids.dtype)
    tokens = jnp.full((B, max_new_tokens), pad_token_id, input_ids.dtype).at[:, 0].set(first)

    def unfinished(carry: Any) -> jax.Array:
        step, _, _, done, _ = carry
        return (step < max_new_tokens) & ~done.all()

    def step_on(carry: Any) -> Any:
        step, last, tokens, done, cache = carry
        hidden, cache = model.model(last[:, None], cache=cache)
        token = choose(hidden, step).astype(tokens.dtype)
        token = jnp.where(done, pad_token_id, token)
        tokens = jax.lax.dynamic_update_slice(tokens, token[:, None], (jnp.int32(0), step))
        return step + 1, token, tokens, done | ended(token), cache

    start = (jnp.int32(1), first, tokens, ended(first), cache)
    _, _, tokens, _, _ = jax.lax.while_loop(unfinished, step_on, start)
    return jnp.concatenate([input_ids, tokens], 1)
