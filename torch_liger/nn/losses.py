"""Loss modules, with Liger-Kernel's constructors."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from liger_ops.cross_entropy.check import check_settings
from torch_liger import losses


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
