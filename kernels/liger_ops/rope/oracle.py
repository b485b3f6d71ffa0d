"""Rotary position embedding in NumPy float64: what every implementation is judged against.

Forward, for the first R features x of every head of q and of k, and the angles' cos and sin of its
position:

    y = x * cos + rotate(x) * sin

    half         rotate(x) = (-x_2, x_1),                    x_1 and x_2 the halves of x
    interleaved  rotate(x)_2i = -x_2i+1, rotate(x)_2i+1 = x_2i

The features beyond R stay as they are.

Backward, for an upstream gradient dy. Rotating by a quarter turn is antisymmetric, its transpose is
its negative, so

    dx = dy * cos - rotate(dy * sin)
    dcos = sum of dy * x,    dsin = sum of dy * rotate(x)

over all heads of q and k, and over the batch where its rows share the angles.

Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding (2021),
arXiv:2104.09864.
"""

import numpy as np


def forward(
    q: np.ndarray, k: np.ndarray, cos: np.ndarray, sin: np.ndarray, *, layout: str
) -> dict[str, np.ndarray]:
    """Returns q and k, rotated, in float64."""
    cos, sin = _float64(cos)[..., None, :], _float64(sin)[..., None, :]
    size = cos.shape[-1]
    results = {}
    for name, x in (("q", _float64(q)), ("k", _float64(k))):
        turned = x[..., :size] * cos + _rotate(x[..., :size], layout) * sin
        results[name] = np.concatenate([turned, x[..., size:]], axis=-1)
    return results


def backward(
    q: np.ndarray,
    k: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    dq: np.ndarray,
    dk: np.ndarray,
    *,
    layout: str,
) -> dict[str, np.ndarray]:
    """Returns dq and dk, of the arguments from those of the results, and dcos and dsin."""
    shape = np.shape(cos)
    cos, sin = _float64(cos)[..., None, :], _float64(sin)[..., None, :]
    size = cos.shape[-1]
    results = {}
    dcos, dsin = np.zeros(shape), np.zeros(shape)
    for name, x, dy in (("dq", _float64(q), _float64(dq)), ("dk", _float64(k), _float64(dk))):
        x, dx = x[..., :size], dy[..., :size]
        back = dx * cos - _rotate(dx * sin, layout)
        results[name] = np.concatenate([back, dy[..., size:]], axis=-1)
        dcos += _sum_to((dx * x).sum(axis=-2), shape)
        dsin += _sum_to((dx * _rotate(x, layout)).sum(axis=-2), shape)
    return {**results, "dcos": dcos, "dsin": dsin}


def _float64(a: np.ndarray) -> np.ndarray:
    return np.asarray(a).astype(np.float64)


def _rotate(x: np.ndarray, layout: str) -> np.ndarray:
    """By a quarter turn, every pair of features."""
    turned = np.empty_like(x)
    if layout == "half":
        half = x.shape[-1] // 2
        turned[..., :half], turned[..., half:] = -x[..., half:], x[..., :half]
    elif layout == "interleaved":
        turned[..., ::2], turned[..., 1::2] = -x[..., 1::2], x[..., ::2]
    else:
        raise ValueError(f"layout must be one of 'half', 'interleaved'; got {layout!r}")
    return turned


def _sum_to(per_position: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """(B, T, R) to (B, T, R), (1, T, R) or (T, R)."""
    if len(shape) == 3 and shape[0] == per_position.shape[0]:
        return per_position
    return per_position.sum(axis=0).reshape(shape)
