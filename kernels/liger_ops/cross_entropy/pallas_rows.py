"""The Pallas kernels of cross-entropy, over rows of logits, seen as logit_scale x + bias.

The forward reads the logits once and keeps two numbers a token, the largest logit and the logarithm
of the sum over the others relative to it; the backward reads the logits once more and writes their
gradient.

Refs are whole arrays: logits (M, V), labels (M,) as `xla.as_classes` makes them, class weights and
bias (V,), and None for what is absent or not asked for.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_ops import backend_pallas
from liger_ops.backend_pallas import exp, for_range, load, store
from liger_ops.cross_entropy.cases import Config
from liger_ops.cross_entropy.xla import IGNORED


@dataclass(frozen=True)
class Settings:
    label_smoothing: float
    softcap: float | None
    z_loss: float
    predict: bool
    interpret: bool
    logit_scale: float = 1.0
    keeps_weight: bool = False  # the label's class weight is a token's third statistic

    def see(self, x: jax.Array, bias_ref, classes: jax.Array, mask: jax.Array | None) -> jax.Array:
        """logit_scale x + bias in float32, for the numbers x of `classes`."""
        x = x.astype(jnp.float32)
        if self.logit_scale != 1.0:
            x *= self.logit_scale
        if bias_ref is not None:
            x += load(bias_ref, classes, mask=mask).astype(jnp.float32)
        return x

    def cap(self, x: jax.Array) -> jax.Array:
        return x if self.softcap is None else self.softcap * jnp.tanh(x / self.softcap)

    def cap_slope(self, x: jax.Array) -> jax.Array | float:
        """1 - tanh(x / softcap)^2, which keeps its precision where tanh is close to 1."""
        if self.softcap is None:
            return 1.0
        e = jnp.exp(-2.0 * jnp.abs(x / self.softcap))
        return 4.0 * e / ((1.0 + e) * (1.0 + e))


_MINUS_INFINITY = float("-inf")
_SUMMED_ROWS = 32  # tokens whose gradients a program adds up for the bias; not yet measured


def _load_label(labels_ref, weight_ref, row):
    """The row's label, whether it counts, whether it is a class, and its weight."""
    label = load(labels_ref, row, mask=None)
    valid = label >= 0
    weight = jnp.float32(1.0)
    if weight_ref is not None:
        weight = load(weight_ref, jnp.maximum(label, 0), mask=None).astype(jnp.float32)
    return label, label != IGNORED, valid, weight


def _load_upstream(ref, row):
    """The token's own number, or the one of all, or 0."""
    if ref is None:
        return jnp.float32(0.0)
    return load(ref, jnp.int32(0) if ref.shape[0] == 1 else row, mask=None)


def _forward_kernel(
    logits_ref,
    labels_ref,
    weight_ref,
    weight_sum_ref,
    bias_ref,
    ce_ref,
    z_ref,
    statistics_ref,
    predicted_ref,
    *,
    settings: Settings,
    config: Config,
):
    """One token a program. The maximum and the sum are kept a column, so that a tile costs no
    exchange between threads and little more than one exponential a logit.
    """
    classes = logits_ref.shape[1]
    steps, columns = config.forward_steps, config.forward_columns
    row = pl.program_id(0)
    label, supervised, valid, weight = _load_label(labels_ref, weight_ref, row)
    y = jnp.maximum(label, 0)
    label_logit = settings.see(load(logits_ref, row, y, mask=None), bias_ref, y, None)
    label_logit = settings.cap(label_logit)
    # What the smoothing's sum is relative to, so that a common offset does not cancel in it.
    base = jnp.where(label_logit == _MINUS_INFINITY, jnp.float32(0.0), label_logit)
    column = jnp.arange(columns, dtype=jnp.int32)
    tile = jnp.arange(steps, dtype=jnp.int32)[:, None] * columns + column[None, :]

    def step(start, carry, inside=None):
        best, total, smooth, at = carry
        cols = start + tile
        l = load(logits_ref, row, cols, mask=inside, other=_MINUS_INFINITY)  # noqa: E741
        l = settings.cap(settings.see(l, bias_ref, cols, inside))  # noqa: E741
        if inside is not None and (settings.softcap is not None or settings.logit_scale != 1.0):
            l = jnp.where(inside, l, jnp.float32(_MINUS_INFINITY))  # noqa: E741
        if smooth is not None:
            below = l - base if inside is None else jnp.where(inside, l - base, jnp.float32(0.0))
            if weight_ref is not None:
                below *= load(weight_ref, cols, mask=inside).astype(jnp.float32)
            smooth += jnp.sum(below, axis=0)
        highest = jnp.max(l, axis=0)
        if at is not None:
            here = start + jax.lax.argmax(l, 0, jnp.int32) * columns + column
            at = jnp.where(highest > best, here, at)
        new_best = jnp.maximum(best, highest)
        # Where nothing but -inf was seen so far:
        shift = jnp.where(new_best == _MINUS_INFINITY, jnp.float32(0.0), new_best)
        total = total * exp(best - shift) + jnp.sum(exp(l - shift[None, :]), axis=0)
        return new_best, total, smooth, at

    zeros = jnp.zeros((columns,), jnp.float32)
    carry: Any = (
        jnp.full((columns,), _MINUS_INFINITY, jnp.float32),
        zeros,
        zeros if settings.label_smoothing else None,
        None if predicted_ref is None else jnp.zeros((columns,), jnp.int32),
    )
    # An ignored row is not read.
    size = steps * columns
    full = jnp.where(supervised, jnp.int32(classes // size), jnp.int32(0))
    carry = for_range(0, full, lambda i, carry: step(i * size, carry), carry)
    if classes % size:
        start = jnp.int32(classes // size * size)
        carry = step(start, carry, supervised & (start + tile < classes))
    best, total, smooth, at = carry

    top = jnp.max(best)
    log_total = jnp.log(jnp.sum(total * exp(best - top)))
    ce = (1.0 - settings.label_smoothing) * weight * (log_total + (top - label_logit))
    if smooth is not None:
        weight_sum = jnp.float32(classes)
        if weight_sum_ref is not None:
            weight_sum = load(weight_sum_ref, jnp.int32(0), mask=None)
        below = weight_sum * (log_total + (top - base)) - jnp.sum(smooth)
        ce += settings.label_smoothing / classes * below
    z = settings.z_loss * (top + log_total) * (top + log_total)

    def put(ref, *indices, value):
        value = jnp.where(valid, value, jnp.float32(jnp.nan))
        value = jnp.where(supervised, value, jnp.float32(0.0))
        store(ref, *indices, value=value, mask=None)

    put(ce_ref, row, value=ce)
    put(statistics_ref, row, jnp.int32(0), value=top)
    put(statistics_ref, row, jnp.int32(1), value=log_total)
    if z_ref is not None:
        put(z_ref, row, value=z)
    if predicted_ref is not None:
        predicted = jnp.min(jnp.where(best == top, at, jnp.int32(classes - 1)))
        store(predicted_ref, row, value=predicted, mask=None)


def _backward_kernel(
    logits_ref,
    labels_ref,
    weight_ref,
    weight_sum_ref,
    bias_ref,
    first_class_ref,
    statistics_ref,
    dce_ref,
    dz_ref,
    dlogits_ref,
    dbias_ref,
    *,
    settings: Settings,
    config: Config,
    classes: int,
):
    """A block of one token's columns a program; of _SUMMED_ROWS tokens' where the bias asks for its
    gradient, whose sum over them is row `group` of dbias_ref, (groups, V). The columns are
    `classes` in all, or a part of them that begins at first_class.
    """
    num_rows, columns = logits_ref.shape
    block = config.backward_block
    blocks = jnp.int32(pl.cdiv(columns, block))
    group = jax.lax.div(pl.program_id(0), blocks)
    cols = jax.lax.rem(pl.program_id(0), blocks) * block + jnp.arange(block, dtype=jnp.int32)
    inside = None if columns % block == 0 else cols < columns
    its_class = cols
    if first_class_ref is not None:
        its_class = cols + load(first_class_ref, jnp.int32(0), mask=None)

    def step(row):
        of_label = None if settings.keeps_weight else weight_ref
        label, supervised, valid, weight = _load_label(labels_ref, of_label, row)
        if settings.keeps_weight:
            weight = load(statistics_ref, row, jnp.int32(2), mask=None)
        read = supervised & (cols < columns)  # an ignored row is not read
        x = load(logits_ref, row, cols, mask=read)
        top = load(statistics_ref, row, jnp.int32(0), mask=None)
        log_total = load(statistics_ref, row, jnp.int32(1), mask=None)
        g = _load_upstream(dce_ref, row)
        target = g * (1.0 - settings.label_smoothing) * weight
        of_p = target
        if dz_ref is not None:
            of_p += 2.0 * _load_upstream(dz_ref, row) * settings.z_loss * (top + log_total)
        spread = g * (settings.label_smoothing / classes)
        if settings.label_smoothing:
            weight_sum = jnp.float32(classes)
            if weight_sum_ref is not None:
                weight_sum = load(weight_sum_ref, jnp.int32(0), mask=None)
            of_p += spread * weight_sum
        of_p = jnp.where(valid, of_p, jnp.float32(jnp.nan))

        x = settings.see(x, bias_ref, its_class, inside)
        p = exp((settings.cap(x) - top) - log_total)
        dl = p * of_p - jnp.where(its_class == label, target, jnp.float32(0.0))
        if settings.label_smoothing:
            if weight_ref is not None:
                dl -= spread * load(weight_ref, its_class, mask=inside).astype(jnp.float32)
            else:
                dl -= spread
        dx = jnp.where(supervised, dl * settings.cap_slope(x), jnp.float32(0.0))
        store(dlogits_ref, row, cols, value=dx * settings.logit_scale, mask=inside)
        return dx

    if dbias_ref is None:
        step(group)
        return
    first = group * _SUMMED_ROWS
    rows = jnp.minimum(jnp.int32(_SUMMED_ROWS), num_rows - first)
    total = jnp.zeros((block,), jnp.float32)
    total = for_range(0, rows, lambda i, total: total + step(first + i), total)
    store(dbias_ref, group, cols, value=total, mask=inside)


class Constants(NamedTuple):
    """What every row shares, each perhaps None: class_weight and bias (V,), weight_sum (1,)."""

    class_weight: jax.Array | None = None
    weight_sum: jax.Array | None = None
    bias: jax.Array | None = None


class Tokens(NamedTuple):
    """What the forward makes of M rows.

    Attributes:
        ce, z: (M,) float32; z None where its coefficient is 0.
        statistics: (M, 2) float32, the largest logit, and log sum exp relative to it; (M, 3) with
            the label's class weight, where settings.keeps_weight.
        predicted: (M,) int32, or None.
    """

    ce: Any
    z: Any
    statistics: Any
    predicted: Any


def class_weight_sum(settings: Settings, class_weight: jax.Array | None) -> jax.Array | None:
    if class_weight is None or not settings.label_smoothing:
        return None
    return jnp.sum(class_weight.astype(jnp.float32))[None]


def shapes(settings: Settings, num_rows: int) -> Tokens:
    token = jax.ShapeDtypeStruct((num_rows,), jnp.float32)
    return Tokens(
        ce=token,
        z=token if settings.z_loss else None,
        statistics=jax.ShapeDtypeStruct((num_rows, 2 + settings.keeps_weight), jnp.float32),
        predicted=jax.ShapeDtypeStruct((num_rows,), jnp.int32) if settings.predict else None,
    )


def forward(
    settings: Settings, logits: jax.Array, classes: jax.Array, constants: Constants
) -> Tokens:
    num_rows, size = logits.shape
    outputs = shapes(settings, num_rows)
    if num_rows == 0:
        return jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), outputs)
    config = Config.for_shape(size)
    outputs = backend_pallas.pallas_call(
        functools.partial(_forward_kernel, settings=settings, config=config),
        tuple(outputs),
        logits,
        classes,
        *constants,
        programs=num_rows,
        num_warps=config.forward_warps,
        interpret=settings.interpret,
    )
    return Tokens(*outputs)


def backward(
    settings: Settings,
    logits: jax.Array,
    classes: jax.Array,
    constants: Constants,
    statistics: jax.Array,
    dce: jax.Array | None,
    dz: jax.Array | None,
    *,
    first_class: jax.Array | None = None,
    vocab: int | None = None,
    in_place: bool = False,
    sum_bias: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """The gradient with respect to the logits as they are given, of their shape and dtype; and
    with `sum_bias` the bias's, (V,) float32, from what is not yet rounded.

    Args:
        logits: (M, V), or with `first_class`, (1,) int32, those of some consecutive ones of
            `vocab` classes.
        dce, dz: the upstream gradients of ce and z, (M,), or (1,) where all tokens have one.
        in_place: the gradient takes the memory of `logits`.
    """
    num_rows, size = logits.shape
    if num_rows == 0:
        return jnp.zeros_like(logits), jnp.zeros((size,), jnp.float32) if sum_bias else None
    config = Config.for_shape(size)
    kernel = functools.partial(
        _backward_kernel, settings=settings, config=config, classes=vocab or size
    )
    groups = pl.cdiv(num_rows, _SUMMED_ROWS) if sum_bias else num_rows
    dlogits, dbias = backend_pallas.pallas_call(
        kernel,
        (
            jax.ShapeDtypeStruct(logits.shape, logits.dtype),
            jax.ShapeDtypeStruct((groups, size), jnp.float32) if sum_bias else None,
        ),
        logits,
        classes,
        *constants,
        first_class,
        statistics,
        dce,
        dz,
        programs=groups * pl.cdiv(size, config.backward_block),
        num_warps=config.backward_warps,
        interpret=settings.interpret,
        aliases={0: 0} if in_place else None,
    )
    return dlogits, None if dbias is None else jnp.sum(dbias, axis=0)
