"""A linear layer with a low-rank adapter in NumPy float64: what implementations are judged against.

Forward, for x (M, D), the base weight W (O, D), the adapter's A (r, D) and B (O, r), bias c (O,),
scaling s and the dropout's factors k (M, D), each 0 or 1 / (1 - p):

    u = (k x) A^T
    y = x W^T + c + s u B^T

Backward, for an upstream gradient dy:

    du = s dy B
    dx = dy W + k (du A)
    dW = dy^T x        dc = sum over rows of dy
    dA = du^T (k x)    dB = s dy^T u

What an implementation may cost. With W frozen the two large products are 4 M D O operations; the
small ones are r / D and r / O of that. x and u, which is M r numbers, are enough for the backward:
k comes again from the seed, and each sum can be made in the memory of its first term.

The dropout's factors are counted, not drawn: Philox4x32-10 with the seed as its key turns the
counter (column mod Q, row, stream, 0) into four words of 32 bits, for columns Q apart in this row,
Q = ceil(D / 4). An element is dropped where the upper 24 bits of its word are below 2^24 p,
rounded.

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models (2021), arXiv:2106.09685;
Kalajdzievski (2023), arXiv:2312.03732, for s = alpha / sqrt(r); Salmon et al., Parallel Random
Numbers: As Easy as 1, 2, 3 (2011), for Philox.
"""

import numpy as np


def forward(
    x: np.ndarray,
    weight: np.ndarray,
    lora_a: np.ndarray,
    lora_b: np.ndarray,
    bias: np.ndarray | None = None,
    *,
    scaling: float = 1.0,
    factors: np.ndarray | float = 1.0,
) -> dict[str, np.ndarray]:
    """Returns y (..., O) in float64. `factors` is k, of the shape of x."""
    x, weight, lora_a, lora_b = map(_float64, (x, weight, lora_a, lora_b))
    y = x @ weight.T + scaling * ((factors * x) @ lora_a.T) @ lora_b.T
    return {"y": y if bias is None else y + _float64(bias)}


def backward(
    x: np.ndarray,
    weight: np.ndarray,
    lora_a: np.ndarray,
    lora_b: np.ndarray,
    bias: np.ndarray | None,
    dy: np.ndarray,
    *,
    scaling: float = 1.0,
    factors: np.ndarray | float = 1.0,
) -> dict[str, np.ndarray]:
    """Returns dx, dweight, dlora_a, dlora_b and (with a bias) dbias in float64."""
    x, weight, lora_a, lora_b, dy = map(_float64, (x, weight, lora_a, lora_b, dy))
    du = scaling * (dy @ lora_b)
    kept, rows = _rows(factors * x), _rows(dy)
    gradients = {
        "dx": dy @ weight + factors * (du @ lora_a),
        "dweight": rows.T @ _rows(x),
        "dlora_a": _rows(du).T @ kept,
        "dlora_b": scaling * rows.T @ (kept @ lora_a.T),
    }
    if bias is not None:
        gradients["dbias"] = rows.sum(0)
    return gradients


def dropout_factors(
    seed: int, shape: tuple[int, ...], dropout_p: float, stream: int = 0
) -> np.ndarray:
    """k in float64, of x's shape (..., D); rows are counted over all dimensions but the last."""
    dim = shape[-1]
    rows = int(np.prod(shape[:-1]))
    quarter = -(-dim // 4)
    words = _philox(seed, np.arange(quarter)[None, :], np.arange(rows)[:, None], stream)
    words = np.concatenate(words, axis=1)[:, :dim]  # (rows, 4 Q) before it is cut
    kept = (words >> 8) >= round(dropout_p * 2**24)
    return kept.reshape(shape) / (1.0 - dropout_p)


def _philox(seed: int, group: np.ndarray, row: np.ndarray, stream: int) -> list[np.ndarray]:
    """Four words of 32 bits for every group and row, in uint64."""
    low = np.uint64(2**32 - 1)
    zeros = np.zeros(np.broadcast_shapes(group.shape, row.shape), np.uint64)
    c = [zeros + group.astype(np.uint64), zeros + row.astype(np.uint64)]
    c += [zeros + np.uint64(stream), zeros]
    keys = seed & (2**32 - 1), seed >> 32
    for i in range(10):
        key = [
            (k + i * step) % 2**32 for k, step in zip(keys, (0x9E3779B9, 0xBB67AE85), strict=True)
        ]
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (second >> np.uint64(32)) ^ c[1] ^ np.uint64(key[0]),
            second & low,
            (first >> np.uint64(32)) ^ c[3] ^ np.uint64(key[1]),
            first & low,
        ]
    return c


def _rows(a: np.ndarray) -> np.ndarray:
    return a.reshape(-1, a.shape[-1])


def _float64(a: np.ndarray) -> np.ndarray:
    return np.asarray(a).astype(np.float64)
