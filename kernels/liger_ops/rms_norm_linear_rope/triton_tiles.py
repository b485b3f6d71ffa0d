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
def rotate_and_store(
    acc,  # (BLOCK_M, HEADS 2 HALF) float32, with the norm's scale and the bias
    row,  # (BLOCK_M,) int64
    part,
    head,
    share,
    q_ptr,
    k_ptr,
    v_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    num_rows,
    T,
    cos_stride_b,
    cos_stride_t,
    sin_stride_b,
    sin_stride_t,
    eps,
    offset,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """The heads' own norm, if there is one, and the rotation, of q and k; v is stored as it is."""
    x = tl.reshape(acc, (acc.shape[0], HEADS, 2, HALF))
    x_1, x_2 = tl.split(tl.permute(x, (0, 1, 3, 2)))  # each (BLOCK_M, HEADS, HALF)
    slot = share * HALF + tl.arange(0, HALF)[None, None, :]
    feature_1, there_1 = feature_of(0, slot, H, R)
    feature_2, there_2 = feature_of(1, slot, H, R)

    if q_norm_ptr is not None or k_norm_ptr is not None:
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

    row = row[:, None, None]
    b, t = row // T, row % T
    fits = row < num_rows
    turns = fits & (slot < tl.where(part < 2, R // 2, 0))
    cos = cos_ptr + b * cos_stride_b + t * cos_stride_t + slot
    sin = sin_ptr + b * sin_stride_b + t * sin_stride_t + slot
    cos_1 = tl.load(cos, mask=turns, other=1.0).to(tl.float32)
    cos_2 = tl.load(cos + R // 2, mask=turns, other=1.0).to(tl.float32)
    sin_1 = tl.load(sin, mask=turns, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin + R // 2, mask=turns, other=0.0).to(tl.float32)
    y_1, y_2 = x_1 * cos_1 - x_2 * sin_1, x_2 * cos_2 + x_1 * sin_2

    heads = tl.where(part == 0, N, K)
    number = head + tl.arange(0, HEADS)[None, :, None]
    fits = fits & (number < heads)
    y_ptr = tl.where(part == 0, q_ptr, tl.where(part == 1, k_ptr, v_ptr))
    at = y_ptr + row * heads * H + number * H
    tl.store(at + feature_1, y_1.to(y_ptr.dtype.element_ty), mask=fits & there_1)
    tl.store(at + feature_2, y_2.to(y_ptr.dtype.element_ty), mask=fits & there_2)


@triton.jit
def _load_pair(ptr, feature_1, there_1, feature_2, there_2):
    first = tl.load(ptr + feature_1, mask=there_1, other=0.0)
    second = tl.load(ptr + feature_2, mask=there_2, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)
