"""Fused linear cross-entropy for PyTorch with the classes split over a process group: the
autograd.Function and the entry point. The loops over parts are in triton_vocab_parts.py.

What crosses processes: in the forward the largest logit and some sums of every token, in float32;
in the backward the sum of hidden's gradient, in float32, part by part.
"""

from typing import Any

import torch

from liger_ops import backend_triton
from liger_ops.backend_triton import dense
from liger_ops.cross_entropy import triton_launch
from liger_ops.cross_entropy.check import Metrics
from liger_ops.cross_entropy.triton_launch import Settings
from liger_ops.fused_linear_cross_entropy import eager_vocab
from liger_ops.fused_linear_cross_entropy.cases import Plan
from liger_ops.fused_linear_cross_entropy.eager_vocab import IGNORED, Shard
from liger_ops.fused_linear_cross_entropy.triton_parts import Needs
from liger_ops.fused_linear_cross_entropy.triton_products import Products
from liger_ops.fused_linear_cross_entropy.triton_vocab_parts import (
    Inputs,
    Rows,
    ShardGradients,
    Shared,
    over_parts,
    weight_by_blocks,
)


class _Options:
    """What is no tensor."""

    def __init__(self, settings: Settings, sum_dtype: torch.dtype, memory: Any, shard: Shard):
        self.settings, self.sum_dtype, self.memory, self.shard = settings, sum_dtype, memory, shard

    def plan(self, inputs: Inputs, needs_weight: bool) -> Plan:
        rows, dim = inputs.hidden.shape
        return Plan.for_shape(
            rows, dim, self.shard.size, inputs.hidden.element_size(),
            sum_itemsize=self.sum_dtype.itemsize, needs_weight=needs_weight, memory=self.memory,
        )  # fmt: skip

    def gradients(self, inputs: Any, needs: Needs, plan: Plan) -> ShardGradients:
        return ShardGradients(inputs, needs, plan, self.sum_dtype, self.settings.logit_scale)


class _VocabParallel(torch.autograd.Function):
    """Outputs those of loss, z_loss and predicted that are asked for."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, labels, bias, class_weight, label_weight, num_items,
                order, live, options: _Options):  # fmt: skip
        inputs = Inputs(hidden, weight, labels, bias, class_weight, label_weight, num_items,
                        Products(order, live))  # fmt: skip
        ctx.needs = Needs(*(ctx.needs_input_grad[i] for i in (0, 1, 3)))
        ctx.plan, ctx.options = options.plan(inputs, ctx.needs.weight), options
        early = options.settings.reduction != "none" and not ctx.plan.keeps_logits
        needs = ctx.needs if early else None
        outputs, ctx.work, statistics, factors = _forward(inputs, options, ctx.plan, needs)
        ctx.save_for_backward(*inputs[:-1], order, live, statistics, factors)
        outputs = tuple(output for output in outputs if output is not None)
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, dloss, *_):  # type: ignore[override]
        if dloss is None:
            return (None,) * 10
        hidden, weight, labels, *rest, order, live, statistics, factors = ctx.saved_tensors
        inputs = Inputs(hidden, weight, labels, *rest, products=Products(order, live))
        if backend_triton.creates_graph():
            gradients = _plain_gradients(inputs, ctx.options, dloss)
        else:
            work, ctx.work = ctx.work, None  # once: it is overwritten, and so made anew after that
            gradients = _backward(
                inputs, ctx.options, ctx.plan, ctx.needs, statistics, factors, dloss, work
            )
        return gradients[0], gradients[1], None, gradients[2], *(None,) * 6


def _forward(inputs: Inputs, options: _Options, plan: Plan, needs: Needs | None) -> Any:
    """loss, z_loss and predicted; the work that the backward goes on with, logits or, where
    `needs`, gradients; statistics, in the products' order; and the mean's factors.
    """
    settings, shard = options.settings, options.shard
    tokens = triton_launch.empty_tokens(inputs.labels, settings)
    factors = None
    if settings.reduction == "mean":
        pair = eager_vocab.mean_factors(
            inputs.labels, inputs.label_weight, inputs.num_items, torch.float32
        )
        factors = torch.stack(pair)
    if needs is None:
        rows, shared = Rows.of(inputs, shard), Shared.of(inputs, settings, shard)
        work = over_parts(inputs, rows, plan, shared, settings, shard, tokens, tokens.statistics)
    else:
        work = _early_gradients(inputs, options, plan, needs, tokens, tokens.statistics, factors)
    as_given = inputs.products.as_given
    if settings.reduction == "none":
        loss, z = (t if t is None else as_given(t) for t in (tokens.ce, tokens.z))
    else:
        pair = None if factors is None else (factors[0], factors[1])
        loss, z = eager_vocab.reduced(tokens.ce, tokens.z, settings.reduction, pair)
    predicted = tokens.predicted if tokens.predicted is None else as_given(tokens.predicted)
    return (loss, z, predicted), work, tokens.statistics, factors


def _early_gradients(inputs, options, plan, needs, tokens, statistics, factors):
    """The gradients but for the loss's own, made with the losses or, without `tokens`, anew."""
    settings, shard = options.settings, options.shard
    if factors is not None and inputs.hidden.dtype == torch.float16:
        # One token's part in a mean may be too small for this type. The mean's factor comes last,
        # and only how much less or more the z-loss is divided by comes here.
        factors = torch.where(factors[:1] == 0.0, factors, factors / factors[:1])
    if plan.classes is not None:  # the weight's gradient comes in the backward
        needs = needs._replace(weight=False)
    gradients = options.gradients(inputs, needs, plan)
    one = torch.ones((), dtype=torch.float32, device=inputs.hidden.device)
    rows, shared = Rows.of(inputs, shard), Shared.of(inputs, settings, shard)
    over_parts(
        inputs, rows, plan, shared, settings, shard, tokens, statistics, gradients, factors, one
    )
    return gradients


def _backward(inputs, options, plan, needs, statistics, factors, dloss, work) -> list[Any]:
    settings, shard = options.settings, options.shard
    bias_dtype = None if inputs.bias is None else inputs.bias.dtype
    rows, shared = Rows.of(inputs, shard), Shared.of(inputs, settings, shard)
    products = inputs.products
    if settings.reduction == "none":
        dloss = products.ordered(dloss)
    if plan.keeps_logits:
        hidden = products.ordered(inputs.hidden)
        if work is None:
            work = hidden.new_empty(len(hidden), len(inputs.weight))
            products.logits(hidden, inputs.weight, work, 0)
        gradients = options.gradients(inputs, needs, plan)
        all_rows = slice(0, len(hidden))
        gradients.add_part(
            all_rows, inputs, rows, hidden, work, shared, settings, statistics, factors, dloss,
            shard,
        )  # fmt: skip
        return gradients.finished(None, bias_dtype)
    if settings.reduction == "none":
        late = needs if plan.classes is None else needs._replace(weight=False)
        gradients = options.gradients(inputs, late, plan)
        over_parts(
            inputs, rows, plan, shared, settings, shard, None, statistics, gradients, None, dloss
        )
        made = gradients.finished(None, bias_dtype)
    else:
        if work is None:
            work = _early_gradients(inputs, options, plan, needs, None, statistics, factors)
        factor = dloss
        if settings.reduction == "mean" and inputs.hidden.dtype == torch.float16:
            factor = dloss * factors[0]
        made = work.finished(factor, bias_dtype)
    if plan.classes is not None and needs.weight:
        gradients = options.gradients(inputs, Needs(False, True, False), plan)
        rows = Rows(*(None if t is None else products.as_given(t) for t in rows))  # type: ignore[arg-type]
        statistics = products.as_given(statistics)
        if settings.reduction == "none":
            dloss = products.as_given(dloss)
        weight_by_blocks(
            inputs, rows, plan, shared, settings, shard, statistics, factors, dloss, gradients
        )
        made[1] = gradients.dweight
    return made


def _plain_gradients(inputs: Inputs, options: _Options, dloss: torch.Tensor) -> list[Any]:
    """Those that can be differentiated again."""
    settings = options.settings
    loss, _, _ = eager_vocab.fused_linear_cross_entropy(
        inputs.hidden, inputs.weight, inputs.products.as_given(inputs.labels), inputs.bias,
        settings.logit_scale, inputs.class_weight, inputs.num_items, IGNORED,
        settings.label_smoothing, settings.softcap, settings.z_loss, settings.reduction, False,
        options.shard,
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
    shard: Shard,
) -> tuple[torch.Tensor, torch.Tensor | None, Metrics | None]:
    """loss, z_loss (None where the coefficient is 0) and metrics, the same in all processes.

    hidden and weight are of one dtype; weight, bias and class_weight have the process's classes.
    """
    shape: Any = labels.shape
    labels = shard.canonical(labels.reshape(-1), settings.ignore_index)
    class_weight = None if class_weight is None else dense(class_weight.detach())
    rows = hidden.reshape(-1, hidden.shape[-1])
    products = Products.over(rows, weight, labels, IGNORED, always_in_order=True)
    in_order = products.ordered(labels)
    inputs = Inputs(
        rows,
        weight,
        in_order,
        dense(bias),
        class_weight,
        None if class_weight is None else shard.label_weight(class_weight, in_order),
        None if num_items is None else num_items.float(),
        products,
    )
    options = _Options(settings._replace(ignore_index=IGNORED), sum_dtype, memory, shard)
    wanted = [t for t in (hidden, weight, bias) if t is not None and t.requires_grad]
    loss: Any
    if torch.is_grad_enabled() and wanted:
        given = (*inputs[:-1], products.order, products.live)
        loss, *others = _VocabParallel.apply(*given, options)
        z_loss = others[0] if settings.z_loss > 0.0 else None
        predicted = others[-1] if settings.return_metrics else None
    else:
        outputs, *_ = _forward(inputs, options, options.plan(inputs, False), None)
        loss, z_loss, predicted = outputs
    metrics = None
    if predicted is not None:
        metrics = eager_vocab.metrics(predicted, labels)
        metrics = metrics._replace(predicted_tokens=metrics.predicted_tokens.reshape(shape))
    if settings.reduction == "none":
        loss, z_loss = (t if t is None else t.reshape(shape) for t in (loss, z_loss))
    return loss, z_loss, metrics
