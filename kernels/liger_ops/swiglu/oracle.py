"""SwiGLU and GeGLU in NumPy float64: what every implementation is judged against.

Forward, elementwise, for a gate g and a factor u:

    y = a(g) u

with the activation a one of

    silu        a = g s(g),                     s(g) = 1 / (1 + e^-g)
    gelu_tanh   a = g s(2 c),                   c = sqrt(2 / pi) (g + 0.044715 g^3)
    gelu        a = g P(g),                     P(g) = erfc(-g / sqrt 2) / 2

The second is g (1 + tanh c) / 2, written with (1 + tanh c) / 2 = s(2 c), which keeps its precision
where tanh c is close to -1.

Backward, for an upstream gradient dy:

    du = dy a(g)
    dg = dy u a'(g)

    silu        a' = s (1 + g (1 - s))
    gelu_tanh   a' = s + g s (1 - s) 2 c',      c' = sqrt(2 / pi) (1 + 3 * 0.044715 g^2)
    gelu        a' = P(g) + g e^(-g^2 / 2) / sqrt(2 pi)

Source: Shazeer, GLU Variants Improve Transformer (2020), arXiv:2002.05202; Hendrycks and Gimpel,
Gaussian Error Linear Units (2016), arXiv:1606.08415.
"""

import math

import numpy as np

_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def forward(gate: np.ndarray, up: np.ndarray, *, activation: str) -> dict[str, np.ndarray]:
    """Returns y in float64."""
    return {"y": _activate(_float64(gate), activation)[0] * _float64(up)}


def backward(
    gate: np.ndarray, up: np.ndarray, dy: np.ndarray, *, activation: str
) -> dict[str, np.ndarray]:
    """Returns dgate and dup in float64."""
    a, slope = _activate(_float64(gate), activation)
    return {"dgate": _float64(dy) * _float64(up) * slope, "dup": _float64(dy) * a}


def _float64(a: np.ndarray) -> np.ndarray:
    return np.asarray(a).astype(np.float64)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(x))  # does not overflow, and loses nothing on either side
    return np.where(x >= 0, 1.0, e) / (1.0 + e)


def _activate(g: np.ndarray, activation: str) -> tuple[np.ndarray, np.ndarray]:
    """a(g) and a'(g)."""
    if activation == "silu":
        s = _sigmoid(g)
        return g * s, s * (1.0 + g * _sigmoid(-g))
    if activation == "gelu_tanh":
        root = np.sqrt(2.0 / np.pi)
        c = root * (g + 0.044715 * g**3)
        s = _sigmoid(2.0 * c)
        return g * s, s + g * s * _sigmoid(-2.0 * c) * 2.0 * root * (1.0 + 3 * 0.044715 * g**2)
    if activation == "gelu":
        p = 0.5 * _erfc(-g / np.sqrt(2.0))
        return g * p, p + g * np.exp(-0.5 * g * g) / np.sqrt(2.0 * np.pi)
    raise ValueError(f"activation must be one of 'silu', 'gelu_tanh', 'gelu'; got {activation!r}")
