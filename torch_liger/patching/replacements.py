"""What stands in for the methods of norms, feed-forward layers and experts.

A table row's entry (`families`) is asked for a replacement for each module, and answers with one
or with the reason why there is none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from liger_ops.swiglu.check import activation_of
from torch_liger import activations, norms
from torch_liger.lora import project
from torch_liger.patching import head
from torch_liger.patching.patched import Replacement

# The activation modules of transformers and PyTorch that `swiglu` and `geglu` compute.
_SILU = ("SiLU", "SiLUActivation")
_GELU = {"GELUTanh": "tanh", "PytorchGELUTanh": "tanh", "GELUActivation": "none", "GELU": None}


@dataclass(frozen=True)
class RMSNorm(Replacement):
    """The settings are those of `torch_liger.rms_norm`; `eps` is the attribute that has it."""

    offset: float = 0.0
    casting_mode: str = "llama"
    eps: str = "variance_epsilon"
    op: ClassVar[str] = "rms_norm"

    def make(self) -> Callable[..., Any]:
        offset, casting_mode, eps = self.offset, self.casting_mode, self.eps

        def forward(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
            return norms.rms_norm(
                hidden_states,
                getattr(module, "weight", None),
                eps=getattr(module, eps),
                offset=offset,
                casting_mode=casting_mode,
            )

        return forward


@dataclass(frozen=True)
class T5RMSNorm(Replacement):
    """T5 rounds to the weight's dtype, whatever came in: LLaMA's way where the two are one."""

    op: ClassVar[str] = "rms_norm"

    def make(self) -> Callable[..., Any]:
        stock = self.owner.forward  # type: ignore[attr-defined]

        def forward(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
            if hidden_states.dtype != module.weight.dtype:
                return stock(module, hidden_states)
            return norms.rms_norm(hidden_states, module.weight, eps=module.variance_epsilon)

        return forward


@dataclass(frozen=True)
class LayerNorm(Replacement):
    """`torch.nn.LayerNorm`, which autocast runs in float32."""

    op: ClassVar[str] = "layer_norm"

    def make(self) -> Callable[..., Any]:
        def forward(module: Any, input: torch.Tensor) -> torch.Tensor:
            if torch.is_autocast_enabled(input.device.type):
                input = input.float()
            return norms.layer_norm(input, module.weight, module.bias, eps=module.eps)

        return forward


@dataclass(frozen=True)
class LayerNorm1P(Replacement):
    """Nemotron's: the weight is stored around 0, and autocast's dtype is kept."""

    op: ClassVar[str] = "layer_norm"

    def make(self) -> Callable[..., Any]:
        def forward(module: Any, input: torch.Tensor) -> torch.Tensor:
            weight, bias, device = module.weight + 1.0, module.bias, input.device.type
            if torch.is_autocast_enabled(device):
                dtype = torch.get_autocast_dtype(device)
                input, weight = input.to(dtype), weight.to(dtype)
                bias = None if bias is None else bias.to(dtype)
            return norms.layer_norm(input, weight, bias, eps=module.eps)

        return forward


@dataclass(frozen=True)
class CohereLayerNorm(Replacement):
    """Without a bias, and with the result in the input's dtype."""

    op: ClassVar[str] = "layer_norm"

    def make(self) -> Callable[..., Any]:
        def forward(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
            y = norms.layer_norm(hidden_states, module.weight, eps=module.variance_epsilon)
            return y.to(hidden_states.dtype)

        return forward


@dataclass(frozen=True)
class GatedMLP(Replacement):
    """down_proj(act(gate_proj(x)) * up_proj(x)). The projections are called, whatever they are; a
    down_proj that is nothing but its weights goes into one function with the activation, whose
    result is then not kept for the backward.

    Args:
        approximate: None for SiLU, else that of `torch_liger.geglu`.
        projections: into the activation; one alone puts out gate and up, in this order.
    """

    approximate: str | None = None
    projections: tuple[str, ...] = ("gate_proj", "up_proj")

    @property
    def op(self) -> str:
        return "swiglu" if self.approximate is None else "geglu"

    def make(self) -> Callable[..., Any]:
        gated, projections = _gated(self.approximate), self.projections
        activation = "silu" if self.approximate is None else activation_of(self.approximate)

        def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
            projected = project(x, *(getattr(module, name) for name in projections))
            down = module.down_proj
            if len(projected) == 2 and _is_all(down):
                return activations.gated_linear(
                    *projected, down.weight, down.bias, activation=activation
                )
            return down(gated(*projected))

        return forward


@dataclass(frozen=True)
class ExpertsGate(Replacement):
    """The activation of experts that are computed together: gate and up come in one tensor."""

    approximate: str | None = None
    method: ClassVar[str] = "_apply_gate"

    @property
    def op(self) -> str:
        return "swiglu" if self.approximate is None else "geglu"

    def make(self) -> Callable[..., Any]:
        gated = _gated(self.approximate)

        def _apply_gate(module: Any, gate_up_out: torch.Tensor) -> torch.Tensor:
            return gated(gate_up_out)

        return _apply_gate


@dataclass(frozen=True)
class Llama4Experts(ExpertsGate):
    """LLaMA 4's experts, as batched products of all experts with all their tokens."""

    method: ClassVar[str] = "forward"

    def make(self) -> Callable[..., Any]:
        gated = _gated(self.approximate)

        def forward(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
            experts = module.gate_up_proj.shape[0]
            x = hidden_states.view(experts, -1, module.hidden_size)
            y = torch.bmm(gated(torch.bmm(x, module.gate_up_proj)), module.down_proj)
            return y.view(-1, module.hidden_size)

        return forward


def _is_all(linear: Any) -> bool:
    """Whether a module is its weight and bias, so that it need not be called. The compiler decides
    by itself what it keeps, and DTensors know their own products.
    """
    if torch.compiler.is_compiling() or head.why_not_linear(linear) is not None:
        return False
    return type(linear.weight.data) is torch.Tensor


def _gated(approximate: str | None) -> Callable[..., torch.Tensor]:
    if approximate is None:
        return activations.swiglu

    def geglu(*projected: torch.Tensor) -> torch.Tensor:
        return activations.geglu(*projected, approximate=approximate)

    return geglu


def gate_of(module: torch.nn.Module) -> tuple[str | None] | str:
    """The `approximate` of a module's activation, in a tuple; or the reason why we have none."""
    activation: Any = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    name = type(activation).__name__
    if name in _SILU:
        return (None,)
    if name in _GELU:
        # transformers has variants of its classes that spell the formula out: the same function.
        return (_GELU[name] or activation.approximate,)
    return f"the activation {name} has no kernel"
