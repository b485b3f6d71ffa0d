"""Fused linear cross-entropy for PyTorch: library products around the Triton kernels of
cross-entropy, over as many rows' logits at once as `Plan` says.

A part's logits are overwritten by their gradient, which only this file sees. The sums over parts
are kept in the type asked for until the backward, which multiplies them by the loss's own gradient
and casts them once.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from liger_ops import backend_triton
from liger_ops.cross_entropy import triton_launch
from liger_ops.cross_entropy.check import Metrics
from liger_ops.cross_entropy.triton_launch import Constants, Settings, Tokens, Totals
from liger_ops.fused_linear_cross_entropy import eager
from liger_ops.fused_linear_cross_entropy.cases import Plan


@triton.jit
def _finish_kernel(
    source_ptr,
    target_ptr,  # may be source_ptr
    factor_ptr,  # scalar float32
    size,
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """target = factor source, cast."""
    factor = tl.load(factor_ptr)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # A loss that nothing follows has a gradient of 1, and its gradients are as they should be.
    size = tl.where(IN_PLACE and factor == 1.0, 0, size)
    value = tl.load(source_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(target_ptr + at, (factor * value).to(target_ptr.dtype.element_ty), mask=at < size)


_FINISH_LAUNCHES: dict[Any, backend_triton.Launch] = {}


def _finish(source: torch.Tensor, target: torch.Tensor, factor: torch.Tensor) -> None:
    in_place = source is target

    def plan() -> backend_triton.Launch:
        size, block = source.numel(), 4096
        return backend_triton.Launch(
            _finish_kernel, -(-size // block), (size,), (in_place, block), 8
        )

    of = backend_triton.metadata
    launch = backend_triton.kept(_FINISH_LAUNCHES, lambda: (of(source), of(target), in_place), plan)
    if launch.programs:
        launch(source, target, factor)


class Inputs(NamedTuple):
    """hidden (M, D) and weight (V, D) of one dtype, and the rest by rows."""

    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    bias: torch.Tensor | None
    class_weight: torch.Tensor | None
    num_items: torch.Tensor | None


class Needs(NamedTuple):
    """Which gradients are wanted."""

    hidden: bool
    weight: bool
    bias: bool


class _Gradients:
    """The sums over parts of rows: of the weight's and the bias's gradient; hidden's needs none."""

    def __init__(
        self, inputs: Inputs, needs: Needs, plan: Plan, sum_dtype: torch.dtype, scale: float
    ):
        hidden, weight = inputs.hidden, inputs.weight
        new = lambda like, dtype: torch.empty(like.shape, dtype=dtype, device=like.device)  # noqa: E731
        self.scale = scale
        self.dhidden = new(hidden, hidden.dtype) if needs.hidden else None
        self.dweight = new(weight, weight.dtype) if needs.weight else None
        self.sum = None  # of the weight's gradient, where it is not summed in place
        if self.dweight is not None and plan.classes is None and plan.rows < len(hidden):
            in_place = torch.promote_types(sum_dtype, weight.dtype) == weight.dtype
            self.sum = self.dweight if in_place else new(weight, torch.float32)
        self.dbias = None
        if needs.bias:
            self.dbias = torch.zeros(len(weight), dtype=torch.float32, device=weight.device)

    def add(
        self,
        part: slice,
        inputs: Inputs,
        logits: torch.Tensor,
        shared: Constants,
        settings: Settings,
        statistics: torch.Tensor,
        factors: torch.Tensor | None,
        dloss: torch.Tensor | None,
    ) -> None:
        """A part of the rows, or all of them where there is no sum. Overwrites their logits."""
        given = (logits, inputs.labels[part], shared, settings, statistics, factors, dloss)
        if self.dbias is not None:
            triton_launch.add_bias_gradient(*given, into=self.dbias)
        triton_launch.backward(*given, None, into=logits)
        if self.dhidden is not None:
            _product(logits, inputs.weight, self.dhidden[part], self.scale)
        if self.sum is not None:
            beta = 0.0 if part.start == 0 else 1.0
            _product(logits.t(), inputs.hidden[part], self.sum, self.scale, beta)
        elif self.dweight is not None:
            _product(logits.t(), inputs.hidden, self.dweight, self.scale)

    def finished(self, factor: torch.Tensor | None, bias_dtype: torch.dtype | None) -> list[Any]:
        """The gradients, each multiplied by `factor` and cast."""
        if self.sum is not None and self.sum is not self.dweight:
            one = torch.ones((), dtype=torch.float32, device=self.sum.device)
            assert self.dweight is not None
            _finish(self.sum, self.dweight, one if factor is None else factor)
        elif factor is not None and self.dweight is not None:
            _finish(self.dweight, self.dweight, factor)
        if factor is not None and self.dhidden is not None:
            _finish(self.dhidden, self.dhidden, factor)
        dbias = self.dbias
        if dbias is not None:
            dbias = (dbias if factor is None else dbias * factor).to(bias_dtype)
        return [self.dhidden, self.dweight, dbias]


def _product(a, b, into: torch.Tensor, alpha: float = 1.0, beta: float = 0.0) -> None:
    """into = alpha a b + beta into, of matrices of one dtype; a float32 `into` sums in float32."""
    if a.dtype == into.dtype:
        torch.addmm(into, a, b, beta=beta, alpha=alpha, out=into)
    elif a.is_cuda:
        torch.addmm(into, a, b, out_dtype=into.dtype, beta=beta, alpha=alpha, out=into)
    else:  # the library has this product for GPUs alone
        torch.addmm(into, a.float(), b.float(), beta=beta, alpha=alpha, out=into)


def _parts(rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows)) for start in range(0, rows, max(size, 1))]


def _make_logits(inputs: Inputs, part: slice, into: torch.Tensor) -> torch.Tensor:
    hidden = inputs.hidden[part]
    logits = into[: len(hidden)]
    torch.mm(hidden, inputs.weight.t(), out=logits)
    return logits


def _sweep(
    inputs: Inputs,
    plan: Plan,
    shared: Constants,
    settings: Settings,
    tokens: Tokens,
    gradients: _Gradients | None = None,
    factors: torch.Tensor | None = None,
    dloss: torch.Tensor | None = None,
    known: bool = False,
) -> torch.Tensor | None:
    """All parts: their losses into `tokens` unless they are `known`, and into `gradients` what
    dloss and the factors make of them. Returns the logits of a single part without gradients.
    """
    parts = _parts(len(inputs.hidden), plan.rows)
    rows, vocab = min(plan.rows, len(inputs.hidden)), len(inputs.weight)
    if plan.in_gradient and gradients is not None and gradients.dweight is not None:
        scratch = gradients.dweight.view(-1)[: rows * vocab].view(rows, vocab)
    else:
        scratch = inputs.hidden.new_empty(rows, vocab)
    for part in parts:
        logits, labels = _make_logits(inputs, part, scratch), inputs.labels[part]
        if not known:
            triton_launch.forward(logits, labels, shared, settings, tokens.part(part))
        if gradients is not None:
            statistics = tokens.statistics[part]
            d = dloss if dloss is None or dloss.dim() == 0 else dloss[part]
            gradients.add(part, inputs, logits, shared, settings, statistics, factors, d)
    return scratch if len(parts) == 1 and gradients is None else None


def _weight_by_blocks(inputs, plan: Any, shared, settings, statistics, factors, dloss, gradients):
    """The weight's gradient, a block of classes at a time over all rows, from logits anew."""
    vocab = len(inputs.weight)
    for block in _parts(vocab, plan.classes):
        logits = inputs.hidden @ inputs.weight[block].t()
        triton_launch.backward(
            logits, inputs.labels, shared, settings, statistics, factors, dloss, None, logits,
            first_class=block.start, vocab=vocab,
        )  # fmt: skip
        _product(logits.t(), inputs.hidden, gradients.dweight[block], gradients.scale)


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """Outputs those of loss, z_loss, accuracy and predicted that are asked for."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, labels, bias, class_weight, num_items, options):
        settings, sum_dtype, memory = options
        inputs = Inputs(hidden, weight, labels, bias, class_weight, num_items)
        ctx.needs = Needs(*(ctx.needs_input_grad[i] for i in (0, 1, 3)))
        ctx.plan = _plan(inputs, ctx.needs.weight, sum_dtype, memory)
        ctx.options = options
        early = settings.reduction != "none" and not ctx.plan.keeps_logits
        totals, tokens, ctx.shared, ctx.work = _forward(
            inputs, settings, ctx.plan, ctx.needs if early else None, sum_dtype
        )
        ctx.save_for_backward(*inputs, tokens.statistics, totals.factors)
        outputs = (totals.loss, totals.z_loss, totals.accuracy, tokens.predicted)
        outputs = tuple(output for output in outputs if output is not None)
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, dloss, *_):  # type: ignore[override]
        *given, statistics, factors = ctx.saved_tensors
        inputs = Inputs(*given)
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


def _plan(inputs: Inputs, needs_weight: bool, sum_dtype: torch.dtype, memory: str | int) -> Plan:
    rows, dim = inputs.hidden.shape
    return Plan.for_shape(
        rows, dim, len(inputs.weight), inputs.hidden.element_size(),
        sum_itemsize=sum_dtype.itemsize, needs_weight=needs_weight, memory=memory,
    )  # fmt: skip


def _forward(
    inputs: Inputs, settings: Settings, plan: Plan, needs: Needs | None, sum_dtype: torch.dtype
) -> tuple[Totals, Tokens, Constants, Any]:
    """Also returns the work that the backward goes on with: logits, or gradients where `needs`."""
    vocab = len(inputs.weight)
    shared = triton_launch.constants(inputs.class_weight, inputs.bias, settings)
    tokens = triton_launch.empty_tokens(inputs.labels, settings)
    if needs is None:
        work = _sweep(inputs, plan, shared, settings, tokens)
    else:
        work = _early_gradients(inputs, settings, plan, needs, sum_dtype, shared, tokens, False)
    totals = triton_launch.reduce(
        tokens, inputs.labels, vocab, inputs.class_weight, inputs.num_items, settings
    )
    return totals, tokens, shared, work


def _early_gradients(inputs, settings, plan, needs, sum_dtype, shared, tokens, known):
    """The gradients but for the loss's own, made with the losses."""
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
    gradients = _Gradients(inputs, needs, plan, sum_dtype, settings.logit_scale)
    one = torch.ones((), dtype=torch.float32, device=inputs.hidden.device)
    _sweep(inputs, plan, shared, settings, tokens, gradients, factors, one, known)
    return gradients


def _backward(
    inputs, settings, plan, needs, sum_dtype, shared, statistics, factors, dloss, work
) -> list[Any]:
    bias_dtype = None if inputs.bias is None else inputs.bias.dtype
    tokens = Tokens(statistics, None, statistics, None)  # of which the statistics alone are read
    scale = settings.logit_scale
    if plan.keeps_logits:
        if work is None:
            work = inputs.hidden @ inputs.weight.t()
        gradients = _Gradients(inputs, needs, plan, sum_dtype, scale)
        rows = slice(0, len(inputs.hidden))
        gradients.add(rows, inputs, work, shared, settings, statistics, factors, dloss)
        return gradients.finished(None, bias_dtype)
    if settings.reduction == "none":
        late = needs if plan.classes is None else needs._replace(weight=False)
        gradients = _Gradients(inputs, late, plan, sum_dtype, scale)
        _sweep(inputs, plan, shared, settings, tokens, gradients, None, dloss, known=True)
        made = gradients.finished(None, bias_dtype)
    else:
        if work is None:
            work = _early_gradients(
                inputs, settings, plan, needs, sum_dtype, shared, tokens, known=True
            )
        factor = dloss
        if settings.reduction == "mean" and inputs.hidden.dtype == torch.float16:
            factor = dloss * factors[0]
        made = work.finished(factor, bias_dtype)
    if plan.classes is not None and needs.weight:
        gradients = _Gradients(inputs, Needs(False, True, False), plan, sum_dtype, scale)
        _weight_by_blocks(inputs, plan, shared, settings, statistics, factors, dloss, gradients)
        made[1] = gradients.dweight
    return made


def _plain_gradients(inputs: Inputs, settings: Settings, dloss: torch.Tensor) -> list[Any]:
    """Those that can be differentiated again."""
    hidden, weight, labels, bias, class_weight, num_items = inputs
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
    inputs = Inputs(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1).contiguous(),
        None if bias is None else bias.contiguous(),
        None if class_weight is None else class_weight.detach().contiguous(),
        None if num_items is None else num_items.float(),
    )
    wanted = [t for t in (hidden, weight, bias) if t is not None and t.requires_grad]
    if torch.is_grad_enabled() and wanted:
        options = (settings, sum_dtype, memory)
        loss, *others = _FusedLinearCrossEntropy.apply(*inputs, options)
        z_loss = others[0] if settings.z_loss > 0.0 else None
        accuracy, predicted = others[-2:] if settings.return_metrics else (None, None)
    else:
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
