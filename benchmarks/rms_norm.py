"""rms_norm over the rows of a matrix, with a weight."""

import torch

from description import Case, Peer, normal, with_liger
from liger_ops.rms_norm.cases import LARGE_SHAPES

SHORT = (128, 4096)
SHAPES = [*LARGE_SHAPES, SHORT]
EPS = 1e-6


def case(rows: int, dim: int) -> Case:
    return Case(
        op="rms_norm",
        rows=rows,
        dim=dim,
        shape=f"{rows} x {dim}",
        data=lambda device: (normal(device, rows, dim).requires_grad_(),),
        parameters=lambda device: (normal(device, dim).requires_grad_(),),
        reference=lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * w,
        others=others,
        elements=rows * dim,
        arrays={"forward": 2, "backward": 3},  # x, y; x, dy, dx
        baseline="F.rms_norm",
    )


def others() -> dict[str, Peer]:
    return with_liger(
        {"F.rms_norm": Peer(lambda x, w: torch.nn.functional.rms_norm(x, x.shape[-1:], w, EPS))},
        "rms_norm",
        "LigerRMSNormFunction",
        # in_place=False: its default overwrites the upstream gradient, which is timed repeatedly.
        lambda apply, x, w: apply(x, w, EPS, 0.0, "llama", False),
    )
