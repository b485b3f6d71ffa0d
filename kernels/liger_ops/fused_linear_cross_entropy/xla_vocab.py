"""The head and cross-entropy in plain jax.numpy, the classes split over axes of a mesh: to be
called under shard_map, with each device's own classes of weight, bias and class_weight.
"""

import jax
import jax.numpy as jnp

from liger_ops import backend_pallas
from liger_ops.cross_entropy import reduce
from liger_ops.cross_entropy.xla import IGNORED, INVALID, weight_of
from liger_ops.fused_linear_cross_entropy import xla

Axes = tuple[str, ...]


def label_weight(class_weight: jax.Array, classes: jax.Array, axes: Axes) -> jax.Array:
    """Every token's, 0 where the label is no class."""
    own, y = _own(classes, class_weight.shape[0], axes)
    return jax.lax.psum(jnp.where(own, weight_of(class_weight, y), 0.0), axes)


def _own(classes: jax.Array, size: int, axes: Axes) -> tuple[jax.Array, jax.Array]:
    """Whether the device has the label, and which of its classes that is, 0 elsewhere."""
    y = classes if not axes else classes - jax.lax.axis_index(axes).astype(jnp.int32) * size
    own = (classes >= 0) & (y >= 0) & (y < size)
    return own, jnp.where(own, y, 0)


def statistics(
    seen: jax.Array, classes: jax.Array, class_weight: jax.Array | None, axes: Axes
) -> tuple[jax.Array, jax.Array]:
    """The largest of `seen` and log sum exp relative to it, (..., 2), with class_weight a third:
    the label's; and the class of the largest. Without axes, of one device's classes.
    """
    its_top = jnp.max(seen, axis=-1)
    top = jax.lax.pmax(its_top, axes) if axes else its_top
    total = jnp.log(jax.lax.psum(jnp.sum(jnp.exp(seen - top[..., None]), axis=-1), axes))
    kept = [top, total]
    if class_weight is not None:
        kept.append(label_weight(class_weight, classes, axes).astype(jnp.float32))
    return jnp.stack(kept, axis=-1), predict(seen, axes)


def predict(seen: jax.Array, axes: Axes) -> jax.Array:
    """The class with the largest of `seen`, the capped logits."""
    seen = jax.lax.stop_gradient(seen)
    at = jnp.argmax(seen, axis=-1).astype(jnp.int32)
    if not axes:
        return at
    size = seen.shape[-1]
    top = jnp.max(seen, axis=-1)
    largest = top == jax.lax.pmax(top, axes)
    last = jnp.int32(size * jax.lax.axis_size(axes) - 1)
    at += jax.lax.axis_index(axes).astype(jnp.int32) * size
    return jax.lax.pmin(jnp.where(largest, at, last), axes)


def seen(logits: jax.Array, softcap: float | None) -> jax.Array:
    x = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return x if softcap is None else softcap * jnp.tanh(x / softcap)


def token_losses(
    hidden: jax.Array,
    weight: jax.Array,
    classes: jax.Array,
    bias: jax.Array | None,
    class_weight: jax.Array | None,
    logit_scale: float,
    vocab_axis: int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    axes: Axes,
) -> tuple[jax.Array, jax.Array]:
    """This device's contribution to every token's ce and z, whose sums over `axes` these are: all
    on the first device, so that each upstream gradient is counted once.
    """
    logits = xla.logits_of(hidden, weight, bias, logit_scale, vocab_axis)
    return losses_of(logits, classes, class_weight, label_smoothing, softcap, z_loss, axes)


def losses_of(
    logits: jax.Array,
    classes: jax.Array,
    class_weight: jax.Array | None,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    axes: Axes,
) -> tuple[jax.Array, jax.Array]:
    """As `token_losses`, of a device's own logits."""
    size, ignored = logits.shape[-1], classes == IGNORED
    vocab = size * jax.lax.axis_size(axes)
    own, y = _own(classes, size, axes)
    # What an ignored row holds is not looked at.
    logits = jnp.where(ignored[..., None], 0.0, logits)
    l = seen(logits, softcap)  # noqa: E741
    top = jax.lax.pmax(jax.lax.stop_gradient(jnp.max(l, axis=-1)), axes)
    above = l - top[..., None]
    weight = None if class_weight is None else class_weight.astype(l.dtype)

    label = jnp.take_along_axis(above, y[..., None], axis=-1)[..., 0]
    sums = [jnp.sum(jnp.exp(above), axis=-1), jnp.where(own, label, 0.0), own.astype(l.dtype)]
    if weight is not None:
        sums.append(jnp.where(own, weight_of(weight, y), 0.0))
    if label_smoothing:
        sums.append(-jnp.sum(above if weight is None else weight * above, axis=-1))
    total, label, owners, *rest = jax.lax.psum(jnp.stack(sums), axes)
    log_total = jnp.log(total)

    ce = log_total - label
    if weight is not None:
        ce *= rest[0]
    if label_smoothing:
        weight_sum = vocab if weight is None else jax.lax.psum(jnp.sum(weight), axes)
        ce *= 1.0 - label_smoothing
        ce += label_smoothing / vocab * (rest[-1] + weight_sum * log_total)
    z = z_loss * jnp.square(top + log_total)
    # NaN by a factor, so that the gradient is NaN too. Labels that differ between the devices have
    # no owner, or more than one.
    wrong = jnp.where((classes == INVALID) | (owners != 1.0), jnp.nan, 1.0).astype(l.dtype)
    factor = jnp.where(ignored, 0.0, wrong)
    first = jax.lax.axis_index(axes) == 0
    return tuple(jnp.where(ignored | ~first, 0.0, x * factor) for x in (ce, z))  # type: ignore[return-value]


def fused_linear_cross_entropy(
    hidden: jax.Array,
    weight: jax.Array,
    classes: jax.Array,
    bias: jax.Array | None,
    class_weight: jax.Array | None,
    num_items: jax.Array | None,
    logit_scale: float,
    vocab_axis: int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    reduction: str,
    axes: Axes,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """loss, z_loss and predicted classes, the same on all devices of `axes`."""
    # Summed over the devices, hidden's gradient is in float32 until all of it is there.
    exact = hidden.astype(jnp.promote_types(hidden.dtype, jnp.float32))
    shared = backend_pallas.match_axes(exact, weight)[0].astype(hidden.dtype)  # type: ignore[union-attr]
    logits = xla.logits_of(shared, weight, bias, logit_scale, vocab_axis)
    ce, z = losses_of(logits, classes, class_weight, label_smoothing, softcap, z_loss, axes)
    weights = None if class_weight is None else label_weight(class_weight, classes, axes)
    factors = reduce.factors(classes, class_weight, num_items, reduction, ce.dtype, weights)
    loss, z = jax.lax.psum(reduce.summed(ce, z, factors), axes)
    return loss, z, predict(seen(logits, softcap), axes)
