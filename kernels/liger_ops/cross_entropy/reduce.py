"""The mean or sum of the tokens' losses in JAX, the same for both implementations."""

from typing import Any

import jax
import jax.numpy as jnp

from liger_ops.cross_entropy.check import Metrics
from liger_ops.cross_entropy.xla import IGNORED, weight_of


def reduce(
    ce: jax.Array,
    z: jax.Array | None,
    classes: jax.Array,
    class_weight: jax.Array | None,
    num_items: jax.Array | None,
    reduction: str,
) -> tuple[jax.Array, jax.Array]:
    """loss and z_loss of the tokens' ce and z, as in the oracle."""
    return summed(ce, z, factors(classes, class_weight, num_items, reduction, ce.dtype))


def factors(
    classes: jax.Array,
    class_weight: jax.Array | None,
    num_items: jax.Array | None,
    reduction: str,
    dtype: Any,
    label_weight: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array] | None:
    """What a token's ce and z are multiplied by before they are summed; None for "none".

    label_weight: every token's, where class_weight holds only some of the classes'.
    """
    if reduction == "none":
        return None
    if reduction == "sum":
        return jnp.ones((), dtype), jnp.ones((), dtype)
    if num_items is not None:
        factor = inverse(num_items, dtype)
        return factor, factor
    count = weight_sum = jnp.sum(classes != IGNORED)
    if class_weight is not None:
        weights = weight_of(class_weight, classes) if label_weight is None else label_weight
        weights = weights.astype(dtype)
        weight_sum = jnp.sum(jnp.where(classes >= 0, weights, 0.0))
    return inverse(weight_sum, dtype), inverse(count, dtype)


def summed(
    ce: jax.Array, z: jax.Array | None, factors: tuple[jax.Array, jax.Array] | None
) -> tuple[jax.Array, jax.Array]:
    if factors is None:
        return (ce, jnp.zeros_like(ce)) if z is None else (ce + z, z)
    z = jnp.zeros((), ce.dtype) if z is None else jnp.sum(z) * factors[1]
    return jnp.sum(ce) * factors[0] + z, z


def inverse(count: jax.Array, dtype) -> jax.Array:
    """1 / count, and 0 of 0: nothing to average is 0 and not NaN."""
    count = count.astype(dtype)
    return jnp.where(count == 0.0, 0.0, 1.0 / jnp.where(count == 0.0, 1.0, count))


def metrics(predicted: Any, classes: jax.Array) -> Metrics:
    supervised = classes != IGNORED
    right = jnp.sum((predicted == classes) & supervised)
    accuracy = right * inverse(jnp.sum(supervised), jnp.float32)
    return Metrics(accuracy, jnp.where(supervised, predicted, -1))
