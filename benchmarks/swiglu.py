"""swiglu of two matrices, or of the two halves of one (`fused`)."""

from collections.abc import Callable

import torch

from description import Case, Peer, normal, with_liger

SHORT = (128, 14336, False)
SHAPES = [
    (rows, dim, fused) for fused in (False, True) for rows, dim in ((16384, 14336), (16384, 11008))
]
SHAPES += [SHORT, (128, 14336, True)]


def case(rows: int, dim: int, fused: bool) -> Case:
    return gated_case("swiglu", rows, dim, fused, torch.nn.functional.silu, others)


def gated_case(
    op: str,
    rows: int,
    dim: int,
    fused: bool,
    activation: Callable[[torch.Tensor], torch.Tensor],
    others: Callable[[bool], dict[str, Peer]],
) -> Case:
    """The description that swiglu and geglu share; `dim` is that of the result."""

    def data(device: str) -> tuple[torch.Tensor, ...]:
        if fused:
            return (normal(device, rows, 2 * dim).requires_grad_(),)
        return tuple(normal(device, rows, dim).requires_grad_() for _ in ("gate", "up"))

    def reference(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        if up is None:
            gate, up = gate.chunk(2, -1)
        return activation(gate) * up

    return Case(
        op=op,
        rows=rows,
        dim=dim,
        shape=f"{rows} x {dim}" + " fused" * fused,
        data=data,
        parameters=lambda device: (),
        reference=reference,
        others=lambda: others(fused),
        elements=rows * dim,
        arrays={"forward": 3, "backward": 5},  # gate, up, y; gate, up, dy, dgate, dup
    )


def others(fused: bool) -> dict[str, Peer]:
    if fused:
        function = "LigerFusedGateUpSiLUMulFunction"
        return with_liger({}, "swiglu", function, lambda apply, gate_up: apply(gate_up))
    # Its backward writes the gradients over gate and up.
    return with_liger(
        {},
        "swiglu",
        "LigerSiLUMulFunction",
        lambda apply, gate, up: apply(gate, up),
        overwrites=True,
    )
