"""SwiGLU and GeGLU in Triton for PyTorch.

Kernels, then launchers, then the autograd.Function, then the entry point. Only gate and up are
saved for the backward, and neither is written to.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from liger_ops import backend_triton
from liger_ops.backend_triton import empty, row_stride, rows
from liger_ops.swiglu import eager
from liger_ops.swiglu.cases import Config


@triton.jit
def _normal_cdf(g):
    """erfc(-g / sqrt 2) / 2, its fractional error below 1.2e-7 everywhere.

    The Chebyshev fit of erfc in Press et al., Numerical Recipes, section 6.2.
    """
    z = tl.abs(g) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.5 * z)
    fit = -0.82215223 + t * 0.17087277
    fit = -1.13520398 + t * (1.48851587 + t * fit)
    fit = -0.18628806 + t * (0.27886807 + t * fit)
    fit = 0.37409196 + t * (0.09678418 + t * fit)
    fit = -1.26551223 + t * (1.00002368 + t * fit)
    tail = 0.5 * t * tl.exp(fit - z * z)
    return tl.where(g < 0.0, tail, 1.0 - tail)


@triton.jit
def _sigmoid(x):
    """s(x) and 1 - s(x), without overflow and without cancellation."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, e, 1.0) / (1.0 + e), tl.where(x < 0.0, 1.0, e) / (1.0 + e)


@triton.jit
def _activate(g, ACTIVATION: tl.constexpr):
    """a(g) and a'(g), float32."""
    if ACTIVATION == "silu":
        s, rest = _sigmoid(g)
        slope = s * (1.0 + g * rest)
    elif ACTIVATION == "gelu_tanh":
        square = tl.minimum(g * g, 1e30)  # an infinite one would meet a zero below
        s, rest = _sigmoid(1.5957691216057308 * g * (1.0 + 0.044715 * square))  # 2 sqrt(2 / pi)
        slope = s + g * s * rest * (1.5957691216057308 * (1.0 + 0.134145 * square))
    else:
        s = _normal_cdf(g)
        slope = s + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)
    return g * s, slope


@triton.jit
def _tile(num_rows, F: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_F: tl.constexpr):
    """This program's rows (R, 1) and columns (1, C), and the mask of what lies in the array."""
    column_blocks: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    program = tl.program_id(0).to(tl.int64)
    row = program // column_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = program % column_blocks * BLOCK_F + tl.arange(0, BLOCK_F)[None, :]
    return row, col, (row < num_rows) & (col < F)


@triton.jit
def _forward_kernel(
    gate_ptr,  # (M, F)
    up_ptr,  # (M, F)
    y_ptr,  # (M, F)
    num_rows,
    gate_stride,
    up_stride,
    F: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_F: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    row, col, mask = _tile(num_rows, F, BLOCK_ROWS, BLOCK_F)
    gate = tl.load(gate_ptr + row * gate_stride + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + col, mask=mask, other=0.0).to(tl.float32)
    activated, _ = _activate(gate, ACTIVATION)
    tl.store(y_ptr + row * F + col, (activated * up).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    gate_ptr,  # (M, F)
    up_ptr,  # (M, F)
    dy_ptr,  # (M, F)
    dgate_ptr,  # (M, F) or None
    dup_ptr,  # (M, F) or None
    num_rows,
    gate_stride,
    up_stride,
    dy_stride,
    gradient_stride,
    F: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_F: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    row, col, mask = _tile(num_rows, F, BLOCK_ROWS, BLOCK_F)
    gate = tl.load(gate_ptr + row * gate_stride + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + col, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * dy_stride + col, mask=mask, other=0.0).to(tl.float32)
    activated, slope = _activate(gate, ACTIVATION)
    at = row * gradient_stride + col
    if dgate_ptr is not None:
        tl.store(dgate_ptr + at, (dy * up * slope).to(dgate_ptr.dtype.element_ty), mask=mask)
    if dup_ptr is not None:
        tl.store(dup_ptr + at, (dy * activated).to(dup_ptr.dtype.element_ty), mask=mask)


# By the arguments' metadata: the launches depend on nothing else.
_FORWARD_LAUNCHES: dict[Any, backend_triton.Launch] = {}
_BACKWARD_LAUNCHES: dict[Any, backend_triton.Launch] = {}


def _launch(kernel: Any, activation: str, *strided: torch.Tensor, stride: int | None = None):
    """The launch of `kernel` over tensors of one shape (..., F)."""
    shape = strided[0].shape
    config = Config.for_shape(shape[-1])
    num_rows = strided[0].numel() // max(shape[-1], 1)
    column_blocks = -(-shape[-1] // config.block_f)
    strides = [row_stride(rows(tensor)) for tensor in strided]
    return backend_triton.Launch(
        kernel,
        -(-num_rows // config.block_rows) * column_blocks,
        (num_rows, *strides, *(() if stride is None else (stride,))),
        (shape[-1], config.block_rows, config.block_f, activation),
        config.num_warps,
    )


def _forward(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    of = backend_triton.metadata
    launch = backend_triton.kept(
        _FORWARD_LAUNCHES,
        lambda: (of(gate), of(up), activation),
        lambda: _launch(_forward_kernel, activation, gate, up),
    )
    y = empty(gate, torch.promote_types(gate.dtype, up.dtype))
    if launch.programs:
        launch(rows(gate), rows(up), y)
    return y


def _backward(
    gate: torch.Tensor,
    up: torch.Tensor,
    dy: torch.Tensor,
    dgate: torch.Tensor | None,
    dup: torch.Tensor | None,
    activation: str,
) -> None:
    """Fills dgate and dup, rows of one distance: whole tensors, or the halves of one."""
    written = dgate if dgate is not None else dup
    stride = row_stride(rows(written))
    of, needed = backend_triton.metadata, (dgate is not None, dup is not None, stride)
    launch = backend_triton.kept(
        _BACKWARD_LAUNCHES,
        lambda: (of(gate), of(up), of(dy), needed, activation),
        lambda: _launch(_backward_kernel, activation, gate, up, dy, stride=stride),
    )
    if launch.programs:
        launch(rows(gate), rows(up), rows(dy), dgate, dup)


class _Gated(torch.autograd.Function):
    """up is None where gate holds both halves."""

    @staticmethod
    def forward(ctx: Any, gate, up, activation):
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _forward(*_halves(gate, up), activation=activation)

    @staticmethod
    def backward(ctx: Any, dy):  # type: ignore[override]
        gate, up = ctx.saved_tensors
        need_gate, need_up, _ = ctx.needs_input_grad
        if backend_triton.creates_graph():
            y = eager.gated(gate, up, ctx.activation)
            return *backend_triton.differentiable_gradients(y, (gate, up), dy), None
        dgate = empty(gate, gate.dtype) if need_gate else None
        dup = empty(up, up.dtype) if need_up else None
        into = (dgate, dup) if up is not None else _halves(dgate, None)
        gate, up = _halves(gate, up)
        _backward(gate, up, dy, into[0], into[1], ctx.activation)
        return dgate, dup, None


def _halves(gate: Any, up: torch.Tensor | None) -> tuple[Any, Any]:
    if up is not None:
        return gate, up
    half = gate.shape[-1] // 2
    return gate[..., :half], gate[..., half:]


def gated(gate: torch.Tensor, up: torch.Tensor | None, activation: str) -> torch.Tensor:
    if torch.is_grad_enabled() and (gate.requires_grad or (up is not None and up.requires_grad)):
        return _Gated.apply(gate, up, activation)
    return _forward(*_halves(gate, up), activation=activation)
