"""The Pallas kernels of LayerNorm for rows too wide to hold in registers.

The forward's sums are taken about the mean of a row's first forward_block_d columns. It is off the
row's mean by at most sqrt(D / forward_block_d) standard deviations, so squares about it do not
cancel.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_ops.backend_pallas import for_range, load, store
from liger_ops.layer_norm.cases import Config
from liger_ops.layer_norm.pallas_helpers import (
    Settings,
    load_parameter,
    load_rows,
    moments_of_sums,
    row_sums,
    select,
)


def forward_wide_kernel(
    x_ref, weight_ref, bias_ref, y_ref, statistics_ref, *, settings: Settings, config: Config
):
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
    e, variance = moments_of_sums(jnp.sum(sum_d), jnp.sum(sum_squares), dim)
    mean, r = shift + e, jax.lax.rsqrt(variance + settings.eps)
    if statistics_ref is not None:
        store(statistics_ref, row, jnp.int32(0), value=mean, mask=None)
        store(statistics_ref, row, jnp.int32(1), value=r, mask=None)

    def write_block(i, _):
        cols, mask, x = load_block(i)
        weight = load_parameter(weight_ref, cols, mask, 1.0).astype(jnp.float32)
        bias = load_parameter(bias_ref, cols, mask, 0.0).astype(jnp.float32)
        y = (x - mean) * r * weight + bias
        store(y_ref, row, cols, value=y, mask=mask)
        return _

    for_range(0, blocks, write_block, None)


def backward_two_pass_kernel(
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
    """For rows too wide to hold: each is read for its two sums, and again for its gradients.

    The second reading comes out of the cache. Partial gradients are summed in this program's own
    row of their arrays, which is read and written once for a whole block of rows.
    """
    num_rows, dim = x_ref.shape
    program, block_rows, block_d = pl.program_id(0), config.backward_rows, config.backward_block_d
    blocks_d = pl.cdiv(dim, block_d)

    def columns(j):
        return j * block_d + jnp.arange(block_d, dtype=jnp.int32)[None, :]

    def block_of_rows(i, carry):
        rows = (program + i * programs) * block_rows + jnp.arange(block_rows, dtype=jnp.int32)
        rows = rows[:, None]

        def load_block(j):
            cols = columns(j)
            x, dy, mean, r = load_rows(x_ref, dy_ref, statistics_ref, rows, cols)
            return cols, (x.astype(jnp.float32) - mean) * r, dy.astype(jnp.float32), r

        def add_block(j, sums):
            cols, n, dy, _ = load_block(j)
            g = dy * load_parameter(weight_ref, cols, cols < dim, 1.0).astype(jnp.float32)
            return sums[0] + g, sums[1] + g * n

        def write_block(j, carry):
            cols, n, dy, r = load_block(j)
            if dx_ref is not None:
                g = dy * load_parameter(weight_ref, cols, cols < dim, 1.0).astype(jnp.float32)
                dx = r * (g - sum_g / dim - n * (sum_gn / dim))
                store(dx_ref, rows, cols, value=dx, mask=(rows < num_rows) & (cols < dim))
            for ref, terms in ((dweight_ref, dy * n), (dbias_ref, dy)):
                if ref is not None:
                    # What an earlier block of rows has left, and nothing before the first one.
                    before = load(ref, program, cols, mask=(cols < dim) & (i > 0))
                    total = before + jnp.sum(terms, axis=0, keepdims=True)
                    store(ref, program, cols, value=total, mask=cols < dim)
            return carry

        if dx_ref is not None:
            zeros = jnp.zeros((block_rows, block_d), jnp.float32)
            sum_g, sum_gn = row_sums(*for_range(0, blocks_d, add_block, (zeros, zeros)))
        for_range(0, blocks_d, write_block, None)
        return carry

    blocks = pl.cdiv(num_rows, block_rows)
    steps = jax.lax.div(blocks - program + programs - 1, jnp.int32(programs))
    for_range(0, steps, block_of_rows, None)
