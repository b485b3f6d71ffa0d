"""Cross-entropy in NumPy float64: what every implementation is judged against.

Forward, for the logits x of one token over V classes, its label y, class weights w (1 without),
smoothing e, soft cap c and z-loss coefficient k:

    l   = c tanh(x / c)                         (l = x without a cap)
    a   = log sum_j exp(l_j)                    the log-partition
    ce  = (1 - e) w_y (a - l_y) + (e / V) sum_j w_j (a - l_j)
    z   = k a^2

A token whose label is ignore_index counts for nothing; a label that is neither this nor a class
makes ce and z NaN. Over the other tokens, t,

    none   loss_t = ce_t + z_t
    sum    loss = sum_t ce_t + sum_t z_t
    mean   loss = sum_t ce_t / sum_t w_{y_t} + sum_t z_t / sum_t 1

where num_items, if given, takes the place of both denominators, and nothing over nothing is 0.

Backward. With p = softmax(l), the derivative of a, W = sum_j w_j and the token's upstream gradients
for the two terms, g for ce and h for z (each with its denominator):

    dl_j = p_j [ g ((1 - e) w_y + e W / V) + 2 h k a ] - g [ (1 - e) w_y [j = y] + (e / V) w_j ]
    dx_j = dl_j (1 - (l_j / c)^2)

Source: Szegedy et al. (2015), arXiv:1512.00567, for the smoothing; de Brebisson and Vincent (2015),
arXiv:1511.05042, for the z-loss; Gemma 2 (2024), arXiv:2408.00118, for the soft cap.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Arguments:
    """The arguments of the public functions that change a value."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    z_loss: float = 0.0
    reduction: str = "mean"
    num_items: float | None = None


def forward(
    logits: np.ndarray,
    labels: np.ndarray,
    class_weight: np.ndarray | None = None,
    arguments: Arguments = Arguments(),
) -> dict[str, np.ndarray]:
    """Returns loss and z_loss in float64: scalars, or (...) where reduction is "none"."""
    row = _Rows(logits, labels, class_weight, arguments)
    if arguments.reduction == "none":
        loss = row.ce + row.z
        return {"loss": loss.reshape(labels.shape), "z_loss": row.z.reshape(labels.shape)}
    z = np.sum(row.z) * row.z_factor
    return {"loss": np.sum(row.ce) * row.ce_factor + z, "z_loss": z}


def backward(
    logits: np.ndarray,
    labels: np.ndarray,
    class_weight: np.ndarray | None,
    arguments: Arguments,
    dloss: np.ndarray,
    dz_loss: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Returns dlogits in float64, for upstream gradients of loss and perhaps of z_loss."""
    row = _Rows(logits, labels, class_weight, arguments)
    e, classes = arguments.label_smoothing, logits.shape[-1]
    g = np.broadcast_to(_float64(dloss).reshape(-1), row.supervised.shape)
    h = g if dz_loss is None else g + _float64(dz_loss).reshape(-1)
    g, h = (np.where(row.supervised, d, 0.0)[:, None] for d in (g, h))
    if arguments.reduction != "none":
        g, h = g * row.ce_factor, h * row.z_factor
    target = (1.0 - e) * row.label_weight[:, None]
    dl = row.p * (g * (target + e * np.sum(row.weight) / classes))
    dl += row.p * 2.0 * h * arguments.z_loss * row.log_partition[:, None]
    dl -= g * (target * row.one_hot + e / classes * row.weight)
    dl[row.invalid] = np.nan
    return {"dlogits": (dl * row.slope).reshape(logits.shape)}


class _Rows:
    """Everything above, over rows (M, V)."""

    def __init__(self, logits, labels, class_weight, arguments: Arguments):
        classes = logits.shape[-1]
        x, y = _float64(logits).reshape(-1, classes), labels.reshape(-1)
        weight = np.ones(classes) if class_weight is None else _float64(class_weight)
        self.weight = weight
        self.supervised = y != arguments.ignore_index
        self.invalid = self.supervised & ((y < 0) | (y >= classes))
        inside = self.supervised & ~self.invalid
        y = np.where(inside, y, 0)
        self.one_hot = np.arange(classes) == y[:, None]

        x = np.where(self.supervised[:, None], x, 0.0)  # what an ignored row holds is not looked at
        cap = arguments.softcap
        l = x if cap is None else cap * np.tanh(x / cap)  # noqa: E741
        self.slope = 1.0 if cap is None else 1.0 - (l / cap) ** 2
        top = l.max(axis=1, keepdims=True) if l.size else np.zeros((len(x), 1))
        partition = np.sum(np.exp(l - top), axis=1, keepdims=True)
        below = np.log(partition) + (top - l)  # a - l_j, without the cancellation
        self.p = np.exp(l - top) / partition
        self.log_partition = (np.log(partition) + top)[:, 0]

        e = arguments.label_smoothing
        self.label_weight = weight[y]
        ce = (1.0 - e) * self.label_weight * below[np.arange(len(y)), y]
        if e:
            ce = ce + e / classes * np.sum(weight * below, axis=1)
        wrong = np.where(self.invalid, np.nan, 1.0)
        self.ce = np.where(self.supervised, ce, 0.0) * wrong
        z = arguments.z_loss * self.log_partition**2
        self.z = np.where(self.supervised, z, 0.0) * wrong

        self.ce_factor = self.z_factor = 1.0
        if arguments.reduction == "mean":
            given = arguments.num_items
            self.ce_factor = _inverse(np.sum(self.label_weight[inside]) if given is None else given)
            self.z_factor = _inverse(np.sum(inside) if given is None else given)


def _inverse(count: float) -> float:
    return 1.0 / count if count else 0.0


def _float64(a: np.ndarray) -> np.ndarray:
    return np.asarray(a).astype(np.float64)
