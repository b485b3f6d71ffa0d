"""RMSNorm in NumPy float64: what every implementation is judged against.

Forward, for a row x of D numbers, weight w, offset o:

    r = (mean(x^2) + eps)^(-1/2)
    n = r x
    y = (w + o) n                       (y = n without a weight)

Backward, for an upstream gradient dy. With g = (w + o) dy and dr/dx = -r^3 x / D:

    dx = r g + (dr/dx) sum(g x)
       = r (g - n mean(g n))
    dw = sum over rows of dy n

With the residual addition fused in, h = x + residual takes the place of x, is returned beside y,
and may have an upstream gradient dh of its own:

    d(x) = d(residual) = dh + r (g - n mean(g n))

The casting modes name where an implementation rounds; exact arithmetic has none of them.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019), arXiv:1910.07467.
"""

import numpy as np


def forward(
    x: np.ndarray,
    weight: np.ndarray | None = None,
    residual: np.ndarray | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> dict[str, np.ndarray]:
    """Returns y and, with a residual, h = x + residual, both (..., D) float64."""
    h = _float64(x) if residual is None else _float64(x) + _float64(residual)
    y = _normalise(h, eps)[0] * _scale(weight, offset)
    return {"y": y} if residual is None else {"y": y, "h": h}


def backward(
    x: np.ndarray,
    weight: np.ndarray | None,
    dy: np.ndarray,
    residual: np.ndarray | None = None,
    dh: np.ndarray | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> dict[str, np.ndarray]:
    """Returns dx, dweight (with a weight) and dresidual (with a residual) in float64."""
    h = _float64(x) if residual is None else _float64(x) + _float64(residual)
    n, r = _normalise(h, eps)
    g = _float64(dy) * _scale(weight, offset)
    dx = r * (g - n * np.mean(g * n, axis=-1, keepdims=True))
    if dh is not None:
        dx = dx + _float64(dh)
    gradients = {"dx": dx}
    if weight is not None:
        gradients["dweight"] = np.sum((_float64(dy) * n).reshape(-1, x.shape[-1]), axis=0)
    if residual is not None:
        gradients["dresidual"] = dx
    return gradients


def _float64(a: np.ndarray) -> np.ndarray:
    return np.asarray(a).astype(np.float64)


def _normalise(h: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    r = 1.0 / np.sqrt(np.mean(h * h, axis=-1, keepdims=True) + eps)
    return h * r, r


def _scale(weight: np.ndarray | None, offset: float) -> np.ndarray | float:
    return 1.0 if weight is None else _float64(weight) + offset
