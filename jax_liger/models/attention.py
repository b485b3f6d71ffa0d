"""Attention by the backend that takes it: cuDNN's flash attention, XLA, or with capped scores."""

import jax
import jax.numpy as jnp


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    *,
    is_causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    backend: str | None,
) -> jax.Array:
    """softmax(scale * q k^T) v for grouped queries.

    Args:
        q: (B, T, N, H).
        k, v: (B, S, K, H), where N is a multiple of K.
        mask: (B, 1, T, S) boolean, True where a query may see a key; None is True throughout.
        is_causal: whether a query sees only keys up to its own place.
        window: how many keys a causal query sees at most, its own among them.
        softcap: c of c tanh(s / c), for the scores; the plain path alone has it.
        backend: "cudnn", "xla", or None to choose.

    Returns:
        (B, T, N, H), in q's dtype.

    Raises:
        ValueError: where cuDNN is asked for by name and the scores are capped.
    """
    if softcap is not None and backend == "cudnn":
        raise ValueError(f"attention='cudnn' has no softcap for the scores; got softcap={softcap}")
    if window is not None and window >= k.shape[1]:
        window = None  # nothing is that far back
    if softcap is not None:
        return _capped(q, k, v, mask, is_causal, window, scale, softcap)
    return jax.nn.dot_product_attention(
        *(q, k, v),
        mask=mask,
        is_causal=is_causal,
        scale=scale,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=backend or ("cudnn" if _cudnn_takes(q, k, mask) else "xla"),  # type: ignore[arg-type]
    )


def attention_mask(segment_ids: jax.Array | None) -> jax.Array | None:
    """(B, 1, T, T): True where query and key are of one document; None for one a row."""
    if segment_ids is None:
        return None
    return (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]


def _cudnn_takes(q: jax.Array, k: jax.Array, mask: jax.Array | None) -> bool:
    (_, T, _, H), S = q.shape, k.shape[1]
    if jax.default_backend() != "gpu" or q.dtype not in (jnp.bfloat16, jnp.float16):
        return False
    hopper = float(jax.devices()[0].compute_capability) >= 9.0
    largest = 256 if hopper else 128
    even = mask is None or (T % 2 == 0 and S % 2 == 0)  # a masked backward's condition
    return largest >= H and H % 8 == 0 and even and T > 1


def _capped(q, k, v, mask, is_causal, window, scale, softcap) -> jax.Array:
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    q = q.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32) * scale
    scores = softcap * jnp.tanh(scores / softcap)
    seen = jnp.ones((1, 1, T, S), bool) if mask is None else mask
    if is_causal:
        behind = jnp.arange(T)[:, None] - jnp.arange(S)
        seen = seen & (behind >= 0) & (behind < (S if window is None else window))
    scores = jnp.where(seen[:, :, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, -1).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(B, T, N, H)
