"""The head and cross-entropy in plain PyTorch: the CPU path, the base and the judge's yardstick."""

import torch

from liger_ops.cross_entropy import eager
from liger_ops.cross_entropy.check import Metrics


def logits_of(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, logit_scale: float
) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, weight)
    if logit_scale != 1.0 or bias is not None:  # in float32, as the rest of what follows
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
        if bias is not None:
            logits = logits + bias
    return logits


def fused_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    logit_scale: float,
    class_weight: torch.Tensor | None,
    num_items: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    reduction: str,
    return_metrics: bool,
) -> tuple[torch.Tensor, torch.Tensor, Metrics | None]:
    """loss, z_loss and metrics. hidden and weight have one dtype, in which the product is."""
    logits = logits_of(hidden, weight, bias, logit_scale)
    loss, z, metrics = eager.cross_entropy(
        logits, labels, class_weight, num_items, ignore_index, label_smoothing, softcap, z_loss,
        reduction, return_metrics,
    )  # fmt: skip
    return loss, z.detach(), metrics
