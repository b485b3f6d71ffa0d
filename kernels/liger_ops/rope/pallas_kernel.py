"""Rotary embedding in Pallas for JAX.

Kernel, then launcher, then the custom_vjp, then the entry point. One kernel rotates q and k in one
launch, forwards or, for the gradients, backwards. Refs are whole arrays: q (M, N, H) and k
(M, K, H) with M = B T, cos and sin (T, R) or (M, R). q or k and its result are None where it is not
asked for.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.experimental import pallas as pl

from liger_ops import backend_pallas
from liger_ops.backend_pallas import as_structure, from_structure, load, store
from liger_ops.rope import xla
from liger_ops.rope.cases import Config

Pair = tuple[jax.Array, jax.Array]  # the first features of all pairs, and the second ones
Where = tuple[tuple[jax.Array, ...], jax.Array | None]  # indices of all axes but the last; a mask


@dataclass(frozen=True)
class _Settings:
    layout: str
    interpret: bool
    backwards: bool = False


def _both(first: jax.Array | None, second: jax.Array | None) -> jax.Array | None:
    if first is None or second is None:
        return second if first is None else first
    return first & second


def _heads(rows: Where, heads: int, share: jax.Array, shares: int, block: int) -> Where:
    """The positions `rows` of one share of the heads, in a tile of `block` of them."""
    (row,), fits = rows
    each = pl.cdiv(heads, shares)
    number = jnp.arange(block, dtype=jnp.int32)[None, :, None]
    head = share * each + number
    if each == block and each * shares == heads:
        return (row, head), fits
    return (row, head), _both(fits, (number < each) & (head < heads))


def _columns(where: Where, start: int, width: int) -> Where:
    """`width` columns from `start`, in a power of two of them."""
    indices, fits = where
    block = pl.next_power_of_2(width)
    column = jnp.arange(block, dtype=jnp.int32)[None, None, :]
    indices = (*indices, start + column)
    fits = _both(fits, None if block == width else column < width)
    shape = jnp.broadcast_shapes(*(index.shape for index in indices))
    return indices, None if fits is None else jnp.broadcast_to(fits, shape)


def _load_columns(ref: Any, where: Where, start: int, width: int) -> Any:
    if width == 0:
        return None
    indices, fits = _columns(where, start, width)
    return load(ref, *indices, mask=fits)


def _store_columns(ref: Any, where: Where, start: int, width: int, value: Any) -> None:
    if width:
        indices, fits = _columns(where, start, width)
        store(ref, *indices, value=value, mask=fits)


def _load_pairs(ref: Any, where: Where, size: int, layout: str) -> Pair:
    """Of the first `size` columns, float32."""
    if layout == "half":
        parts = [_load_columns(ref, where, start, size // 2) for start in (0, size // 2)]
    else:  # read side by side, as they lie, and taken apart in registers
        x = _load_columns(ref, where, 0, size)
        pairs = x.reshape(*x.shape[:2], x.shape[2] // 2, 2)
        parts = [part.reshape(part.shape[:3]) for part in jax.lax.split(pairs, (1, 1), axis=3)]
    first, second = (part.astype(jnp.float32) for part in parts)
    return first, second


def _store_pairs(ref: Any, where: Where, size: int, layout: str, pairs: Pair) -> None:
    if layout == "half":
        for start, value in zip((0, size // 2), pairs, strict=True):
            _store_columns(ref, where, start, size // 2, value)
    else:
        x = jnp.concatenate([part.astype(ref.dtype)[..., None] for part in pairs], axis=3)
        _store_columns(ref, where, 0, size, x.reshape(*x.shape[:2], 2 * x.shape[2]))


def _rotate_kernel(
    q_ref, k_ref, cos_ref, sin_ref, q_out_ref, k_out_ref, *, settings: _Settings, config: Config
):
    size, head_dim = cos_ref.shape[-1], (k_ref if q_ref is None else q_ref).shape[-1]
    num_rows = (k_ref if q_ref is None else q_ref).shape[0]
    heads, kv_heads = (0 if ref is None else ref.shape[1] for ref in (q_ref, k_ref))
    shares, block_n, block_k = config.deal(heads, kv_heads)
    share = jax.lax.rem(pl.program_id(0), jnp.int32(shares))
    first_row = jax.lax.div(pl.program_id(0), jnp.int32(shares)) * config.block_rows
    row = first_row + jnp.arange(config.block_rows, dtype=jnp.int32)[:, None, None]
    rows = (row,), None if num_rows % config.block_rows == 0 else row < num_rows
    # Rows of the batch that share their angles have those of their time.
    angles = (jax.lax.rem(row, jnp.int32(cos_ref.shape[0])),), rows[1]
    tiles = [
        (x_ref, out_ref, _heads(rows, x_ref.shape[1], share, shares, block))
        for x_ref, out_ref, block in ((q_ref, q_out_ref, block_n), (k_ref, k_out_ref, block_k))
        if x_ref is not None
    ]

    # Everything is asked for before anything is computed.
    cos_1, cos_2 = _load_pairs(cos_ref, angles, size, settings.layout)
    sin_1, sin_2 = _load_pairs(sin_ref, angles, size, settings.layout)
    loaded = [_load_pairs(x_ref, where, size, settings.layout) for x_ref, _, where in tiles]
    rest = [_load_columns(x_ref, where, size, head_dim - size) for x_ref, _, where in tiles]

    if settings.backwards:
        sin_1, sin_2 = -sin_2, -sin_1
    for (_, out_ref, where), (x_1, x_2), after in zip(tiles, loaded, rest, strict=True):
        y = x_1 * cos_1 - x_2 * sin_1, x_2 * cos_2 + x_1 * sin_2
        _store_pairs(out_ref, where, size, settings.layout, y)
        _store_columns(out_ref, where, size, head_dim - size, after)


def turned_back(
    layout: str, interpret: bool, dq: jax.Array, dk: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The gradients of q and k, from those of the results, on one device."""
    return _run(_Settings(layout, interpret, backwards=True), dq, dk, cos, sin)


def _run(settings: _Settings, q: Any, k: Any, cos: jax.Array, sin: jax.Array) -> Any:
    """On one device."""
    # What has no elements is not rotated.
    given = tuple(x if x is not None and x.size else None for x in (q, k))
    rotated = given
    if jax.tree.leaves(given):
        heads, kv_heads = (0 if x is None else x.shape[2] for x in given)
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), given)
        num_rows, _, head_dim = jax.tree.leaves(rows)[0].shape
        config = Config.for_shape(num_rows, heads, kv_heads, head_dim)
        rotated = backend_pallas.pallas_call(
            functools.partial(_rotate_kernel, settings=settings, config=config),
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rows),
            *rows,
            *(angle.reshape(-1, angle.shape[-1]) for angle in (cos, sin)),
            programs=pl.cdiv(num_rows, config.block_rows) * config.deal(heads, kv_heads)[0],
            num_warps=config.num_warps,
            interpret=settings.interpret,
        )
    return tuple(
        x if y is None else y.reshape(x.shape) for x, y in zip((q, k), rotated, strict=True)
    )


@functools.partial(jax.jit, static_argnums=0)
def _rotate(
    settings: _Settings, q: jax.Array | None, k: jax.Array | None, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array | None, jax.Array | None]:
    """Each in its own dtype; None stays None."""
    batch = jax.tree.leaves((q, k))[0].shape[0]
    # A batch axis of 1 is the same for all rows, however those are split.
    angle = "t r" if cos.ndim == 2 else "b t r" if cos.shape[0] == batch else "one t r"
    rule = f"b t n h, b t k h, {angle}, {angle} -> b t n h, b t k h"
    local = functools.partial(_run, settings)
    return backend_pallas.split(local, rule, q, k, cos, sin, over=("b", "t", "n", "k"))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _backward(settings, dq, dk, cos, sin):
    """The gradients of q and k, from those of the results; None for what is not asked for."""
    return _rotate(replace(settings, backwards=True), dq, dk, cos, sin)


@_backward.defjvp
def _backward_jvp(settings, primals, tangents):
    """Second derivatives come from the XLA version."""

    def plain(dq, dk, cos, sin):
        back = functools.partial(xla.rotated, layout=settings.layout, transposed=True)
        return tuple(None if dy is None else back(dy, cos, sin) for dy in (dq, dk))

    return jax.jvp(plain, primals, tangents)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rope(settings, q, k, cos, sin):
    return _rotate(settings, q, k, cos, sin)


def _rope_fwd(settings, *primals):
    q, k, cos, sin = (primal.value for primal in primals)
    need = [primal.perturbed for primal in primals]
    # q and k are kept only where the angles ask for a gradient.
    inputs = (q, k) if any(need[2:]) else (None, None)
    # Not _rotate: this may be differentiated once more.
    return _rope(settings, q, k, cos, sin), (as_structure(*need), *inputs, cos, sin)


def _rope_bwd(settings, saved, cotangents):
    need, q, k, cos, sin = saved
    need = from_structure(need)
    dq, dk = (None if isinstance(ct, SymbolicZero) else ct for ct in cotangents)
    wanted = tuple(dy if asked else None for dy, asked in zip((dq, dk), need[:2], strict=True))
    gradients = (None, None)
    if jax.tree.leaves(wanted):
        gradients = _backward(settings, *wanted, cos, sin)
    if not any(need[2:]):
        return *gradients, None, None

    def plain(cos, sin):  # of the results that were used
        rotated = functools.partial(xla.rotated, layout=settings.layout)
        return [rotated(x, cos, sin) for x, dy in ((q, dq), (k, dk)) if dy is not None]

    dcos, dsin = jax.vjp(plain, cos, sin)[1]([dy for dy in (dq, dk) if dy is not None])
    return *gradients, dcos if need[2] else None, dsin if need[3] else None


# Symbolic zeros tell which inputs ask for a gradient, and which results were used.
_rope.defvjp(_rope_fwd, _rope_bwd, symbolic_zeros=True)


def rope(q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array, layout: str) -> Any:
    settings = _Settings(layout, backend_pallas.interpret())
    return _rope(settings, *backend_pallas.match_axes(q, k, cos, sin))
