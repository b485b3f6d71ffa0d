"""Normalisation modules. Parameter names are those of the modules they stand in for."""

from collections.abc import Callable

import torch

from torch_liger import norms


def _ones_or_zeros(init_fn: str) -> Callable[..., torch.Tensor]:
    if init_fn not in ("ones", "zeros"):
        raise ValueError(f"init_fn must be one of 'ones', 'zeros'; got {init_fn!r}")
    return torch.ones if init_fn == "ones" else torch.zeros


class LigerRMSNorm(torch.nn.Module):
    """RMSNorm by the fused kernel, with the parameter `weight` of shape (hidden_size,).

    Args:
        hidden_size: D, the size of the last dimension.
        eps, offset, casting_mode, implementation: those of `torch_liger.rms_norm`.
        init_fn: "ones" or "zeros"; "zeros" goes with offset=1.0.
        in_place, row_mode: taken so that calls written for Liger-Kernel work. They choose between
            its kernels; here gradients are never written over the caller's, and tiles are chosen
            from the shape.
        elementwise_affine: False for a norm without a weight.
        device, dtype: of the weight.
    """

    weight: torch.nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
        *,
        implementation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        init = _ones_or_zeros(init_fn)
        self.hidden_size = hidden_size
        self.variance_epsilon = eps
        self.offset = offset
        self.casting_mode = casting_mode
        self.implementation = implementation
        self.weight = None
        if elementwise_affine:
            self.weight = torch.nn.Parameter(init(hidden_size, device=device, dtype=dtype))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalises (..., hidden_size) over its last dimension."""
        return norms.rms_norm(
            hidden_states,
            self.weight,
            eps=self.variance_epsilon,
            offset=self.offset,
            casting_mode=self.casting_mode,
            implementation=self.implementation,
        )

    def extra_repr(self) -> str:
        return (
            f"({self.hidden_size},), eps={self.variance_epsilon}, offset={self.offset}, "
            f"casting_mode={self.casting_mode!r}"
        )


class LigerLayerNorm(torch.nn.Module):
    """LayerNorm by the fused kernel, with the parameters of `torch.nn.LayerNorm`.

    Args:
        hidden_size: D, the size of the last dimension.
        eps, implementation: those of `torch_liger.layer_norm`.
        bias: True for a parameter `bias`, which starts at 0. False, the default as in Liger-Kernel,
            for none at all (there, for one that starts at 0).
        init_fn: "ones" or "zeros", what the parameter `weight` starts as.
        device, dtype: of the parameters.

    With the same parameters it computes what `torch.nn.LayerNorm` does, and either loads the
    other's state. The result has the promoted dtype of input and parameters.
    """

    bias: torch.nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        bias: bool = False,
        init_fn: str = "ones",
        *,
        implementation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        init = _ones_or_zeros(init_fn)
        self.hidden_size = hidden_size
        self.variance_epsilon = eps
        self.implementation = implementation
        self.weight = torch.nn.Parameter(init(hidden_size, device=device, dtype=dtype))
        self.bias = None
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, device=device, dtype=dtype))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalises (..., hidden_size) over its last dimension."""
        return norms.layer_norm(
            hidden_states,
            self.weight,
            self.bias,
            eps=self.variance_epsilon,
            implementation=self.implementation,
        )

    def extra_repr(self) -> str:
        return f"({self.hidden_size},), eps={self.variance_epsilon}, bias={self.bias is not None}"
