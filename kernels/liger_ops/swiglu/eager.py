"""SwiGLU and GeGLU in plain PyTorch: the CPU path, the benchmark's base, the judge's yardstick."""

import torch
import torch.nn.functional as F


def gated(gate: torch.Tensor, up: torch.Tensor | None, activation: str) -> torch.Tensor:
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
