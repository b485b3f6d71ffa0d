"""RMSNorm in Pallas for JAX, alone and with the residual addition before it.

Kernels, then launchers, then the custom_vjp, then the two entry points. The backward saves only
the normalised input and the weight: it has to read the input anyway, so the row's scale is cheaper
to recompute than to store.

Refs are whole arrays of shape (M, D), and None for what is absent or not asked for.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.experimental import pallas as pl

from liger_ops import backend_pallas
from liger_ops.backend_pallas import as_structure, for_range, from_structure, load, store
from liger_ops.rms_norm import xla
from liger_ops.rms_norm.cases import Config
from liger_ops.rms_norm.pallas_helpers import Settings, load_scale, round_as_llama
from liger_ops.rms_norm.pallas_wide import backward_two_pass_kernel, forward_wide_kernel


def _forward_kernel(
    x_ref, residual_ref, weight_ref, y_ref, h_ref, *, settings: Settings, config: Config
):
    num_rows, dim = x_ref.shape
    rows = (
        pl.program_id(0) * config.forward_rows + jnp.arange(config.forward_rows, dtype=jnp.int32)
    )[:, None]
    cols = jnp.arange(config.forward_block_d, dtype=jnp.int32)[None, :]
    # Tiles that fill the array need no mask, and are faster without.
    fits = dim == config.forward_block_d and num_rows % config.forward_rows == 0
    mask = None if fits else (rows < num_rows) & (cols < dim)
    scale = load_scale(weight_ref, cols, None if fits else cols < dim, settings)

    h = load(x_ref, rows, cols, mask=mask)
    if residual_ref is not None:
        residual = load(residual_ref, rows, cols, mask=mask)
        # Rounded before it is normalised: the next layer sees the same h as the norm does.
        h = (h.astype(jnp.float32) + residual.astype(jnp.float32)).astype(h_ref.dtype)
        store(h_ref, rows, cols, value=h, mask=mask)
    h32 = h.astype(jnp.float32)
    r = jax.lax.rsqrt(jnp.sum(h32 * h32, axis=1, keepdims=True) / dim + settings.eps)
    n = round_as_llama(h32 * r, h.dtype, settings)
    store(y_ref, rows, cols, value=n * scale, mask=mask)


def _backward_kernel(
    h_ref,
    weight_ref,
    dy_ref,
    dh_ref,
    dx_ref,
    dweight_ref,
    *,
    settings: Settings,
    config: Config,
    programs: int,
):
    """Each program walks over row blocks and loads the next one before it works on this one.

    dweight_ref is (programs, D) float32: one partial sum a program.
    """
    num_rows, dim = h_ref.shape
    program = pl.program_id(0)
    cols = jnp.arange(config.backward_block_d, dtype=jnp.int32)[None, :]
    scale = load_scale(weight_ref, cols, cols < dim, settings)

    def load_rows(block):
        rows = (block * config.backward_rows + jnp.arange(config.backward_rows, dtype=jnp.int32))[
            :, None
        ]
        mask = (rows < num_rows) & (cols < dim)
        return load(h_ref, rows, cols, mask=mask), load(dy_ref, rows, cols, mask=mask)

    def step(i, carry):
        dweight, h, dy = carry
        block = program + i * programs
        following = load_rows(block + programs)

        rows = (block * config.backward_rows + jnp.arange(config.backward_rows, dtype=jnp.int32))[
            :, None
        ]
        mask = (rows < num_rows) & (cols < dim)
        h32, dy32 = h.astype(jnp.float32), dy.astype(jnp.float32)
        g = dy32 * scale
        r = jax.lax.rsqrt(jnp.sum(h32 * h32, axis=1, keepdims=True) / dim + settings.eps)
        if num_rows % config.backward_rows:
            # Without eps, rows beyond the last would have a scale of infinity.
            r = jnp.where(rows < num_rows, r, jnp.float32(0.0))
        n = h32 * r
        if dx_ref is not None:
            # mean(g n), summed over g h so that it need not wait for r
            c = r * jnp.sum(g * h32, axis=1, keepdims=True) / dim
            dx = r * (g - n * c)
            if dh_ref is not None:
                dx += load(dh_ref, rows, cols, mask=mask).astype(jnp.float32)
            store(dx_ref, rows, cols, value=dx, mask=mask)
        if dweight_ref is not None:
            dweight += jnp.sum(dy32 * round_as_llama(n, h.dtype, settings), axis=0)
        return dweight, *following

    zeros = None if dweight_ref is None else jnp.zeros((config.backward_block_d,), jnp.float32)
    blocks = pl.cdiv(num_rows, config.backward_rows)
    steps = jax.lax.div(blocks - program + programs - 1, jnp.int32(programs))
    dweight = for_range(0, steps, step, (zeros, *load_rows(program)))[0]
    if dweight_ref is not None:
        store(dweight_ref, program, cols[0], value=dweight, mask=cols[0] < dim)


def normed_rows(
    settings: Settings, x: jax.Array, residual: jax.Array | None, weight: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """y and h on one device."""
    h_dtype = x.dtype if residual is None else jnp.promote_types(x.dtype, residual.dtype)
    y_dtype = h_dtype
    if weight is not None and settings.casting_mode != "gemma":
        y_dtype = jnp.promote_types(h_dtype, weight.dtype)
    shape, dim = x.shape, x.shape[-1]
    rows = jax.tree.map(lambda a: a.reshape(-1, dim), (x, residual))
    num_rows = rows[0].shape[0]
    y = jax.ShapeDtypeStruct((num_rows, dim), y_dtype)
    h = None if residual is None else jax.ShapeDtypeStruct((num_rows, dim), h_dtype)
    if x.size == 0:
        outputs = jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), (y, h))
    else:
        config = Config.for_shape(dim)
        wide = dim > config.forward_block_d
        outputs = backend_pallas.pallas_call(
            functools.partial(
                forward_wide_kernel if wide else _forward_kernel,
                settings=settings,
                config=config,
            ),
            (y, h),
            *rows,
            weight,
            programs=num_rows if wide else pl.cdiv(num_rows, config.forward_rows),
            num_warps=config.forward_warps,
            interpret=settings.interpret,
        )
    return jax.tree.map(lambda a: a.reshape(shape), outputs)


@functools.partial(jax.jit, static_argnums=0)
def _forward(
    settings: Settings, x: jax.Array, residual: jax.Array | None, weight: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    local = functools.partial(normed_rows, settings)
    return backend_pallas.split_rows(local, x, residual, weight)


def gradients_of_rows(
    settings: Settings,
    need: tuple[bool, bool],
    h: jax.Array,
    weight: jax.Array | None,
    dy: jax.Array,
    dh: jax.Array | None,
) -> tuple[jax.Array | None, jax.Array | None]:
    """dx (..., D) in h's dtype and dweight (D,) float32, on one device; None for what `need` does
    not ask.
    """
    shape, dim = h.shape, h.shape[-1]
    h, dy, dh = jax.tree.map(lambda a: a.reshape(-1, dim), (h, dy, dh))
    dx = jax.ShapeDtypeStruct(h.shape, h.dtype) if need[0] else None
    if h.size == 0:
        dweight = jnp.zeros((dim,), jnp.float32) if need[1] else None
        return None if dx is None else jnp.zeros(shape, dx.dtype), dweight
    config = Config.for_shape(dim)
    blocks = pl.cdiv(h.shape[0], config.backward_rows)
    programs = min(blocks, config.backward_programs * backend_pallas.multiprocessors())
    dweight = jax.ShapeDtypeStruct((programs, dim), jnp.float32) if need[1] else None
    dx, dweight = backend_pallas.pallas_call(
        functools.partial(
            backward_two_pass_kernel if config.backward_two_pass else _backward_kernel,
            settings=settings,
            config=config,
            programs=programs,
        ),
        (dx, dweight),
        h,
        weight,
        dy,
        dh,
        programs=programs,
        num_warps=config.backward_warps,
        interpret=settings.interpret,
    )
    return None if dx is None else dx.reshape(shape), None if dweight is None else dweight.sum(0)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
@functools.partial(jax.jit, static_argnums=(0, 1))
def _backward(
    settings: Settings,
    need: tuple[bool, bool],
    h: jax.Array,
    weight: jax.Array | None,
    dy: jax.Array,
    dh: jax.Array | None,
) -> tuple[jax.Array | None, jax.Array | None]:
    """What `gradients_of_rows` returns, summed over the devices' rows."""
    local = functools.partial(gradients_of_rows, settings, need)
    return backend_pallas.split_rows(local, h, weight, dy, dh)


@_backward.defjvp
def _backward_jvp(settings, need, primals, tangents):
    """Second derivatives come from the XLA version."""

    def plain(h, weight, dy, dh):
        def y(h, weight):
            return xla.rms_norm(h, weight, settings.eps, settings.offset, settings.casting_mode)

        dx, dweight = jax.vjp(y, h, weight)[1](dy)
        if dh is not None:
            dx = dx + dh
        return dx if need[0] else None, dweight.astype(jnp.float32) if need[1] else None

    return jax.jvp(plain, primals, tangents)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rms_norm(settings, x, residual, weight):
    return _forward(settings, x, residual, weight)


def _rms_norm_fwd(settings, x, residual, weight):
    primals = jax.tree.map(lambda p: p.value, (x, residual, weight), is_leaf=_is_primal)
    # Not _forward: this may be differentiated once more.
    y, h = _rms_norm(settings, *primals)  # type: ignore[misc]
    need = as_structure(*(p is not None and p.perturbed for p in (x, residual, weight)))
    # Residuals are arrays: the gradients' dtypes are kept as those of empty ones.
    dtypes = tuple(None if p is None else jnp.zeros((0,), p.dtype) for p in primals)
    return (y, h), (need, dtypes, primals[0] if h is None else h, primals[2])


def _is_primal(leaf: Any) -> bool:
    return hasattr(leaf, "perturbed")


def _rms_norm_bwd(settings, saved, cotangents):
    need, dtypes, h, weight = saved
    need_x, need_residual, need_weight = from_structure(need)
    dy, dh = (None if isinstance(ct, SymbolicZero) else ct for ct in cotangents)
    if dy is None:  # only h was used
        dx, dweight = dh, None
    else:
        need_dx = need_x or need_residual
        dx, dweight = _backward(settings, (need_dx, need_weight), h, weight, dy, dh)

    def gradient(needed, value, like):
        return value.astype(like.dtype) if needed and value is not None else None

    return (
        gradient(need_x, dx, dtypes[0]),
        gradient(need_residual, dx, dtypes[1]),
        gradient(need_weight, dweight, dtypes[2]),
    )


# Symbolic zeros tell which inputs ask for a gradient, so that a frozen weight costs nothing.
# optimize_remat, which excludes them, would save nothing here: forward and fwd do the same work.
_rms_norm.defvjp(_rms_norm_fwd, _rms_norm_bwd, symbolic_zeros=True)


def rms_norm(x, weight, eps, offset, casting_mode) -> jax.Array:
    return fused_add_rms_norm(x, None, weight, eps, offset, casting_mode)[0]


def fused_add_rms_norm(x, residual, weight, eps, offset, casting_mode) -> Any:
    settings = Settings(eps, offset, casting_mode, backend_pallas.interpret())
    return _rms_norm(settings, *backend_pallas.match_axes(x, residual, weight))
