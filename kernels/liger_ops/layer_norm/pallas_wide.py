"""The Pallas kernels of LayerNorm for rows too wide to hold in registers.

Sums are taken about the mean of a row's first columns. It is off the row's mean by no more than a
few standard deviations, which is all that the two steps of centring need.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_ops.backend_pallas import for_range, load, store
from liger_ops.layer_norm.cases import Config
from liger_ops.layer_norm.pallas_helpers import Settings, load_parameter, moments, select


def forward_wide_kernel(x_ref, weight_ref, bias_ref, y_ref, *, settings: Settings, config: Config):
    """One row a program, D taken in blocks: once for the sums, once to normalise."""
    row = pl.program_id(0)
    dim, block_d = x_ref.shape[1], config.forward_block_d
    blocks = pl.cdiv(dim, block_d)

    def load_block(i):
        cols = i * block_d + jnp.arange(block_d, dtype=jnp.int32)
        mask = cols < dim
        return cols, mask, load(x_ref, row, cols, mask=mask).astype(jnp.float32)

    shift = jnp.sum(load_block(0)[2]) / block_d  # the whole block, since D is wider

    def add_block(i, sums):
        _, mask, x = load_block(i)
        d = select(mask, x - shift)
        return sums[0] + d, sums[1] + d * d

    zeros = jnp.zeros((block_d,), jnp.float32)
    sum_d, sum_squares = for_range(0, blocks, add_block, (zeros, zeros))
    e, r = moments(jnp.sum(sum_d), jnp.sum(sum_squares), dim, settings.eps)

    def write_block(i, _):
        cols, mask, x = load_block(i)
        y = (x - shift - e) * r * load_parameter(weight_ref, cols, mask, 1.0)
        y += load_parameter(bias_ref, cols, mask, 0.0)
        store(y_ref, row, cols, value=y, mask=mask)
        return _

    for_range(0, blocks, write_block, None)


def backward_two_pass_kernel(
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
    """For rows too wide to hold: each is read for its four sums, and again for its gradients.

    The second reading comes out of the cache, and goes along with the first reading of the next
    row. A partial gradient wider than a block is summed in this program's own row of its array.
    """
    num_rows, dim = x_ref.shape
    program, block_d = pl.program_id(0), config.backward_block_d
    blocks = pl.cdiv(dim, block_d)
    partial_refs = (dweight_ref, dbias_ref)
    zeros = lambda: jnp.zeros((block_d,), jnp.float32)  # noqa: E731

    def columns(i):
        cols = i * block_d + jnp.arange(block_d, dtype=jnp.int32)
        return cols, cols < dim

    def clear(i, carry):
        cols, mask = columns(i)
        for ref in partial_refs:
            if ref is not None:
                store(ref, program, cols, value=zeros(), mask=mask)
        return carry

    if blocks > 1:
        for_range(0, blocks, clear, None)

    shift_cols = jnp.arange(min(block_d, 1024), dtype=jnp.int32)

    def load_head(row):
        return load(x_ref, row, shift_cols, mask=(shift_cols < dim) & (row < num_rows))

    def shift_of(head):
        return jnp.sum(head.astype(jnp.float32)) / min(shift_cols.size, dim)

    def load_block(row, cols, mask):
        mask &= row < num_rows
        x, dy = load(x_ref, row, cols, mask=mask), load(dy_ref, row, cols, mask=mask)
        return x, dy, mask

    def add_block(sums, x, dy, mask, weight, shift):
        d = select(mask, x.astype(jnp.float32) - shift)
        g = dy.astype(jnp.float32) * weight
        return tuple(a + b for a, b in zip(sums, (d, d * d, g, g * d), strict=True))

    def total(sums):
        return tuple(jnp.sum(a) for a in sums)

    def one_row(i, carry):
        partials, (sum_d, sum_squares, sum_g, sum_gd), shift, next_shift = carry
        row = program + i * programs
        e, r = moments(sum_d, sum_squares, dim, settings.eps)
        mean_g = sum_g / dim
        mean_gn = r * (sum_gd / dim - e * mean_g)
        # Of the row after the next, wanted at the end of this step only.
        head = load_head(row + 2 * programs)

        def one_block(j, carry):
            partials, sums = carry
            cols, mask = columns(j)
            following = load_block(row + programs, cols, mask)
            x, dy, _ = load_block(row, cols, mask)
            weight = load_parameter(weight_ref, cols, mask, 1.0)
            n, dy = (x.astype(jnp.float32) - shift - e) * r, dy.astype(jnp.float32)
            if dx_ref is not None:
                dx = r * (dy * weight - mean_g - n * mean_gn)
                store(dx_ref, row, cols, value=dx, mask=mask)
            added = []
            for ref, partial, term in zip(partial_refs, partials, (dy * n, dy), strict=True):
                if ref is not None:
                    if blocks > 1:
                        partial = load(ref, program, cols, mask=mask)
                    partial += term
                    if blocks > 1:
                        store(ref, program, cols, value=partial, mask=mask)
                added.append(partial)
            return tuple(added), add_block(sums, *following, weight, next_shift)

        sums = (zeros(), zeros(), zeros(), zeros())
        partials, sums = for_range(0, blocks, one_block, (partials, sums))
        return partials, total(sums), next_shift, shift_of(head)

    shift, next_shift = shift_of(load_head(program)), shift_of(load_head(program + programs))

    def first_row(j, sums):
        cols, mask = columns(j)
        weight = load_parameter(weight_ref, cols, mask, 1.0)
        return add_block(sums, *load_block(program, cols, mask), weight, shift)

    sums = for_range(0, blocks, first_row, (zeros(), zeros(), zeros(), zeros()))
    steps = jax.lax.div(num_rows - program + programs - 1, jnp.int32(programs))
    partials = tuple(None if ref is None else zeros() for ref in partial_refs)
    carry = (partials, total(sums), shift, next_shift)
    partials = for_range(0, steps, one_row, carry)[0]
    if blocks == 1:
        cols, mask = columns(0)
        for ref, partial in zip(partial_refs, partials, strict=True):
            if ref is not None:
                store(ref, program, cols, value=partial, mask=mask)
