"""The Pallas kernels of RMSNorm for rows too wide to hold in registers."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_ops.backend_pallas import for_range, load, store
from liger_ops.rms_norm.cases import Config
from liger_ops.rms_norm.pallas_helpers import Settings, load_scale, round_as_llama


def forward_wide_kernel(
    x_ref, residual_ref, weight_ref, y_ref, h_ref, *, settings: Settings, config: Config
):
    """One row a program, D taken in blocks: once for the sum of squares, once to scale."""
    row = pl.program_id(0)
    dim = x_ref.shape[1]
    blocks = pl.cdiv(dim, config.forward_block_d)

    def add_squares(i, squares):
        cols = i * config.forward_block_d + jnp.arange(config.forward_block_d, dtype=jnp.int32)
        h = load(x_ref, row, cols, mask=cols < dim)
        if residual_ref is not None:
            residual = load(residual_ref, row, cols, mask=cols < dim)
            h = (h.astype(jnp.float32) + residual.astype(jnp.float32)).astype(h_ref.dtype)
            store(h_ref, row, cols, value=h, mask=cols < dim)
        return squares + h.astype(jnp.float32) * h.astype(jnp.float32)

    squares = for_range(0, blocks, add_squares, jnp.zeros((config.forward_block_d,), jnp.float32))
    r = jax.lax.rsqrt(jnp.sum(squares) / dim + settings.eps)

    def write_block(i, _):
        cols = i * config.forward_block_d + jnp.arange(config.forward_block_d, dtype=jnp.int32)
        # Each thread reads back what it wrote itself.
        h = load(x_ref if residual_ref is None else h_ref, row, cols, mask=cols < dim)
        n = round_as_llama(h.astype(jnp.float32) * r, h.dtype, settings)
        y = n * load_scale(weight_ref, cols, cols < dim, settings)
        store(y_ref, row, cols, value=y, mask=cols < dim)
        return _

    for_range(0, blocks, write_block, None)


def backward_two_pass_kernel(
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
    """For rows too wide to hold: each is read for its two sums, and again for its gradients.

    The second reading comes out of the cache, and goes along with the first reading of the next
    row. A partial weight gradient wider than a block is summed in this program's own row of
    dweight_ref.
    """
    num_rows, dim = h_ref.shape
    program, block_d = pl.program_id(0), config.backward_block_d
    blocks = pl.cdiv(dim, block_d)
    zeros = lambda: jnp.zeros((block_d,), jnp.float32)  # noqa: E731

    def columns(i):
        cols = i * block_d + jnp.arange(block_d, dtype=jnp.int32)
        return cols, cols < dim

    def clear(i, carry):
        cols, mask = columns(i)
        store(dweight_ref, program, cols, value=zeros(), mask=mask)
        return carry

    if dweight_ref is not None and blocks > 1:
        for_range(0, blocks, clear, None)

    def load_block(row, cols, mask):
        mask &= row < num_rows
        return load(h_ref, row, cols, mask=mask), load(dy_ref, row, cols, mask=mask)

    def add_block(sums, h, dy, scale):
        h = h.astype(jnp.float32)
        return sums[0] + h * h, sums[1] + dy.astype(jnp.float32) * scale * h

    def one_row(i, carry):
        dweight, (squares, products) = carry
        row = program + i * programs
        r = jax.lax.rsqrt(jnp.sum(squares) / dim + settings.eps)
        c = r * jnp.sum(products) / dim

        def one_block(j, carry):
            dweight, sums = carry
            cols, mask = columns(j)
            following = load_block(row + programs, cols, mask)
            h, dy = load_block(row, cols, mask)
            scale = load_scale(weight_ref, cols, mask, settings)
            n, dy = h.astype(jnp.float32) * r, dy.astype(jnp.float32)
            if dx_ref is not None:
                dx = r * (dy * scale - n * c)
                if dh_ref is not None:
                    dx += load(dh_ref, row, cols, mask=mask).astype(jnp.float32)
                store(dx_ref, row, cols, value=dx, mask=mask)
            if dweight_ref is not None:
                if blocks > 1:
                    dweight = load(dweight_ref, program, cols, mask=mask)
                dweight += dy * round_as_llama(n, h.dtype, settings)
                if blocks > 1:
                    store(dweight_ref, program, cols, value=dweight, mask=mask)
            return dweight, add_block(sums, *following, scale)

        return for_range(0, blocks, one_block, (dweight, (zeros(), zeros())))

    def first_row(j, sums):
        cols, mask = columns(j)
        scale = load_scale(weight_ref, cols, mask, settings)
        return add_block(sums, *load_block(program, cols, mask), scale)

    sums = for_range(0, blocks, first_row, (zeros(), zeros()))
    steps = jax.lax.div(num_rows - program + programs - 1, jnp.int32(programs))
    dweight = None if dweight_ref is None else zeros()
    dweight, _ = for_range(0, steps, one_row, (dweight, sums))
    if dweight_ref is not None and blocks == 1:
        store(dweight_ref, program, *columns(0)[:1], value=dweight, mask=columns(0)[1])
