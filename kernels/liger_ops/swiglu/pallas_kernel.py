"""SwiGLU and GeGLU in Pallas for JAX.

Kernels, then launchers, then the custom_vjp, then the entry point. Only gate and up are saved for
the backward. Refs are whole arrays (M, F); where gate holds both halves, gate_ref and dgate_ref are
(M, 2 F), and up_ref and dup_ref are None.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_ops import backend_pallas
from liger_ops.backend_pallas import as_structure, from_structure, load, store
from liger_ops.swiglu import xla
from liger_ops.swiglu.cases import Config


@dataclass(frozen=True)
class _Settings:
    activation: str
    interpret: bool


def _normal_cdf(g: jax.Array) -> jax.Array:
    """erfc(-g / sqrt 2) / 2, its fractional error below 1.2e-7 everywhere.

    The Chebyshev fit of erfc in Press et al., Numerical Recipes, section 6.2.
    """
    z = jnp.abs(g) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.5 * z)
    fit = -0.82215223 + t * 0.17087277
    fit = -1.13520398 + t * (1.48851587 + t * fit)
    fit = -0.18628806 + t * (0.27886807 + t * fit)
    fit = 0.37409196 + t * (0.09678418 + t * fit)
    fit = -1.26551223 + t * (1.00002368 + t * fit)
    tail = 0.5 * t * jnp.exp(fit - z * z)
    return jnp.where(g < 0.0, tail, 1.0 - tail)


def _sigmoid(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """s(x) and 1 - s(x), without overflow and without cancellation."""
    e, one = jnp.exp(-jnp.abs(x)), jnp.float32(1.0)
    return jnp.where(x < 0.0, e, one) / (1.0 + e), jnp.where(x < 0.0, one, e) / (1.0 + e)


def _activate(g: jax.Array, activation: str) -> tuple[jax.Array, jax.Array]:
    """a(g) and a'(g), float32."""
    if activation == "silu":
        s, rest = _sigmoid(g)
        slope = s * (1.0 + g * rest)
    elif activation == "gelu_tanh":
        square = jnp.minimum(g * g, jnp.float32(1e30))  # an infinite one would meet a zero below
        s, rest = _sigmoid(1.5957691216057308 * g * (1.0 + 0.044715 * square))  # 2 sqrt(2 / pi)
        slope = s + g * s * rest * (1.5957691216057308 * (1.0 + 0.134145 * square))
    else:
        s = _normal_cdf(g)
        slope = s + g * 0.3989422804014327 * jnp.exp(-0.5 * g * g)
    return g * s, slope


def _tile(num_rows: int, dim: int, config: Config) -> tuple[jax.Array, jax.Array, Any]:
    """This program's rows (R, 1) and columns (1, C), and the mask, None where the tiles fit."""
    program, column_blocks = pl.program_id(0), jnp.int32(pl.cdiv(dim, config.block_f))
    first_row = jax.lax.div(program, column_blocks) * config.block_rows
    first_col = jax.lax.rem(program, column_blocks) * config.block_f
    rows = (first_row + jnp.arange(config.block_rows, dtype=jnp.int32))[:, None]
    cols = (first_col + jnp.arange(config.block_f, dtype=jnp.int32))[None, :]
    if num_rows % config.block_rows == 0 and dim % config.block_f == 0:
        return rows, cols, None
    return rows, cols, (rows < num_rows) & (cols < dim)


def _load_inputs(gate_ref, up_ref, dim: int, rows, cols, mask) -> tuple[jax.Array, jax.Array]:
    gate = load(gate_ref, rows, cols, mask=mask)
    if up_ref is None:
        up = load(gate_ref, rows, cols + dim, mask=mask)
    else:
        up = load(up_ref, rows, cols, mask=mask)
    return gate.astype(jnp.float32), up.astype(jnp.float32)


def _forward_kernel(gate_ref, up_ref, y_ref, *, settings: _Settings, config: Config):
    num_rows, dim = y_ref.shape
    rows, cols, mask = _tile(num_rows, dim, config)
    gate, up = _load_inputs(gate_ref, up_ref, dim, rows, cols, mask)
    store(y_ref, rows, cols, value=_activate(gate, settings.activation)[0] * up, mask=mask)


def _backward_kernel(
    gate_ref, up_ref, dy_ref, dgate_ref, dup_ref, *, settings: _Settings, config: Config
):
    num_rows, dim = dy_ref.shape
    rows, cols, mask = _tile(num_rows, dim, config)
    gate, up = _load_inputs(gate_ref, up_ref, dim, rows, cols, mask)
    dy = load(dy_ref, rows, cols, mask=mask).astype(jnp.float32)
    activated, slope = _activate(gate, settings.activation)
    if dgate_ref is not None:
        store(dgate_ref, rows, cols, value=dy * up * slope, mask=mask)
    if up_ref is None:
        store(dgate_ref, rows, cols + dim, value=dy * activated, mask=mask)
    elif dup_ref is not None:
        store(dup_ref, rows, cols, value=dy * activated, mask=mask)


def _run(kernel: Any, settings: _Settings, dim: int, outputs: Any, *inputs: Any) -> Any:
    """The kernel over the inputs' rows; `outputs` are shapes or None, in its order."""
    num_rows = inputs[0].shape[0]
    if num_rows == 0 or dim == 0:
        return jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), outputs)
    config = Config.for_shape(dim)
    return backend_pallas.pallas_call(
        functools.partial(kernel, settings=settings, config=config),
        outputs,
        *inputs,
        programs=pl.cdiv(num_rows, config.block_rows) * pl.cdiv(dim, config.block_f),
        num_warps=config.num_warps,
        interpret=settings.interpret,
    )


def _as_rows(*arrays: jax.Array | None) -> Any:
    return jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), arrays)


def _split(local: Any, gate: jax.Array, up: jax.Array | None, *others: jax.Array) -> Any:
    """local on every device's own part: of all dimensions where gate and up lie apart, so also of F
    split by tensor parallelism; of all but the last where they are halves of one.
    """
    if up is None:
        return backend_pallas.split_rows(local, gate, up, *others)

    dims = tuple(f"d{i}" for i in range(gate.ndim))
    inputs = ", ".join([" ".join(dims)] * (2 + len(others)))
    outputs = ", ".join([" ".join(dims)] * (2 if others else 1))
    return backend_pallas.split(local, f"{inputs} -> {outputs}", gate, up, *others, over=dims)


@functools.partial(jax.jit, static_argnums=0)
def _forward(settings: _Settings, gate: jax.Array, up: jax.Array | None) -> jax.Array:
    dtype = gate.dtype if up is None else jnp.promote_types(gate.dtype, up.dtype)

    def local(gate, up):
        dim = gate.shape[-1] if up is not None else gate.shape[-1] // 2
        shape = (*gate.shape[:-1], dim)
        inputs = _as_rows(gate, up)
        y = jax.ShapeDtypeStruct((inputs[0].shape[0], dim), dtype)
        return _run(_forward_kernel, settings, dim, y, *inputs).reshape(shape)

    return _split(local, gate, up)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
@functools.partial(jax.jit, static_argnums=(0, 1))
def _backward(settings, need: tuple[bool, bool], gate, up, dy):
    """dgate and dup in the dtypes of gate and up; None for what `need` does not ask."""

    def local(gate, up, dy):
        inputs = _as_rows(gate, up, dy)
        dgate, dup = (
            jax.ShapeDtypeStruct(a.shape, a.dtype) if a is not None and needed else None
            for a, needed in zip(inputs[:2], need, strict=True)
        )
        dgate, dup = _run(_backward_kernel, settings, dy.shape[-1], (dgate, dup), *inputs)
        return (
            None if dgate is None else dgate.reshape(gate.shape),
            None if dup is None else dup.reshape(up.shape),
        )

    return _split(local, gate, up, dy)


@_backward.defjvp
def _backward_jvp(settings, need, primals, tangents):
    """Second derivatives come from the XLA version."""

    def plain(gate, up, dy):
        y = functools.partial(xla.gated, activation=settings.activation)
        gradients = jax.vjp(y, gate, up)[1](dy)
        return tuple(g if needed else None for g, needed in zip(gradients, need, strict=True))

    return jax.jvp(plain, primals, tangents)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated(settings, gate, up):
    return _forward(settings, gate, up)


def _gated_fwd(settings, gate, up):
    need = as_structure(gate.perturbed, up is not None and up.perturbed)
    gate, up = gate.value, None if up is None else up.value
    # Not _forward: this may be differentiated once more.
    return _gated(settings, gate, up), (need, gate, up)


def _gated_bwd(settings, saved, dy):
    need, gate, up = saved
    return _backward(settings, from_structure(need), gate, up, dy)


# Symbolic zeros tell which inputs ask for a gradient.
_gated.defvjp(_gated_fwd, _gated_bwd, symbolic_zeros=True)


def gated(gate: jax.Array, up: jax.Array | None, activation: str) -> Any:
    settings = _Settings(activation, backend_pallas.interpret())
    return _gated(settings, *backend_pallas.match_axes(gate, up))
