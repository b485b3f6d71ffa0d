"""Linear layers with low-rank adapters for PyTorch: library products that add up where they lie.

y is the base product's memory and dx the first base product's, so that the adapter writes nothing
of their size but them. x, the weights and the (M, r) products are kept for the backward; dropout's
factors come again from the seed.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from liger_ops import backend_triton
from liger_ops.lora_linear import eager
from liger_ops.lora_linear.triton_dropout import Dropout
from liger_ops.lora_linear.triton_parts import (
    add_down_backward,
    add_up,
    down,
    down_backward,
    up_backward,
)


class Weights(NamedTuple):
    """One projection: weight (O, D) and bias (O,) of x's dtype, A (r, D) and B (O, r) of another
    or the same.
    """

    weight: torch.Tensor
    lora_a: torch.Tensor
    lora_b: torch.Tensor
    bias: torch.Tensor | None


class Needs(NamedTuple):
    """Which of a projection's weights ask for a gradient."""

    weight: bool
    lora_a: bool
    lora_b: bool
    bias: bool


class Options(NamedTuple):
    """What is not a tensor."""

    scalings: tuple[float, ...]
    dropout_p: float


def _forward(
    x: torch.Tensor, seed: torch.Tensor | None, projections: list[Weights], options: Options
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Each y (M, O) and u (M, r)."""
    drop = None if seed is None else Dropout(options.dropout_p, seed)
    us = down(x, [p.lora_a for p in projections], drop)
    ys = []
    for u, projection, scaling in zip(us, projections, options.scalings, strict=True):
        y = F.linear(x, projection.weight, projection.bias)
        ys.append(add_up(y, u, projection.lora_b, scaling))
    return ys, us


def _backward(
    x: torch.Tensor | None,
    seed: torch.Tensor | None,
    projections: list[Weights],
    us: Sequence[torch.Tensor | None],
    dys: Sequence[torch.Tensor | None],
    options: Options,
    need_x: bool,
    needs: list[Needs],
) -> tuple[torch.Tensor | None, list[list[torch.Tensor | None]]]:
    """dx and, for each projection, the gradients of its weights, None where not needed."""
    drop = None if seed is None else Dropout(options.dropout_p, seed)
    dx: torch.Tensor | None = None
    dus: list[torch.Tensor | None] = []
    gradients: list[list[torch.Tensor | None]] = []
    for p, u, dy, scaling, need in zip(projections, us, dys, options.scalings, needs, strict=True):
        made: list[torch.Tensor | None] = [None] * 4
        gradients.append(made)
        if dy is None:
            dus.append(None)
            continue
        lora_b = p.lora_b if need_x or need.lora_a else None
        du, made[2] = up_backward(dy, u if need.lora_b else None, lora_b, scaling)
        dus.append(du)
        if need.weight:
            assert x is not None
            made[0] = dy.t() @ x
        if need.bias:
            made[3] = dy.sum(0, dtype=torch.float32).to(dy.dtype)
        if need_x:
            dx = dy @ p.weight if dx is None else dx.addmm_(dy, p.weight)
    wanted = [du if need.lora_a else None for du, need in zip(dus, needs, strict=True)]
    if any(du is not None for du in wanted):
        assert x is not None
        for made, gradient in zip(gradients, down_backward(x, wanted, drop), strict=True):
            made[1] = gradient
    if dx is not None:
        given = [i for i, du in enumerate(dus) if du is not None]
        lora_as = [projections[i].lora_a for i in given]
        add_down_backward(dx, [dus[i] for i in given], lora_as, given, drop)  # type: ignore[misc]
    return dx, gradients


def _plain_gradients(
    x: torch.Tensor | None,
    seed: torch.Tensor | None,
    projections: list[Weights],
    us: Sequence[torch.Tensor | None],
    dys: Sequence[torch.Tensor | None],
    options: Options,
    need_x: bool,
    needs: list[Needs],
) -> tuple[torch.Tensor | None, list[list[torch.Tensor | None]]]:
    """As `_backward`, by operations that can be differentiated again."""
    if x is None and need_x and any(need.lora_b for need in needs):
        raise RuntimeError(
            "lora_linear: x is not kept where lora_a and weight are frozen, so lora_b's gradient "
            "cannot be differentiated in x; implementation='eager' can"
        )
    dx: torch.Tensor | None = None
    gradients: list[list[torch.Tensor | None]] = []
    for i, (p, u, dy, scaling, need) in enumerate(
        zip(projections, us, dys, options.scalings, needs, strict=True)
    ):
        made: list[torch.Tensor | None] = [None] * 4
        gradients.append(made)
        if dy is None:
            continue
        factors: Any = 1.0
        if seed is not None:
            shape = torch.Size((len(dy), p.lora_a.shape[1] if x is None else x.shape[1]))
            factors = eager.dropout_factors(seed, shape, options.dropout_p, i)
        if need_x or need.lora_a:
            cast = dy.to(p.lora_b.dtype)
            du = scaling * (cast @ p.lora_b)
            if need_x:
                part = dy @ p.weight + ((du @ p.lora_a) * factors).to(dy.dtype)
                dx = part if dx is None else dx + part
            if need.lora_a:
                made[1] = du.t() @ (x * factors).to(du.dtype)  # type: ignore[operator]
        if need.lora_b:
            if x is not None:
                u = (x * factors).to(p.lora_a.dtype) @ p.lora_a.t()
            made[2] = scaling * (dy.t().to(u.dtype) @ u)  # type: ignore[union-attr]
        if need.weight:
            made[0] = dy.t() @ x  # type: ignore[operator]
        if need.bias:
            made[3] = dy.sum(0)
    return dx, gradients


class _LoraLinears(torch.autograd.Function):
    """All ys of projections that share x; `flat` is the fields of one `Weights` after another."""

    @staticmethod
    def forward(ctx: Any, x, seed, options, *flat):
        projections = _grouped(flat)
        ys, us = _forward(x, seed, projections, options)
        ctx.options = options
        ctx.need_x = need_x = ctx.needs_input_grad[0]
        ctx.needs = [
            Needs(*ctx.needs_input_grad[3 + 4 * i : 7 + 4 * i]) for i in range(len(projections))
        ]
        keep_x = any(need.weight or need.lora_a for need in ctx.needs)
        saved: list[Any] = [x if keep_x else None, seed]
        for p, u, need in zip(projections, us, ctx.needs, strict=True):
            saved += [
                p.weight if need_x else None,
                p.lora_a if need_x or need.lora_b else None,
                p.lora_b if need_x or need.lora_a else None,
                u if need.lora_b else None,
            ]
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *dys):  # type: ignore[override]
        x, seed, *saved = ctx.saved_tensors
        groups = [saved[i : i + 4] for i in range(0, len(saved), 4)]
        projections = [Weights(w, a, b, None) for w, a, b, _ in groups]
        us = [group[3] for group in groups]
        run = _plain_gradients if backend_triton.creates_graph() else _backward
        device = next(dy.device.type for dy in dys if dy is not None)
        with torch.autocast(device, enabled=False):  # as in the forward
            dx, gradients = run(x, seed, projections, us, dys, ctx.options, ctx.need_x, ctx.needs)
        return dx, None, None, *(gradient for made in gradients for gradient in made)


def _grouped(flat: Sequence[Any]) -> list[Weights]:
    return [Weights(*flat[i : i + 4]) for i in range(0, len(flat), 4)]


def lora_linears(
    x: torch.Tensor,
    projections: list[Weights],
    scalings: tuple[float, ...],
    dropout_p: float,
    seed: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Each projection's y, (..., O). `seed` is None without dropout. x, the weights and biases are
    of one dtype, and so are all As and Bs.
    """
    rows = x.reshape(-1, x.shape[-1])
    if seed is not None and rows.stride(1) != 1:
        rows = rows.contiguous()
    flat = [tensor for projection in projections for tensor in projection]
    options = Options(scalings, dropout_p)
    given = (x, *flat)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
        ys = _LoraLinears.apply(rows, seed, options, *flat)
    else:
        ys, _ = _forward(rows, seed, projections, options)
    return [y.reshape(*x.shape[:-1], y.shape[-1]) for y in ys]
