"""geglu (with tanh) of two matrices, or of the two halves of one (`fused`)."""

import functools

import torch

from description import Case, Peer, with_liger
from swiglu import SHORT as SHORT
from swiglu import gated_case

SHAPES = [(16384, 14336, False), (16384, 14336, True), SHORT]


def case(rows: int, dim: int, fused: bool) -> Case:
    gelu = functools.partial(torch.nn.functional.gelu, approximate="tanh")
    return gated_case("geglu", rows, dim, fused, gelu, others)


def others(fused: bool) -> dict[str, Peer]:
    if fused:  # liger-kernel has none
        return {}
    # Its backward writes the gradients over gate and up.
    return with_liger(
        {},
        "geglu",
        "LigerGELUMulFunction",
        lambda apply, gate, up: apply(gate, up),
        overwrites=True,
    )
