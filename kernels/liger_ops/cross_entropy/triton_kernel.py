"""Cross-entropy in Triton for PyTorch: the autograd.Function and the entry point.

The kernels are in triton_rows.py, their launchers in triton_launch.py.
"""

from typing import Any

import torch

from liger_ops import backend_triton
from liger_ops.backend_triton import empty
from liger_ops.cross_entropy import eager, triton_launch
from liger_ops.cross_entropy.check import Metrics
from liger_ops.cross_entropy.triton_launch import Constants, Settings, Tokens, Totals


def _forward(
    logits, labels, class_weight, num_items, settings: Settings
) -> tuple[Totals, Tokens, Constants]:
    shared = triton_launch.constants(class_weight, None, settings)
    tokens = triton_launch.empty_tokens(labels, settings)
    triton_launch.forward(logits, labels, shared, settings, tokens)
    classes = logits.shape[-1]
    totals = triton_launch.reduce(tokens, labels, classes, class_weight, num_items, settings)
    return totals, tokens, shared


def _backward(logits, labels, shared, settings, statistics, factors, dloss, dz) -> torch.Tensor:
    dlogits = empty(logits, logits.dtype)
    triton_launch.backward(
        logits, labels, shared, settings, statistics, factors, dloss, dz, into=dlogits
    )
    return dlogits


class _CrossEntropy(torch.autograd.Function):
    """Outputs those of loss, z_loss, accuracy and predicted that are asked for."""

    @staticmethod
    def forward(ctx: Any, logits, labels, class_weight, num_items, settings: Settings):
        totals, tokens, shared = _forward(logits, labels, class_weight, num_items, settings)
        ctx.save_for_backward(
            logits, labels, class_weight, num_items, shared.weight_sum, tokens.statistics,
            totals.factors,
        )  # fmt: skip
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        if settings.return_metrics:
            ctx.mark_non_differentiable(totals.accuracy, tokens.predicted)
        outputs = (totals.loss, totals.z_loss, totals.accuracy, tokens.predicted)
        # Only tensors: torch.compile stumbles over a None among the outputs.
        return tuple(output for output in outputs if output is not None)

    @staticmethod
    def backward(ctx: Any, dloss, *others):  # type: ignore[override]
        settings = ctx.settings
        dz = others[0] if settings.z_loss > 0.0 else None
        logits, labels, class_weight, num_items, weight_sum, statistics, factors = ctx.saved_tensors
        if dloss is None and dz is None:
            return None, None, None, None, None
        if backend_triton.creates_graph():
            loss, z, _ = eager.cross_entropy(
                logits, labels, class_weight, num_items, *settings[:5], return_metrics=False
            )
            used = [(y, dy) for y, dy in ((loss, dloss), (z, dz)) if dy is not None]
            ys, dys = zip(*used, strict=True)
            (dlogits,) = backend_triton.differentiable_gradients(ys, (logits,), dys)
        else:
            shared = Constants(class_weight, weight_sum)
            dlogits = _backward(logits, labels, shared, settings, statistics, factors, dloss, dz)
        return dlogits, None, None, None, None


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    class_weight: torch.Tensor | None,
    num_items: torch.Tensor | None,
    *settings: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, Metrics | None]:
    """loss, z_loss (None where the coefficient is 0) and metrics."""
    given = Settings(*settings)
    labels = labels.contiguous()
    if class_weight is not None:
        class_weight = class_weight.detach().contiguous()
    if num_items is not None:
        num_items = num_items.float()
    if torch.is_grad_enabled() and logits.requires_grad:
        outputs = _CrossEntropy.apply(logits, labels, class_weight, num_items, given)
        loss, *others = outputs
        metrics = Metrics(*others[-2:]) if given.return_metrics else None
        return loss, others[0] if given.z_loss > 0.0 else None, metrics
    totals, tokens, _ = _forward(logits, labels, class_weight, num_items, given)
    metrics = Metrics(totals.accuracy, tokens.predicted) if given.return_metrics else None
    return totals.loss, totals.z_loss, metrics
