"""What every Triton kernel of LayerNorm does with a row.

A row is centred in two steps: d = x - s for an s near its mean, and then d - mean(d). So nothing
large cancels, neither in the variance mean(d^2) - mean(d)^2 nor where the mean itself is rounded.
"""

import triton
import triton.language as tl


@triton.jit
def load_parameter(ptr, cols, mask, absent):
    """A weight or bias, or `absent` in its place, float32 (BLOCK_D,)."""
    if ptr is None:
        return tl.full(cols.shape, absent, tl.float32)
    else:
        return tl.load(ptr + cols, mask=mask, other=0.0, eviction_policy="evict_last").to(
            tl.float32
        )


@triton.jit
def moments(sum_d, sum_squares, D: tl.constexpr, eps):
    """mean(d) and r = 1 / sqrt(var + eps), of the sums of d and of d^2."""
    e = sum_d / D
    # Rounding can leave a row of equal numbers just below 0.
    return e, tl.rsqrt(tl.maximum(sum_squares / D - e * e, 0.0) + eps)
