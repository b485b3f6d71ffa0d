"""Cross-entropy in Pallas for JAX: every token's own loss; the sums over tokens are XLA's.

Kernels, then launchers, then the custom_vjp, then the entry point. The forward reads the logits
once and keeps two numbers a token, the largest logit and the logarithm of the sum over the others
relative to it; the backward reads the logits once more and writes their gradient.

Refs are whole arrays: logits (M, V), labels (M,) as `xla.as_classes` makes them, and None for what
is absent or not asked for.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.experimental import pallas as pl

from liger_ops import backend_pallas
from liger_ops.backend_pallas import exp, for_range, load, store
from liger_ops.cross_entropy import xla
from liger_ops.cross_entropy.cases import Config
from liger_ops.cross_entropy.xla import IGNORED


@dataclass(frozen=True)
class _Settings:
    label_smoothing: float
    softcap: float | None
    z_loss: float
    predict: bool
    interpret: bool

    def cap(self, x: jax.Array) -> jax.Array:
        return x if self.softcap is None else self.softcap * jnp.tanh(x / self.softcap)

    def cap_slope(self, x: jax.Array) -> jax.Array | float:
        """1 - tanh(x / softcap)^2, which keeps its precision where tanh is close to 1."""
        if self.softcap is None:
            return 1.0
        e = jnp.exp(-2.0 * jnp.abs(x / self.softcap))
        return 4.0 * e / ((1.0 + e) * (1.0 + e))


_MINUS_INFINITY = float("-inf")


def _load_label(labels_ref, weight_ref, row):
    """The row's label, whether it counts, whether it is a class, and its weight."""
    label = load(labels_ref, row, mask=None)
    valid = label >= 0
    weight = jnp.float32(1.0)
    if weight_ref is not None:
        weight = load(weight_ref, jnp.maximum(label, 0), mask=None).astype(jnp.float32)
    return label, label != IGNORED, valid, weight


def _forward_kernel(
    logits_ref,
    labels_ref,
    weight_ref,
    weight_sum_ref,
    ce_ref,
    z_ref,
    statistics_ref,
    predicted_ref,
    *,
    settings: _Settings,
    config: Config,
):
    """One token a program. The maximum and the sum are kept a column, so that a tile costs no
    exchange between threads and little more than one exponential a logit.
    """
    classes = logits_ref.shape[1]
    steps, columns = config.forward_steps, config.forward_columns
    row = pl.program_id(0)
    label, supervised, valid, weight = _load_label(labels_ref, weight_ref, row)
    label_logit = load(logits_ref, row, jnp.maximum(label, 0), mask=None).astype(jnp.float32)
    label_logit = settings.cap(label_logit)
    # What the smoothing's sum is relative to, so that a common offset does not cancel in it.
    base = jnp.where(label_logit == _MINUS_INFINITY, jnp.float32(0.0), label_logit)
    column = jnp.arange(columns, dtype=jnp.int32)
    tile = jnp.arange(steps, dtype=jnp.int32)[:, None] * columns + column[None, :]

    def step(start, carry, inside=None):
        best, total, smooth, at = carry
        cols = start + tile
        l = load(logits_ref, row, cols, mask=inside, other=_MINUS_INFINITY)  # noqa: E741
        l = settings.cap(l.astype(jnp.float32))  # noqa: E741
        if inside is not None and settings.softcap is not None:
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
    statistics_ref,
    dce_ref,
    dz_ref,
    dlogits_ref,
    *,
    settings: _Settings,
    config: Config,
):
    classes = logits_ref.shape[1]
    block = config.backward_block
    blocks = jnp.int32(pl.cdiv(classes, block))
    row = jax.lax.div(pl.program_id(0), blocks)
    cols = jax.lax.rem(pl.program_id(0), blocks) * block + jnp.arange(block, dtype=jnp.int32)
    inside = None if classes % block == 0 else cols < classes
    label, supervised, valid, weight = _load_label(labels_ref, weight_ref, row)
    read = supervised & (cols < classes)  # an ignored row is not read
    x = load(logits_ref, row, cols, mask=read)
    top = load(statistics_ref, row, jnp.int32(0), mask=None)
    log_total = load(statistics_ref, row, jnp.int32(1), mask=None)
    g = jnp.float32(0.0) if dce_ref is None else load(dce_ref, row, mask=None)
    target = g * (1.0 - settings.label_smoothing) * weight
    of_p = target
    if dz_ref is not None:
        h = load(dz_ref, row, mask=None)
        of_p += 2.0 * h * settings.z_loss * (top + log_total)
    spread = g * (settings.label_smoothing / classes)
    if settings.label_smoothing:
        weight_sum = jnp.float32(classes)
        if weight_sum_ref is not None:
            weight_sum = load(weight_sum_ref, jnp.int32(0), mask=None)
        of_p += spread * weight_sum
    of_p = jnp.where(valid, of_p, jnp.float32(jnp.nan))

    x = x.astype(jnp.float32)
    p = exp((settings.cap(x) - top) - log_total)
    dl = p * of_p - jnp.where(cols == label, target, jnp.float32(0.0))
    if settings.label_smoothing:
        if weight_ref is not None:
            dl -= spread * load(weight_ref, cols, mask=inside).astype(jnp.float32)
        else:
            dl -= spread
    dx = jnp.where(supervised, dl * settings.cap_slope(x), jnp.float32(0.0))
    store(dlogits_ref, row, cols, value=dx, mask=inside)


def _weight_sum(settings: _Settings, class_weight: jax.Array | None) -> jax.Array | None:
    if class_weight is None or not settings.label_smoothing:
        return None
    return jnp.sum(class_weight.astype(jnp.float32))[None]


@functools.partial(jax.jit, static_argnums=0)
def _forward(settings: _Settings, logits, classes, class_weight):
    """ce, z, statistics and predicted; what is not asked for is None."""

    def local(logits, classes, class_weight, weight_sum):
        size = logits.shape[-1]
        leading, num_rows = logits.shape[:-1], logits.size // size
        config = Config.for_shape(size)
        token = jax.ShapeDtypeStruct((num_rows,), jnp.float32)
        outputs = (
            token,
            token if settings.z_loss else None,
            jax.ShapeDtypeStruct((num_rows, 2), jnp.float32),
            jax.ShapeDtypeStruct((num_rows,), jnp.int32) if settings.predict else None,
        )
        if num_rows == 0:
            outputs = jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), outputs)
        else:
            outputs = backend_pallas.pallas_call(
                functools.partial(_forward_kernel, settings=settings, config=config),
                outputs,
                logits.reshape(num_rows, size),
                classes.reshape(num_rows),
                class_weight,
                weight_sum,
                programs=num_rows,
                num_warps=config.forward_warps,
                interpret=settings.interpret,
            )
        return jax.tree.map(lambda a: a.reshape(*leading, 2 if a.ndim == 2 else 1), outputs)

    ce, z, statistics, predicted = backend_pallas.split_rows(
        local, logits, classes[..., None], class_weight, _weight_sum(settings, class_weight)
    )
    ce, z, predicted = jax.tree.map(lambda a: a[..., 0], (ce, z, predicted))
    return ce, z, statistics, predicted


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
@functools.partial(jax.jit, static_argnums=0)
def _backward(settings: _Settings, logits, classes, class_weight, statistics, dce, dz):
    """dlogits, for the upstream gradients of every token's ce and z, each perhaps None."""

    def local(logits, classes, statistics, dce, dz, class_weight, weight_sum):
        size = logits.shape[-1]
        num_rows = logits.size // size
        config = Config.for_shape(size)
        if num_rows == 0:
            return jnp.zeros_like(logits)
        return backend_pallas.pallas_call(
            functools.partial(_backward_kernel, settings=settings, config=config),
            jax.ShapeDtypeStruct((num_rows, size), logits.dtype),
            logits.reshape(num_rows, size),
            classes.reshape(num_rows),
            class_weight,
            weight_sum,
            statistics.reshape(num_rows, 2),
            *(None if d is None else d.reshape(num_rows) for d in (dce, dz)),
            programs=num_rows * pl.cdiv(size, config.backward_block),
            num_warps=config.backward_warps,
            interpret=settings.interpret,
        ).reshape(logits.shape)

    dce, dz, classes = jax.tree.map(lambda a: a[..., None], (dce, dz, classes))
    weight_sum = _weight_sum(settings, class_weight)
    return backend_pallas.split_rows(
        local, logits, classes, statistics, dce, dz, class_weight, weight_sum
    )


@_backward.defjvp
def _backward_jvp(settings, primals, tangents):
    """Second derivatives come from the XLA version."""

    def plain(logits, classes, class_weight, statistics, dce, dz):
        def losses(logits):
            return xla.token_losses(
                logits, classes, class_weight, settings.label_smoothing, settings.softcap,
                settings.z_loss,
            )  # fmt: skip

        outputs, vjp = jax.vjp(losses, logits)
        dce = jnp.zeros_like(outputs[0]) if dce is None else dce
        dz = jnp.zeros_like(outputs[1]) if dz is None else dz
        return vjp((dce, dz))[0]

    return jax.jvp(plain, primals, tangents)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_losses(settings, logits, classes, class_weight):
    return _forward(settings, logits, classes, class_weight)


def _token_losses_fwd(settings, logits, classes, class_weight):
    given = logits.value, classes.value, None if class_weight is None else class_weight.value
    # Not _forward: this may be differentiated once more.
    outputs: Any = _token_losses(settings, *given)
    return outputs, (*given, outputs[2])


def _token_losses_bwd(settings, saved, cotangents):
    dce, dz = (None if isinstance(d, SymbolicZero) else d for d in cotangents[:2])
    if dce is None and dz is None:
        return jnp.zeros_like(saved[0]), None, None
    return _backward(settings, *saved, dce, dz), None, None


_token_losses.defvjp(_token_losses_fwd, _token_losses_bwd, symbolic_zeros=True)


def token_losses(
    logits: jax.Array,
    classes: jax.Array,
    class_weight: jax.Array | None,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    predict: bool,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """ce, z (None where its coefficient is 0) and, if asked for, predicted classes (...)."""
    settings = _Settings(label_smoothing, softcap, z_loss, predict, backend_pallas.interpret())
    given = backend_pallas.match_axes(logits, classes, class_weight)
    outputs: Any = _token_losses(settings, *given)
    ce, z, _, predicted = outputs
    return ce, z, predicted
