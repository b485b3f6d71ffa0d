"""The head's three matrix products: the library's, or on a Hopper GPU a kernel's.

The kernel does what the library cannot: it reads on the device how many rows there are, so that
ignored ones cost nothing and nobody waits for their number, and it adds a product to a float32 sum
while the next tile is being multiplied.
"""

# tl.range, and constexprs:
# pyright: reportGeneralTypeIssues=false

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from liger_ops import backend_triton
from liger_ops.fused_linear_cross_entropy.cases import LEAST_WORK


@triton.jit
def _product_kernel(
    a_desc,  # (M, K), or (K, M) where A_ACROSS
    b_desc,  # (K, N), or (N, K) where B_ACROSS
    c_desc,  # (M, N)
    live_ptr,  # int32 scalar: rows that count
    first_row,
    M,
    N,
    K,
    scale,
    A_ACROSS: tl.constexpr,
    B_ACROSS: tl.constexpr,
    DEPTH: tl.constexpr,
    ADD: tl.constexpr,
    SCALE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PIECES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """c = scale a b, or c += scale a b where ADD. Each program takes tile after tile.

    The rows from first_row on that count, of which live_ptr tells, are those of c, and the others
    are left alone; or where DEPTH those that are summed over, and what lies behind them is 0.
    """
    scale = tl.cast(scale, tl.float32)  # torch.compile hands float arguments on as float64
    live = tl.load(live_ptr) - first_row
    if DEPTH:
        K = tl.maximum(tl.minimum(K, live), 0)
        if ADD:  # nothing to add
            M = tl.where(K == 0, 0, M)
    else:
        M = tl.maximum(tl.minimum(M, live), 0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        # Tiles that are worked on together share their operands in the L2 cache.
        group = tile // (GROUP * tiles_n)
        height = tl.minimum(tiles_m - group * GROUP, GROUP)
        inside = tile % (GROUP * tiles_n)
        m = (group * GROUP + inside % height) * BLOCK_M
        n = (inside // height) * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(steps):
            k = step * BLOCK_K
            a = a_desc.load([k, m]).T if A_ACROSS else a_desc.load([m, k])
            b = b_desc.load([n, k]).T if B_ACROSS else b_desc.load([k, n])
            total = tl.dot(a, b, total)
        if SCALE:
            total *= scale
        # In pieces, so that they and the operands of the next tile fit into shared memory.
        left, right = _halves(total, BLOCK_M, BLOCK_N)
        if PIECES == 2:
            _put(c_desc, m, n, left, ADD)
            _put(c_desc, m, n + BLOCK_N // 2, right, ADD)
        else:
            first, second = _halves(left, BLOCK_M, BLOCK_N // 2)
            third, fourth = _halves(right, BLOCK_M, BLOCK_N // 2)
            _put(c_desc, m, n, first, ADD)
            _put(c_desc, m, n + BLOCK_N // 4, second, ADD)
            _put(c_desc, m, n + BLOCK_N // 2, third, ADD)
            _put(c_desc, m, n + 3 * BLOCK_N // 4, fourth, ADD)


@triton.jit
def _halves(tile, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """The left and the right columns."""
    return tl.split(tl.permute(tl.reshape(tile, (HEIGHT, 2, WIDTH // 2)), (0, 2, 1)))


@triton.jit
def _put(c_desc, m, n, value, ADD: tl.constexpr):
    value = value.to(c_desc.dtype)
    if ADD:  # by the copy engine, while the program goes on
        c_desc.atomic_add([m, n], value)
    else:
        c_desc.store([m, n], value)


@dataclass(frozen=True)
class Config:
    """Tiles of the kernel.

    Measured on an H200 (docs/fused_linear_cross_entropy.md): with four stages of 128 x 256 x 64 it
    is as fast as cuBLAS, with three 12 to 15 % slower, with tiles of 128 x 128 a third. A float32
    tile goes out in four pieces, since two would leave room for three stages only.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    pieces: int = 2
    group: int = 8
    num_warps: int = 8
    num_stages: int = 4

    @classmethod
    def for_sum(cls, itemsize: int) -> "Config":
        """For elements of `itemsize` bytes in the product."""
        return cls(pieces=4 if itemsize == 4 else 2)


def has_kernel(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether products of hidden (M, D) and weight (V, D) are the kernel's."""
    if torch.compiler.is_compiling() or hidden.dtype not in (torch.bfloat16, torch.float16):
        return False
    if not all(_has_descriptor(t) for t in (hidden, weight)) or len(weight) % 8:
        return False
    if not hidden.is_cuda:
        return True  # the interpreter
    hopper = torch.cuda.get_device_capability(hidden.device)[0] == 9
    return hopper and hidden.numel() * len(weight) >= LEAST_WORK


def _has_descriptor(matrix: torch.Tensor) -> bool:
    """What the copy engine asks of a matrix of 2-byte elements, and of parts of its rows."""
    return (
        matrix.numel() > 0
        and matrix.stride(1) == 1
        and matrix.stride(0) % 8 == 0
        and matrix.data_ptr() % 16 == 0
        and max(matrix.shape) < 2**31
    )


@dataclass(frozen=True)
class Products:
    """The three products, and the order of the rows they are of.

    Attributes:
        order: (M,) int64, the rows that count before the others; None for all rows in the order
            they have.
        live: int32 scalar on the device, how many those are; None for the library's products, of
            all rows.
    """

    order: torch.Tensor | None = None
    live: torch.Tensor | None = None

    @classmethod
    def over(
        cls,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        ignore_index: int,
        *,
        always_in_order: bool = False,
    ) -> "Products":
        """always_in_order: that order with the library's products too, as processes need it that
        share rows, and of which some may have no kernel.
        """
        kernel = has_kernel(hidden, weight)
        if not kernel and not always_in_order:
            return cls()
        ignored = labels == ignore_index
        live = (~ignored).sum(dtype=torch.int32) if kernel else None
        return cls(torch.argsort(ignored, stable=True), live)

    def ordered(self, per_row: torch.Tensor, part: slice | None = None) -> torch.Tensor:
        """Those of a part of the rows, or of all: a copy, but of rows in their own order a view."""
        order = self.order if part is None or self.order is None else self.order[part]
        if order is not None:
            return per_row[order]
        return per_row if part is None else per_row[part]

    def put_back(self, into: torch.Tensor, part: slice, values: torch.Tensor) -> None:
        """What `ordered` took of the rows, in their own places."""
        assert self.order is not None
        into.index_copy_(0, self.order[part], values)

    def as_given(self, per_row: torch.Tensor) -> torch.Tensor:
        """What is in the products' order in the rows' own."""
        if self.order is None:
            return per_row
        return torch.empty_like(per_row).index_copy_(0, self.order, per_row)

    def logits(self, hidden, weight, into: torch.Tensor, first_row: int) -> None:
        """hidden weight^T of the rows that count."""
        if self.live is None:
            torch.mm(hidden, weight.t(), out=into)
        else:
            self._launch(hidden, weight, into, first_row, b_across=True)

    def hidden_gradient(self, dlogits, weight, into, scale: float, first_row: int) -> None:
        """scale dlogits weight, and 0 in the rows that do not count.

        Where its tiles would leave a third of the GPU idle it is the library's, which cuts the sum
        over the classes as well.
        """
        if self.live is None or _idle(len(into), into.shape[1], into.device) > 1 / 3:
            backend_triton.library_product(dlogits, weight, into, scale)
        else:
            self._launch(dlogits, weight, into.zero_(), first_row, scale)

    def weight_gradient(
        self, dlogits, hidden, into, scale: float, first_row: int, *, add: bool = False
    ) -> None:
        """scale dlogits^T hidden, added to `into` where `add`."""
        if self.live is None:
            backend_triton.library_product(dlogits.t(), hidden, into, scale, 1.0 if add else 0.0)
        else:
            self._launch(dlogits, hidden, into, first_row, scale, a_across=True, add=add)

    def _launch(
        self, a, b, c, first_row, scale=1.0, *, a_across=False, b_across=False, add=False
    ) -> None:
        kernel: Any = _product_kernel
        config = Config.for_sum(c.element_size())
        m, n, k = config.block_m, config.block_n, config.block_k
        depth, width = (a.shape[0], b.shape[1]) if a_across else (a.shape[1], c.shape[1])
        programs = backend_triton.multiprocessors(c.device)
        descriptor = TensorDescriptor.from_tensor
        with torch.cuda.device_of(c):
            kernel[(programs,)](
                descriptor(a, [k, m] if a_across else [m, k]),
                descriptor(b, [n, k] if b_across else [k, n]),
                descriptor(c, [m, n // config.pieces]),
                self.live, first_row, c.shape[0], width, depth, scale, a_across, b_across,
                a_across, add, scale != 1.0, programs, m, n, k, config.pieces, config.group,
                num_warps=config.num_warps, num_stages=config.num_stages,
            )  # fmt: skip


def _idle(rows: int, columns: int, device: torch.device) -> float:
    """The part of the multiprocessors' time that tiles of so large a result leave unused."""
    tiles = triton.cdiv(rows, Config.block_m) * triton.cdiv(columns, Config.block_n)
    programs = backend_triton.multiprocessors(device)
    return 1.0 - tiles / (triton.cdiv(tiles, programs) * programs)
