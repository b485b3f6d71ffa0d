"""What the Pallas kernels make, by the XLA version, which has second derivatives."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from liger_ops.cross_entropy import pallas_rows
from liger_ops.fused_linear_cross_entropy import xla, xla_vocab
from liger_ops.fused_linear_cross_entropy.pallas_parts import Gradients, Need, Settings, Upstream


class Outputs(NamedTuple):
    """What the forward makes; None for what is not.

    Attributes:
        ce, z, predicted: of the labels' shape.
        statistics: (..., 2).
        logits: (..., V).
        gradients: times a power of two that `Upstream.normalized` gives of the mean's factors.
    """

    ce: Any
    z: Any
    predicted: Any
    statistics: Any
    logits: Any
    gradients: Gradients


def upstream_of(settings: Settings, factors: jax.Array) -> Upstream:
    """Of every token's ce and z, by the mean's factors, (2,)."""
    return Upstream(factors[:1], factors[1:] if settings.rows.z_loss else None)


def hidden_dtype(settings: Settings, hidden: jax.Array) -> Any:
    """Of hidden's gradient: under shard_map not yet rounded, for it is summed over the shards."""
    return jnp.float32 if settings.manual else hidden.dtype


def forward(
    settings: Settings, keeps_logits: bool, now: Need, keeps_statistics: bool,
    hidden, weight, bias, classes, class_weight, factors,
) -> Outputs:  # fmt: skip
    """now: the gradients that the forward makes."""
    rows = settings.rows
    losses = _losses(settings, classes, class_weight)
    (ce, z), vjp = jax.vjp(losses, hidden, weight, bias)
    logits = xla.logits_of(hidden, weight, None, 1.0, settings.vocab_axis)
    gradients = Gradients()
    if any(now):
        of_ce, of_z = upstream_of(settings, factors).normalized()[1]
        of_z = jnp.zeros_like(of_ce) if of_z is None else of_z
        made = vjp((jnp.broadcast_to(of_ce, ce.shape), jnp.broadcast_to(of_z, z.shape)))
        gradients = _asked_for(now, made, hidden_dtype(settings, hidden), settings.sum_dtype)
    seen = rows.cap(_seen(rows, jax.lax.stop_gradient(logits), bias))
    statistics, predicted = xla_vocab.statistics(
        seen, classes, class_weight if rows.keeps_weight else None, settings.manual_axes
    )
    return Outputs(
        ce,
        z if rows.z_loss else None,
        predicted if rows.predict else None,
        statistics if keeps_statistics else None,
        logits if keeps_logits else None,
        gradients,
    )


def backward(
    settings: Settings, need: Need, hidden, weight, bias, classes, class_weight, statistics, logits,
    upstream: Upstream,
) -> Gradients:  # fmt: skip
    del statistics, logits  # which are made again
    (ce, z), vjp = jax.vjp(_losses(settings, classes, class_weight), hidden, weight, bias)
    of_z = jnp.zeros((), z.dtype) if upstream.dz is None else upstream.dz
    made = vjp((jnp.broadcast_to(upstream.dce, ce.shape), jnp.broadcast_to(of_z, z.shape)))
    return _asked_for(need, made, hidden_dtype(settings, hidden), weight.dtype)


def _asked_for(need: Need, made: Any, of_hidden: Any, of_weight: Any) -> Gradients:
    dtypes = (of_hidden, of_weight, jnp.float32)
    return Gradients(
        *(
            gradient.astype(dtype) if needed else None
            for gradient, dtype, needed in zip(made, dtypes, need, strict=True)
        )
    )


def _seen(rows: pallas_rows.Settings, logits: jax.Array, bias: jax.Array | None) -> jax.Array:
    x = logits.astype(jnp.float32) * rows.logit_scale
    return x if bias is None else x + jax.lax.stop_gradient(bias)


def _losses(settings: Settings, classes, class_weight) -> Any:
    rows = settings.rows
    options = (rows.label_smoothing, rows.softcap, rows.z_loss)

    def losses(hidden, weight, bias):
        given = (hidden, weight, classes, bias, class_weight)
        given = (*given, rows.logit_scale, settings.vocab_axis)
        if settings.manual:
            return xla_vocab.token_losses(*given, *options, settings.manual_axes)
        return xla.token_losses(*given, *options)

    return losses
