"""A head whose classes are split over devices. Each makes the logits of its own classes with the
kernels of cross-entropy; a few numbers a token are then added up across the devices, and the
gradient follows from those as on one device.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from liger_ops import backend_pallas
from liger_ops.cross_entropy import pallas_rows
from liger_ops.cross_entropy.pallas_rows import Constants, Tokens
from liger_ops.cross_entropy.xla import IGNORED

ELSEWHERE = 2**31 - 1  # a class of another device: no column's number, not even a padded one's


class Shard(NamedTuple):
    """The classes of one device.

    Attributes:
        axes: the mesh axes over which the classes are split.
        first: the first of them, scalar int32.
        size, vocab: how many here, and of all devices.
        manual: under shard_map, where the sum of hidden's gradient over the devices is the
            transpose of handing hidden to all of them, and not made here.
    """

    axes: tuple[str, ...]
    first: jax.Array
    size: int
    vocab: int
    manual: bool

    def sum_gradient(self, partial: jax.Array) -> jax.Array:
        return partial if self.manual else jax.lax.psum(partial, self.axes)


def shard_of(axes: tuple[str, ...], size: int, manual_axes: tuple[str, ...]) -> Shard | None:
    """None where the classes are whole."""
    if not axes:
        return None
    first = jax.lax.axis_index(axes).astype(jnp.int32) * size
    return Shard(axes, first, size, size * jax.lax.axis_size(axes), bool(manual_axes))


def size(shard: Shard | None) -> int | None:
    """The classes of all devices; None where they are those of the weight."""
    return None if shard is None else shard.vocab


def gradient_dtype(shard: Shard | None, dtype: Any) -> Any:
    """Of hidden's gradient: of `dtype` where it is complete."""
    return jnp.float32 if shard is not None and shard.manual else dtype


def own_labels(classes: jax.Array, shard: Shard | None) -> jax.Array:
    """`classes` counted from the device's first one, and ELSEWHERE where they are not its own."""
    if shard is None:
        return classes
    label = classes - shard.first
    own = (label >= 0) & (label < shard.size)
    return jnp.where(classes < 0, classes, jnp.where(own, label, jnp.int32(ELSEWHERE)))


def contribution(tokens: Tokens, shard: Shard) -> Tokens:
    """What every device gives of ce, z and predicted to the sum over all of them."""
    mine = lambda a: jnp.where(shard.first == 0, a, jnp.zeros_like(a))  # noqa: E731
    ce, z, predicted = jax.tree.map(mine, (tokens.ce, tokens.z, tokens.predicted))
    return Tokens(ce, z, tokens.statistics, predicted)


def forward(
    settings: pallas_rows.Settings,
    logits: jax.Array,
    labels: jax.Array,
    constants: Constants,
    shard: Shard | None,
) -> Tokens:
    """As `pallas_rows.forward`, for the logits of a shard and what `own_labels` returns."""
    of_kernel = dataclasses.replace(settings, keeps_weight=False)
    if shard is None:
        tokens = pallas_rows.forward(of_kernel, logits, labels, constants)
        if not settings.keeps_weight:
            return tokens
        assert constants.class_weight is not None
        weight = constants.class_weight[jnp.maximum(labels, 0)].astype(jnp.float32)
        return tokens._replace(statistics=jnp.column_stack([tokens.statistics, weight]))
    # Of the shard alone: largest logit, log sum exp, the sum that smoothing needs, largest class.
    smoothing = settings.label_smoothing
    of_kernel = dataclasses.replace(
        of_kernel, label_smoothing=1.0 if smoothing else 0.0, z_loss=0.0
    )
    own = (labels >= 0) & (labels != ELSEWHERE)
    y = jnp.where(own, labels, 0)
    local_sum = pallas_rows.class_weight_sum(of_kernel, constants.class_weight)
    given = Constants(constants.class_weight, local_sum, constants.bias)
    its = pallas_rows.forward(of_kernel, logits, jnp.where(labels < 0, labels, y), given)
    its_top, its_log_total = its.statistics[:, 0], its.statistics[:, 1]

    top = jax.lax.pmax(its_top, shard.axes)
    above = (its_top - top) + its_log_total  # of the shard's log sum exp over the largest logit
    empty = its_top == -jnp.inf  # a shard of masked classes
    label_logit = logits[jnp.arange(y.size, dtype=jnp.int32), y].astype(jnp.float32)
    label_logit *= settings.logit_scale
    if constants.bias is not None:
        label_logit += constants.bias[y].astype(jnp.float32)
    sums = [
        jnp.where(empty, 0.0, jnp.exp(above)),
        jnp.where(own, settings.cap(label_logit), 0.0),
        own.astype(jnp.float32),
    ]
    if constants.class_weight is not None:
        sums.append(jnp.where(own, constants.class_weight[y].astype(jnp.float32), 0.0))
    if smoothing:  # of w (largest logit - logit)
        weight_sum = jnp.float32(shard.size) if local_sum is None else local_sum[0]
        sums.append(its.ce * shard.size - weight_sum * above)
    total, label_logit, owners, *rest = jax.lax.psum(jnp.stack(sums), shard.axes)
    log_total = jnp.log(total)

    weight = jnp.ones_like(total) if constants.class_weight is None else rest[0]
    ce = (1.0 - smoothing) * weight * (log_total + (top - label_logit))
    if smoothing:
        weight_sum = jnp.float32(shard.vocab)
        if constants.weight_sum is not None:
            weight_sum = constants.weight_sum[0]
        ce += smoothing / shard.vocab * (rest[-1] + weight_sum * log_total)
    z = jnp.square(top + log_total) * settings.z_loss if settings.z_loss else None

    def put(value: jax.Array) -> jax.Array:
        # Labels that differ between the devices have no owner, or more than one.
        value = jnp.where(owners == 1.0, value, jnp.nan)
        return jnp.where(labels == IGNORED, 0.0, value)

    ce, z, top_out, log_total = jax.tree.map(put, (ce, z, top, log_total))
    predicted = None
    if its.predicted is not None:
        at = jnp.where(its_top == top, shard.first + its.predicted, jnp.int32(shard.vocab - 1))
        predicted = jax.lax.pmin(at, shard.axes)
    kept = [top_out, log_total] + ([weight] if settings.keeps_weight else [])
    tokens = Tokens(ce, z, jnp.stack(kept, axis=-1), predicted)
    # A loop's carry varies over the axes as what it starts from.
    of_logits = lambda a: backend_pallas.match_axes(a, logits)[0]  # noqa: E731
    return jax.tree.map(of_logits, tokens)
