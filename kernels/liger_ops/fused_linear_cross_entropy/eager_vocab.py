"""The head and cross-entropy in plain PyTorch, the classes split over a process group: each process
has its own classes of weight, bias and class_weight, and all have the same hidden and labels.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from liger_ops.cross_entropy import eager
from liger_ops.cross_entropy.check import Metrics
from liger_ops.fused_linear_cross_entropy.eager import logits_of

IGNORED, INVALID = -1, -2


class Shard(NamedTuple):
    """The classes of one process.

    Attributes:
        group: of the processes that have a part of the classes each.
        first: the first class here.
        size, vocab: how many here, and of all processes.
    """

    group: Any
    first: int
    size: int
    vocab: int

    def own(self, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the process has the label, and which of its classes that is, 0 elsewhere. The
        labels are what `canonical` returns.
        """
        y = labels - self.first
        own = (labels >= 0) & (y >= 0) & (y < self.size)
        return own, torch.where(own, y, 0)

    def canonical(self, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
        """int64: the class, IGNORED, or INVALID."""
        labels = labels.long()
        known = torch.where((labels >= 0) & (labels < self.vocab), labels, INVALID)
        return torch.where(labels == ignore_index, IGNORED, known)

    def all_reduce(self, x: torch.Tensor, op: Any = None) -> torch.Tensor:
        """The sum over the processes, or what `op` says, in place of x."""
        if x.numel():
            dist.all_reduce(x, op or dist.ReduceOp.SUM, self.group)
        return x

    def start_all_reduce(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Returns what waits for the sum, which is then in place of x, and gives it."""
        work = dist.all_reduce(x, group=self.group, async_op=True) if x.numel() else None

        def finish() -> torch.Tensor:
            if work is not None:
                work.wait()
            return x

        return finish

    def label_weight(self, class_weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Every token's, 0 where the label is no class."""
        own, y = self.own(labels)
        return self.all_reduce(torch.where(own, class_weight[y].float(), 0.0))

    def predicted(self, its_top, its_class, top) -> torch.Tensor:
        """The first class of all with the largest logit, from every process's own."""
        at = torch.where(its_top == top, its_class + self.first, self.vocab - 1)
        return self.all_reduce(at, dist.ReduceOp.MIN)


class _Spread(torch.autograd.Function):
    """What all processes have alike, to be used by each for its own part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shard: Shard) -> torch.Tensor:
        ctx.shard = shard
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy):  # type: ignore[override]
        return summed(dy, ctx.shard), None


class _Summed(torch.autograd.Function):
    """The sum over the processes, which then all have alike."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shard: Shard) -> torch.Tensor:
        ctx.shard = shard
        return shard.all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, dy):  # type: ignore[override]
        return spread(dy, ctx.shard), None


def spread(x: torch.Tensor, shard: Shard) -> torch.Tensor:
    """x, whose gradient is the sum of the processes'; any number of times differentiable."""
    return _Spread.apply(x, shard)  # type: ignore[return-value]


def summed(x: torch.Tensor, shard: Shard) -> torch.Tensor:
    """The sum of the processes' x; any number of times differentiable."""
    return _Summed.apply(x, shard)  # type: ignore[return-value]


def token_losses(
    logits: torch.Tensor,
    labels: torch.Tensor,
    class_weight: torch.Tensor | None,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    shard: Shard,
) -> tuple[torch.Tensor, torch.Tensor]:
    """ce and z of every token, as in the oracle, from the process's own logits."""
    ignored = labels == IGNORED
    own, y = shard.own(labels)
    l = _seen(logits, ignored, softcap)  # noqa: E741
    top = shard.all_reduce(l.detach().amax(-1), dist.ReduceOp.MAX)
    above = l - top[..., None]
    weight = None if class_weight is None else class_weight.detach().to(l.dtype)
    label = above.gather(-1, y[..., None])[..., 0]
    sums = [above.exp().sum(-1), torch.where(own, label, 0.0), own.to(l.dtype)]
    if weight is not None:
        sums.append(torch.where(own, weight[y], 0.0))
    if label_smoothing:
        sums.append(-(above if weight is None else above * weight).sum(-1))
    total, label, owners, *rest = summed(torch.stack(sums), shard).unbind(0)
    log_total = total.log()

    ce = log_total - label
    if weight is not None:
        ce = ce * rest[0]
    if label_smoothing:
        weight_sum = shard.vocab if weight is None else shard.all_reduce(weight.sum())
        smooth = rest[-1] + weight_sum * log_total
        ce = (1.0 - label_smoothing) * ce + label_smoothing / shard.vocab * smooth
    z = z_loss * (top + log_total).square() if z_loss else torch.zeros_like(ce)
    # NaN by a factor, so that the gradient is NaN too. Labels that differ between the processes
    # have no owner, or more than one.
    wrong = (labels == INVALID) | (owners != 1.0)
    keep = torch.where(ignored, 0.0, torch.where(wrong, torch.nan, 1.0)).to(l.dtype)
    return torch.where(ignored, 0.0, ce) * keep, torch.where(ignored, 0.0, z) * keep


def _seen(logits: torch.Tensor, ignored: torch.Tensor, softcap: float | None) -> torch.Tensor:
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    x = x.masked_fill(ignored[..., None], 0.0)  # what an ignored row holds is not looked at
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def mean_factors(
    labels: torch.Tensor,
    label_weight: torch.Tensor | None,
    num_items: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a token's ce and z are multiplied by in the mean."""
    if num_items is not None:
        factor = eager.inverse(num_items, dtype)
        return factor, factor
    count = (labels != IGNORED).sum()
    weight_sum = count if label_weight is None else label_weight.sum()
    return eager.inverse(weight_sum, dtype), eager.inverse(count, dtype)


def reduced(
    ce: torch.Tensor,
    z: torch.Tensor | None,
    reduction: str,
    factors: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """loss and z_loss; z may be None for 0."""
    if reduction != "none":
        one = (1.0, 1.0) if factors is None else factors
        ce = ce.sum() * one[0]
        z = None if z is None else z.sum() * one[1]
    return ce if z is None else ce + z, z


def metrics(predicted: torch.Tensor, labels: torch.Tensor) -> Metrics:
    supervised = labels != IGNORED
    right = ((predicted == labels) & supervised).sum()
    accuracy = right * eager.inverse(supervised.sum(), torch.float32)
    return Metrics(accuracy, torch.where(supervised, predicted, -1))


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
    shard: Shard,
) -> tuple[torch.Tensor, torch.Tensor, Metrics | None]:
    """loss, z_loss and metrics, the same in all processes of the group."""
    labels = shard.canonical(labels, ignore_index)
    # Summed over the processes, hidden's gradient is in float32 until all of it is there.
    exact = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    logits = logits_of(spread(exact, shard).to(hidden.dtype), weight, bias, logit_scale)
    ce, z = token_losses(logits, labels, class_weight, label_smoothing, softcap, z_loss, shard)
    factors = None
    if reduction == "mean":
        of_label = None if class_weight is None else shard.label_weight(class_weight, labels)
        factors = mean_factors(labels, of_label, num_items, ce.dtype)
    loss, z = reduced(ce, z, reduction, factors)
    assert z is not None
    if not return_metrics:
        return loss, z.detach(), None
    its_top, its_class = _seen(logits.detach(), labels == IGNORED, softcap).max(-1)
    top = shard.all_reduce(its_top.clone(), dist.ReduceOp.MAX)
    return loss, z.detach(), metrics(shard.predicted(its_top, its_class, top), labels)
