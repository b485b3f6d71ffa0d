"""PyTorch modules. Parameter names are those of the modules they stand in for."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from liger_ops.cross_entropy.check import check_settings
from torch_liger import activations, losses, norms


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


class CrossEntropyOutput(NamedTuple):
    """What the loss modules return where more than the loss was asked for; else None."""

    loss: torch.Tensor
    z_loss: torch.Tensor | None = None
    token_accuracy: torch.Tensor | None = None
    predicted_tokens: torch.Tensor | None = None


class _CrossEntropyModule(torch.nn.Module):
    """The arguments that both loss modules have, in Liger-Kernel's names."""

    def __init__(
        self,
        weight: torch.Tensor | None,
        ignore_index: int,
        lse_square_scale: float,
        label_smoothing: float,
        reduction: str,
        softcap: float | None,
        returns: tuple[bool, bool, bool],
        implementation: str | None,
    ):
        super().__init__()
        check_settings(label_smoothing, softcap, lse_square_scale, reduction, False)
        # A buffer, as torch.nn.CrossEntropyLoss has it.
        self.register_buffer("class_weight", weight, persistent=False)
        self.ignore_index = ignore_index
        self.lse_square_scale = lse_square_scale
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.softcap = softcap
        self.return_z_loss, self.return_token_accuracy, self.return_predicted_tokens = returns
        self.implementation = implementation

    def _loss(
        self, function: Callable[..., Any], *args: Any, **settings: Any
    ) -> torch.Tensor | CrossEntropyOutput:
        wants_metrics = self.return_token_accuracy or self.return_predicted_tokens
        loss, z_loss, *metrics = function(
            *args,
            ignore_index=self.ignore_index,
            class_weight=self.class_weight,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            z_loss=self.lse_square_scale,
            reduction=self.reduction,
            return_z_loss=True,
            return_metrics=wants_metrics,
            implementation=self.implementation,
            **settings,
        )
        if not self.return_z_loss and not wants_metrics:
            return loss
        return CrossEntropyOutput(
            loss,
            z_loss if self.return_z_loss else None,
            metrics[0].token_accuracy if self.return_token_accuracy else None,
            metrics[0].predicted_tokens if self.return_predicted_tokens else None,
        )


class LigerCrossEntropyLoss(_CrossEntropyModule):
    """Cross-entropy over given logits by the fused kernel.

    Args:
        weight: class weights (V,), the `class_weight` of `torch_liger.cross_entropy`.
        lse_square_scale: its `z_loss`.
        ignore_index, label_smoothing, reduction, softcap, implementation: its own.
        return_z_loss, return_token_accuracy, return_predicted_tokens: return a
            `CrossEntropyOutput` with these, and not the loss alone.
    """

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        *,
        implementation: str | None = None,
    ):
        returns = (return_z_loss, return_token_accuracy, return_predicted_tokens)
        super().__init__(
            weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, returns,
            implementation,
        )  # fmt: skip

    def forward(
        self, input: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor | CrossEntropyOutput:
        """The loss of logits (..., V) for labels (...)."""
        return self._loss(losses.cross_entropy, input, target)


class LigerFusedLinearCrossEntropyLoss(_CrossEntropyModule):
    """The head and its cross-entropy in one, without holding the logits.

    Args:
        ce_weight: class weights (V,), the `class_weight` of
            `torch_liger.fused_linear_cross_entropy`.
        accum_dtype: its own; None is float32.
        use_token_scaling: taken so that calls written for Liger-Kernel work; True, which weighs
            each token by its own probability, is refused.
        memory: its own.
        The others are those of `LigerCrossEntropyLoss`.
    """

    def __init__(
        self,
        ce_weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        *,
        memory: str | int = "fast",
        implementation: str | None = None,
    ):
        if use_token_scaling:
            raise ValueError("use_token_scaling must be False; got True")
        returns = (return_z_loss, return_token_accuracy, return_predicted_tokens)
        super().__init__(
            ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, returns,
            implementation,
        )  # fmt: skip
        self.accum_dtype = torch.float32 if accum_dtype is None else accum_dtype
        self.memory = memory

    def forward(
        self,
        lin_weight: torch.Tensor,
        _input: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor | CrossEntropyOutput:
        """The loss of _input (..., D) through a head (V, D) for labels (...)."""
        return self._loss(
            losses.fused_linear_cross_entropy,
            _input,
            lin_weight,
            target,
            bias=bias,
            accum_dtype=self.accum_dtype,
            memory=self.memory,
        )
