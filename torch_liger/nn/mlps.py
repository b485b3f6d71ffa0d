"""Feed-forward modules. Parameter names are those of the modules they stand in for."""

from collections.abc import Callable
from typing import Any

import torch

from torch_liger import activations


class _GatedMLP(torch.nn.Module):
    """down_proj(act(gate_proj(x)) * up_proj(x)), with Hugging Face's parameter names."""

    function: Callable[..., torch.Tensor]
    activations: dict[str, dict[str, Any]]  # hidden_act: the arguments of the function
    into: tuple[str, ...] = ("gate_proj", "up_proj")

    def __init__(self, config: Any, *, implementation: str | None = None):
        super().__init__()
        # Gemma 2 and 3 call it hidden_activation.
        hidden_act = getattr(config, "hidden_activation", None) or config.hidden_act
        if hidden_act not in self.activations:
            raise ValueError(
                f"hidden_act must be one of {', '.join(map(repr, self.activations))} for "
                f"{type(self).__name__}; got {hidden_act!r}"
            )
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size
        self.hidden_act = hidden_act
        self.implementation = implementation
        bias = getattr(config, "mlp_bias", False)
        for name in self.into:
            width = self.intermediate_size * (2 if name == "gate_up_proj" else 1)
            self.add_module(name, torch.nn.Linear(self.hidden_size, width, bias=bias))
        self.down_proj = torch.nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (..., hidden_size) to (..., hidden_size)."""
        settings = {**self.activations[self.hidden_act], "implementation": self.implementation}
        projected = (getattr(self, name)(x) for name in self.into)
        return self.down_proj(self.function(*projected, **settings))


class LigerSwiGLUMLP(_GatedMLP):
    """The feed-forward layer of LLaMA, Mistral and Qwen, its activation by the fused kernel.

    Args:
        config: a Hugging Face config: hidden_size, intermediate_size, hidden_act ("silu" or
            "swish"), and mlp_bias where the family has it. Another activation is refused.
        implementation: that of `torch_liger.swiglu`.
    """

    function = staticmethod(activations.swiglu)
    activations = {"silu": {}, "swish": {}}  # noqa: RUF012


class LigerPhi3SwiGLUMLP(LigerSwiGLUMLP):
    """The feed-forward layer of Phi-3, whose gate and up are one projection, gate first.

    Args:
        The arguments are those of `LigerSwiGLUMLP`.
    """

    into = ("gate_up_proj",)


class LigerGEGLUMLP(_GatedMLP):
    """The feed-forward layer of Gemma, its activation by the fused kernel.

    Args:
        config: a Hugging Face config: hidden_size, intermediate_size, and hidden_act or
            hidden_activation ("gelu_pytorch_tanh", or "gelu" for the exact one). Another
            activation is refused.
        implementation: that of `torch_liger.geglu`.
    """

    function = staticmethod(activations.geglu)
    activations = {  # noqa: RUF012
        "gelu_pytorch_tanh": {"approximate": "tanh"},
        "gelu": {"approximate": "none"},
    }
