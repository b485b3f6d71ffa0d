"""Fused linear cross-entropy in NumPy float64: what every implementation is judged against.

Forward, for hidden states h (M, D), the head's weight W (V, D), bias b (V,) and scale s:

    x = s h W^T + b
    loss, z_loss = cross_entropy(x, labels)        as cross_entropy/oracle.py has it

Backward, with dx what that oracle gives for the logits x:

    dh = s dx W        dW = s dx^T h        db = sum over rows of dx

What an implementation may cost. The three matrix products are 6 M D V operations. The logits, M V
numbers, need not exist at once: some rows' are enough, and where the loss is a mean or a sum its
gradient is known up to a factor as soon as those logits are, so that they are formed once.

Source: Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models (2024),
arXiv:2411.09009; Hsu et al., Liger-Kernel (2024), arXiv:2410.10989.
"""

import numpy as np

from liger_ops.cross_entropy import oracle as cross_entropy
from liger_ops.cross_entropy.oracle import Arguments


def forward(
    hidden: np.ndarray,
    weight: np.ndarray,
    labels: np.ndarray,
    class_weight: np.ndarray | None,
    bias: np.ndarray | None,
    arguments: Arguments,
    logit_scale: float = 1.0,
) -> dict[str, np.ndarray]:
    """Returns loss and z_loss in float64."""
    logits = _logits(hidden, weight, bias, logit_scale)
    return cross_entropy.forward(logits, labels, class_weight, arguments)


def backward(
    hidden: np.ndarray,
    weight: np.ndarray,
    labels: np.ndarray,
    class_weight: np.ndarray | None,
    bias: np.ndarray | None,
    arguments: Arguments,
    dloss: np.ndarray,
    logit_scale: float = 1.0,
) -> dict[str, np.ndarray]:
    """Returns dhidden, dweight and (with a bias) dbias in float64."""
    logits = _logits(hidden, weight, bias, logit_scale)
    dx = cross_entropy.backward(logits, labels, class_weight, arguments, dloss)["dlogits"]
    rows = dx.reshape(-1, dx.shape[-1])
    gradients = {
        "dhidden": logit_scale * (dx @ _float64(weight)),
        "dweight": logit_scale * (rows.T @ _float64(hidden).reshape(-1, hidden.shape[-1])),
    }
    if bias is not None:
        gradients["dbias"] = rows.sum(0)
    return gradients


def _logits(hidden, weight, bias, logit_scale: float) -> np.ndarray:
    logits = logit_scale * (_float64(hidden) @ _float64(weight).T)
    return logits if bias is None else logits + _float64(bias)


def _float64(a: np.ndarray) -> np.ndarray:
    return np.asarray(a).astype(np.float64)
