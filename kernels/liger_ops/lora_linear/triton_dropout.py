"""The dropout of a low-rank adapter in Triton: multiplies by factors that come from the seed alone.

The same factors serve the forward and the backward, so nothing of x's size is kept between them.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from liger_ops import backend_triton
from liger_ops.backend_triton import row_stride
from liger_ops.lora_linear import cases
from liger_ops.lora_linear.cases import Config


class Dropout(NamedTuple):
    """p above 0 and where its factors come from."""

    p: float
    seed: torch.Tensor  # (1,) int64

    @property
    def scale(self) -> float:
        """Of what is kept."""
        return 1.0 / (1.0 - self.p)


@triton.jit
def _dropout_kernel(
    source_ptr,  # (M, D)
    target_ptr,  # (M, D)
    seed_ptr,  # (1,) int64
    num_rows,
    first_row,  # of these rows, as the factors count them
    source_stride,
    target_stride,
    threshold,
    adapter,  # whose factors: torch.compile's launcher has a `stream` of its own
    scale,  # 1 / (1 - p)
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
):
    """target = factors * source, or target + factors * source. oracle.py says what is counted."""
    quarter: tl.constexpr = (D + 3) // 4
    blocks: tl.constexpr = (quarter + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    group = program % blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    zero = (row + group).to(tl.uint32) * 0
    words = tl.philox(
        tl.load(seed_ptr),
        zero + group.to(tl.uint32),
        zero + (first_row + row).to(tl.uint32),
        zero + adapter,
        zero,
    )
    inside = (row < num_rows) & (group < quarter)
    for i in tl.static_range(4):  # type: ignore[attr-defined]
        col = group + i * quarter
        mask = inside & (col < D)
        source = tl.load(source_ptr + row * source_stride + col, mask=mask, other=0.0)
        kept = (words[i] >> 8) >= threshold
        value = tl.where(kept, source.to(tl.float32) * scale, 0.0)
        at = target_ptr + row * target_stride + col
        if ADD:
            value += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, value.to(target_ptr.dtype.element_ty), mask=mask)


_LAUNCHES: dict[Any, backend_triton.Launch] = {}  # by all that they depend on


def dropout(
    source: torch.Tensor,
    target: torch.Tensor,
    seed: torch.Tensor,
    dropout_p: float,
    adapter: int,
    first_row: int,
    add: bool = False,
    scaled: bool = True,
) -> None:
    """target = factors * source, or with `add` target + factors * source.

    Both are (M, D), their columns adjacent; their first row is row `first_row` of the factors,
    which are 0 or 1 where they are not `scaled`.
    """
    of = backend_triton.metadata
    launch = backend_triton.kept(
        _LAUNCHES,
        lambda: (of(source), of(target), dropout_p, adapter, first_row, add, scaled),
        lambda: _launch(source, target, dropout_p, adapter, first_row, add, scaled),
    )
    if launch.programs:
        launch(source, target, seed)


def _launch(source, target, dropout_p, adapter, first_row, add, scaled) -> backend_triton.Launch:
    rows, dim = source.shape
    config = Config.for_shape(dim)
    blocks = -(-dim // (4 * config.block_columns))
    return backend_triton.Launch(
        _dropout_kernel,
        -(-rows // config.block_rows) * blocks,
        (
            rows, first_row, row_stride(source), row_stride(target), round(dropout_p * 2**24),
            adapter, 1.0 / (1.0 - dropout_p) if scaled else 1.0,
        ),
        (dim, config.block_rows, config.block_columns, add),
        config.num_warps,
    )  # fmt: skip


def kept_rows(
    x: torch.Tensor,
    part: slice,
    dtype: torch.dtype,
    drop: Dropout,
    adapter: int,
    scaled: bool = True,
) -> torch.Tensor:
    """The rows x[part] with dropout, in `dtype`."""
    rows = x[part]
    kept = torch.empty(rows.shape, dtype=dtype, device=x.device)
    dropout(rows, kept, drop.seed, drop.p, adapter, part.start, scaled=scaled)
    return kept


def parts(x: torch.Tensor, dtype: torch.dtype) -> list[slice]:
    """All rows of x (M, D), in parts of which a copy in `dtype` is small."""
    rows, size = len(x), cases.rows_of_a_part(x.shape[1], dtype.itemsize)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
