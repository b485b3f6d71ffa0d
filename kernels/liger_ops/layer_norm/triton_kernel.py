"""LayerNorm in Triton for PyTorch.

Kernels, then launchers, then the autograd.Function, then the entry point. The backward saves only
the input and the weight: it has to read the input anyway, so the row's mean and scale are cheaper
to recompute than to store.
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
from liger_ops.layer_norm.triton_helpers import load_parameter, moments
from liger_ops.layer_norm.triton_wide import backward_two_pass_kernel, forward_wide_kernel
from liger_ops.row_sums import launch_of_sums


@triton.jit
def _forward_kernel(
    x_ptr,  # (M, D)
    weight_ptr,  # (D,) or None
    bias_ptr,  # (D,) or None
    y_ptr,  # (M, D)
    num_rows,
    x_stride,
    eps,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    cols = tl.arange(0, BLOCK_D)
    in_row = (cols < D)[None, :]
    mask = (rows < num_rows) & in_row
    x = tl.load(x_ptr + rows * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = load_parameter(weight_ptr, cols, cols < D, 1.0)
    bias = load_parameter(bias_ptr, cols, cols < D, 0.0)

    d = tl.where(in_row, x - tl.sum(x, axis=1, keep_dims=True) / D, 0.0)
    e, r = moments(tl.sum(d, axis=1, keep_dims=True), tl.sum(d * d, axis=1, keep_dims=True), D, eps)
    y = (d - e) * r * weight[None, :] + bias[None, :]
    tl.store(y_ptr + rows * D + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    x_ptr,  # (M, D)
    weight_ptr,  # (D,) or None
    dy_ptr,  # (M, D)
    dx_ptr,  # (M, D) or None
    partial_ptr,  # (programs, those asked for of dweight and dbias, D) float32, or None
    num_rows,
    x_stride,
    dy_stride,
    eps,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WITH_DWEIGHT: tl.constexpr,
    WITH_DBIAS: tl.constexpr,
):
    """Each program walks over row blocks and loads the next one before it works on this one."""
    cols = tl.arange(0, BLOCK_D)
    in_row = cols < D
    step = tl.num_programs(0)
    weight = load_parameter(weight_ptr, cols, in_row, 1.0)
    if WITH_DWEIGHT:
        dweight = tl.zeros((BLOCK_D,), tl.float32)
    if WITH_DBIAS:
        dbias = tl.zeros((BLOCK_D,), tl.float32)

    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    mask = (rows < num_rows) & in_row[None, :]
    x = tl.load(x_ptr + rows * x_stride + cols[None, :], mask=mask, other=0.0)
    dy = tl.load(dy_ptr + rows * dy_stride + cols[None, :], mask=mask, other=0.0)
    for _ in tl.range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_ROWS), step, num_stages=1):
        next_rows = rows + step * BLOCK_ROWS
        next_mask = (next_rows < num_rows) & in_row[None, :]
        next_x = tl.load(x_ptr + next_rows * x_stride + cols[None, :], mask=next_mask, other=0.0)
        next_dy = tl.load(dy_ptr + next_rows * dy_stride + cols[None, :], mask=next_mask, other=0.0)

        x32 = x.to(tl.float32)
        dy32 = dy.to(tl.float32)
        if dx_ptr is not None or WITH_DWEIGHT:
            d = tl.where(in_row[None, :], x32 - tl.sum(x32, axis=1, keep_dims=True) / D, 0.0)
            e, r = moments(
                tl.sum(d, axis=1, keep_dims=True), tl.sum(d * d, axis=1, keep_dims=True), D, eps
            )
            n = (d - e) * r
        if dx_ptr is not None:
            # Selected, so that the product is rounded before its mean is taken off: fused into one
            # operation, the two would not cancel where a row is one number.
            g = tl.where(in_row[None, :], dy32 * weight[None, :], 0.0)
            mean_g = tl.sum(g, axis=1, keep_dims=True) / D
            # mean(g n), summed over g d so that it need not wait for r
            mean_gn = r * (tl.sum(g * d, axis=1, keep_dims=True) / D - e * mean_g)
            dx = r * (g - mean_g - n * mean_gn)
            tl.store(dx_ptr + rows * D + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if WITH_DWEIGHT:
            dweight += tl.sum(dy32 * n, axis=0)
        if WITH_DBIAS:
            dbias += tl.sum(dy32, axis=0)
        rows, mask, x, dy = next_rows, next_mask, next_x, next_dy
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


def _plan_backward(x, weight, dy, eps, need_dweight, need_dbias) -> _BackwardPlan:
    dim = x.shape[-1]
    num_rows = x.numel() // max(dim, 1)
    config = Config.for_shape(dim)
    blocks = -(-num_rows // config.backward_rows)
    programs = min(blocks, config.backward_programs * backend_triton.multiprocessors(x.device))
    flags = (int(need_dweight), int(need_dbias))
    launch = backend_triton.Launch(
        backward_two_pass_kernel if config.backward_two_pass else _backward_kernel,
        programs,
        (num_rows, row_stride(rows(x)), row_stride(rows(dy)), eps),
        (dim, config.backward_rows, config.backward_block_d, *flags),
        config.backward_warps,
        config.backward_registers,
    )
    return _BackwardPlan((programs, sum(flags), dim), launch, launch_of_sums(programs, dim))


def _forward(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    of = backend_triton.metadata
    plan = backend_triton.kept(
        _FORWARD_PLANS,
        lambda: (of(x), of(weight), of(bias), eps),
        lambda: _plan_forward(x, weight, bias, eps),
    )
    y = empty(x, plan.y_dtype)
    if plan.launch.programs:
        plan.launch(rows(x), dense(weight), dense(bias), y)
    return y


def _backward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    dy: torch.Tensor,
    bias_dtype: torch.dtype | None,
    eps: float,
    need_dx: bool,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    need = (need_dx, need_dweight, need_dbias)
    of = backend_triton.metadata
    plan = backend_triton.kept(
        _BACKWARD_PLANS,
        lambda: (of(x), of(weight), of(dy), bias_dtype, eps, need),
        lambda: _plan_backward(x, weight, dy, eps, need_dweight, need_dbias),
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
        plan.launch(rows(x), dense(weight), rows(dy), dx, None)
        return dx, None, None
    partial = torch.empty(plan.partial_shape, dtype=torch.float32, device=x.device)
    plan.launch(rows(x), dense(weight), rows(dy), dx, partial)
    if dweight is None:
        plan.launch_sums(partial, dbias, None)
    else:
        plan.launch_sums(partial, dweight, dbias)
    return dx, dweight, dbias


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, weight, bias, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _forward(x, weight, bias, eps)

    @staticmethod
    def backward(ctx: Any, dy):  # type: ignore[override]
        x, weight = ctx.saved_tensors
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
            x, weight, dy, ctx.bias_dtype, ctx.eps, need_x, need_weight, need_bias
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
    return _forward(x, weight, bias, eps)
