"""Cross-entropy in plain jax.numpy: the CPU path, the base and the judge's yardstick."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

IGNORED, INVALID = -1, -2


def as_classes(labels: jax.Array, classes: int, ignore_index: int) -> jax.Array:
    """Labels as int32 in [0, V), IGNORED where they are ignore_index and INVALID elsewhere."""
    valid = (labels >= 0) & (labels < classes)
    known = jnp.where(valid, labels, INVALID).astype(jnp.int32)
    return jnp.where(labels == ignore_index, jnp.int32(IGNORED), known)


def token_losses(
    logits: jax.Array,
    classes: jax.Array,
    class_weight: jax.Array | None,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
) -> tuple[jax.Array, jax.Array]:
    """ce and z of every token, as in the oracle, in float32 (float64 of float64 logits).

    `classes` is what `as_classes` returns.
    """
    size = logits.shape[-1]
    ignored = classes == IGNORED
    y = jnp.maximum(classes, 0)[..., None]
    x = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    x = jnp.where(ignored[..., None], 0.0, x)  # what an ignored row holds is not looked at
    if softcap is not None:
        x = softcap * jnp.tanh(x / softcap)
    log_p = jax.nn.log_softmax(x, axis=-1)
    weight = None if class_weight is None else class_weight.astype(x.dtype)
    ce = -jnp.take_along_axis(log_p, y, axis=-1)[..., 0]
    if weight is not None:
        ce = ce * weight_of(weight, classes)
    if label_smoothing:
        smooth = -jnp.sum(log_p if weight is None else log_p * weight, axis=-1)
        ce = (1.0 - label_smoothing) * ce + label_smoothing / size * smooth
    z = jnp.zeros_like(ce)
    if z_loss:
        z = z_loss * jnp.square(jax.nn.logsumexp(x, axis=-1))
    # NaN by a factor, so that the gradient is NaN too.
    wrong = jnp.where(classes == INVALID, jnp.nan, 1.0).astype(x.dtype)
    return jnp.where(ignored, 0.0, ce) * wrong, jnp.where(ignored, 0.0, z) * wrong


def weight_of(class_weight: jax.Array, classes: jax.Array) -> jax.Array:
    """Each token's class weight; some class's where the label is none."""
    sharding = jax.typeof(classes).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        sharding = None  # the compiler's to choose
    return class_weight.at[jnp.maximum(classes, 0)].get(out_sharding=sharding)


def predict(logits: jax.Array, softcap: float | None) -> jax.Array:
    """The class with the largest logit, int32."""
    x = jax.lax.stop_gradient(logits).astype(jnp.promote_types(logits.dtype, jnp.float32))
    if softcap is not None:  # where it saturates, different logits become equal
        x = softcap * jnp.tanh(x / softcap)
    return jnp.argmax(x, axis=-1).astype(jnp.int32)
