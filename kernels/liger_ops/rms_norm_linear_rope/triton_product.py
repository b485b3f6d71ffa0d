"""The Triton kernels of rms_norm_linear_rope: one tile a program, or one program that walks over
tiles, and what comes before those: the rows' scales, and a weight with the norm's in it.

    rotate(r (x (w + o)) W^T + b),    r = (sum of squares / D + eps)^(-1/2) of a row

Where x is multiplied as it lies in memory, nothing else may read it: Triton gives a tile that is
read in two ways a buffer too few, and an H200's sums were wrong (docs/rms_norm_linear_rope.md). So
r is found beforehand there, and multiplied onto the sums. Where a tile of x is changed in registers
before it is multiplied, its squares are gathered beside the product.
"""

# tl.range, and names that exist on one side of a constexpr:
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

from liger_ops.rms_norm_linear_rope.triton_tiles import (
    columns_of,
    halves,
    norm_heads,
    place_of,
    rotate,
    rotate_and_store_slots,
    store,
)


@triton.jit
def scale_kernel(
    x_ptr,  # (M, D)
    r_ptr,  # (M,) float32
    x_stride,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """r of one row a program."""
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros((BLOCK_D,), tl.float32)
    for start in tl.range(0, D, BLOCK_D):
        k = start + tl.arange(0, BLOCK_D)
        x = tl.load(x_ptr + row * x_stride + k, mask=k < D, other=0.0).to(tl.float32)
        squares += x * x
    tl.store(r_ptr + row, tl.rsqrt(tl.sum(squares, 0) / D + tl.cast(eps, tl.float32)))


@triton.jit
def weight_kernel(
    weight_ptr,  # (O, D)
    norm_ptr,  # (D,)
    scaled_ptr,  # (O, D)
    weight_stride,
    offset,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One row a program of the weight with the norm's in it, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    for start in tl.range(0, D, BLOCK_D):
        k = start + tl.arange(0, BLOCK_D)
        weight = tl.load(weight_ptr + row * weight_stride + k, mask=k < D, other=0.0)
        scale = tl.load(norm_ptr + k, mask=k < D, other=0.0).to(tl.float32) + offset
        scaled = weight.to(tl.float32) * scale
        tl.store(scaled_ptr + row * D + k, scaled.to(scaled_ptr.dtype.element_ty), mask=k < D)


@triton.jit
def tile_kernel(
    x_ptr,  # (M, D)
    norm_ptr,  # (D,), or None where it is in the weight already, or there is none
    weight_ptr,  # ((N + 2 K) H, D)
    bias_ptr,  # ((N + 2 K) H,) or None
    q_norm_ptr,  # (H,) or None
    k_norm_ptr,  # (H,) or None
    cos_ptr,  # (B, T, R)
    sin_ptr,  # (B, T, R)
    r_ptr,  # (M,) float32; None where a changed x gathers it here
    q_ptr,  # (M, N, H)
    k_ptr,  # (M, K, H)
    v_ptr,  # (M, K, H)
    num_rows,
    T,
    x_stride,
    weight_stride,
    cos_stride_b,  # 0 where rows of the batch share their angles
    cos_stride_t,
    sin_stride_b,
    sin_stride_t,
    eps,
    offset,
    D: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row_block, column_block = _tile_of(tl.program_id(0), num_rows, BLOCK_ROWS, COLUMN_BLOCKS, GROUP)
    part, head, share = place_of(column_block, N, K, HEADS, SHARES)
    WHOLE: tl.constexpr = R == H and SHARES * HALF * 2 == H and SHARES == 1
    column, there = columns_of(part, head, share, N, K, H, R, HEADS, HALF, WHOLE)
    row = row_block.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    # Rows and columns beyond the last read what is there, and are not written.
    x_at = x_ptr + tl.minimum(row, num_rows - 1)[:, None] * x_stride
    weight_at = weight_ptr + tl.where(there, column, 0).to(tl.int64)[None, :] * weight_stride
    x_dtype: tl.constexpr = x_ptr.dtype.element_ty
    AS_IT_IS: tl.constexpr = norm_ptr is None and x_dtype == weight_ptr.dtype.element_ty
    tl.static_assert(r_ptr is not None or not AS_IT_IS)
    if r_ptr is not None:
        r = tl.load(r_ptr + tl.minimum(row, num_rows - 1))

    COLUMNS: tl.constexpr = 2 * HEADS * HALF
    # A Hopper's product reads the larger operand out of shared memory if its rows are 64 or more.
    FEW: tl.constexpr = BLOCK_ROWS < 64
    ACROSS: tl.constexpr = FEW and COLUMNS >= 64
    acc = tl.zeros((COLUMNS, BLOCK_ROWS) if ACROSS else (BLOCK_ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((BLOCK_ROWS, BLOCK_D), tl.float32)  # of a row: added up once, at the end
    for start in tl.range(0, D, BLOCK_D):
        k = start + tl.arange(0, BLOCK_D)
        if D % BLOCK_D == 0:
            # Where rows are few, those that are not there are not read again and again.
            x = tl.load(x_at + k[None, :], mask=row[:, None] < num_rows if FEW else None)
            weight = tl.load(weight_at + k[:, None])
        else:
            x = tl.load(x_at + k[None, :], mask=k[None, :] < D, other=0.0)
            weight = tl.load(weight_at + k[:, None], mask=k[:, None] < D, other=0.0)
        if not AS_IT_IS:
            x32 = x.to(tl.float32)
            if r_ptr is None:
                squares += x32 * x32
            else:  # x itself, times a weight, may be too large or too small for the dtype
                x32 = x32 * r[:, None]
            if norm_ptr is not None:
                x32 = x32 * (tl.load(norm_ptr + k, mask=k < D, other=0.0).to(tl.float32) + offset)
            x = x32.to(weight.dtype)
        if ACROSS:
            acc = tl.dot(weight.T, x.T, acc, input_precision=PRECISION)
        else:
            acc = tl.dot(x, weight, acc, input_precision=PRECISION)
    if ACROSS:
        acc = acc.T

    if r_ptr is None:
        r = tl.rsqrt(tl.sum(squares, 1) / D + tl.cast(eps, tl.float32))
    if AS_IT_IS or r_ptr is None:
        acc = acc * r[:, None]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + column, mask=there, other=0.0).to(tl.float32)[None, :]
    if not WHOLE:
        acc = tl.where(there[None, :], acc, 0.0)  # for the sums of the heads' own norms
    x_1, x_2 = halves(acc, HEADS)
    x_1, x_2 = norm_heads(x_1, x_2, part, share, q_norm_ptr, k_norm_ptr, eps, offset, H, R)
    y_1, y_2 = rotate(
        x_1, x_2, row, part, share * HALF, cos_ptr, sin_ptr, num_rows, T,
        cos_stride_b, cos_stride_t, sin_stride_b, sin_stride_t, R,
    )  # fmt: skip
    store(y_1, y_2, row, part, head, share, q_ptr, k_ptr, v_ptr, num_rows, N, K, H, R)


@triton.jit
def persistent_kernel(
    x_desc,  # (M, D), in blocks of (BLOCK_ROWS, BLOCK_D)
    weight_desc,  # ((N + 2 K) H, D), of x's dtype, in blocks of (HEADS H, BLOCK_D)
    y_desc,  # (M, N + 2 K, H), all heads of a row, in blocks of (BLOCK_ROWS, HEADS, H / 4)
    bias_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    r_ptr,
    num_rows,
    steps,
    T,
    cos_stride_b,
    cos_stride_t,
    sin_stride_b,
    sin_stride_t,
    eps,
    offset,
    D: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """As tile_kernel, of heads that are rotated whole and an x that is multiplied as it is.

    One descriptor has all results: which of three to use would be a branch, and Triton 3.6 cannot
    fuse the loops around one.
    """
    tiles = tl.cdiv(num_rows, BLOCK_ROWS) * COLUMN_BLOCKS
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row_block, column_block = _tile_of(tile, num_rows, BLOCK_ROWS, COLUMN_BLOCKS, GROUP)
        part, head, share = place_of(column_block, N, K, HEADS, 1)
        column, there = columns_of(part, head, share, N, K, H, H, HEADS, H // 2, True)
        first = tl.where(part == 0, 0, tl.where(part == 1, N, N + K)) + head
        acc = tl.zeros((BLOCK_ROWS, HEADS * H), tl.float32)
        for step in range(steps):
            x = x_desc.load([row_block * BLOCK_ROWS, step * BLOCK_D])
            weight = weight_desc.load([first * H, step * BLOCK_D])
            acc = tl.dot(x, weight.T, acc, input_precision=PRECISION)
        row = row_block.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        acc = acc * tl.load(r_ptr + row, mask=row < num_rows, other=0.0)[:, None]
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + column, mask=there, other=0.0).to(tl.float32)[None, :]
        x_1, x_2 = halves(acc, HEADS)
        x_1, x_2 = norm_heads(x_1, x_2, part, share, q_norm_ptr, k_norm_ptr, eps, offset, H, H)
        # In pieces, so that they and the operands of the next tile fit into shared memory.
        left_1, right_1 = halves(x_1, HEADS)
        left_2, right_2 = halves(x_2, HEADS)
        first_row = row_block * BLOCK_ROWS
        rotate_and_store_slots(
            left_1, left_2, row, part, first, 0, y_desc, first_row, cos_ptr, sin_ptr, num_rows, T,
            cos_stride_b, cos_stride_t, sin_stride_b, sin_stride_t, H,
        )  # fmt: skip
        rotate_and_store_slots(
            right_1, right_2, row, part, first, H // 4, y_desc, first_row, cos_ptr, sin_ptr,
            num_rows, T, cos_stride_b, cos_stride_t, sin_stride_b, sin_stride_t, H,
        )  # fmt: skip


@triton.jit
def _tile_of(
    tile,
    num_rows,
    BLOCK_ROWS: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Its row block and column block: GROUP row blocks of one column block follow one another."""
    group = tile // (GROUP * COLUMN_BLOCKS)
    size = tl.minimum(tl.cdiv(num_rows, BLOCK_ROWS) - group * GROUP, GROUP)
    within = tile % (GROUP * COLUMN_BLOCKS)
    return group * GROUP + within % size, within // size
