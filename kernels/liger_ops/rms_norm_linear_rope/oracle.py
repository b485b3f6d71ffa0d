"""RMSNorm, projection and rotation in NumPy float64: what every implementation is judged against.

Forward, for a row x of D numbers, the norm's weight w and offset o, the projection's weight W and
bias b, and the angles' cos and sin of the row's position:

    r = (mean(x^2) + eps)^(-1/2)
    u = W ((w + o) r x) + b                     split into heads of q, k and v
    q, k: norm(u) or u, rotated                 norm and rotation as in rms_norm and rope
    v:    u

One product is enough. r is one number a row, and the product is linear, so

    u = r W ((w + o) x) + b = r (W diag(w + o)) x + b

r is needed only after the sum over D, and the sum of squares that it is made of runs over the same
tiles of x: both are gathered at once, and x is read as it is. The weight w may be multiplied into x
tile by tile, or into W beforehand. What comes after, bias, norm of a head and rotation, are of the
columns of one head: a tile that holds whole heads, or both features of every pair, finishes them
before anything is stored, and neither the normed x nor u ever exists.

Rounding. In both orders every number that is multiplied has been rounded once: here (w + o) x or
(w + o) W, there the normed x (twice in the mode "llama"). Rounding is relative to the number, so it
does not matter that x is not divided by its size yet, except where that leaves the dtype's range;
float16's is so narrow that there r is computed first and multiplied in before the rounding. An
outlier is rounded as coarsely in either order.

Backward, for upstream gradients of q, k and v. With du what the backward of the rotation and of the
heads' norms makes of them:

    dW = du^T y    db = sum of du over rows    dy = du W        y = (w + o) r x
    dx and dw from dy by the norm's backward

so y, which is cheap to compute again, is all that is missing, and x all that is kept of a row.
Norms of heads need u, for which q's and k's part of the product is computed again.

Source: Zhang and Sennrich (2019), arXiv:1910.07467; Su et al. (2021), arXiv:2104.09864.
"""

import numpy as np

from liger_ops.rms_norm import oracle as rms_norm
from liger_ops.rms_norm_linear_rope.check import Heads
from liger_ops.rope import oracle as rope

Arrays = dict[str, np.ndarray]


def forward(
    inputs: Arrays, heads: Heads, *, eps: float = 1e-6, offset: float = 0.0
) -> dict[str, np.ndarray]:
    """Returns q, k and v in float64.

    inputs: x (B, T, D), weight ((N + 2 K) H, D), cos and sin, and perhaps norm_weight (D,), bias,
    q_norm_weight and k_norm_weight (H,).
    """
    q, k, v = _split(_product(inputs, eps, offset), heads)
    for name, value in (("q", q), ("k", k)):
        weight = inputs.get(f"{name}_norm_weight")
        if weight is not None:
            value[:] = rms_norm.forward(value, weight, eps=eps, offset=offset)["y"]
    return {**rope.forward(q, k, inputs["cos"], inputs["sin"], layout="half"), "v": v}


def backward(
    inputs: Arrays, upstream: Arrays, heads: Heads, *, eps: float = 1e-6, offset: float = 0.0
) -> dict[str, np.ndarray]:
    """Returns dx, dweight, and the gradients of what else `inputs` has but cos and sin, in float64.

    upstream: the gradients q, k and v.
    """
    u = dict(zip("qkv", _split(_product(inputs, eps, offset), heads), strict=True))
    angles = inputs["cos"], inputs["sin"]
    back = rope.backward(u["q"], u["k"], *angles, upstream["q"], upstream["k"], layout="half")
    du = {"q": back["dq"], "k": back["dk"], "v": _float64(upstream["v"])}
    gradients = {}
    for name in "qk":
        weight = inputs.get(f"{name}_norm_weight")
        if weight is not None:
            own = rms_norm.backward(u[name], weight, du[name], eps=eps, offset=offset)
            du[name], gradients[f"d{name}_norm_weight"] = own["dx"], own["dweight"]

    x, norm_weight = inputs["x"], inputs.get("norm_weight")
    rows = np.concatenate([du[name] for name in "qkv"], axis=2).reshape(-1, heads.columns)
    y = rms_norm.forward(x, norm_weight, eps=eps, offset=offset)["y"].reshape(-1, x.shape[-1])
    dy = (rows @ _float64(inputs["weight"])).reshape(x.shape)
    own = rms_norm.backward(x, norm_weight, dy, eps=eps, offset=offset)
    gradients |= {"dx": own["dx"], "dweight": rows.T @ y}
    if norm_weight is not None:
        gradients["dnorm_weight"] = own["dweight"]
    if "bias" in inputs:
        gradients["dbias"] = rows.sum(axis=0)
    return gradients


def _product(inputs: Arrays, eps: float, offset: float) -> np.ndarray:
    y = rms_norm.forward(inputs["x"], inputs.get("norm_weight"), eps=eps, offset=offset)["y"]
    u = y @ _float64(inputs["weight"]).T
    return u + _float64(inputs["bias"]) if "bias" in inputs else u


def _split(u: np.ndarray, heads: Heads) -> list[np.ndarray]:
    u = u.reshape(*u.shape[:-1], heads.q + 2 * heads.kv, heads.size)
    return np.split(u, [heads.q, heads.q + heads.kv], axis=2)


def _float64(a: np.ndarray) -> np.ndarray:
    return np.asarray(a).astype(np.float64)
