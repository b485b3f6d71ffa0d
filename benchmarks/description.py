"""What a benchmark has to say about its operation; `measuring` does the rest."""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Peer:
    """One implementation in PyTorch.

    Attributes:
        function: takes the arguments as the operation does. Its backward is autograd's.
        in_graph: False where it waits for the GPU and so cannot be captured in a CUDA graph.
        overwrites: True where it writes into its arguments, into what it saved of them, or into
            upstream gradients. It gets copies of its own, made before the clock runs, and repeated
            calls then work on what the last one left: other numbers, the same bytes.
    """

    function: Callable[..., Any]
    in_graph: bool = True
    overwrites: bool = False


@dataclass(frozen=True)
class Case:
    """One operation at one shape.

    Attributes:
        op: the function's name in both packages.
        rows, dim, shape: how results name the shape, in two numbers and in words.
        data: draws on a device the arguments of which every set has its own. Those that require a
            gradient, here and in `parameters`, are those it is measured for.
        parameters: draws the arguments that follow, which all sets share.
        reference: the operation by its formula, run in float64 for the check.
        others: draws up the peers in PyTorch beside the two versions of `torch_liger`.
        elements: of the bfloat16 array whose device copy is the measure.
        arrays: for each pass to time, how many such arrays it has to read or write.
        baseline: the peer that launch costs are relative to.
    """

    op: str
    rows: int
    dim: int
    shape: str
    data: Callable[[str], Tensors]
    parameters: Callable[[str], Tensors]
    reference: Callable[..., Any]
    others: Callable[[], dict[str, Peer]]
    elements: int
    arrays: dict[str, int]
    baseline: str = "eager"


def normal(device: str, *shape: int, spread: float = 1.0) -> torch.Tensor:
    """Normally distributed bfloat16 numbers."""
    return torch.randn(*shape, device=device, dtype=torch.bfloat16).mul_(spread)


def with_liger(
    peers: dict[str, Peer], module: str, function: str, call: Callable[..., Any], **settings: bool
) -> dict[str, Peer]:
    """The peers, and liger-kernel's autograd function where it is installed.

    Args:
        module, function: where it is, in `liger_kernel.ops`.
        call: gets the function's `apply` and then the operation's arguments.
        settings: of `Peer`.
    """
    try:
        apply = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function).apply
    except ImportError:
        return peers
    name = "liger-kernel" if settings.get("in_graph", True) else "liger-kernel (no graph)"
    return {**peers, name: Peer(functools.partial(call, apply), **settings)}
