"""layer_norm over the rows of a matrix, with a weight and a bias."""

import torch

from description import Case, Peer, normal, with_liger
from rms_norm import SHAPES as SHAPES
from rms_norm import SHORT as SHORT

EPS = 1e-5


def case(rows: int, dim: int) -> Case:
    return Case(
        op="layer_norm",
        rows=rows,
        dim=dim,
        shape=f"{rows} x {dim}",
        data=lambda device: (normal(device, rows, dim).requires_grad_(),),
        parameters=lambda device: tuple(normal(device, dim).requires_grad_() for _ in "wb"),
        reference=_reference,
        others=others,
        elements=rows * dim,
        arrays={"forward": 2, "backward": 3},  # x, y; x, dy, dx
        baseline="F.layer_norm",
    )


def _reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + EPS) * weight + bias


def others() -> dict[str, Peer]:
    layer_norm = torch.nn.functional.layer_norm
    return with_liger(
        {"F.layer_norm": Peer(lambda x, w, b: layer_norm(x, x.shape[-1:], w, b, EPS))},
        "layer_norm",
        "LigerLayerNormFunction",
        lambda apply, x, w, b: apply(x, w, b, EPS),
    )
