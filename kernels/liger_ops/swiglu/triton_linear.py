"""The gated activation and the linear layer behind it for PyTorch: the activation's result is
computed again in the backward and not kept.
"""

from typing import Any

import torch
import torch.nn.functional as F

from liger_ops import backend_triton
from liger_ops.backend_triton import empty
from liger_ops.swiglu import eager, triton_kernel


class _GatedLinear(torch.autograd.Function):
    """y = a weight^T + bias of a = act(gate) up. Two passes of the backward read gate and up: one
    makes a again, which one kernel for both would have to write all the same.
    """

    @staticmethod
    def forward(ctx: Any, gate, up, weight, bias, activation):
        ctx.save_for_backward(gate, up, weight, bias)
        ctx.activation = activation
        return F.linear(triton_kernel._forward(gate, up, activation), weight, bias)

    @staticmethod
    def backward(ctx: Any, dy):  # type: ignore[override]
        gate, up, weight, bias = ctx.saved_tensors
        need_gate, need_up, need_weight, need_bias, _ = ctx.needs_input_grad
        if backend_triton.creates_graph():
            y = F.linear(eager.gated(gate, up, ctx.activation), weight, bias)
            given = (gate, up, weight, bias)
            return *backend_triton.differentiable_gradients(y, given, dy), None
        rows = dy.reshape(-1, dy.shape[-1])
        dweight = dbias = dgate = dup = None
        if need_weight:
            activated = triton_kernel._forward(gate, up, ctx.activation)
            dweight = rows.t() @ activated.view(-1, activated.shape[-1])
            del activated
        if need_bias:
            dbias = rows.sum(0)
        if need_gate or need_up:
            da = (rows @ weight).view(gate.shape)
            dgate = empty(gate, gate.dtype) if need_gate else None
            dup = empty(up, up.dtype) if need_up else None
            triton_kernel._backward(gate, up, da, dgate, dup, ctx.activation)
        return dgate, dup, dweight, dbias, None


def gated_linear(gate, up, weight, bias, activation: str) -> torch.Tensor:
    """gate (..., F), up (..., F), weight (D, F) and bias (D,), of one dtype, to (..., D)."""
    return _GatedLinear.apply(gate, up, weight, bias, activation)
