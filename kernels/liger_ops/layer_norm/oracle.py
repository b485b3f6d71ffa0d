"""LayerNorm in NumPy float64: what every implementation is judged against.

Forward, for a row x of D numbers, weight w, bias b:

    m = mean(x)
    r = (mean((x - m)^2) + eps)^(-1/2)
    n = r (x - m)
    y = w n + b                         (w = 1 and b = 0 where there is none)

Backward, for an upstream gradient dy. With g = w dy, dm/dx = 1 / D and dr/dx = -r^2 n / D:

    dx = r g + (dr/dx) sum(g (x - m)) - (dm/dx) r sum(g)
       = r (g - mean(g) - n mean(g n))
    dw = sum over rows of dy n
    db = sum over rows of dy

Source: Ba, Kiros and Hinton, Layer Normalization (2016), arXiv:1607.06450.
"""

import numpy as np


def forward(
    x: np.ndarray,
    weight: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    *,
    eps: float = 1e-5,
) -> dict[str, np.ndarray]:
    """Returns y (..., D) in float64."""
    y = _normalise(_float64(x), eps)[0]
    if weight is not None:
        y = y * _float64(weight)
    return {"y": y if bias is None else y + _float64(bias)}


def backward(
    x: np.ndarray,
    weight: np.ndarray | None,
    bias: np.ndarray | None,
    dy: np.ndarray,
    *,
    eps: float = 1e-5,
) -> dict[str, np.ndarray]:
    """Returns dx, and dweight and dbias where there is a weight and a bias, in float64."""
    n, r = _normalise(_float64(x), eps)
    dy = _float64(dy)
    g = dy if weight is None else dy * _float64(weight)
    mean = lambda a: np.mean(a, axis=-1, keepdims=True)  # noqa: E731
    over_rows = lambda a: np.sum(a.reshape(-1, x.shape[-1]), axis=0)  # noqa: E731
    gradients = {"dx": r * (g - mean(g) - n * mean(g * n))}
    if weight is not None:
        gradients["dweight"] = over_rows(dy * n)
    if bias is not None:
        gradients["dbias"] = over_rows(dy)
    return gradients


def _float64(a: np.ndarray) -> np.ndarray:
    return np.asarray(a).astype(np.float64)


def _normalise(x: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    centred = x - np.mean(x, axis=-1, keepdims=True)
    r = 1.0 / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + eps)
    return centred * r, r
