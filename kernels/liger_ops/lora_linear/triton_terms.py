"""The small products of float32 adapters beside bfloat16 rows, on tensor cores and as exact.

A float32 number is a sum of three bfloat16 numbers of 8 bits each, a = hi + mid + lo, and a product
of two bfloat16 numbers is exact in float32. So a bfloat16 x times a float32 A is x times hi, mid
and lo side by side, one product of the library that reads x as it lies and sums in float32; adding
up its three parts leaves what a float32 product leaves. Where both sides are float32 the result is
added to a bfloat16 y or dx, which keeps 8 bits, and hi hi + mid hi + hi mid are enough: what they
leave out is below 2^-16. A rank of r so costs as much as one of 3 r in bfloat16.

A float32 product without tensor cores is many times slower, and takes a float32 copy of its rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from liger_ops import backend_triton
from liger_ops.backend_triton import add_product, library_product
from liger_ops.lora_linear.triton_dropout import Dropout, dropout, kept_rows, parts

_ALL = (0, 1, 2)  # hi, mid and lo
_LEFT, _RIGHT = (0, 1, 0), (0, 0, 1)  # whose products are hi hi + mid hi + hi mid
_BLOCK = 1024


def applies(dtype: torch.dtype, adapter: torch.dtype) -> bool:
    """Whether rows and adapters of these dtypes are what this is for."""
    return dtype == torch.bfloat16 and adapter == torch.float32


@triton.jit
def _split_kernel(
    source_ptr,  # (rows, COLUMNS) float32
    target_ptr,  # bfloat16, three times that
    num_rows,
    source_stride,
    target_stride,  # of rows
    target_step,  # from one term to the next
    COLUMNS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Three of hi, mid and lo (0, 1 and 2) of each element."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, col = i // COLUMNS, i % COLUMNS
    inside = row < num_rows
    value = tl.load(source_ptr + row * source_stride + col, mask=inside, other=0.0)
    hi = value.to(tl.bfloat16)
    rest = value - hi.to(tl.float32)
    mid = rest.to(tl.bfloat16)
    lo = (rest - mid.to(tl.float32)).to(tl.bfloat16)
    at = target_ptr + row * target_stride + col
    tl.store(at, hi if FIRST == 0 else (mid if FIRST == 1 else lo), mask=inside)
    at += target_step
    tl.store(at, hi if SECOND == 0 else (mid if SECOND == 1 else lo), mask=inside)
    at += target_step
    tl.store(at, hi if THIRD == 0 else (mid if THIRD == 1 else lo), mask=inside)


_LAUNCHES: dict[Any, backend_triton.Launch] = {}  # by all that they depend on


def beside(a: torch.Tensor, terms: tuple[int, int, int]) -> torch.Tensor:
    """(rows, 3 columns): three terms of a (rows, columns), side by side."""
    return _split(a, terms, 1)


def below(a: torch.Tensor, terms: tuple[int, int, int]) -> torch.Tensor:
    """(3 rows, columns): three terms of a (rows, columns), one below the other."""
    return _split(a, terms, 0)


def _split(a: torch.Tensor, terms: tuple[int, int, int], dim: int) -> torch.Tensor:
    if backend_triton.INTERPRET and torch.compiler.is_compiling():  # which takes no interpreter
        return _plain_split(a, terms, dim)
    if a.stride(1) != 1:
        a = a.contiguous()
    rows, columns = a.shape
    shape = (rows, 3 * columns) if dim == 1 else (3 * rows, columns)
    made = torch.empty(shape, dtype=torch.bfloat16, device=a.device)
    step = columns if dim == 1 else rows * columns
    of = backend_triton.metadata
    launch = backend_triton.kept(
        _LAUNCHES, lambda: (of(a), of(made), terms), lambda: _launch(a, made, terms, step)
    )
    if launch.programs:
        launch(a, made)
    return made


def _plain_split(a: torch.Tensor, terms: tuple[int, int, int], dim: int) -> torch.Tensor:
    """Not for inductor, which takes a cast to bfloat16 and back for nothing."""
    hi = a.bfloat16()
    mid = (a - hi.float()).bfloat16()
    lo = (a - hi.float() - mid.float()).bfloat16()
    return torch.cat([(hi, mid, lo)[term] for term in terms], dim)


def _launch(a, made, terms, step) -> backend_triton.Launch:
    rows, columns = a.shape
    return backend_triton.Launch(
        _split_kernel,
        -(-rows * columns // _BLOCK),
        (rows, a.stride(0), made.stride(0), step),
        (columns, *terms, _BLOCK),
        num_warps=4,
    )


def down(x: torch.Tensor, lora_as: list[torch.Tensor], drop: Dropout | None) -> list[torch.Tensor]:
    """(k_i x) A_i^T for each A_i (r_i, D), (M, r_i): columns of one tensor."""
    if drop is None:
        stacked = joined(lora_as, 0)
        wide = _product(x, below(stacked, _ALL).t())
        us = wide.view(len(x), 3, len(stacked)).sum(1)
        return list(us.split([len(a) for a in lora_as], dim=1))
    widths = [len(a) for a in lora_as]
    into = x.new_empty(len(x), sum(widths), dtype=torch.float32).split(widths, dim=1)
    split = [below(a, _ALL).t() for a in lora_as]
    for part in parts(x, x.dtype):
        for i, terms in enumerate(split):
            wide = _product(kept_rows(x, part, x.dtype, drop, i, scaled=False), terms, drop.scale)
            torch.sum(wide.view(len(wide), 3, widths[i]), 1, out=into[i][part])
    return list(into)


def add_up(y: torch.Tensor, u: torch.Tensor, lora_b: torch.Tensor, scaling: float) -> torch.Tensor:
    """y + s u B^T, where y lies. u is (M, r), B (O, r), y (M, O)."""
    return add_product(y, beside(u, _LEFT), beside(lora_b, _RIGHT).t(), scaling)


def up_backward(
    dy: torch.Tensor, u: torch.Tensor | None, lora_b: torch.Tensor | None, scaling: float
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """du = s dy B (M, r) where B is given, and dB = s dy^T u (O, r) where u is."""
    du = db = None
    if lora_b is not None:
        wide = _product(dy, beside(lora_b, _ALL), scaling)
        du = wide.view(len(dy), 3, lora_b.shape[1]).sum(1)
    if u is not None:
        wide = _product(dy.t(), beside(u, _ALL), scaling)
        db = wide.view(dy.shape[1], 3, u.shape[1]).sum(1)
    return du, db


def down_backward(
    x: torch.Tensor, dus: list[tuple[int, torch.Tensor]], drop: Dropout | None
) -> list[torch.Tensor]:
    """dA_i = du_i^T (k_i x), (r_i, D), for each number of a projection and its du_i (M, r_i)."""
    widths = [du.shape[1] for _, du in dus]
    if drop is None:
        stacked = beside(joined([du for _, du in dus], 1), _ALL)
        made = _product(stacked.t(), x).view(3, sum(widths), x.shape[1]).sum(0)
        return list(made.split(widths))
    split = [beside(du, _ALL) for _, du in dus]
    sums = [
        torch.zeros(3 * width, x.shape[1], dtype=torch.float32, device=x.device) for width in widths
    ]
    for part in parts(x, x.dtype):
        for total, terms, (i, _) in zip(sums, split, dus, strict=True):
            rows = kept_rows(x, part, x.dtype, drop, i, scaled=False)
            library_product(terms[part].t(), rows, total, drop.scale, beta=1.0)
    return [total.view(3, width, -1).sum(0) for total, width in zip(sums, widths, strict=True)]


def add_down_backward(
    dx: torch.Tensor,
    dus: list[torch.Tensor],
    lora_as: list[torch.Tensor],
    adapters: list[int],
    drop: Dropout | None,
) -> None:
    """dx += the sum of k_i (du_i A_i), where it lies."""
    if drop is None:
        dx.addmm_(beside(joined(dus, 1), _LEFT), below(joined(lora_as, 0), _RIGHT))
        return
    split = [(beside(du, _LEFT), below(a, _RIGHT)) for du, a in zip(dus, lora_as, strict=True)]
    for part in parts(dx, torch.float32):
        for (left, right), adapter in zip(split, adapters, strict=True):
            rows = _product(left[part], right)
            dropout(rows, dx[part], drop.seed, drop.p, adapter, part.start, add=True)


def joined(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
    """One tensor of all; no copy of a single one."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def _product(a: torch.Tensor, b: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    """alpha a b of two of bfloat16, in float32."""
    made = torch.empty(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    if a.shape[1] == 0:
        return made.zero_()
    library_product(a, b, made, alpha)
    return made
