"""Fused linear cross-entropy for PyTorch: library products around the Triton kernels of
cross-entropy, over as many rows' logits at once as `Plan` says.

The sums over parts are kept in the type asked for until the backward, which multiplies them by the
loss's own gradient and casts them once. The loops over parts are in triton_parts.py.
"""

from typing import Any

import torch

from liger_ops import backend_triton
from liger_ops.backend_triton import dense
from liger_ops.cross_entropy import triton_launch
from liger_ops.cross_entropy.check import Metrics
from liger_ops.cross_entropy.triton_launch import Constants, Settings, Tokens, Totals
from liger_ops.fused_linear_cross_entropy import eager
from liger_ops.fused_linear_cross_entropy.cases import Plan
from liger_ops.fused_linear_cross_entropy.triton_parts import (
    Gradients,
    Inputs,
    Needs,
    over_parts,
    weight_by_blocks,
)
from liger_ops.fused_linear_cross_entropy.triton_products import Products


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """Outputs those of loss, z_loss, accuracy and predicted that are asked for."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, labels, bias, class_weight, num_items, options):
        settings, sum_dtype, memory = options
        inputs = _inputs(hidden, weight, labels, bias, class_weight, num_items, settings)
        ctx.needs = Needs(*(ctx.needs_input_grad[i] for i in (0, 1, 3)))
        ctx.plan = _plan(inputs, ctx.needs.weight, sum_dtype, memory)
        ctx.options = options
        early = settings.reduction != "none" and not ctx.plan.keeps_logits
        totals, tokens, ctx.shared, ctx.work = _forward(
            inputs, settings, ctx.plan, ctx.needs if early else None, sum_dtype
        )
        products = inputs.products
        ctx.save_for_backward(
            *inputs[:-1], products.order, products.live, tokens.statistics, totals.factors
        )
        outputs = (totals.loss, totals.z_loss, totals.accuracy, tokens.predicted)
        outputs = tuple(output for output in outputs if output is not None)
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, dloss, *_):  # type: ignore[override]
        hidden, weight, labels, *rest, order, live, statistics, factors = ctx.saved_tensors
        inputs = Inputs(hidden, weight, labels, *rest, products=Products(order, live))
        if dloss is None:
            return (None,) * 7
        settings, sum_dtype, _ = ctx.options
        if backend_triton.creates_graph():
            gradients = _plain_gradients(inputs, settings, dloss)
        else:
            work, ctx.work = ctx.work, None  # once: it is overwritten, and so made anew after that
            gradients = _backward(
                inputs, settings, ctx.plan, ctx.needs, sum_dtype, ctx.shared, statistics, factors,
                dloss, work,
            )  # fmt: skip
        return gradients[0], gradients[1], None, gradients[2], None, None, None


def _inputs(hidden, weight, labels, bias, class_weight, num_items, settings: Settings) -> Inputs:
    products = Products.over(hidden, weight, labels, settings.ignore_index)
    labels = products.ordered(labels)
    return Inputs(hidden, weight, labels, bias, class_weight, num_items, products)


def _plan(inputs: Inputs, needs_weight: bool, sum_dtype: torch.dtype, memory: str | int) -> Plan:
    rows, dim = inputs.hidden.shape
    return Plan.for_shape(
        rows, dim, len(inputs.weight), inputs.hidden.element_size(),
        sum_itemsize=sum_dtype.itemsize, needs_weight=needs_weight, memory=memory,
    )  # fmt: skip


def _forward(
    inputs: Inputs, settings: Settings, plan: Plan, needs: Needs | None, sum_dtype: torch.dtype
) -> tuple[Totals, Tokens, Constants, Any]:
    """Also returns the work that the backward goes on with: logits, or gradients where `needs`.

    What there is one of a token is in the rows' own order, but for the statistics.
    """
    vocab = len(inputs.weight)
    shared = triton_launch.constants(inputs.class_weight, inputs.bias, settings)
    tokens = triton_launch.empty_tokens(inputs.labels, settings)
    if needs is None:
        work = over_parts(inputs, plan, shared, settings, tokens, tokens.statistics)
    else:
        work = _early_gradients(
            inputs, settings, plan, needs, sum_dtype, shared, tokens, tokens.statistics
        )
    totals = triton_launch.reduce(
        tokens, inputs.labels, vocab, inputs.class_weight, inputs.num_items, settings
    )
    as_given = inputs.products.as_given
    if settings.reduction == "none":
        z_loss = None if totals.z_loss is None else as_given(totals.z_loss)
        totals = totals._replace(loss=as_given(totals.loss), z_loss=z_loss)
    if tokens.predicted is not None:
        tokens = tokens._replace(predicted=as_given(tokens.predicted))
    return totals, tokens, shared, work


def _early_gradients(inputs, settings, plan, needs, sum_dtype, shared, tokens, statistics):
    """The gradients but for the loss's own, made with the losses or, without `tokens`, anew."""
    factors = None
    if settings.reduction == "mean":
        factors = triton_launch.mean_factors(
            inputs.labels, len(inputs.weight), inputs.class_weight, inputs.num_items,
            settings.ignore_index,
        )  # fmt: skip
        if inputs.hidden.dtype == torch.float16:
            # One token's part in a mean may be too small for this type. The mean's factor comes
            # last, and only how much less or more the z-loss is divided by comes here.
            factors = torch.where(factors[:1] == 0.0, factors, factors / factors[:1])
    if plan.classes is not None:  # the weight's gradient comes in the backward
        needs = needs._replace(weight=False)
    gradients = Gradients(inputs, needs, plan, sum_dtype, settings.logit_scale)
    one = torch.ones((), dtype=torch.float32, device=inputs.hidden.device)
    over_parts(inputs, plan, shared, settings, tokens, statistics, gradients, factors, one)
    return gradients


def _backward(
    inputs, settings, plan, needs, sum_dtype, shared, statistics, factors, dloss, work
) -> list[Any]:
    bias_dtype = None if inputs.bias is None else inputs.bias.dtype
    scale, products = settings.logit_scale, inputs.products
    if settings.reduction == "none":
        dloss = products.ordered(dloss)
    if plan.keeps_logits:
        hidden = products.ordered(inputs.hidden)
        if work is None:
            work = hidden.new_empty(len(hidden), len(inputs.weight))
            products.logits(hidden, inputs.weight, work, 0)
        gradients = Gradients(inputs, needs, plan, sum_dtype, scale)
        rows = slice(0, len(hidden))
        gradients.add(rows, inputs, hidden, work, shared, settings, statistics, factors, dloss)
        return gradients.finished(None, bias_dtype)
    if settings.reduction == "none":
        late = needs if plan.classes is None else needs._replace(weight=False)
        gradients = Gradients(inputs, late, plan, sum_dtype, scale)
        over_parts(inputs, plan, shared, settings, None, statistics, gradients, None, dloss)
        made = gradients.finished(None, bias_dtype)
    else:
        if work is None:
            work = _early_gradients(
                inputs, settings, plan, needs, sum_dtype, shared, None, statistics
            )
        factor = dloss
        if settings.reduction == "mean" and inputs.hidden.dtype == torch.float16:
            factor = dloss * factors[0]
        made = work.finished(factor, bias_dtype)
    if plan.classes is not None and needs.weight:
        gradients = Gradients(inputs, Needs(False, True, False), plan, sum_dtype, scale)
        inputs = inputs._replace(labels=products.as_given(inputs.labels))
        statistics = products.as_given(statistics)
        if settings.reduction == "none":
            dloss = products.as_given(dloss)
        weight_by_blocks(inputs, plan, shared, settings, statistics, factors, dloss, gradients)
        made[1] = gradients.dweight
    return made


def _plain_gradients(inputs: Inputs, settings: Settings, dloss: torch.Tensor) -> list[Any]:
    """Those that can be differentiated again."""
    hidden, weight, labels, bias, class_weight, num_items, products = inputs
    labels = products.as_given(labels)
    loss, _, _ = eager.fused_linear_cross_entropy(
        hidden, weight, labels, bias, settings.logit_scale, class_weight, num_items,
        settings.ignore_index, settings.label_smoothing, settings.softcap, settings.z_loss,
        settings.reduction, return_metrics=False,
    )  # fmt: skip
    wanted = (inputs.hidden, inputs.weight, inputs.bias)
    return backend_triton.differentiable_gradients(loss, wanted, dloss)


def fused_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
    num_items: torch.Tensor | None,
    settings: Settings,
    sum_dtype: torch.dtype,
    memory: str | int,
) -> tuple[torch.Tensor, torch.Tensor | None, Metrics | None]:
    """loss, z_loss (None where the coefficient is 0) and metrics. hidden and weight are of one
    dtype.
    """
    shape: Any = labels.shape
    loss: Any
    given = (
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1).contiguous(),
        dense(bias),
        None if class_weight is None else dense(class_weight.detach()),
        None if num_items is None else num_items.float(),
    )
    wanted = [t for t in (hidden, weight, bias) if t is not None and t.requires_grad]
    if torch.is_grad_enabled() and wanted:
        options = (settings, sum_dtype, memory)
        loss, *others = _FusedLinearCrossEntropy.apply(*given, options)
        z_loss = others[0] if settings.z_loss > 0.0 else None
        accuracy, predicted = others[-2:] if settings.return_metrics else (None, None)
    else:
        inputs = _inputs(*given, settings)
        plan = _plan(inputs, False, sum_dtype, memory)
        totals, tokens, _, _ = _forward(inputs, settings, plan, None, sum_dtype)
        loss, z_loss, accuracy = totals.loss, totals.z_loss, totals.accuracy
        predicted = tokens.predicted
    if settings.reduction == "none":
        loss, z_loss = (t if t is None else t.reshape(shape) for t in (loss, z_loss))
    if not settings.return_metrics:
        return loss, z_loss, None
    assert predicted is not None
    return loss, z_loss, Metrics(accuracy, predicted.reshape(shape))
