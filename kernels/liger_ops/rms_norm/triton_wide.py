"""The Triton kernels of RMSNorm for rows too wide to hold in registers."""

# tl.range, and names that exist on one side of a constexpr:
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

from liger_ops.rms_norm.triton_helpers import load_scale, round_as_llama


@triton.jit
def forward_wide_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    h_ptr,
    num_rows,
    x_stride,
    residual_stride,
    eps,
    offset,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CASTING: tl.constexpr,
):
    """One row a program, D taken in blocks: once for the sum of squares, once to scale."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * D
    if residual_ptr is not None:
        residual_ptr += row * residual_stride
        h_ptr += row * D

    squares = tl.zeros((BLOCK_D,), tl.float32)
    for start in tl.range(0, D, BLOCK_D):
        cols = start + tl.arange(0, BLOCK_D)
        h = tl.load(x_ptr + cols, mask=cols < D, other=0.0)
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + cols, mask=cols < D, other=0.0)
            h = (h.to(tl.float32) + residual.to(tl.float32)).to(h_ptr.dtype.element_ty)
            tl.store(h_ptr + cols, h, mask=cols < D)
        squares += h.to(tl.float32) * h.to(tl.float32)
    r = tl.rsqrt(tl.sum(squares, axis=0) / D + tl.cast(eps, tl.float32))

    for start in tl.range(0, D, BLOCK_D):
        cols = start + tl.arange(0, BLOCK_D)
        if residual_ptr is not None:  # each thread reads back what it wrote itself
            h = tl.load(h_ptr + cols, mask=cols < D, other=0.0)
        else:
            h = tl.load(x_ptr + cols, mask=cols < D, other=0.0)
        n = round_as_llama(h.to(tl.float32) * r, h.dtype, CASTING)
        y = n * load_scale(weight_ptr, cols, cols < D, offset)
        tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=cols < D)


@triton.jit
def backward_two_pass_kernel(
    h_ptr,
    weight_ptr,
    dy_ptr,
    dh_ptr,
    dx_ptr,
    dweight_ptr,
    num_rows,
    h_stride,
    dy_stride,
    dh_stride,
    eps,
    offset,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CASTING: tl.constexpr,
):
    """For rows too wide to hold: each is read for its two sums, and again for its gradients.

    The second reading comes out of the cache, and goes along with the first reading of the next
    row. A partial weight gradient wider than a block is summed in this program's own row of
    dweight_ptr.
    """
    first = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0)
    if dweight_ptr is not None:
        dweight_ptr += first * D
        dweight = tl.zeros((BLOCK_D,), tl.float32)
        if D > BLOCK_D:
            for start in tl.range(0, D, BLOCK_D):
                cols = start + tl.arange(0, BLOCK_D)
                tl.store(dweight_ptr + cols, dweight, mask=cols < D)

    squares = tl.zeros((BLOCK_D,), tl.float32)
    products = tl.zeros((BLOCK_D,), tl.float32)
    for start in tl.range(0, D, BLOCK_D):
        cols = start + tl.arange(0, BLOCK_D)
        scale = load_scale(weight_ptr, cols, cols < D, offset)
        h = tl.load(h_ptr + first * h_stride + cols, mask=cols < D, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + first * dy_stride + cols, mask=cols < D, other=0.0).to(tl.float32)
        squares += h * h
        products += dy * scale * h

    for row in tl.range(first, num_rows, step, num_stages=1):
        r = tl.rsqrt(tl.sum(squares, axis=0) / D + tl.cast(eps, tl.float32))
        c = r * tl.sum(products, axis=0) / D
        squares = tl.zeros((BLOCK_D,), tl.float32)
        products = tl.zeros((BLOCK_D,), tl.float32)
        next_row = row + step
        for start in tl.range(0, D, BLOCK_D):
            cols = start + tl.arange(0, BLOCK_D)
            mask = cols < D
            next_mask = mask & (tl.zeros_like(cols) + next_row < num_rows)
            next_h = tl.load(h_ptr + next_row * h_stride + cols, mask=next_mask, other=0.0)
            next_dy = tl.load(dy_ptr + next_row * dy_stride + cols, mask=next_mask, other=0.0)
            h = tl.load(h_ptr + row * h_stride + cols, mask=mask, other=0.0)
            dy = tl.load(dy_ptr + row * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
            scale = load_scale(weight_ptr, cols, mask, offset)
            n = h.to(tl.float32) * r
            if dx_ptr is not None:
                dx = r * (dy * scale - n * c)
                if dh_ptr is not None:
                    dh = tl.load(dh_ptr + row * dh_stride + cols, mask=mask, other=0.0)
                    dx += dh.to(tl.float32)
                tl.store(dx_ptr + row * D + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            if dweight_ptr is not None:
                if D > BLOCK_D:
                    dweight = tl.load(dweight_ptr + cols, mask=mask, other=0.0)
                dweight += dy * round_as_llama(n, h.dtype, CASTING)
                if D > BLOCK_D:
                    tl.store(dweight_ptr + cols, dweight, mask=mask)
            next_h32 = next_h.to(tl.float32)
            squares += next_h32 * next_h32
            products += next_dy.to(tl.float32) * scale * next_h32
    if dweight_ptr is not None and D <= BLOCK_D:
        cols = tl.arange(0, BLOCK_D)
        tl.store(dweight_ptr + cols, dweight, mask=cols < D)
