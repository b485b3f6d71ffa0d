"""The small products of a low-rank adapter, over parts of the rows where x or dy must be cast or
dropped out first: one part's rows exist at a time, and sums over parts are float32.

Without either, each is one product of the library over all rows. Float32 adapters beside bfloat16
rows, PEFT's default, are triton_terms.py's.
"""

import torch

from liger_ops.backend_triton import add_product, library_product
from liger_ops.lora_linear import triton_terms
from liger_ops.lora_linear.triton_dropout import Dropout, dropout, kept_rows, parts


def product(a: torch.Tensor, b: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    """alpha a b, with one rounding."""
    if alpha == 1.0:
        return a @ b
    # Not read where beta is 0, but inductor multiplies it by that.
    unread = a.new_zeros(()) if torch.compiler.is_compiling() else a.new_empty(())
    return torch.addmm(unread, a, b, beta=0.0, alpha=alpha)


def down(x: torch.Tensor, lora_as: list[torch.Tensor], drop: Dropout | None) -> list[torch.Tensor]:
    """(k_i x) A_i^T for each A_i (r_i, D), (M, r_i): columns of one tensor."""
    if triton_terms.applies(x.dtype, lora_as[0].dtype):
        return triton_terms.down(x, lora_as, drop)
    widths = [len(a) for a in lora_as]
    if drop is None:
        stacked = triton_terms.joined(lora_as, 0).t()
        if stacked.dtype == x.dtype:
            return list((x @ stacked).split(widths, dim=1))
    us = x.new_empty(len(x), sum(widths), dtype=lora_as[0].dtype)
    into = us.split(widths, dim=1)
    for part in parts(x, us.dtype):
        if drop is None:
            us[part] = x[part].to(us.dtype) @ stacked  # type: ignore[possibly-unbound]
            continue
        for i, a in enumerate(lora_as):
            into[i][part] = kept_rows(x, part, us.dtype, drop, i) @ a.t()
    return list(into)


def add_up(y: torch.Tensor, u: torch.Tensor, lora_b: torch.Tensor, scaling: float) -> torch.Tensor:
    """y + s u B^T, where y lies. u is (M, r), B (O, r), y (M, O)."""
    if y.dtype == u.dtype:
        return add_product(y, u, lora_b.t(), scaling)
    if triton_terms.applies(y.dtype, u.dtype):
        return triton_terms.add_up(y, u, lora_b, scaling)
    for part in parts(y, u.dtype):
        y[part].add_(u[part] @ lora_b.t(), alpha=scaling)
    return y


def up_backward(
    dy: torch.Tensor,
    u: torch.Tensor | None,
    lora_b: torch.Tensor | None,
    scaling: float,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """du = s dy B (M, r) where B is given, and dB = s dy^T u (O, r) where u is."""
    given = lora_b if lora_b is not None else u
    if given is None:
        return None, None
    dtype = given.dtype
    if dtype == dy.dtype:
        return (
            None if lora_b is None else product(dy, lora_b, scaling),
            None if u is None else product(dy.t(), u, scaling),
        )
    if triton_terms.applies(dy.dtype, dtype):
        return triton_terms.up_backward(dy, u, lora_b, scaling)
    du = None if lora_b is None else dy.new_empty(len(dy), lora_b.shape[1], dtype=dtype)
    sum_b = None if u is None else _zeros(dy.shape[1], u.shape[1], u)
    for part in parts(dy, dtype):
        rows = dy[part].to(dtype)
        if du is not None and lora_b is not None:
            du[part] = product(rows, lora_b, scaling)
        if sum_b is not None and u is not None:
            library_product(rows.t(), u[part], sum_b, scaling, beta=1.0)
    return du, None if sum_b is None else sum_b.to(dtype)


def down_backward(
    x: torch.Tensor, dus: list[torch.Tensor | None], drop: Dropout | None
) -> list[torch.Tensor | None]:
    """dA_i = du_i^T (k_i x), (r_i, D), for each du_i (M, r_i) that is given."""
    given = [(i, du) for i, du in enumerate(dus) if du is not None]
    gradients: list[torch.Tensor | None] = [None] * len(dus)
    if not given:
        return gradients
    dtype = given[0][1].dtype
    if triton_terms.applies(x.dtype, dtype):
        for (i, _), gradient in zip(given, triton_terms.down_backward(x, given, drop), strict=True):
            gradients[i] = gradient
        return gradients
    if drop is None:
        widths = [du.shape[1] for _, du in given]
        stacked = triton_terms.joined([du for _, du in given], 1)
        if dtype == x.dtype:
            made = stacked.t() @ x
        else:
            made = _zeros(stacked.shape[1], x.shape[1], stacked)
            for part in parts(x, dtype):
                library_product(stacked[part].t(), x[part].to(dtype), made, beta=1.0)
            made = made.to(dtype)
        for (i, _), gradient in zip(given, made.split(widths), strict=True):
            gradients[i] = gradient
        return gradients
    sums = [_zeros(du.shape[1], x.shape[1], du) for _, du in given]
    for part in parts(x, dtype):
        for total, (i, du) in zip(sums, given, strict=True):
            library_product(du[part].t(), kept_rows(x, part, dtype, drop, i), total, beta=1.0)
    for total, (i, _) in zip(sums, given, strict=True):
        gradients[i] = total.to(dtype)
    return gradients


def add_down_backward(
    dx: torch.Tensor,
    dus: list[torch.Tensor],
    lora_as: list[torch.Tensor],
    adapters: list[int],
    drop: Dropout | None,
) -> None:
    """dx += the sum of k_i (du_i A_i), where it lies."""
    dtype = dus[0].dtype
    if triton_terms.applies(dx.dtype, dtype):
        triton_terms.add_down_backward(dx, dus, lora_as, adapters, drop)
        return
    if drop is None:
        du, a = triton_terms.joined(dus, 1), triton_terms.joined(lora_as, 0)
        if dtype == dx.dtype:
            dx.addmm_(du, a)
            return
        for part in parts(dx, dtype):
            dx[part].add_(du[part] @ a)
        return
    for part in parts(dx, dtype):
        for du, a, adapter in zip(dus, lora_as, adapters, strict=True):
            dropout(du[part] @ a, dx[part], drop.seed, drop.p, adapter, part.start, add=True)


def _zeros(rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(rows, columns, dtype=torch.float32, device=like.device)
