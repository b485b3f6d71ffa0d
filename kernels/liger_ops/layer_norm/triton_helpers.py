"""What every Triton kernel of LayerNorm does with a row, or with a block of rows.

An exchange between the warps that share a row costs more than the arithmetic on it, so sums that do
not depend on each other are exchanged as one.
"""

# tl.static_range, and names that exist on one side of a constexpr:
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl


@triton.jit
def load_parameter(ptr, cols, mask, absent):
    """A weight or bias, or `absent` in its place, of the shape of cols."""
    if ptr is None:
        return tl.full(cols.shape, absent, tl.float32)
    else:
        return tl.load(ptr + cols, mask=mask, other=0.0, eviction_policy="evict_last")


@triton.jit
def row_sums(a, b):
    """The sums of the rows of both, (BLOCK_ROWS, 1) each, in one exchange."""
    first, second = tl.split(tl.sum(tl.join(a, b), axis=1))
    return first[:, None], second[:, None]


@triton.jit
def first_shift(x_ptr, rows, mask, x_stride, D: tl.constexpr):
    """The mean of four numbers of each row, (BLOCK_ROWS, 1): every thread reads them itself."""
    shift = tl.zeros(rows.shape, tl.float32)
    for i in tl.static_range(4):
        shift += tl.load(x_ptr + rows * x_stride + i * D // 4, mask=mask, other=0.0).to(tl.float32)
    return shift / 4


@triton.jit
def moments_of_sums(sum_d, sum_squares, D: tl.constexpr):
    """mean(d) and var(d), of the sums of d and of d^2."""
    e = sum_d / D
    # Rounding can leave a row of equal numbers just below 0.
    return e, tl.maximum(sum_squares / D - e * e, 0.0)


@triton.jit
def is_far(e, variance):
    """Whether the numbers of some row were summed about a shift off their mean by more than twice
    their standard deviation. Up to there the variance has at most 5 times the rounding error of a
    sum of squares about the mean itself; beyond, the sums are taken again about the mean found.
    """
    return tl.max(tl.where(e * e > 4.0 * variance, 1, 0)) > 0


@triton.jit
def moments(x, shift, in_row, D: tl.constexpr):
    """mean(x - shift) and var(x)."""
    d = tl.where(in_row, x - shift, 0.0)
    sum_d, sum_squares = row_sums(d, d * d)
    return moments_of_sums(sum_d, sum_squares, D)


@triton.jit
def scale_of(variance, eps):
    """r = 1 / sqrt(var + eps), float32 also where torch.compile hands eps on as float64."""
    return tl.rsqrt(variance + tl.cast(eps, tl.float32))


@triton.jit
def load_rows(
    x_ptr, dy_ptr, statistics_ptr, rows, cols, num_rows, x_stride, dy_stride, D: tl.constexpr
):
    """x and dy (BLOCK_ROWS, BLOCK_D) as they are stored, and the rows' mean and scale."""
    inside = rows < num_rows
    mask = inside & (cols < D)
    x = tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=0.0)
    dy = tl.load(dy_ptr + rows * dy_stride + cols, mask=mask, other=0.0)
    mean = tl.load(statistics_ptr + 2 * rows, mask=inside, other=0.0)
    r = tl.load(statistics_ptr + 2 * rows + 1, mask=inside, other=0.0)
    return x, dy, mean, r
