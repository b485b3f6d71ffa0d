"""Cross-entropy in Pallas for JAX: every token's own loss; the sums over tokens are XLA's.

Launchers, then the custom_vjp, then the entry point; the kernels are in pallas_rows.py. Saved for
the backward are the logits and two numbers a token.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from liger_ops import backend_pallas
from liger_ops.cross_entropy import pallas_rows, xla
from liger_ops.cross_entropy.pallas_rows import Constants, Settings, class_weight_sum


@functools.partial(jax.jit, static_argnums=0)
def _forward(settings: Settings, logits, classes, class_weight):
    """ce, z, statistics and predicted; what is not asked for is None."""

    def local(logits, classes, class_weight, weight_sum):
        leading = logits.shape[:-1]
        rows = logits.reshape(classes.size, logits.shape[-1])
        constants = Constants(class_weight, weight_sum)
        outputs = pallas_rows.forward(settings, rows, classes.reshape(-1), constants)
        return jax.tree.map(lambda a: a.reshape(*leading, 2 if a.ndim == 2 else 1), tuple(outputs))

    ce, z, statistics, predicted = backend_pallas.split_rows(
        local, logits, classes[..., None], class_weight, class_weight_sum(settings, class_weight)
    )
    ce, z, predicted = jax.tree.map(lambda a: a[..., 0], (ce, z, predicted))
    return ce, z, statistics, predicted


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
@functools.partial(jax.jit, static_argnums=0)
def _backward(settings: Settings, logits, classes, class_weight, statistics, dce, dz):
    """dlogits, for the upstream gradients of every token's ce and z, each perhaps None."""

    def local(logits, classes, statistics, dce, dz, class_weight, weight_sum):
        rows = logits.reshape(classes.size, logits.shape[-1])
        classes, dce, dz = jax.tree.map(lambda a: a.reshape(-1), (classes, dce, dz))
        constants = Constants(class_weight, weight_sum)
        dlogits, _ = pallas_rows.backward(
            settings, rows, classes, constants, statistics.reshape(classes.size, 2), dce, dz
        )
        return dlogits.reshape(logits.shape)

    dce, dz, classes = jax.tree.map(lambda a: a[..., None], (dce, dz, classes))
    weight_sum = class_weight_sum(settings, class_weight)
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
    settings = Settings(label_smoothing, softcap, z_loss, predict, backend_pallas.interpret())
    given = backend_pallas.match_axes(logits, classes, class_weight)
    outputs: Any = _token_losses(settings, *given)
    ce, z, _, predicted = outputs
    return ce, z, predicted
