"""The second step of a gradient summed over rows in Triton: adding up the programs' partial sums.

A fixed order, so two runs give the same bits.
"""

import triton
import triton.language as tl

from liger_ops import backend_triton


@triton.jit
def sum_kernel(
    partial_ptr,  # (programs, D) float32, or (programs, 2, D) with a second sum
    first_ptr,  # (D,)
    second_ptr,  # (D,) or None
    programs,
    D: tl.constexpr,
    BLOCK_PROGRAMS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Reads all programs' parts at once: a loop would cost a latency a turn."""
    rows = tl.arange(0, BLOCK_PROGRAMS)[:, None]
    cols = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    mask = (rows < programs) & (cols < D)
    stride: tl.constexpr = D if second_ptr is None else 2 * D
    partial = tl.load(partial_ptr + rows * stride + cols, mask=mask, other=0.0)
    if second_ptr is not None:
        second = tl.load(partial_ptr + rows * stride + D + cols, mask=mask, other=0.0)
        total = tl.sum(second, axis=0, keep_dims=True).to(second_ptr.dtype.element_ty)
        tl.store(second_ptr + cols, total, mask=cols < D)
    total = tl.sum(partial, axis=0, keep_dims=True).to(first_ptr.dtype.element_ty)
    tl.store(first_ptr + cols, total, mask=cols < D)


def launch_of_sums(programs: int, dim: int) -> backend_triton.Launch:
    """To be called with the partial sums, the first sum, and the second or None."""
    block_programs, block_d = triton.next_power_of_2(programs), 16
    return backend_triton.Launch(
        sum_kernel, -(-dim // block_d), (programs,), (dim, block_programs, block_d), 8
    )
