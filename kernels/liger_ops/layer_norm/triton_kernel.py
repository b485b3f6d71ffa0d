"""LayerNorm in Triton for PyTorch.

Kernels, then launchers, then the autograd.Function, then the entry point. Beside the input and the
weight, the backward is given every row's mean and scale: two numbers, whose sums would have to come
before its own.
"""

# tl.range, and names that exist on one side of a constexpr:
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from liger_ops import backend_triton
from liger_ops.backend_triton import dense, empty, row_stride, rows
from liger_ops.layer_norm import eager
from liger_ops.layer_norm.cases import Config
from liger_ops.layer_norm.triton_helpers import (
    first_shift,
    is_far,
    load_parameter,
    load_rows,
    moments,
    row_sums,
    scale_of,
)
from liger_ops.layer_norm.triton_wide import backward_two_pass_kernel, forward_wide_kernel
from liger_ops.row_sums import launch_of_sums


@triton.jit
def _forward_kernel(
    x_ptr,  # (M, D)
    weight_ptr,  # (D,) or None
    bias_ptr,  # (D,) or None
    y_ptr,  # (M, D)
    statistics_ptr,  # (M, 2) float32 or None: every row's mean and scale
    num_rows,
    x_stride,
    eps,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    cols = tl.arange(0, BLOCK_D)[None, :]
    in_row = cols < D
    mask = (rows < num_rows) & in_row
    x = tl.load(x_ptr + rows * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    shift = first_shift(x_ptr, rows, rows < num_rows, x_stride, D)

    e, variance = moments(x, shift, in_row, D)
    # Of several rows, to ask whether one is far off would cost the exchange that is to be spared.
    again = True
    if BLOCK_ROWS == 1:
        again = is_far(e, variance)
    if again:
        shift += e
        e, variance = moments(x, shift, in_row, D)
    mean, r = shift + e, scale_of(variance, eps)
    # Loaded only now: they come out of the cache, and fewer registers hold more rows in flight.
    weight = load_parameter(weight_ptr, cols, in_row, 1.0)
    bias = load_parameter(bias_ptr, cols, in_row, 0.0)
    y = (x - mean) * r * weight.to(tl.float32) + bias.to(tl.float32)
    tl.store(y_ptr + rows * D + cols, y.to(y_ptr.dtype.element_ty), mask=mask)
    if statistics_ptr is not None:
        tl.store(statistics_ptr + 2 * rows, mean, mask=rows < num_rows)
        tl.store(statistics_ptr + 2 * rows + 1, r, mask=rows < num_rows)


@triton.jit
def _backward_kernel(
    x_ptr,  # (M, D)
    weight_ptr,  # (D,) or None
    statistics_ptr,  # (M, 2) float32
    dy_ptr,  # (M, D)
    dx_ptr,  # (M, D) or None
    partial_ptr,  # (programs, those asked for of dweight and dbias, D) float32, or None
    num_rows,
    x_stride,
    dy_stride,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WITH_DWEIGHT: tl.constexpr,
    WITH_DBIAS: tl.constexpr,
):
    """Each program walks over row blocks and loads the next one before it works on this one."""
    cols = tl.arange(0, BLOCK_D)[None, :]
    in_row = cols < D
    step = tl.num_programs(0)
    weight = load_parameter(weight_ptr, cols, in_row, 1.0)
    dweight = tl.zeros((1, BLOCK_D), tl.float32)
    dbias = tl.zeros((1, BLOCK_D), tl.float32)

    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    x, dy, mean, r = load_rows(
        x_ptr, dy_ptr, statistics_ptr, rows, cols, num_rows, x_stride, dy_stride, D
    )
    for _ in tl.range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_ROWS), step, num_stages=1):
        next_rows = rows + step * BLOCK_ROWS
        next_x, next_dy, next_mean, next_r = load_rows(
            x_ptr, dy_ptr, statistics_ptr, next_rows, cols, num_rows, x_stride, dy_stride, D
        )
        dy32 = dy.to(tl.float32)
        n = (x.to(tl.float32) - mean) * r
        if WITH_DWEIGHT:
            dweight += tl.sum(dy32 * n, axis=0, keep_dims=True)
        if WITH_DBIAS:
            dbias += tl.sum(dy32, axis=0, keep_dims=True)
        if dx_ptr is not None:
            # Selected, so that the product is rounded before its mean is taken off: fused into one
            # operation, the two would not cancel where a row is one number.
            g = tl.where(in_row, dy32 * weight.to(tl.float32), 0.0)
            sum_g, sum_gn = row_sums(g, g * n)
            dx = r * (g - sum_g / D - n * (sum_gn / D))
            mask = (rows < num_rows) & in_row
            tl.store(dx_ptr + rows * D + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        rows, x, dy, mean, r = next_rows, next_x, next_dy, next_mean, next_r
    if WITH_DWEIGHT or WITH_DBIAS:
        partial_ptr += tl.program_id(0).to(tl.int64) * (WITH_DWEIGHT + WITH_DBIAS) * D
    if WITH_DWEIGHT:
        tl.store(partial_ptr + cols, dweight, mask=in_row)
    if WITH_DBIAS:
        tl.store(partial_ptr + WITH_DWEIGHT * D + cols, dbias, mask=in_row)


class _ForwardPlan(NamedTuple):
    y_dtype: torch.dtype
    launch: backend_triton.Launch


class _BackwardPlan(NamedTuple):
    partial_shape: tuple[int, int, int]
    launch: backend_triton.Launch
    launch_sums: backend_triton.Launch


# By the arguments' metadata: the plans depend on nothing else.
_FORWARD_PLANS: dict[Any, _ForwardPlan] = {}
_BACKWARD_PLANS: dict[Any, _BackwardPlan] = {}


def _plan_forward(x, weight, bias, eps) -> _ForwardPlan:
    y_dtype = x.dtype
    for parameter in (weight, bias):
        if parameter is not None:
            y_dtype = torch.promote_types(y_dtype, parameter.dtype)
    dim = x.shape[-1]
    num_rows = x.numel() // max(dim, 1)
    config = Config.for_shape(dim)
    wide = dim > config.forward_block_d
    launch = backend_triton.Launch(
        forward_wide_kernel if wide else _forward_kernel,
        num_rows if wide else -(-num_rows // config.forward_rows),
        (num_rows, row_stride(rows(x)), eps),
        (dim, config.forward_rows, config.forward_block_d),
        config.forward_warps,
    )
    return _ForwardPlan(y_dtype, launch)


def _plan_backward(x, weight, dy, need_dweight, need_dbias) -> _BackwardPlan:
    dim = x.shape[-1]
    num_rows = x.numel() // max(dim, 1)
    config = Config.for_shape(dim)
    blocks = -(-num_rows // config.backward_rows)
    programs = min(blocks, config.backward_programs * backend_triton.multiprocessors(x.device))
    flags = (int(need_dweight), int(need_dbias))
    launch = backend_triton.Launch(
        backward_two_pass_kernel if config.backward_two_pass else _backward_kernel,
        programs,
        (num_rows, row_stride(rows(x)), row_stride(rows(dy))),
        (dim, config.backward_rows, config.backward_block_d, *flags),
        config.backward_warps,
        config.backward_registers,
    )
    return _BackwardPlan((programs, sum(flags), dim), launch, launch_of_sums(programs, dim))


def _forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    for_backward: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """y, and where it is asked for the rows' mean and scale, (M, 2)."""
    of = backend_triton.metadata
    plan = backend_triton.kept(
        _FORWARD_PLANS,
        lambda: (of(x), of(weight), of(bias), eps, for_backward),
        lambda: _plan_forward(x, weight, bias, eps),
    )
    y = empty(x, plan.y_dtype)
    statistics = None
    if for_backward:
        num_rows = x.numel() // max(x.shape[-1], 1)
        statistics = torch.empty((num_rows, 2), dtype=torch.float32, device=x.device)
    if plan.launch.programs:
        plan.launch(rows(x), dense(weight), dense(bias), y, statistics)
    return y, statistics


def _backward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    statistics: torch.Tensor,
    dy: torch.Tensor,
    bias_dtype: torch.dtype | None,
    need_dx: bool,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    need = (need_dx, need_dweight, need_dbias)
    of = backend_triton.metadata
    plan = backend_triton.kept(
        _BACKWARD_PLANS,
        lambda: (of(x), of(weight), of(dy), need),
        lambda: _plan_backward(x, weight, dy, need_dweight, need_dbias),
    )
    dx = empty(x, x.dtype) if need_dx else None
    make = torch.empty if plan.launch.programs else torch.zeros
    dweight = dbias = None
    if need_dweight:
        assert weight is not None
        dweight = make(weight.shape, dtype=weight.dtype, device=x.device)
    if need_dbias:
        dbias = make(x.shape[-1:], dtype=bias_dtype, device=x.device)
    if not plan.launch.programs:
        return dx, dweight, dbias
    if dweight is None and dbias is None:
        plan.launch(rows(x), dense(weight), statistics, rows(dy), dx, None)
        return dx, None, None
    partial = torch.empty(plan.partial_shape, dtype=torch.float32, device=x.device)
    plan.launch(rows(x), dense(weight), statistics, rows(dy), dx, partial)
    if dweight is None:
        plan.launch_sums(partial, dbias, None)
    else:
        plan.launch_sums(partial, dweight, dbias)
    return dx, dweight, dbias


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, weight, bias, eps):
        y, statistics = _forward(x, weight, bias, eps, True)
        ctx.save_for_backward(x, weight, statistics)
        ctx.eps = eps
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy):  # type: ignore[override]
        x, weight, statistics = ctx.saved_tensors
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        if backend_triton.creates_graph():
            bias = None
            if ctx.bias_dtype is not None:
                # Gradients do not depend on the bias, so any stands in for it.
                bias = torch.zeros(x.shape[-1:], dtype=ctx.bias_dtype, device=x.device)
                bias.requires_grad_(need_bias)
            y = eager.layer_norm(x, weight, bias, ctx.eps)
            return *backend_triton.differentiable_gradients(y, (x, weight, bias), dy), None
        gradients = _backward(
            x, weight, statistics, dy, ctx.bias_dtype, need_x, need_weight, need_bias
        )
        return *gradients, None


def layer_norm(x, weight, bias, eps) -> torch.Tensor:
    if torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        return _LayerNorm.apply(x, weight, bias, eps)  # type: ignore[return-value]
    # autograd.Function costs as much host time as the launch: spared where nothing is to be saved.
    return _forward(x, weight, bias, eps, False)[0]
