"""The Pallas kernel of rms_norm_linear_rope: one tile a program.

    rotate(r (x (w + o)) W^T + b),    r = (sum of squares / D + eps)^(-1/2) of a row

Where x is multiplied as it lies in memory, nothing else may read it: Triton gives a tile that is
read in two ways a buffer too few, and an H200's sums were wrong (docs/rms_norm_linear_rope.md). So
r is found beforehand there, and multiplied onto the sums. Where a tile of x is changed in registers
before it is multiplied, its squares are gathered beside the product.

A tile holds `heads` heads of one of q, k and v, and of each the features of 2 `half` columns: first
`half` with the first features of as many pairs, then `half` with their second features. Those that
are not rotated, beyond R, are dealt out to both. `shares` tiles beside each other make up a head
where one does not hold it.

Refs are whole arrays: x (M, D), the weight either way, cos and sin (T, R) or (M, R), r (M,) or None
where a changed x gathers it, and as results q (M, N, H), k and v (M, K, H).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_ops.backend_pallas import for_range, load, store
from liger_ops.rms_norm_linear_rope.cases import Config
from liger_ops.rms_norm_linear_rope.check import Heads, Norm

Array = jax.Array


@dataclass(frozen=True)
class Settings:
    """What is known before tracing.

    full_precision: whether products of float32 keep all of its digits, or those of TF32.
    """

    heads: Heads
    norm: Norm
    out_axis: int
    full_precision: bool
    config: Config | None
    interpret: bool


def _div(a: Array, b: int) -> Array:
    return jax.lax.div(a, jnp.int32(b))


def _rem(a: Array, b: int) -> Array:
    return jax.lax.rem(a, jnp.int32(b))


def _pick(part: Array, of_q: int, of_k: int, of_v: int) -> Array:
    """One of three constants, by arithmetic: a choice between two would lower as one of bits."""
    return of_q + jnp.minimum(part, 1) * (of_k - of_q) + _div(part, 2) * (of_v - of_k)


def feature_of(second: Any, slot: Array, size: int, rotary: int) -> tuple[Array, Array]:
    """The feature in a slot of a head's first or second half of columns, and whether there is one.

    Slot i < R / 2 has feature i or i + R / 2; the slots after those have the features from R on.
    """
    pairs, rest = rotary // 2, (size - rotary + 1) // 2
    if rest == 0:
        return slot + second * pairs, slot < pairs
    turning, second = slot < pairs, jnp.int32(second) if isinstance(second, int) else second
    feature = slot + jnp.where(turning, second * pairs, pairs + second * rest)
    return feature, turning | ((slot < pairs + rest) & (feature < size))


def tile_kernel(
    x_ref, norm_ref, weight_ref, bias_ref, q_norm_ref, k_norm_ref, cos_ref, sin_ref, r_ref,
    q_ref, k_ref, v_ref, *, settings: Settings, config: Config,
):  # fmt: skip
    num_rows, dim = x_ref.shape
    heads, eps, offset = settings.heads, settings.norm.eps, settings.norm.offset
    size, rotary = heads.size, cos_ref.shape[-1]
    of_tile, half, shares = config.tile(size)
    whole = rotary == size and 2 * half == size

    # `group` row blocks of one column block follow one another.
    column_blocks = config.column_blocks(*heads)
    program = pl.program_id(0)
    group = _div(program, config.group * column_blocks)
    row_blocks = pl.cdiv(num_rows, config.block_rows)
    together = jnp.minimum(row_blocks - group * config.group, config.group).astype(jnp.int32)
    within = _rem(program, config.group * column_blocks)
    row_block = group * config.group + jax.lax.rem(within, together)
    block = jax.lax.div(within, together)

    # The part, q, k or v, its first head there, and the share of it.
    q_blocks, k_blocks = (-(-n // of_tile) * shares for n in (heads.q, heads.kv))
    part = (block >= q_blocks).astype(jnp.int32) + (block >= q_blocks + k_blocks).astype(jnp.int32)
    block = block - _pick(part, 0, q_blocks, q_blocks + k_blocks)
    head, share = _div(block, shares) * of_tile, _rem(block, shares)
    of_part = _pick(part, heads.q, heads.kv, heads.kv)

    number = jnp.arange(of_tile * 2 * half, dtype=jnp.int32)
    first = (_pick(part, 0, heads.q, heads.q + heads.kv) + head) * size
    every_head = heads.q % of_tile == 0 and heads.kv % of_tile == 0
    there = None if every_head else head + _div(number, 2 * half) < of_part
    if whole:
        column = first + number
    else:
        slot = share * half + _rem(number, half)
        feature, exists = feature_of(_rem(_div(number, half), 2), slot, size, rotary)
        column = first + _div(number, 2 * half) * size + feature
        if shares * half * 2 != size or rotary != size:
            there = exists if there is None else there & exists
    row = row_block * config.block_rows + jnp.arange(config.block_rows, dtype=jnp.int32)
    # Rows beyond the last read what is there, and are not written.
    every_row = num_rows % config.block_rows == 0
    read = row if every_row else jnp.minimum(row, num_rows - 1).astype(jnp.int32)
    r = None if r_ref is None else load(r_ref, read, mask=None)
    as_it_is = norm_ref is None and x_ref.dtype == weight_ref.dtype
    assert r is not None or not as_it_is
    axis = settings.out_axis
    # A Hopper's product reads the larger operand out of shared memory if its rows are 64 or more.
    few = config.block_rows < 64
    turned = few and of_tile * 2 * half >= 64

    def across(vector, along: int):  # the weight's tile has columns on `axis`, and D on the other
        return jnp.expand_dims(vector, 1 - along)

    def step(i, carry):
        acc, squares = carry
        k = i * config.block_dim + jnp.arange(config.block_dim, dtype=jnp.int32)
        fits = None if dim % config.block_dim == 0 else k < dim
        x_mask, weight_mask = None, None if there is None else across(there, axis)
        if fits is not None:
            x_mask = fits[None, :]
            on_dim = across(fits, 1 - axis)
            weight_mask = on_dim if weight_mask is None else weight_mask & on_dim
        indices = [across(column, axis), across(k, 1 - axis)]
        if axis == 1:
            indices.reverse()
        if weight_mask is not None:
            shape = jnp.broadcast_shapes(*(index.shape for index in indices))
            weight_mask = jnp.broadcast_to(weight_mask, shape)
        if few and not every_row:  # those that are not there are not read again and again
            exist = row[:, None] < num_rows
            x_mask = exist if x_mask is None else x_mask & exist
        if x_mask is not None:
            x_mask = jnp.broadcast_to(x_mask, (config.block_rows, config.block_dim))
        x = load(x_ref, read[:, None], k[None, :], mask=x_mask)
        weight = load(weight_ref, *indices, mask=weight_mask)
        if not as_it_is:
            x32 = x.astype(jnp.float32)
            if r is None:
                squares = squares + x32 * x32
            else:  # x itself, times a weight, may be too large or too small for the dtype
                x32 = x32 * r[:, None]
            if norm_ref is not None:
                x32 = x32 * (load(norm_ref, k, mask=fits).astype(jnp.float32) + offset)[None, :]
            x = x32.astype(weight.dtype)
        full = settings.full_precision and x.dtype == jnp.float32
        left, right, depths = x, weight, ((1,), (1 - axis,))
        if turned:
            left, right, depths = weight, x, ((1 - axis,), (1,))
        product = jax.lax.dot_general(
            left, right, (depths, ((), ())), preferred_element_type=jnp.float32,
            precision=jax.lax.Precision.HIGHEST if full else jax.lax.Precision.DEFAULT,
        )  # fmt: skip
        return acc + product, squares

    shape = (config.block_rows, of_tile * 2 * half)
    zeros = jnp.zeros(shape[::-1] if turned else shape, jnp.float32)
    squares = None  # of a row: added up once, at the end
    if r_ref is None:
        squares = jnp.zeros((config.block_rows, config.block_dim), jnp.float32)
    acc, squares = for_range(0, pl.cdiv(dim, config.block_dim), step, (zeros, squares))
    if turned:
        acc = acc.T
    if r is None:
        r = jax.lax.rsqrt(jnp.sum(squares, axis=1) / dim + eps)
    if as_it_is or r_ref is None:
        acc = acc * r[:, None]
    if bias_ref is not None:
        acc = acc + load(bias_ref, column, mask=there).astype(jnp.float32)[None, :]

    # The last step: the heads' own norm, and the rotation, each feature beside its pair's other.
    x = acc.reshape(config.block_rows, of_tile, 2 * half)
    x_1, x_2 = jax.lax.split(x, (half, half), axis=2)
    slot = (share * half + jnp.arange(half, dtype=jnp.int32))[None, None, :]
    feature_1, there_1 = feature_of(0, slot, size, rotary)
    feature_2, there_2 = feature_of(1, slot, size, rotary)
    every_slot = rotary == size and shares * half * 2 == size
    if q_norm_ref is not None or k_norm_ref is not None:
        squares = jnp.sum(x_1 * x_1, axis=2, keepdims=True)
        squares = squares + jnp.sum(x_2 * x_2, axis=2, keepdims=True)
        own_r = jax.lax.rsqrt(squares / size + eps)
    for which, ref in enumerate((q_norm_ref, k_norm_ref)):
        if ref is None:
            continue
        scale_1, scale_2 = (
            load(ref, f, mask=None if every_slot else t).astype(jnp.float32) + offset
            for f, t in ((feature_1, there_1), (feature_2, there_2))
        )
        x_1 = jnp.where(part == which, x_1 * own_r * scale_1, x_1)
        x_2 = jnp.where(part == which, x_2 * own_r * scale_2, x_2)

    # Rows of the batch that share their angles have those of their time.
    at = jax.lax.rem(read, jnp.int32(cos_ref.shape[0]))[:, None, None]
    turns = jnp.broadcast_to(slot < _pick(part, rotary // 2, rotary // 2, 0),
                             (config.block_rows, 1, half))  # fmt: skip
    cos_1, cos_2, sin_1, sin_2 = (
        load(ref, at, slot + start, mask=turns, other=other).astype(jnp.float32)
        for ref, other in ((cos_ref, 1.0), (sin_ref, 0.0))
        for start in (0, rotary // 2)
    )
    y_1, y_2 = x_1 * cos_1 - x_2 * sin_1, x_2 * cos_2 + x_1 * sin_2

    number = (head + jnp.arange(of_tile, dtype=jnp.int32))[None, :, None]
    row = row[:, None, None]
    masks = [] if every_row else [row < num_rows]
    masks += [] if every_head else [number < of_part]
    shape = (config.block_rows, of_tile, half)

    def write(ref):
        for feature, exists, y in ((feature_1, there_1, y_1), (feature_2, there_2, y_2)):
            all_masks = masks + ([] if every_slot else [exists])
            mask = None
            for one in all_masks:
                mask = jnp.broadcast_to(one, shape) if mask is None else mask & one
            store(ref, row, number, feature, value=y, mask=mask)

    for which, ref in enumerate((q_ref, k_ref, v_ref)):
        pl.when(part == which)(lambda ref=ref: write(ref))
