"""LayerNorm in Pallas for JAX.

Kernels, then launchers, then the custom_vjp, then the entry point. Beside the input and the weight,
the backward is given every row's mean and scale: two numbers, whose sums would have to come before
its own.

Refs are whole arrays of shape (M, D) or (D,), and None for what is absent or not asked for.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.experimental import pallas as pl

from liger_ops import backend_pallas
from liger_ops.backend_pallas import as_structure, for_range, from_structure, load, store
from liger_ops.layer_norm import xla
from liger_ops.layer_norm.cases import Config
from liger_ops.layer_norm.pallas_helpers import (
    Settings,
    first_shift,
    is_far,
    load_parameter,
    load_rows,
    moments,
    row_sums,
    select,
)
from liger_ops.layer_norm.pallas_wide import backward_two_pass_kernel, forward_wide_kernel


def _forward_kernel(
    x_ref, weight_ref, bias_ref, y_ref, statistics_ref, *, settings: Settings, config: Config
):
    """statistics_ref is (M, 2) float32: every row's mean and scale."""
    num_rows, dim = x_ref.shape
    rows = (
        pl.program_id(0) * config.forward_rows + jnp.arange(config.forward_rows, dtype=jnp.int32)
    )[:, None]
    cols = jnp.arange(config.forward_block_d, dtype=jnp.int32)[None, :]
    # Tiles that fill the array need no mask, and are faster without.
    in_row = None if dim == config.forward_block_d else cols < dim
    inside = None if num_rows % config.forward_rows == 0 else rows < num_rows
    fits = in_row is None and inside is None
    mask = None if fits else (rows < num_rows) & (cols < dim)
    x = load(x_ref, rows, cols, mask=mask).astype(jnp.float32)
    shift = first_shift(x_ref, rows, inside)

    e, variance = moments(x, shift, in_row, dim)

    def again(shift, e, _):
        return shift + e, *moments(x, shift + e, in_row, dim)

    if config.forward_rows == 1:
        far = is_far(e, variance)
        shift, e, variance = jax.lax.cond(far, again, lambda *a: a, shift, e, variance)
    else:
        # To ask whether one of several is far off would cost the exchange that is to be spared.
        shift, e, variance = again(shift, e, variance)
    mean, r = shift + e, jax.lax.rsqrt(variance + settings.eps)
    # Loaded only now: they come out of the cache, and fewer registers hold more rows in flight.
    weight = load_parameter(weight_ref, cols, in_row, 1.0)
    bias = load_parameter(bias_ref, cols, in_row, 0.0)
    y = (x - mean) * r * weight.astype(jnp.float32) + bias.astype(jnp.float32)
    store(y_ref, rows, cols, value=y, mask=mask)
    if statistics_ref is not None:
        for i, value in enumerate((mean, r)):
            column = jnp.full(rows.shape, i, jnp.int32)
            store(statistics_ref, rows, column, value=value, mask=inside)


def _backward_kernel(
    x_ref,
    weight_ref,
    statistics_ref,
    dy_ref,
    dx_ref,
    dweight_ref,
    dbias_ref,
    *,
    settings: Settings,
    config: Config,
    programs: int,
):
    """Each program walks over row blocks and loads the next one before it works on this one.

    dweight_ref and dbias_ref are (programs, D) float32: one partial sum a program.
    """
    num_rows, dim = x_ref.shape
    program = pl.program_id(0)
    cols = jnp.arange(config.backward_block_d, dtype=jnp.int32)[None, :]
    in_row = cols < dim
    weight = load_parameter(weight_ref, cols, in_row, 1.0)

    def rows_of(block):
        rows = block * config.backward_rows + jnp.arange(config.backward_rows, dtype=jnp.int32)
        return rows[:, None]

    def load_block(block):
        return load_rows(x_ref, dy_ref, statistics_ref, rows_of(block), cols)

    def step(i, carry):
        dweight, dbias, x, dy, mean, r = carry
        block = program + i * programs
        following = load_block(block + programs)

        n, dy = (x.astype(jnp.float32) - mean) * r, dy.astype(jnp.float32)
        if dweight_ref is not None:
            dweight += jnp.sum(dy * n, axis=0, keepdims=True)
        if dbias_ref is not None:
            dbias += jnp.sum(dy, axis=0, keepdims=True)
        if dx_ref is not None:
            # Selected, so that the product is rounded before its mean is taken off: fused into one
            # operation, the two would not cancel where a row is one number.
            g = select(in_row, dy * weight.astype(jnp.float32))
            sum_g, sum_gn = row_sums(g, g * n)
            dx, rows = r * (g - sum_g / dim - n * (sum_gn / dim)), rows_of(block)
            store(dx_ref, rows, cols, value=dx, mask=(rows < num_rows) & in_row)
        return dweight, dbias, *following

    refs = (dweight_ref, dbias_ref)
    zeros = jnp.zeros(cols.shape, jnp.float32)
    partials = tuple(None if ref is None else zeros for ref in refs)
    blocks = pl.cdiv(num_rows, config.backward_rows)
    steps = jax.lax.div(blocks - program + programs - 1, jnp.int32(programs))
    partials = for_range(0, steps, step, (*partials, *load_block(program)))[:2]
    for ref, partial in zip(refs, partials, strict=True):
        if ref is not None:
            store(ref, program, cols, value=partial, mask=in_row)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(
    settings: Settings,
    for_backward: bool,
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """y, and where it is asked for the rows' mean and scale, (..., 2)."""

    def local(x, weight, bias):
        num_rows, dim = math.prod(x.shape[:-1]), x.shape[-1]
        outputs = (
            jax.ShapeDtypeStruct((num_rows, dim), settings.dtype),
            jax.ShapeDtypeStruct((num_rows, 2), jnp.float32) if for_backward else None,
        )
        if x.size == 0:
            outputs = jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), outputs)
        else:
            config = Config.for_shape(dim)
            wide = dim > config.forward_block_d
            outputs = backend_pallas.pallas_call(
                functools.partial(
                    forward_wide_kernel if wide else _forward_kernel,
                    settings=settings,
                    config=config,
                ),
                outputs,
                x.reshape(num_rows, dim),
                weight,
                bias,
                programs=num_rows if wide else pl.cdiv(num_rows, config.forward_rows),
                num_warps=config.forward_warps,
                interpret=settings.interpret,
            )
        return jax.tree.map(lambda a: a.reshape(*x.shape[:-1], a.shape[-1]), outputs)

    return backend_pallas.split_rows(local, x, weight, bias)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
@functools.partial(jax.jit, static_argnums=(0, 1))
def _backward(
    settings: Settings,
    need: tuple[bool, bool, bool],
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    statistics: jax.Array,
    dy: jax.Array,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """dx (..., D) in x's dtype, and dweight and dbias (D,) float32; None for what `need` does not
    ask. Of the bias only the dtype matters, and it is (0,).
    """

    def local(x, weight, statistics, dy):
        shape, dim = x.shape, x.shape[-1]
        dtypes = (x.dtype, jnp.float32, jnp.float32)
        if x.size == 0:
            shapes = (shape, (dim,), (dim,))
            return tuple(
                jnp.zeros(s, dtype) if needed else None
                for needed, s, dtype in zip(need, shapes, dtypes, strict=True)
            )
        x, dy = x.reshape(-1, dim), dy.reshape(-1, dim)
        config = Config.for_shape(dim)
        blocks = pl.cdiv(x.shape[0], config.backward_rows)
        programs = min(blocks, config.backward_programs * backend_pallas.multiprocessors())
        shapes = (x.shape, (programs, dim), (programs, dim))
        dx, dweight, dbias = backend_pallas.pallas_call(
            functools.partial(
                backward_two_pass_kernel if config.backward_two_pass else _backward_kernel,
                settings=settings,
                config=config,
                programs=programs,
            ),
            tuple(
                jax.ShapeDtypeStruct(s, dtype) if needed else None
                for needed, s, dtype in zip(need, shapes, dtypes, strict=True)
            ),
            x,
            weight,
            statistics.reshape(-1, 2),
            dy,
            programs=programs,
            num_warps=config.backward_warps,
            interpret=settings.interpret,
        )
        return (
            None if dx is None else dx.reshape(shape),
            None if dweight is None else dweight.sum(0),
            None if dbias is None else dbias.sum(0),
        )

    return backend_pallas.split_rows(local, x, weight, statistics, dy)


@_backward.defjvp
def _backward_jvp(settings, need, primals, tangents):
    """Second derivatives come from the XLA version."""

    def plain(x, weight, bias, statistics, dy):
        if bias is not None:  # gradients do not depend on its values
            bias = jnp.zeros(x.shape[-1:], bias.dtype)
        y = functools.partial(xla.layer_norm, eps=settings.eps, dtype=settings.dtype)
        gradients = jax.vjp(y, x, weight, bias)[1](dy)
        dtypes = (x.dtype, jnp.float32, jnp.float32)
        return tuple(
            gradient.astype(dtype) if needed else None
            for needed, gradient, dtype in zip(need, gradients, dtypes, strict=True)
        )

    return jax.jvp(plain, primals, tangents)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _layer_norm(settings, for_backward, x, weight, bias):
    return _forward(settings, for_backward, x, weight, bias)


def _layer_norm_fwd(settings, for_backward, *primals):
    need = as_structure(*(p is not None and p.perturbed for p in primals))
    x, weight, bias = (None if p is None else p.value for p in primals)
    # Residuals are arrays: the bias's dtype is kept as that of an empty one.
    bias_dtype = None if bias is None else jnp.zeros((0,), bias.dtype)
    # Not _forward: this may be differentiated once more.
    outputs: Any = _layer_norm(settings, True, x, weight, bias)
    y, statistics = outputs
    kept = statistics if for_backward else None
    return (y, kept), (need, x, weight, bias_dtype, statistics)


def _layer_norm_bwd(settings, for_backward, saved, cotangents):
    need, x, weight, bias, statistics = saved
    dy = cotangents[0]  # none reaches the statistics: second derivatives come from the XLA version
    if isinstance(dy, SymbolicZero):
        return None, None, None
    dx, dweight, dbias = _backward(settings, from_structure(need), x, weight, bias, statistics, dy)
    return (
        dx,
        None if dweight is None else dweight.astype(weight.dtype),
        None if dbias is None else dbias.astype(bias.dtype),
    )


# Symbolic zeros tell which inputs ask for a gradient, so that a frozen parameter costs nothing.
_layer_norm.defvjp(_layer_norm_fwd, _layer_norm_bwd, symbolic_zeros=True)


def layer_norm(x, weight, bias, eps, dtype) -> jax.Array:
    settings = Settings(eps, dtype, backend_pallas.interpret())
    outputs: Any = _layer_norm(settings, False, *backend_pallas.match_axes(x, weight, bias))
    return outputs[0]
