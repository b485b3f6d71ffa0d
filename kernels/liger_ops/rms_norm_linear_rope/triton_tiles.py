"""Where a tile of the Triton kernels of rms_norm_linear_rope lies, and its last step.

A tile holds HEADS heads of one of q, k and v, and of each the features of 2 HALF columns: first
HALF columns with the first features of as many pairs, then HALF with their second features. Those
that are not rotated, beyond R, are dealt out to both. SHARES tiles beside each other make up a
head where one does not hold it.
"""

import triton
import triton.language as tl


@triton.jit
def feature_of(second, slot, H: tl.constexpr, R: tl.constexpr):
    """The feature in a slot of a head's first or second half of columns, and whether there is one.

    Slot i < R / 2 has feature i or i + R / 2; the slots after those have the features from R on.
    """
    if R == H:
        return slot + second * (R // 2), slot < R // 2
    rest: tl.constexpr = (H - R + 1) // 2
    turning = slot < R // 2
    feature = slot + tl.where(turning, second * (R // 2), R // 2 + second * rest)
    return feature, turning | ((slot < R // 2 + rest) & (feature < H))


@triton.jit
def place_of(
    block,
    N: tl.constexpr,
    K: tl.constexpr,
    HEADS: tl.constexpr,
    SHARES: tl.constexpr,
):
    """Of a column block: 0, 1 or 2 for q, k or v, its first head there, and its share of it."""
    q_blocks: tl.constexpr = (N + HEADS - 1) // HEADS * SHARES
    k_blocks: tl.constexpr = (K + HEADS - 1) // HEADS * SHARES
    part = (block >= q_blocks).to(tl.int32) + (block >= q_blocks + k_blocks).to(tl.int32)
    within = block - tl.where(part == 0, 0, q_blocks + tl.where(part == 1, 0, k_blocks))
    return part, within // SHARES * HEADS, within % SHARES


@triton.jit
def columns_of(
    part,
    head,
    share,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The rows of the weight behind a tile's columns (HEADS 2 HALF,), and which of them there are.

    WHOLE: they follow one another, as where heads are rotated whole.
    """
    column = tl.arange(0, HEADS * 2 * HALF)
    first = tl.where(part == 0, 0, tl.where(part == 1, N, N + K)) + head
    heads = tl.where(part == 0, N, K)
    fits = head + column // (2 * HALF) < heads
    if WHOLE:
        return first * H + column, fits
    slot = share * HALF + column % HALF
    feature, there = feature_of(column // HALF % 2, slot, H, R)
    return (first + column // (2 * HALF)) * H + feature, fits & there


@triton.jit
def halves(x, HEADS: tl.constexpr):
    """The first and the second half of what x (BLOCK_M, HEADS W) has of every head, (.., W / 2)."""
    W: tl.constexpr = x.numel // (x.shape[0] * HEADS)
    x = tl.reshape(x, (x.shape[0], HEADS, 2, W // 2))
    return tl.split(tl.permute(x, (0, 1, 3, 2)))


@triton.jit
def norm_heads(
    x_1,  # (BLOCK_M, HEADS, HALF) float32, the heads' first features
    x_2,  # and their second ones
    part,
    share,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    offset,
    H: tl.constexpr,
    R: tl.constexpr,
):
    """The norm of q's or k's heads of their own, where there is one."""
    if q_norm_ptr is not None or k_norm_ptr is not None:
        HALF: tl.constexpr = x_1.shape[2]
        slot = share * HALF + tl.arange(0, HALF)[None, None, :]
        feature_1, there_1 = feature_of(0, slot, H, R)
        feature_2, there_2 = feature_of(1, slot, H, R)
        r = tl.rsqrt(
            (tl.sum(x_1 * x_1, 2, keep_dims=True) + tl.sum(x_2 * x_2, 2, keep_dims=True)) / H
            + tl.cast(eps, tl.float32)
        )
        if q_norm_ptr is not None:
            scale_1, scale_2 = _load_pair(q_norm_ptr, feature_1, there_1, feature_2, there_2)
            x_1 = tl.where(part == 0, x_1 * r * (scale_1 + offset), x_1)
            x_2 = tl.where(part == 0, x_2 * r * (scale_2 + offset), x_2)
        if k_norm_ptr is not None:
            scale_1, scale_2 = _load_pair(k_norm_ptr, feature_1, there_1, feature_2, there_2)
            x_1 = tl.where(part == 1, x_1 * r * (scale_1 + offset), x_1)
            x_2 = tl.where(part == 1, x_2 * r * (scale_2 + offset), x_2)
    return x_1, x_2


@triton.jit
def _load_pair(ptr, feature_1, there_1, feature_2, there_2):
    first = tl.load(ptr + feature_1, mask=there_1, other=0.0)
    second = tl.load(ptr + feature_2, mask=there_2, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def rotate(
    x_1,  # (BLOCK_M, HEADS, W) float32, of the slots from first_slot on
    x_2,
    row,  # (BLOCK_M,) int64
    part,
    first_slot,
    cos_ptr,
    sin_ptr,
    num_rows,
    T,
    cos_stride_b,
    cos_stride_t,
    sin_stride_b,
    sin_stride_t,
    R: tl.constexpr,
):
    """The pairs of q's and k's heads turned by their row's angles; v's as they are."""
    slot = first_slot + tl.arange(0, x_1.shape[2])[None, None, :]
    row = row[:, None, None]
    b, t = row // T, row % T
    turns = (row < num_rows) & (slot < tl.where(part < 2, R // 2, 0))
    cos = cos_ptr + b * cos_stride_b + t * cos_stride_t + slot
    sin = sin_ptr + b * sin_stride_b + t * sin_stride_t + slot
    cos_1 = tl.load(cos, mask=turns, other=1.0).to(tl.float32)
    cos_2 = tl.load(cos + R // 2, mask=turns, other=1.0).to(tl.float32)
    sin_1 = tl.load(sin, mask=turns, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin + R // 2, mask=turns, other=0.0).to(tl.float32)
    return x_1 * cos_1 - x_2 * sin_1, x_2 * cos_2 + x_1 * sin_2


@triton.jit
def store(
    y_1,  # (BLOCK_M, HEADS, HALF)
    y_2,
    row,
    part,
    head,
    share,
    q_ptr,  # (M, N, H)
    k_ptr,  # (M, K, H)
    v_ptr,  # (M, K, H)
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
):
    """To where the part's heads have those features."""
    HALF: tl.constexpr = y_1.shape[2]
    slot = share * HALF + tl.arange(0, HALF)[None, None, :]
    feature_1, there_1 = feature_of(0, slot, H, R)
    feature_2, there_2 = feature_of(1, slot, H, R)
    row = row[:, None, None]
    heads = tl.where(part == 0, N, K)
    number = head + tl.arange(0, y_1.shape[1])[None, :, None]
    fits = (row < num_rows) & (number < heads)
    y_ptr = tl.where(part == 0, q_ptr, tl.where(part == 1, k_ptr, v_ptr))
    at = y_ptr + row * heads * H + number * H
    tl.store(at + feature_1, y_1.to(y_ptr.dtype.element_ty), mask=fits & there_1)
    tl.store(at + feature_2, y_2.to(y_ptr.dtype.element_ty), mask=fits & there_2)


@triton.jit
def rotate_and_store_slots(
    x_1,  # (BLOCK_M, HEADS, W) float32, of the slots from first_slot on
    x_2,
    row,
    part,
    head,  # the first of the tile, among all heads of a row
    first_slot,
    y_desc,  # (M, N + 2 K, H), in blocks of (BLOCK_M, HEADS, W)
    first_row,
    cos_ptr,
    sin_ptr,
    num_rows,
    T,
    cos_stride_b,
    cos_stride_t,
    sin_stride_b,
    sin_stride_t,
    H: tl.constexpr,
):
    """A part of the slots of heads that are rotated whole, by a descriptor, which leaves out what
    lies beyond the last row.

    The angles change the layout of what they are multiplied with, by way of shared memory: in two
    pieces, which take up half as much of it.
    """
    HEADS: tl.constexpr = x_1.shape[1]
    W: tl.constexpr = x_1.shape[2]
    left_1, right_1 = halves(x_1, HEADS)
    left_2, right_2 = halves(x_2, HEADS)
    left_1, left_2 = rotate(
        left_1, left_2, row, part, first_slot, cos_ptr, sin_ptr, num_rows, T,
        cos_stride_b, cos_stride_t, sin_stride_b, sin_stride_t, H,
    )  # fmt: skip
    right_1, right_2 = rotate(
        right_1, right_2, row, part, first_slot + W // 2, cos_ptr, sin_ptr, num_rows, T,
        cos_stride_b, cos_stride_t, sin_stride_b, sin_stride_t, H,
    )  # fmt: skip
    y_1 = _joined(left_1.to(y_desc.dtype), right_1.to(y_desc.dtype))
    y_2 = _joined(left_2.to(y_desc.dtype), right_2.to(y_desc.dtype))
    y_desc.store([first_row, head, first_slot], y_1)
    y_desc.store([first_row, head, first_slot + H // 2], y_2)


@triton.jit
def _joined(left, right):
    y = tl.permute(tl.join(left, right), (0, 1, 3, 2))
    return tl.reshape(y, (left.shape[0], left.shape[1], 2 * left.shape[2]))
