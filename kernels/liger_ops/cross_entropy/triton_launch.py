"""Launching the Triton kernels of cross-entropy; what fused linear cross-entropy calls as well."""

from typing import Any, NamedTuple

import torch
import triton

from liger_ops import backend_triton
from liger_ops.backend_triton import row_stride, rows
from liger_ops.cross_entropy.cases import Config
from liger_ops.cross_entropy.triton_reduce import reduce_kernel
from liger_ops.cross_entropy.triton_rows import (
    backward_kernel,
    bias_gradient_kernel,
    forward_kernel,
)


class Settings(NamedTuple):
    """The arguments that are no tensors, in the public functions' order."""

    ignore_index: int
    label_smoothing: float
    softcap: float | None
    z_loss: float
    reduction: str
    return_metrics: bool
    logit_scale: float = 1.0

    @property
    def scalars(self) -> tuple[int, float, float, float, float]:
        """What every kernel takes, in its order."""
        cap = 1.0 if self.softcap is None else self.softcap
        return self.ignore_index, self.label_smoothing, cap, self.z_loss, self.logit_scale

    @property
    def flags(self) -> tuple[bool, bool, bool]:
        """Which of them matter: smoothing, cap and scale."""
        return self.label_smoothing > 0.0, self.softcap is not None, self.logit_scale != 1.0


class Constants(NamedTuple):
    """Tensors that all rows share, each perhaps None."""

    class_weight: torch.Tensor | None = None  # (V,)
    weight_sum: torch.Tensor | None = None  # scalar float32, where the smoothing needs it
    bias: torch.Tensor | None = None  # (V,)


class Tokens(NamedTuple):
    """What the forward gives for each token."""

    ce: torch.Tensor  # (...) float32; holds z too where reduction is "none"
    z: torch.Tensor | None  # (...) float32, where there is a z-loss
    statistics: torch.Tensor  # (M, 2) float32
    predicted: torch.Tensor | None  # (...) int64, where metrics are asked for

    def part(self, rows: slice) -> "Tokens":
        """Those of some rows, where labels are one-dimensional."""
        z, predicted = (t if t is None else t[rows] for t in (self.z, self.predicted))
        return Tokens(self.ce[rows], z, self.statistics[rows], predicted)


class Totals(NamedTuple):
    """What there is one of a batch."""

    loss: torch.Tensor
    z_loss: torch.Tensor | None
    accuracy: torch.Tensor | None
    factors: torch.Tensor | None  # (2,) float32: 1 / what the mean divides ce and z by


# By the arguments' metadata: the launches depend on nothing else.
_FORWARD_LAUNCHES: dict[Any, backend_triton.Launch] = {}
_REDUCE_LAUNCHES: dict[Any, backend_triton.Launch] = {}
_BACKWARD_LAUNCHES: dict[Any, backend_triton.Launch] = {}
_BIAS_LAUNCHES: dict[Any, backend_triton.Launch] = {}


def constants(
    class_weight: torch.Tensor | None, bias: torch.Tensor | None, settings: Settings
) -> Constants:
    weight_sum = None
    if class_weight is not None and settings.label_smoothing:
        weight_sum = class_weight.float().sum()
    return Constants(class_weight, weight_sum, bias)


def empty_tokens(labels: torch.Tensor, settings: Settings) -> Tokens:
    new = lambda: torch.empty(labels.shape, dtype=torch.float32, device=labels.device)  # noqa: E731
    return Tokens(
        new(),
        new() if settings.z_loss > 0.0 else None,
        torch.empty(labels.numel(), 2, dtype=torch.float32, device=labels.device),
        torch.empty(labels.shape, dtype=torch.int64, device=labels.device)
        if settings.return_metrics
        else None,
    )


def forward(
    logits: torch.Tensor, labels: torch.Tensor, shared: Constants, settings: Settings, into: Tokens
) -> None:
    """Fills `into` for logits (..., V) and labels (...)."""

    def plan() -> backend_triton.Launch:
        classes = logits.shape[-1]
        config = Config.for_shape(classes)
        add_z = settings.reduction == "none" and settings.z_loss > 0.0
        return backend_triton.Launch(
            forward_kernel,
            logits.numel() // classes,
            (row_stride(rows(logits)), *settings.scalars),
            (classes, config.forward_steps, config.forward_columns, *settings.flags, add_z),
            config.forward_warps,
        )

    of = backend_triton.metadata
    launch = backend_triton.kept(
        _FORWARD_LAUNCHES,
        lambda: (of(logits), of(labels), *map(of, shared), settings),
        plan,
    )
    if launch.programs:
        launch(rows(logits), labels, *shared, *into)


def mean_factors(
    labels: torch.Tensor,
    classes: int,
    class_weight: torch.Tensor | None,
    num_items: torch.Tensor | None,
    ignore_index: int,
) -> torch.Tensor:
    """The factors of `Totals`, which depend on the labels alone."""
    factors = torch.empty(2, dtype=torch.float32, device=labels.device)
    given, into = (None, None, class_weight, None, num_items), (None, None, None, factors)
    _reduce(labels, given, into, classes, ignore_index)
    return factors


def reduce(
    tokens: Tokens,
    labels: torch.Tensor,
    classes: int,
    class_weight: torch.Tensor | None,
    num_items: torch.Tensor | None,
    settings: Settings,
) -> Totals:
    """The batch's numbers; where reduction is "none", loss and z_loss are the tokens' own."""
    new = lambda *shape: torch.empty(shape, dtype=torch.float32, device=labels.device)  # noqa: E731
    is_sum = settings.reduction != "none"
    loss = new() if is_sum else None
    z_loss = new() if is_sum and tokens.z is not None else None
    accuracy = None if tokens.predicted is None else new()
    factors = new(2) if settings.reduction == "mean" else None
    if is_sum or accuracy is not None:
        weight = None if factors is None else class_weight
        given = (tokens.ce, tokens.z, weight, tokens.predicted, num_items)
        into = (loss, z_loss, accuracy, factors)
        _reduce(labels, given, into, classes, settings.ignore_index)
    if loss is None:
        return Totals(tokens.ce, tokens.z, accuracy, factors)
    return Totals(loss, z_loss, accuracy, factors)


def _reduce(labels, given, into, classes: int, ignore_index: int) -> None:
    def plan() -> backend_triton.Launch:
        block = min(max(triton.next_power_of_2(labels.numel()), 16), 4096)
        scalars = (labels.numel(), ignore_index)
        return backend_triton.Launch(reduce_kernel, 1, scalars, (classes, block), 8)

    of = backend_triton.metadata
    launch = backend_triton.kept(
        _REDUCE_LAUNCHES,
        lambda: (of(labels), *map(of, given), *map(of, into), classes, ignore_index),
        plan,
    )
    launch(labels, *given, *into)


def backward(
    logits: torch.Tensor,
    labels: torch.Tensor,
    shared: Constants,
    settings: Settings,
    statistics: torch.Tensor,
    factors: torch.Tensor | None,
    dloss: torch.Tensor | None,
    dz: torch.Tensor | None,
    into: torch.Tensor,
    first_class: int = 0,
    vocab: int | None = None,
    label_weight: torch.Tensor | None = None,
) -> None:
    """Fills `into`, contiguous, with the gradient; it may be `logits` itself.

    dloss and dz are scalars or one number a token, of any distance between them. The logits may be
    those of a part of `vocab` classes, from first_class on; then label_weight, (M,) float32, has
    the labels' class weights where class_weight and bias are of some classes only.
    """

    def plan() -> backend_triton.Launch:
        classes = logits.shape[-1]
        config = Config.for_shape(classes)
        strides = (0 if t is None or t.dim() == 0 else t.stride(0) for t in (dloss, dz))
        return backend_triton.Launch(
            backward_kernel,
            logits.numel() // classes * -(-classes // config.backward_block),
            (row_stride(rows(logits)), *strides, first_class, *settings.scalars),
            (classes, vocab or classes, config.backward_block, *settings.flags),
            config.backward_warps,
        )

    dloss, dz = (t if t is None or t.dim() == 0 else t.reshape(-1) for t in (dloss, dz))
    of = backend_triton.metadata
    launch = backend_triton.kept(
        _BACKWARD_LAUNCHES,
        lambda: (
            of(logits),
            of(labels),
            *map(of, shared),
            of(factors),
            of(dloss),
            of(dz),
            of(label_weight),
            settings,
            first_class,
            vocab,
        ),
        plan,
    )
    if launch.programs:
        launch(rows(logits), labels, *shared, statistics, label_weight, factors, dloss, dz, into)


def add_bias_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    shared: Constants,
    settings: Settings,
    statistics: torch.Tensor,
    factors: torch.Tensor | None,
    dloss: torch.Tensor | None,
    into: torch.Tensor,
    vocab: int | None = None,
    label_weight: torch.Tensor | None = None,
) -> None:
    """Adds the sum over rows of the gradient, before it is rounded, to `into` (V,) float32. vocab
    and label_weight are those of `backward`.
    """

    def plan() -> backend_triton.Launch:
        num_rows, classes = logits.shape
        stride = 0 if dloss is None or dloss.dim() == 0 else dloss.stride(0)
        block = 128
        return backend_triton.Launch(
            bias_gradient_kernel,
            -(-classes // block),
            (num_rows, logits.stride(0), stride, *settings.scalars),
            (classes, vocab or classes, 16, block, *settings.flags),
            4,
        )

    of = backend_triton.metadata
    launch = backend_triton.kept(
        _BIAS_LAUNCHES,
        lambda: (
            of(logits),
            of(labels),
            *map(of, shared),
            of(factors),
            of(dloss),
            of(label_weight),
            settings,
            vocab,
        ),
        plan,
    )
    launch(logits, labels, *shared, statistics, label_weight, factors, dloss, into)
