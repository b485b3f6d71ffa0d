"""LayerNorm in Pallas for JAX.

Kernels, then launchers, then the custom_vjp, then the entry point. The backward saves only the
input and the weight: it has to read the input anyway, so the row's mean and scale are cheaper to
recompute than to store.

Refs are whole arrays of shape (M, D) or (D,), and None for what is absent or not asked for.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_ops import backend_pallas
from liger_ops.backend_pallas import as_structure, for_range, from_structure, load, store
from liger_ops.layer_norm import xla
from liger_ops.layer_norm.cases import Config
from liger_ops.layer_norm.pallas_helpers import Settings, load_parameter, moments, select
from liger_ops.layer_norm.pallas_wide import backward_two_pass_kernel, forward_wide_kernel


def _forward_kernel(x_ref, weight_ref, bias_ref, y_ref, *, settings: Settings, config: Config):
    num_rows, dim = x_ref.shape
    rows = (
        pl.program_id(0) * config.forward_rows + jnp.arange(config.forward_rows, dtype=jnp.int32)
    )[:, None]
    cols = jnp.arange(config.forward_block_d, dtype=jnp.int32)[None, :]
    # Tiles that fill the array need no mask, and are faster without.
    in_row = None if dim == config.forward_block_d else cols < dim
    fits = in_row is None and num_rows % config.forward_rows == 0
    mask = None if fits else (rows < num_rows) & (cols < dim)
    x = load(x_ref, rows, cols, mask=mask).astype(jnp.float32)
    weight = load_parameter(weight_ref, cols, in_row, 1.0)
    bias = load_parameter(bias_ref, cols, in_row, 0.0)

    total = functools.partial(jnp.sum, axis=1, keepdims=True)
    d = select(in_row, x - total(x) / dim)
    e, r = moments(total(d), total(d * d), dim, settings.eps)
    store(y_ref, rows, cols, value=(d - e) * r * weight + bias, mask=mask)


def _backward_kernel(
    x_ref,
    weight_ref,
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
    total = functools.partial(jnp.sum, axis=1, keepdims=True)

    def rows_of(block):
        rows = block * config.backward_rows + jnp.arange(config.backward_rows, dtype=jnp.int32)
        rows = rows[:, None]
        return rows, (rows < num_rows) & in_row

    def load_rows(block):
        rows, mask = rows_of(block)
        return load(x_ref, rows, cols, mask=mask), load(dy_ref, rows, cols, mask=mask)

    def step(i, carry):
        dweight, dbias, x, dy = carry
        block = program + i * programs
        following = load_rows(block + programs)

        x, dy = x.astype(jnp.float32), dy.astype(jnp.float32)
        if dx_ref is not None or dweight_ref is not None:
            d = select(in_row, x - total(x) / dim)
            e, r = moments(total(d), total(d * d), dim, settings.eps)
            n = (d - e) * r
            if dx_ref is not None:
                # Selected, so that the product is rounded before its mean is taken off: fused into
                # one operation, the two would not cancel where a row is one number.
                g = select(in_row, dy * weight)
                mean_g = total(g) / dim
                # mean(g n), summed over g d so that it need not wait for r
                mean_gn = r * (total(g * d) / dim - e * mean_g)
                rows, mask = rows_of(block)
                store(dx_ref, rows, cols, value=r * (g - mean_g - n * mean_gn), mask=mask)
            if dweight_ref is not None:
                dweight += jnp.sum(dy * n, axis=0)
        if dbias_ref is not None:
            dbias += jnp.sum(dy, axis=0)
        return dweight, dbias, *following

    refs = (dweight_ref, dbias_ref)
    zeros = jnp.zeros((config.backward_block_d,), jnp.float32)
    partials = tuple(None if ref is None else zeros for ref in refs)
    blocks = pl.cdiv(num_rows, config.backward_rows)
    steps = jax.lax.div(blocks - program + programs - 1, jnp.int32(programs))
    partials = for_range(0, steps, step, (*partials, *load_rows(program)))[:2]
    for ref, partial in zip(refs, partials, strict=True):
        if ref is not None:
            store(ref, program, cols[0], value=partial, mask=in_row[0])


@functools.partial(jax.jit, static_argnums=0)
def _forward(
    settings: Settings, x: jax.Array, weight: jax.Array | None, bias: jax.Array | None
) -> jax.Array:
    def local(x, weight, bias):
        if x.size == 0:
            return jnp.zeros(x.shape, settings.dtype)
        dim = x.shape[-1]
        rows = x.reshape(-1, dim)
        config = Config.for_shape(dim)
        wide = dim > config.forward_block_d
        y = backend_pallas.pallas_call(
            functools.partial(
                forward_wide_kernel if wide else _forward_kernel, settings=settings, config=config
            ),
            jax.ShapeDtypeStruct(rows.shape, settings.dtype),
            rows,
            weight,
            bias,
            programs=rows.shape[0] if wide else pl.cdiv(rows.shape[0], config.forward_rows),
            num_warps=config.forward_warps,
            interpret=settings.interpret,
        )
        return y.reshape(x.shape)

    return backend_pallas.split_rows(local, x, weight, bias)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
@functools.partial(jax.jit, static_argnums=(0, 1))
def _backward(
    settings: Settings,
    need: tuple[bool, bool, bool],
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    dy: jax.Array,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """dx (..., D) in x's dtype, and dweight and dbias (D,) float32; None for what `need` does not
    ask. Of the bias only the dtype matters, and it is (0,).
    """

    def local(x, weight, dy):
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

    return backend_pallas.split_rows(local, x, weight, dy)


@_backward.defjvp
def _backward_jvp(settings, need, primals, tangents):
    """Second derivatives come from the XLA version."""

    def plain(x, weight, bias, dy):
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer_norm(settings, x, weight, bias):
    return _forward(settings, x, weight, bias)


def _layer_norm_fwd(settings, *primals):
    need = as_structure(*(p is not None and p.perturbed for p in primals))
    x, weight, bias = (None if p is None else p.value for p in primals)
    # Residuals are arrays: the bias's dtype is kept as that of an empty one.
    bias_dtype = None if bias is None else jnp.zeros((0,), bias.dtype)
    # Not _forward: this may be differentiated once more.
    return _layer_norm(settings, x, weight, bias), (need, x, weight, bias_dtype)


def _layer_norm_bwd(settings, saved, dy):
    need, x, weight, bias = saved
    dx, dweight, dbias = _backward(settings, from_structure(need), x, weight, bias, dy)
    return (
        dx,
        None if dweight is None else dweight.astype(weight.dtype),
        None if dbias is None else dbias.astype(bias.dtype),
    )


# Symbolic zeros tell which inputs ask for a gradient, so that a frozen parameter costs nothing.
_layer_norm.defvjp(_layer_norm_fwd, _layer_norm_bwd, symbolic_zeros=True)


def layer_norm(x, weight, bias, eps, dtype) -> jax.Array:
    settings = Settings(eps, dtype, backend_pallas.interpret())
    return _layer_norm(settings, *backend_pallas.match_axes(x, weight, bias))
