"""RMSNorm in Triton for PyTorch, alone and with the residual addition before it.

Kernels, then launchers, then the autograd.Function, then the two entry points. The backward saves
only the normalised input and the weight: it has to read the input anyway, so the row's scale is
cheaper to recompute than to store.
"""

# tl.range, and names that exist on one side of a constexpr:
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from liger_ops import backend_triton
from liger_ops.backend_triton import dense, empty, row_stride, rows
from liger_ops.rms_norm import eager
from liger_ops.rms_norm.cases import Config
from liger_ops.rms_norm.triton_helpers import load_scale, round_as_llama
from liger_ops.rms_norm.triton_wide import backward_two_pass_kernel, forward_wide_kernel
from liger_ops.row_sums import launch_of_sums


@triton.jit
def _forward_kernel(
    x_ptr,  # (M, D)
    residual_ptr,  # (M, D) or None
    weight_ptr,  # (D,) or None
    y_ptr,  # (M, D)
    h_ptr,  # (M, D) or None: x + residual
    num_rows,
    x_stride,
    residual_stride,
    eps,
    offset,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CASTING: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    cols = tl.arange(0, BLOCK_D)
    mask = (rows < num_rows) & (cols < D)[None, :]
    scale = load_scale(weight_ptr, cols, cols < D, offset)

    h = tl.load(x_ptr + rows * x_stride + cols[None, :], mask=mask, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(
            residual_ptr + rows * residual_stride + cols[None, :], mask=mask, other=0.0
        )
        # Rounded before it is normalised: the next layer sees the same h as the norm does.
        h = (h.to(tl.float32) + residual.to(tl.float32)).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + rows * D + cols[None, :], h, mask=mask)
    h32 = h.to(tl.float32)
    r = tl.rsqrt(tl.sum(h32 * h32, axis=1, keep_dims=True) / D + tl.cast(eps, tl.float32))
    n = round_as_llama(h32 * r, h.dtype, CASTING)
    y = n * scale[None, :]
    tl.store(y_ptr + rows * D + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    h_ptr,  # (M, D): the input that was normalised
    weight_ptr,  # (D,) or None
    dy_ptr,  # (M, D)
    dh_ptr,  # (M, D) or None: gradient that reaches h past the norm
    dx_ptr,  # (M, D) or None
    dweight_ptr,  # (programs, D) float32 or None: one partial sum a program
    num_rows,
    h_stride,
    dy_stride,
    dh_stride,
    eps,
    offset,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CASTING: tl.constexpr,
):
    """Each program walks over row blocks and loads the next one before it works on this one."""
    cols = tl.arange(0, BLOCK_D)
    in_row = cols < D
    step = tl.num_programs(0)
    scale = load_scale(weight_ptr, cols, in_row, offset)
    if dweight_ptr is not None:
        dweight = tl.zeros((BLOCK_D,), tl.float32)

    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    mask = (rows < num_rows) & in_row[None, :]
    h = tl.load(h_ptr + rows * h_stride + cols[None, :], mask=mask, other=0.0)
    dy = tl.load(dy_ptr + rows * dy_stride + cols[None, :], mask=mask, other=0.0)
    for _ in tl.range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_ROWS), step, num_stages=1):
        next_rows = rows + step * BLOCK_ROWS
        next_mask = (next_rows < num_rows) & in_row[None, :]
        next_h = tl.load(h_ptr + next_rows * h_stride + cols[None, :], mask=next_mask, other=0.0)
        next_dy = tl.load(dy_ptr + next_rows * dy_stride + cols[None, :], mask=next_mask, other=0.0)

        h32 = h.to(tl.float32)
        dy32 = dy.to(tl.float32)
        g = dy32 * scale[None, :]
        r = tl.rsqrt(tl.sum(h32 * h32, axis=1, keep_dims=True) / D + tl.cast(eps, tl.float32))
        if BLOCK_ROWS > 1:  # without eps, rows beyond the last would have a scale of infinity
            r = tl.where(rows < num_rows, r, 0.0)
        n = h32 * r
        if dx_ptr is not None:
            # mean(g n), summed over g h so that it need not wait for r
            c = r * tl.sum(g * h32, axis=1, keep_dims=True) / D
            dx = r * (g - n * c)
            if dh_ptr is not None:
                dh = tl.load(dh_ptr + rows * dh_stride + cols[None, :], mask=mask, other=0.0)
                dx += dh.to(tl.float32)
            tl.store(dx_ptr + rows * D + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if dweight_ptr is not None:
            dweight += tl.sum(dy32 * round_as_llama(n, h.dtype, CASTING), axis=0)
        rows, mask, h, dy = next_rows, next_mask, next_h, next_dy
    if dweight_ptr is not None:
        tl.store(dweight_ptr + tl.program_id(0).to(tl.int64) * D + cols, dweight, mask=in_row)


class _ForwardPlan(NamedTuple):
    y_dtype: torch.dtype
    h_dtype: torch.dtype
    launch: backend_triton.Launch


class _BackwardPlan(NamedTuple):
    partial_shape: tuple[int, int]
    launch: backend_triton.Launch
    launch_sum: backend_triton.Launch


# By the arguments' metadata: the plans depend on nothing else.
_FORWARD_PLANS: dict[Any, _ForwardPlan] = {}
_BACKWARD_PLANS: dict[Any, _BackwardPlan] = {}


def _plan_forward(x, residual, weight, eps, offset, casting_mode) -> _ForwardPlan:
    h_dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    y_dtype = h_dtype
    if weight is not None and casting_mode != "gemma":
        y_dtype = torch.promote_types(h_dtype, weight.dtype)
    dim = x.shape[-1]
    num_rows = x.numel() // dim
    config = Config.for_shape(dim)
    wide = dim > config.forward_block_d
    launch = backend_triton.Launch(
        forward_wide_kernel if wide else _forward_kernel,
        num_rows if wide else -(-num_rows // config.forward_rows),
        (num_rows, row_stride(rows(x)), row_stride(rows(residual)), eps, offset),
        (dim, config.forward_rows, config.forward_block_d, casting_mode),
        config.forward_warps,
    )
    return _ForwardPlan(y_dtype, h_dtype, launch)


def _plan_backward(h, weight, dy, dh, eps, offset, casting_mode) -> _BackwardPlan:
    dim = h.shape[-1]
    num_rows = h.numel() // dim
    config = Config.for_shape(dim)
    blocks = -(-num_rows // config.backward_rows)
    programs = min(blocks, config.backward_programs * backend_triton.multiprocessors(h.device))
    launch = backend_triton.Launch(
        backward_two_pass_kernel if config.backward_two_pass else _backward_kernel,
        programs,
        (num_rows, *(row_stride(rows(tensor)) for tensor in (h, dy, dh)), eps, offset),
        (dim, config.backward_rows, config.backward_block_d, casting_mode),
        config.backward_warps,
    )
    return _BackwardPlan((programs, dim), launch, launch_of_sums(programs, dim))


def _forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    settings = (eps, offset, casting_mode)
    of = backend_triton.metadata
    plan = backend_triton.kept(
        _FORWARD_PLANS,
        lambda: (of(x), of(residual), of(weight), settings),
        lambda: _plan_forward(x, residual, weight, *settings),
    )
    y = empty(x, plan.y_dtype)
    h = None if residual is None else empty(x, plan.h_dtype)
    if plan.launch.programs:
        plan.launch(rows(x), rows(residual), dense(weight), y, h)
    return y, h


def _backward(
    h: torch.Tensor,
    weight: torch.Tensor | None,
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    settings = (eps, offset, casting_mode)
    of = backend_triton.metadata
    plan = backend_triton.kept(
        _BACKWARD_PLANS,
        lambda: (of(h), of(weight), of(dy), of(dh), settings, need_dx, need_dweight),
        lambda: _plan_backward(h, weight, dy, dh, *settings),
    )
    dx = empty(h, h.dtype) if need_dx else None
    if weight is None or not need_dweight:
        if plan.launch.programs:
            plan.launch(rows(h), dense(weight), rows(dy), rows(dh), dx, None)
        return dx, None
    if not plan.launch.programs:
        return dx, torch.zeros_like(weight)
    partial = torch.empty(plan.partial_shape, dtype=torch.float32, device=h.device)
    plan.launch(rows(h), dense(weight), rows(dy), rows(dh), dx, partial)
    dweight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    plan.launch_sum(partial, dweight, None)
    return dx, dweight


class _RMSNorm(torch.autograd.Function):
    """Outputs y, and h = x + residual beside it when there is a residual."""

    @staticmethod
    def forward(ctx: Any, x, residual, weight, settings):
        y, h = _forward(x, residual, weight, *settings)
        ctx.settings = settings
        if h is None:
            ctx.dtypes = x.dtype, None
            ctx.save_for_backward(x, weight)
            return y
        ctx.dtypes = x.dtype, residual.dtype
        ctx.save_for_backward(h, weight)
        ctx.set_materialize_grads(False)
        return y, h

    @staticmethod
    def backward(ctx: Any, dy, dh=None):
        h, weight = ctx.saved_tensors
        need_x, need_residual, need_weight, _ = ctx.needs_input_grad
        if dy is None:  # only h was used, or nothing was
            dx, dweight = dh, None
        elif backend_triton.creates_graph():
            y = eager.rms_norm(h, weight, *ctx.settings)
            dx, dweight = backend_triton.differentiable_gradients(y, (h, weight), dy)
            if dx is not None and dh is not None:
                dx = dx + dh
        else:
            eps, offset, casting_mode = ctx.settings
            dx, dweight = _backward(
                h, weight, dy, dh, eps, offset, casting_mode, need_x or need_residual, need_weight
            )
        x_dtype, residual_dtype = ctx.dtypes
        return (
            dx.to(x_dtype) if need_x and dx is not None else None,
            dx.to(residual_dtype) if need_residual and dx is not None else None,
            dweight if need_weight else None,
            None,
        )


def _apply(x, residual, weight, eps, offset, casting_mode) -> Any:
    if torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (residual is not None and residual.requires_grad)
    ):
        return _RMSNorm.apply(x, residual, weight, (eps, offset, casting_mode))
    # autograd.Function costs as much host time as the launch: spared where nothing is to be saved.
    y, h = _forward(x, residual, weight, eps, offset, casting_mode)
    return y if h is None else (y, h)


def rms_norm(x, weight, eps, offset, casting_mode) -> torch.Tensor:
    return _apply(x, None, weight, eps, offset, casting_mode)


def fused_add_rms_norm(
    x, residual, weight, eps, offset, casting_mode
) -> tuple[torch.Tensor, torch.Tensor]:
    return _apply(x, residual, weight, eps, offset, casting_mode)
