"""A decoder's parts in NumPy float64, rounded where a model rounds: what captures are held to."""

import numpy as np
import torch

from liger_ops.drawing import DTYPES
from liger_ops.rope import oracle as rope_oracle
from liger_ops.swiglu import oracle as swiglu_oracle
from liger_validate.tensors import product


def float64(a: np.ndarray) -> np.ndarray:
    """The same numbers in float64."""
    a = np.asarray(a)
    if a.dtype == DTYPES["bfloat16"]:  # the upper half of a float32, in a fifth of astype's time
        bits = a.view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64)
    return a.astype(np.float64)


def rounded(a: np.ndarray, dtype: str) -> np.ndarray:
    """To the nearest number of the dtype, in float64."""
    return float64(a if dtype == "float64" else a.astype(DTYPES[dtype]))


def rounded_to_tf32(a: np.ndarray) -> np.ndarray:
    """float32 with ten bits of mantissa, as tensor cores take it, to nearest even."""
    bits = np.ascontiguousarray(a.astype(np.float32)).view(np.uint32).astype(np.uint64)
    bits = (bits + 0xFFF + ((bits >> 13) & 1)) & 0xFFFFE000
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def rms_norm(
    x: np.ndarray, weight: np.ndarray, *, eps: float, offset: float, casting: str, dtype: str
) -> np.ndarray:
    """x / rms(x) * (weight + offset); "llama" rounds before the weight and after, "gemma" once."""
    n = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)
    n = rounded(n, dtype) if casting == "llama" else n
    return rounded(n * (weight + offset), dtype)


def linear(x: np.ndarray, weight: torch.Tensor, bias: np.ndarray | None, dtype: str) -> np.ndarray:
    """x weight^T + bias, with weight (outputs, inputs)."""
    y = product(x, weight.T)
    return rounded(y if bias is None else y + bias, dtype)


def gated(gate: np.ndarray, up: np.ndarray, activation: str, dtype: str) -> np.ndarray:
    """act(gate) * up."""
    return rounded(swiglu_oracle.forward(gate, up, activation=activation)["y"], dtype)


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    angles: tuple[np.ndarray, np.ndarray] | None,
    seen: np.ndarray,
    *,
    scale: float,
    softcap: float | None,
    layout: str,
    dtype: str,
) -> np.ndarray:
    """Rotation and attention of q (B, T, N, H) over k and v (B, T, K, H), to (B, T, N H).

    seen: (B, T, T), True where a query may see a key.
    """
    q, k, v = _rotated(q, k, v, angles, layout, dtype)
    weights, _ = _weights(q, k, seen, scale, softcap, dtype)
    out = np.einsum("bnts,bsnh->btnh", weights, v)
    return rounded(out.reshape(*out.shape[:2], -1), dtype)


def attention_backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    angles: tuple[np.ndarray, np.ndarray] | None,
    seen: np.ndarray,
    d_out: np.ndarray,
    *,
    scale: float,
    softcap: float | None,
    layout: str,
    dtype: str,
    back: int = 1,
) -> dict[str, np.ndarray]:
    """The gradients of q, k and v (B, T, heads, H), of `attention`'s gradient d_out (B, T, N H).

    back: 1 turns those of q and k back, as is right; 0 does not, and -1 turns them forwards.
    """
    K = k.shape[2]
    q, k, v = _rotated(q, k, v, angles, layout, dtype)
    weights, slope = _weights(q, k, seen, scale, softcap, dtype)
    d_out = d_out.reshape(q.shape)
    d_weights = np.einsum("btnh,bsnh->bnts", d_out, v)
    d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdims=True)) * slope * scale
    d = {
        "q": np.einsum("bnts,bsnh->btnh", d_scores, k),
        "k": np.einsum("bnts,btnh->bsnh", d_scores, q),
        "v": np.einsum("bnts,btnh->bsnh", weights, d_out),
    }
    for part in "kv":  # of all queries that share a head
        B, S, N, H = d[part].shape
        d[part] = d[part].reshape(B, S, K, N // K, H).sum(3)
    if angles is not None and back:
        cos, sin = angles
        turned = rope_oracle.forward(d["q"], d["k"], cos, -back * sin, layout=layout)
        d |= {"q": turned["q"], "k": turned["k"]}
    return {part: rounded(gradient, dtype) for part, gradient in d.items()}


def _rotated(q, k, v, angles, layout, dtype):
    """q and k rotated, and k and v once for every head of q."""
    if angles is not None:
        turned = rope_oracle.forward(q, k, *angles, layout=layout)
        q, k = rounded(turned["q"], dtype), rounded(turned["k"], dtype)
    groups = q.shape[2] // k.shape[2]
    return q, *(np.repeat(a, groups, axis=2) for a in (k, v))


def _weights(q, k, seen, scale, softcap, dtype):
    """The softmax of the scores (B, N, T, S), and the softcap's slope at them."""
    scores, slope = np.einsum("btnh,bsnh->bnts", q, k) * scale, 1.0
    if softcap is not None:
        capped = np.tanh(scores / softcap)
        scores, slope = softcap * capped, 1.0 - capped**2
    scores = np.where(seen[:, None], scores, -1e300)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return rounded(weights / weights.sum(-1, keepdims=True), dtype), slope


def visible(mask: np.ndarray, *, causal: bool = True, window: int | None = None) -> np.ndarray:
    """(B, T, T): which keys each query sees; padding is seen by none."""
    steps = np.arange(mask.shape[1])
    behind = steps[:, None] - steps
    seen = np.ones_like(behind, bool)
    if causal:
        seen &= behind >= 0
    if window is not None:
        seen &= behind < window
    return seen[None] & mask.astype(bool)[:, None, :]


def angles(
    positions: np.ndarray, inv_freq: np.ndarray, factor: float
) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin (B, T, R) of positions (B, T), each half of R alike."""
    angle = positions[..., None] * np.concatenate([inv_freq, inv_freq]).astype(np.float64)
    return factor * np.cos(angle), factor * np.sin(angle)
