"""One process's part of a head whose classes are split over a process group: the loops over parts
of the rows, or of its classes.

Each part's logits give a few numbers a token, which are added up over the group; the gradient then
follows from those as in one process. The kernels are those of cross-entropy.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from liger_ops.backend_triton import library_product
from liger_ops.cross_entropy import triton_launch
from liger_ops.cross_entropy.triton_launch import Constants, Settings, Tokens
from liger_ops.fused_linear_cross_entropy.cases import Plan
from liger_ops.fused_linear_cross_entropy.eager_vocab import IGNORED, Shard
from liger_ops.fused_linear_cross_entropy.triton_parts import Gradients, parts_of
from liger_ops.fused_linear_cross_entropy.triton_products import Products


class Inputs(NamedTuple):
    """hidden (M, D) and weight (size, D) of one dtype; bias and class_weight (size,).

    Attributes:
        labels: (M,) int64, as `Shard.canonical` returns them, in the order of `products`.
        label_weight: (M,) float32, with a class_weight, in that order.
        num_items: scalar float32, or None.
        products: whose order is the same in all processes.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    bias: torch.Tensor | None
    class_weight: torch.Tensor | None
    label_weight: torch.Tensor | None
    num_items: torch.Tensor | None
    products: Products


class Shared(NamedTuple):
    """What all rows share: for the backward's kernels, whose sum of weights is over all classes,
    and for the forward's, where it is over the process's own.
    """

    constants: Constants
    own: Constants

    @classmethod
    def of(cls, inputs: Inputs, settings: Settings, shard: Shard) -> "Shared":
        own = triton_launch.constants(inputs.class_weight, inputs.bias, settings)
        if own.weight_sum is None:
            return cls(own, own)
        return cls(own._replace(weight_sum=shard.all_reduce(own.weight_sum.clone())), own)


class Rows(NamedTuple):
    """Labels for the kernels, (M,) int64: counted from the process's first class.

    Elsewhere they are `vocab` - 1, which is a class and so valid, but none of the process's unless
    it has them all; a padded column of that number is never looked at.
    """

    labels: torch.Tensor
    own: torch.Tensor
    label_weight: torch.Tensor | None

    @classmethod
    def of(cls, inputs: Inputs, shard: Shard) -> "Rows":
        own, y = shard.own(inputs.labels)
        known = torch.where(own, y, shard.vocab - 1)
        labels = torch.where(inputs.labels < 0, inputs.labels, known)
        return cls(labels, own, inputs.label_weight)

    def part(self, rows: slice) -> "Rows":
        return Rows(*(None if t is None else t[rows] for t in self))  # type: ignore[arg-type]


def token_losses(
    logits: torch.Tensor, rows: Rows, shared: Shared, settings: Settings, shard: Shard, into: Tokens
) -> None:
    """Fills `into`, as `triton_launch.forward` does with the logits of all classes."""
    smoothing, constants = settings.label_smoothing, shared.constants
    of_kernel = settings._replace(
        label_smoothing=1.0 if smoothing else 0.0, z_loss=0.0, reduction="sum"
    )
    y = torch.where(rows.own, rows.labels, 0)
    its = triton_launch.empty_tokens(y, of_kernel)
    known = torch.where(rows.labels < 0, rows.labels, y)
    triton_launch.forward(logits, known, shared.own, of_kernel, its)
    its_top, its_log_total = its.statistics.unbind(1)

    top = shard.all_reduce(its_top.clone(), dist.ReduceOp.MAX)
    above = (its_top - top) + its_log_total  # of the process's log sum exp over the largest logit
    empty = its_top == float("-inf")  # nothing but masked classes
    sums = [
        torch.where(empty, 0.0, above.exp()),
        torch.where(rows.own, _label_logit(logits, y, constants, settings), 0.0),
        rows.own.float(),
    ]
    if smoothing:  # the sum of w (largest logit - logit)
        weight_sum = shard.size if shared.own.weight_sum is None else shared.own.weight_sum
        sums.append(its.ce * shard.size - weight_sum * above)
    total, label_logit, owners, *rest = shard.all_reduce(torch.stack(sums)).unbind(0)
    log_total = total.log()

    ce = (1.0 - smoothing) * (log_total + (top - label_logit))
    if rows.label_weight is not None:
        ce *= rows.label_weight
    if smoothing:
        weight_sum = shard.vocab if constants.weight_sum is None else constants.weight_sum
        ce += smoothing / shard.vocab * (rest[0] + weight_sum * log_total)
    # Labels that differ between the processes have no owner, or more than one.
    nan = torch.where(owners == 1.0, 0.0, torch.nan)
    ignored = rows.labels == IGNORED
    put = lambda target, x: target.copy_(torch.where(ignored, 0.0, x + nan))  # noqa: E731
    if into.z is not None:
        z = settings.z_loss * (top + log_total).square()
        put(into.z, z)
        ce += z if settings.reduction == "none" else 0.0
    put(into.ce, ce)
    put(into.statistics[:, 0], top)
    put(into.statistics[:, 1], log_total)
    if into.predicted is not None:
        assert its.predicted is not None
        predicted = shard.predicted(its_top, its.predicted, top)
        into.predicted.copy_(torch.where(ignored, -1, predicted))


def _label_logit(logits, y, constants: Constants, settings: Settings) -> torch.Tensor:
    x = logits.gather(1, y[:, None])[:, 0].float() * settings.logit_scale
    if constants.bias is not None:
        x += constants.bias[y].float()
    return x if settings.softcap is None else settings.softcap * torch.tanh(x / settings.softcap)


class ShardGradients(Gradients):
    """The sums over parts; hidden's gradient is the sum over the group as well."""

    def add_part(
        self,
        part: slice,
        inputs: Inputs,
        rows: Rows,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        shared: Shared,
        settings: Settings,
        statistics: torch.Tensor,
        factors: torch.Tensor | None,
        dloss: torch.Tensor,
        shard: Shard,
    ) -> None:
        """A part of the rows, or all of them where there is no sum. Overwrites their logits."""
        given = (logits, rows.labels, shared.constants, settings, statistics, factors, dloss)
        of_shard = {"vocab": shard.vocab, "label_weight": rows.label_weight}
        if self.dbias is not None:
            triton_launch.add_bias_gradient(*given, into=self.dbias, **of_shard)
        triton_launch.backward(*given, None, into=logits, **of_shard)
        products, first, finish = inputs.products, part.start, None
        if self.dhidden is not None:
            total = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device)
            products.hidden_gradient(logits, inputs.weight, total, self.scale, first)
            finish = shard.start_all_reduce(total)  # while the next product runs
        if self.dweight is not None:
            into = self.dweight if self.sum is None else self.sum
            products.weight_gradient(logits, hidden, into, self.scale, first, add=first > 0)
        if self.dhidden is not None and finish is not None:
            products.put_back(self.dhidden, part, finish().to(self.dhidden.dtype))


def over_parts(
    inputs: Inputs,
    rows: Rows,
    plan: Plan,
    shared: Shared,
    settings: Settings,
    shard: Shard,
    tokens: Tokens | None,
    statistics: torch.Tensor,
    gradients: ShardGradients | None = None,
    factors: torch.Tensor | None = None,
    dloss: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """All parts: their losses into `tokens`, None where the statistics are known, and into
    `gradients` what dloss and the factors make of them. Returns the logits of a single part
    without gradients.
    """
    num_rows = len(inputs.hidden)
    parts, most = parts_of(num_rows, plan.rows), min(plan.rows, num_rows)
    if plan.in_gradient and gradients is not None and gradients.dweight is not None:
        scratch = gradients.dweight.view(-1)[: most * shard.size].view(most, shard.size)
    else:
        scratch = inputs.hidden.new_empty(most, shard.size)
    for part in parts:
        hidden, its_rows = inputs.products.ordered(inputs.hidden, part), rows.part(part)
        logits = scratch[: len(hidden)]
        inputs.products.logits(hidden, inputs.weight, logits, part.start)
        if tokens is not None:
            token_losses(logits, its_rows, shared, settings, shard, tokens.part(part))
        if gradients is not None:
            assert dloss is not None
            d = dloss if dloss.dim() == 0 else dloss[part]
            gradients.add_part(
                part, inputs, its_rows, hidden, logits, shared, settings, statistics[part],
                factors, d, shard,
            )  # fmt: skip
    return scratch if len(parts) == 1 and gradients is None else None


def weight_by_blocks(
    inputs: Inputs, rows: Rows, plan: Plan, shared: Shared, settings: Settings, shard: Shard,
    statistics, factors, dloss, gradients: ShardGradients,
) -> None:  # fmt: skip
    """The weight's gradient, a block of classes at a time over all rows, from logits anew. What
    there is one of a token is in the rows' own order.
    """
    assert gradients.dweight is not None and plan.classes is not None
    for block in parts_of(shard.size, plan.classes):
        logits = inputs.hidden @ inputs.weight[block].t()
        triton_launch.backward(
            logits, rows.labels, shared.constants, settings, statistics, factors, dloss, None,
            logits, first_class=block.start, vocab=shard.vocab, label_weight=rows.label_weight,
        )  # fmt: skip
        library_product(logits.t(), inputs.hidden, gradients.dweight[block], gradients.scale)
