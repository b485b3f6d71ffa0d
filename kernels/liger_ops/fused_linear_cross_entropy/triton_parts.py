"""The products of the head and the kernels between them, over parts of the rows or of the classes.

Logits are overwritten by their gradient, which nobody else sees.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from liger_ops import backend_triton
from liger_ops.cross_entropy import triton_launch
from liger_ops.cross_entropy.triton_launch import Constants, Settings, Tokens
from liger_ops.fused_linear_cross_entropy.cases import Plan
from liger_ops.fused_linear_cross_entropy.triton_products import Products


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
    """hidden (M, D) and weight (V, D) of one dtype; labels (M,) in the order of `products`."""

    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    bias: torch.Tensor | None
    class_weight: torch.Tensor | None
    num_items: torch.Tensor | None
    products: Products


class Needs(NamedTuple):
    """Which gradients are wanted."""

    hidden: bool
    weight: bool
    bias: bool


class Gradients:
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
        hidden: torch.Tensor,
        logits: torch.Tensor,
        shared: Constants,
        settings: Settings,
        statistics: torch.Tensor,
        factors: torch.Tensor | None,
        dloss: torch.Tensor | None,
    ) -> None:
        """A part of the rows, or all of them where there is no sum. Overwrites their logits, and
        their hidden states where `products` has copied those.
        """
        given = (logits, inputs.labels[part], shared, settings, statistics, factors, dloss)
        products, first = inputs.products, part.start
        if self.dbias is not None:
            triton_launch.add_bias_gradient(*given, into=self.dbias)
        triton_launch.backward(*given, None, into=logits)
        if self.dweight is not None:
            into = self.dweight if self.sum is None else self.sum
            products.weight_gradient(logits, hidden, into, self.scale, first, add=first > 0)
        if self.dhidden is not None:
            in_order = products.order is None
            into = self.dhidden[part] if in_order else hidden
            products.hidden_gradient(logits, inputs.weight, into, self.scale, first)
            if not in_order:
                products.put_back(self.dhidden, part, into)

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


def parts_of(rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows)) for start in range(0, rows, max(size, 1))]


def over_parts(
    inputs: Inputs,
    plan: Plan,
    shared: Constants,
    settings: Settings,
    tokens: Tokens | None,
    statistics: torch.Tensor,
    gradients: Gradients | None = None,
    factors: torch.Tensor | None = None,
    dloss: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """All parts: their losses into `tokens`, None where the statistics are known, and into
    `gradients` what dloss and the factors make of them. Returns the logits of a single part
    without gradients.
    """
    parts = parts_of(len(inputs.hidden), plan.rows)
    rows, vocab = min(plan.rows, len(inputs.hidden)), len(inputs.weight)
    if plan.in_gradient and gradients is not None and gradients.dweight is not None:
        scratch = gradients.dweight.view(-1)[: rows * vocab].view(rows, vocab)
    else:
        scratch = inputs.hidden.new_empty(rows, vocab)
    for part in parts:
        hidden, labels = inputs.products.ordered(inputs.hidden, part), inputs.labels[part]
        logits = scratch[: len(hidden)]
        inputs.products.logits(hidden, inputs.weight, logits, part.start)
        if tokens is not None:
            triton_launch.forward(logits, labels, shared, settings, tokens.part(part))
        if gradients is not None:
            d = dloss if dloss is None or dloss.dim() == 0 else dloss[part]
            gradients.add(
                part, inputs, hidden, logits, shared, settings, statistics[part], factors, d
            )
    return scratch if len(parts) == 1 and gradients is None else None


def weight_by_blocks(inputs, plan: Any, shared, settings, statistics, factors, dloss, gradients):
    """The weight's gradient, a block of classes at a time over all rows in their own order, from
    logits anew.
    """
    products = Products()
    for block in parts_of(len(inputs.weight), plan.classes):
        weight = inputs.weight[block]
        logits = inputs.hidden.new_empty(len(inputs.hidden), len(weight))
        products.logits(inputs.hidden, weight, logits, 0)
        triton_launch.backward(
            logits, inputs.labels, shared, settings, statistics, factors, dloss, None, logits,
            first_class=block.start, vocab=len(inputs.weight),
        )  # fmt: skip
        into = gradients.dweight[block]
        products.weight_gradient(logits, inputs.hidden, into, gradients.scale, 0)
