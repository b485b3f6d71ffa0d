"""The Triton kernels of LayerNorm for rows too wide to hold in registers.

The forward's sums are taken about the mean of a row's first BLOCK_D columns. It is off the row's
mean by at most sqrt(D / BLOCK_D) standard deviations, so squares about it do not cancel.
"""

# tl.range, and names that exist on one side of a constexpr:
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false

import triton
import triton.language as tl

from liger_ops.layer_norm.triton_helpers import (
    load_parameter,
    load_rows,
    moments_of_sums,
    row_sums,
    scale_of,
)


@triton.jit
def forward_wide_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    statistics_ptr,
    num_rows,
    x_stride,
    eps,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One row a program, D taken in blocks: once for the sums, once to normalise."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * D

    first = tl.load(x_ptr + tl.arange(0, BLOCK_D))  # the whole block, since D is wider
    shift = tl.sum(first.to(tl.float32), axis=0) / BLOCK_D
    sum_d = tl.zeros((BLOCK_D,), tl.float32)
    sum_squares = tl.zeros((BLOCK_D,), tl.float32)
    for start in tl.range(0, D, BLOCK_D):
        cols = start + tl.arange(0, BLOCK_D)
        x = tl.load(x_ptr + cols, mask=cols < D, other=0.0)
        d = tl.where(cols < D, x.to(tl.float32) - shift, 0.0)
        sum_d += d
        sum_squares += d * d
    e, variance = moments_of_sums(tl.sum(sum_d, axis=0), tl.sum(sum_squares, axis=0), D)
    mean, r = shift + e, scale_of(variance, eps)
    if statistics_ptr is not None:
        tl.store(statistics_ptr + 2 * row, mean)
        tl.store(statistics_ptr + 2 * row + 1, r)

    for start in tl.range(0, D, BLOCK_D):
        cols = start + tl.arange(0, BLOCK_D)
        x = tl.load(x_ptr + cols, mask=cols < D, other=0.0)
        weight = load_parameter(weight_ptr, cols, cols < D, 1.0).to(tl.float32)
        bias = load_parameter(bias_ptr, cols, cols < D, 0.0).to(tl.float32)
        y = (x.to(tl.float32) - mean) * r * weight + bias
        tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=cols < D)


@triton.jit
def backward_two_pass_kernel(
    x_ptr,
    weight_ptr,
    statistics_ptr,
    dy_ptr,
    dx_ptr,
    partial_ptr,
    num_rows,
    x_stride,
    dy_stride,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WITH_DWEIGHT: tl.constexpr,
    WITH_DBIAS: tl.constexpr,
):
    """For rows too wide to hold: each is read for its two sums, and again for its gradients.

    The second reading comes out of the cache. Partial gradients are summed in this program's own
    part of partial_ptr, which is read and written once for a whole block of rows.
    """
    step = tl.num_programs(0)
    dweight_ptr = partial_ptr
    dbias_ptr = partial_ptr
    if WITH_DWEIGHT or WITH_DBIAS:
        dweight_ptr += tl.program_id(0).to(tl.int64) * (WITH_DWEIGHT + WITH_DBIAS) * D
        dbias_ptr = dweight_ptr + WITH_DWEIGHT * D
    first_block = tl.program_id(0)
    rows = first_block.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    for block in tl.range(first_block, tl.cdiv(num_rows, BLOCK_ROWS), step, num_stages=1):
        sums_g = tl.zeros((BLOCK_ROWS, BLOCK_D), tl.float32)
        sums_gn = tl.zeros((BLOCK_ROWS, BLOCK_D), tl.float32)
        if dx_ptr is not None:
            for start in tl.range(0, D, BLOCK_D):
                cols = start + tl.arange(0, BLOCK_D)[None, :]
                x, dy, mean, r = load_rows(
                    x_ptr, dy_ptr, statistics_ptr, rows, cols, num_rows, x_stride, dy_stride, D
                )
                weight = load_parameter(weight_ptr, cols, cols < D, 1.0).to(tl.float32)
                g = dy.to(tl.float32) * weight
                sums_g += g
                sums_gn += g * ((x.to(tl.float32) - mean) * r)
        sum_g, sum_gn = row_sums(sums_g, sums_gn)
        for start in tl.range(0, D, BLOCK_D):
            cols = start + tl.arange(0, BLOCK_D)[None, :]
            x, dy, mean, r = load_rows(
                x_ptr, dy_ptr, statistics_ptr, rows, cols, num_rows, x_stride, dy_stride, D
            )
            dy32 = dy.to(tl.float32)
            n = (x.to(tl.float32) - mean) * r
            if dx_ptr is not None:
                weight = load_parameter(weight_ptr, cols, cols < D, 1.0).to(tl.float32)
                dx = r * (dy32 * weight - sum_g / D - n * (sum_gn / D))
                mask = (rows < num_rows) & (cols < D)
                tl.store(dx_ptr + rows * D + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            # What an earlier block of rows has left, and nothing before the first one.
            before = (cols < D) & (tl.zeros_like(cols) + block > first_block)
            if WITH_DWEIGHT:
                dweight = tl.sum(dy32 * n, axis=0, keep_dims=True)
                dweight += tl.load(dweight_ptr + cols, mask=before, other=0.0)
                tl.store(dweight_ptr + cols, dweight, mask=cols < D)
            if WITH_DBIAS:
                dbias = tl.sum(dy32, axis=0, keep_dims=True)
                dbias += tl.load(dbias_ptr + cols, mask=before, other=0.0)
                tl.store(dbias_ptr + cols, dbias, mask=cols < D)
        rows += step * BLOCK_ROWS
