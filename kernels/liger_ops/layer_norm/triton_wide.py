"""The Triton kernels of LayerNorm for rows too wide to hold in registers.

Sums are taken about the mean of a row's first columns. It is off the row's mean by no more than a
few standard deviations, which is all that the two steps of centring need.
"""

# tl.range, and names that exist on one side of a constexpr:
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAssignmentType=false

import triton
import triton.language as tl

from liger_ops.layer_norm.triton_helpers import load_parameter, moments


@triton.jit
def forward_wide_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
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
    e, r = moments(tl.sum(sum_d, axis=0), tl.sum(sum_squares, axis=0), D, eps)

    for start in tl.range(0, D, BLOCK_D):
        cols = start + tl.arange(0, BLOCK_D)
        x = tl.load(x_ptr + cols, mask=cols < D, other=0.0)
        n = (x.to(tl.float32) - shift - e) * r
        y = n * load_parameter(weight_ptr, cols, cols < D, 1.0)
        y += load_parameter(bias_ptr, cols, cols < D, 0.0)
        tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=cols < D)


@triton.jit
def backward_two_pass_kernel(
    x_ptr,
    weight_ptr,
    dy_ptr,
    dx_ptr,
    partial_ptr,
    num_rows,
    x_stride,
    dy_stride,
    eps,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WITH_DWEIGHT: tl.constexpr,
    WITH_DBIAS: tl.constexpr,
):
    """For rows too wide to hold: each is read for its four sums, and again for its gradients.

    The second reading comes out of the cache, and goes along with the first reading of the next
    row. A partial gradient wider than a block is summed in this program's own row of partial_ptr.
    """
    first = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0)
    in_memory: tl.constexpr = D > BLOCK_D
    if WITH_DWEIGHT or WITH_DBIAS:
        dweight_ptr = partial_ptr + first * (WITH_DWEIGHT + WITH_DBIAS) * D
        dbias_ptr = dweight_ptr + WITH_DWEIGHT * D
    dweight = tl.zeros((BLOCK_D,), tl.float32)
    dbias = tl.zeros((BLOCK_D,), tl.float32)
    if in_memory:
        for start in tl.range(0, D, BLOCK_D):
            cols = start + tl.arange(0, BLOCK_D)
            if WITH_DWEIGHT:
                tl.store(dweight_ptr + cols, dweight, mask=cols < D)
            if WITH_DBIAS:
                tl.store(dbias_ptr + cols, dbias, mask=cols < D)

    SHIFT: tl.constexpr = min(BLOCK_D, 1024)
    shift_cols = tl.arange(0, SHIFT)
    in_shift = shift_cols < D
    head = tl.load(x_ptr + first * x_stride + shift_cols, mask=in_shift, other=0.0)
    shift = tl.sum(head.to(tl.float32), axis=0) / min(SHIFT, D)
    in_next = in_shift & (tl.zeros_like(shift_cols) + first + step < num_rows)
    head = tl.load(x_ptr + (first + step) * x_stride + shift_cols, mask=in_next, other=0.0)
    next_shift = tl.sum(head.to(tl.float32), axis=0) / min(SHIFT, D)

    sum_d = tl.zeros((BLOCK_D,), tl.float32)
    sum_squares = tl.zeros((BLOCK_D,), tl.float32)
    sum_g = tl.zeros((BLOCK_D,), tl.float32)
    sum_gd = tl.zeros((BLOCK_D,), tl.float32)
    for start in tl.range(0, D, BLOCK_D):
        cols = start + tl.arange(0, BLOCK_D)
        mask = cols < D
        x = tl.load(x_ptr + first * x_stride + cols, mask=mask, other=0.0)
        dy = tl.load(dy_ptr + first * dy_stride + cols, mask=mask, other=0.0)
        d = tl.where(mask, x.to(tl.float32) - shift, 0.0)
        g = dy.to(tl.float32) * load_parameter(weight_ptr, cols, mask, 1.0)
        sum_d += d
        sum_squares += d * d
        sum_g += g
        sum_gd += g * d
    d_total = tl.sum(sum_d, axis=0)
    squares_total = tl.sum(sum_squares, axis=0)
    g_total = tl.sum(sum_g, axis=0)
    gd_total = tl.sum(sum_gd, axis=0)

    for row in tl.range(first, num_rows, step, num_stages=1):
        e, r = moments(d_total, squares_total, D, eps)
        mean_g = g_total / D
        mean_gn = r * (gd_total / D - e * mean_g)
        next_row = row + step
        # The shift of the row after the next, wanted at the end of this step only.
        in_ahead = in_shift & (tl.zeros_like(shift_cols) + next_row + step < num_rows)
        head = tl.load(x_ptr + (next_row + step) * x_stride + shift_cols, mask=in_ahead, other=0.0)
        sum_d = tl.zeros((BLOCK_D,), tl.float32)
        sum_squares = tl.zeros((BLOCK_D,), tl.float32)
        sum_g = tl.zeros((BLOCK_D,), tl.float32)
        sum_gd = tl.zeros((BLOCK_D,), tl.float32)
        for start in tl.range(0, D, BLOCK_D):
            cols = start + tl.arange(0, BLOCK_D)
            mask = cols < D
            next_mask = mask & (tl.zeros_like(cols) + next_row < num_rows)
            next_x = tl.load(x_ptr + next_row * x_stride + cols, mask=next_mask, other=0.0)
            next_dy = tl.load(dy_ptr + next_row * dy_stride + cols, mask=next_mask, other=0.0)
            x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0)
            dy = tl.load(dy_ptr + row * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
            weight = load_parameter(weight_ptr, cols, mask, 1.0)
            n = (x.to(tl.float32) - shift - e) * r
            if dx_ptr is not None:
                dx = r * (dy * weight - mean_g - n * mean_gn)
                tl.store(dx_ptr + row * D + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            if WITH_DWEIGHT:
                if in_memory:
                    dweight = tl.load(dweight_ptr + cols, mask=mask, other=0.0)
                dweight += dy * n
                if in_memory:
                    tl.store(dweight_ptr + cols, dweight, mask=mask)
            if WITH_DBIAS:
                if in_memory:
                    dbias = tl.load(dbias_ptr + cols, mask=mask, other=0.0)
                dbias += dy
                if in_memory:
                    tl.store(dbias_ptr + cols, dbias, mask=mask)
            d = tl.where(next_mask, next_x.to(tl.float32) - next_shift, 0.0)
            g = next_dy.to(tl.float32) * weight
            sum_d += d
            sum_squares += d * d
            sum_g += g
            sum_gd += g * d
        d_total = tl.sum(sum_d, axis=0)
        squares_total = tl.sum(sum_squares, axis=0)
        g_total = tl.sum(sum_g, axis=0)
        gd_total = tl.sum(sum_gd, axis=0)
        shift = next_shift
        next_shift = tl.sum(head.to(tl.float32), axis=0) / min(SHIFT, D)
    if not in_memory:
        cols = tl.arange(0, BLOCK_D)
        if WITH_DWEIGHT:
            tl.store(dweight_ptr + cols, dweight, mask=cols < D)
        if WITH_DBIAS:
            tl.store(dbias_ptr + cols, dbias, mask=cols < D)
