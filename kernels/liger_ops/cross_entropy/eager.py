"""Cross-entropy in plain PyTorch: the CPU path, the benchmark's base and the judge's yardstick."""

import torch

from liger_ops.cross_entropy.check import Metrics


def token_losses(
    logits: torch.Tensor,
    labels: torch.Tensor,
    class_weight: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """ce and z of every token, as in the oracle, in float32 (float64 of float64 logits)."""
    classes = logits.shape[-1]
    ignored = labels == ignore_index
    valid = (labels >= 0) & (labels < classes)
    y = torch.where(valid & ~ignored, labels, 0).long()[..., None]
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    x = x.masked_fill(ignored[..., None], 0.0)  # what an ignored row holds is not looked at
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    log_p = torch.log_softmax(x, dim=-1)
    weight = None if class_weight is None else class_weight.detach().to(x.dtype)
    ce = -log_p.gather(-1, y)[..., 0]
    if weight is not None:
        ce = ce * weight[y[..., 0]]
    if label_smoothing:
        smooth = -(log_p if weight is None else log_p * weight).sum(-1)
        ce = (1.0 - label_smoothing) * ce + label_smoothing / classes * smooth
    # NaN by a factor, so that the gradient is NaN too.
    keep = torch.where(ignored, 0.0, torch.where(valid, 1.0, torch.nan)).to(x.dtype)
    z = z_loss * torch.logsumexp(x, dim=-1).square() if z_loss else torch.zeros_like(ce)
    return torch.where(ignored, 0.0, ce) * keep, torch.where(ignored, 0.0, z) * keep


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    class_weight: torch.Tensor | None,
    num_items: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    reduction: str,
    return_metrics: bool,
) -> tuple[torch.Tensor, torch.Tensor, Metrics | None]:
    """loss, z_loss and metrics."""
    ce, z = token_losses(
        logits, labels, class_weight, ignore_index, label_smoothing, softcap, z_loss
    )
    ignored = labels == ignore_index
    if reduction == "mean":
        count = weight_sum = (~ignored).sum() if num_items is None else num_items
        if num_items is None and class_weight is not None:
            inside = ~ignored & (labels >= 0) & (labels < logits.shape[-1])
            y = torch.where(inside, labels, 0).long()
            weight_sum = torch.where(inside, class_weight.detach().to(ce.dtype)[y], 0.0).sum()
        z = z.sum() * inverse(count, ce.dtype)
        loss = ce.sum() * inverse(weight_sum, ce.dtype) + z
    elif reduction == "sum":
        z = z.sum()
        loss = ce.sum() + z
    else:
        loss = ce + z
    return loss, z, metrics(logits, labels, ignored, softcap) if return_metrics else None


def inverse(count: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """1 / count, and 0 of 0: nothing to average is 0 and not NaN."""
    count = count.to(dtype)
    return torch.where(count == 0.0, 0.0, 1.0 / torch.where(count == 0.0, 1.0, count))


def metrics(
    logits: torch.Tensor, labels: torch.Tensor, ignored: torch.Tensor, softcap: float | None
) -> Metrics:
    x = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:  # where it saturates, different logits become equal
        x = softcap * torch.tanh(x / softcap)
    predicted = torch.where(ignored, -1, x.argmax(-1))
    right = ((predicted == labels) & ~ignored).sum()
    return Metrics(right * inverse((~ignored).sum(), torch.float32), predicted)
