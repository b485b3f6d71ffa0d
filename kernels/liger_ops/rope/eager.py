"""Rotary embedding in plain PyTorch: the CPU path, the benchmark's base, the judge's yardstick."""

from collections.abc import Iterable

import torch


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return rotated(q, cos, sin, layout), rotated(k, cos, sin, layout)


def rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str, transposed: bool = False
) -> torch.Tensor:
    """x (B, T, N, H) rotated; backwards, as its gradient is, if `transposed`."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # (..., T, 1, R)
    size = cos.shape[-1]
    turning = x[..., :size]
    if transposed:
        y = turning * cos - _rotate(turning * sin, layout)
    else:
        y = turning * cos + _rotate(turning, layout) * sin
    y = y.to(x.dtype)
    return y if size == x.shape[-1] else torch.cat([y, x[..., size:]], dim=-1)


def _rotate(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "half":
        first, second = x.chunk(2, dim=-1)
        return torch.cat([-second, first], dim=-1)
    return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)


def gradients_of_angles(
    rotations: Iterable[tuple[torch.Tensor | None, torch.Tensor | None]],
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: str,
    transposed: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dcos and dsin from each x that was rotated and the gradient of its result.

    Differentiable, as all here. None if no result was used.
    """
    dcos, dsin = [], []
    for x, dy in rotations:
        if x is None or dy is None:
            continue
        x, dy = (
            a[..., : cos.shape[-1]].to(torch.promote_types(a.dtype, cos.dtype)) for a in (x, dy)
        )
        dcos.append((dy * x).sum(-2))
        turned = _rotate(dy, layout) * x if transposed else dy * _rotate(x, layout)
        dsin.append(turned.sum(-2))
    if not dcos:
        return None, None
    return (
        sum(dcos[1:], dcos[0]).sum_to_size(cos.shape).to(cos.dtype),
        sum(dsin[1:], dsin[0]).sum_to_size(sin.shape).to(sin.dtype),
    )
