"""The loss of a causal language model without its logits, for every family.

The model's own forward runs, with all it does for its family: only its head and its loss function
are ours. The head keeps the hidden states and hands out an empty tensor; the loss function, which
the forward calls with the labels and whatever else came for it, computes head and loss in one.
"""

import inspect
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from torch_liger import losses
from torch_liger.patching import head
from torch_liger.patching.patched import Replacement, record_of
from torch_liger.patching.report import log_once


@dataclass(frozen=True)
class Logits:
    """What a family does to its logits, as names of attributes of the config (or the model).

    Args:
        softcap: c of c tanh(logits / c); the attribute may be None.
        multiplied_by, divided_by: a scale.
    """

    softcap: str | None = None
    multiplied_by: str | None = None
    divided_by: str | None = None

    def names(self) -> set[str]:
        return {name for name in (self.softcap, self.multiplied_by, self.divided_by) if name}

    def of(self, model: Any) -> tuple[float | None, float]:
        """softcap and scale of this model."""
        softcap = getattr(model.config, self.softcap) if self.softcap else None
        scale = 1.0
        if self.multiplied_by:
            scale = getattr(model, self.multiplied_by)
        if self.divided_by:
            scale = 1.0 / getattr(model.config, self.divided_by)
        return softcap, scale


def transforms_named_in(forward: Any) -> set[str]:
    """Names in the forward's code that are, by their look, about changing logits."""
    names = inspect.unwrap(forward).__code__.co_names
    return {n for n in names if re.search(r"logits?_scal|soft_?cap|multiplier", n)}


@dataclass(frozen=True)
class FusedLoss(Replacement):
    """The forward of a causal language model with the head and the loss in one."""

    logits: Logits = Logits()
    op: ClassVar[str] = "fused_linear_cross_entropy"

    def make(self) -> Callable[..., Any]:
        stock: Any = self.owner.forward  # type: ignore[attr-defined]
        names = list(inspect.signature(stock).parameters)[1:]
        transforms = self.logits

        def forward(module: Any, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
            if "forward" not in record_of(module):  # unpatched, but called by a wrapper around us
                return stock(module, *args, **kwargs)
            kwargs.update(zip(names, args, strict=False))
            if kwargs.get("labels") is None and kwargs.get("shift_labels") is not None:
                kwargs["labels"] = kwargs["shift_labels"]  # with both, the loss takes the shifted
            has_labels = kwargs.get("labels") is not None
            if skip_logits is None:
                skip_logits = module.training and has_labels
            if not skip_logits:
                return stock(module, **kwargs)
            if not has_labels:
                raise ValueError("skip_logits=True needs labels or shift_labels; got neither")
            reason = head.why_not(module)
            if reason is not None:
                _warn_once(type(module).__name__, reason)
                return stock(module, **kwargs)
            return _without_logits(stock, module, kwargs, transforms)

        return forward


def _without_logits(stock: Any, module: Any, kwargs: dict[str, Any], transforms: Logits) -> Any:
    return_dict = kwargs.pop("return_dict", None)
    if return_dict is None:
        return_dict = module.config.return_dict
    output = stock(_WithOurHead(module, transforms), return_dict=True, **kwargs)
    fields = {name: value for name, value in output.items() if name != "logits"}
    output = type(output)(**fields)
    return output if return_dict else output.to_tuple()


class _WithOurHead:
    """The model as its own forward sees it: other than the head and the loss, it is the model."""

    def __init__(self, model: Any, transforms: Logits):
        self._model = model
        self._transforms = transforms
        self._hidden: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        self._hidden = hidden
        return hidden.new_empty(0)

    def loss_function(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        softcap, scale = self._transforms.of(self._model)

        def loss(hidden: torch.Tensor) -> torch.Tensor:
            weight, bias = head.parameters(self._model)
            hidden = hidden.to(weight.device)  # the head may be on another GPU
            if bias is not None and scale != 1.0:
                bias = bias * scale
            return losses.fused_linear_cross_entropy(
                hidden.reshape(-1, hidden.shape[-1]),
                weight,
                next_tokens(labels, shift_labels, ignore_index).to(weight.device),
                bias=bias,
                logit_scale=scale,
                softcap=softcap,
                ignore_index=ignore_index,
                num_items=num_items_in_batch,
            )

        return head.in_place_of(self._model, loss, self._hidden)


@dataclass(frozen=True)
class CrossEntropy(Replacement):
    """The loss function of a causal language model, over its logits."""

    op: ClassVar[str] = "cross_entropy"
    method: ClassVar[str] = "_loss_function"  # what transformers' `loss_function` looks for

    def make(self) -> Callable[..., Any]:
        def _loss_function(
            module: Any,
            logits: torch.Tensor,
            labels: torch.Tensor,
            vocab_size: int | None = None,
            num_items_in_batch: int | torch.Tensor | None = None,
            ignore_index: int = -100,
            shift_labels: torch.Tensor | None = None,
            **kwargs: Any,
        ) -> torch.Tensor:
            return losses.cross_entropy(
                logits.reshape(-1, logits.shape[-1]),
                next_tokens(labels, shift_labels, ignore_index).to(logits.device),
                ignore_index=ignore_index,
                num_items=num_items_in_batch,
            )

        return _loss_function


def next_tokens(
    labels: torch.Tensor, shift_labels: torch.Tensor | None, ignore_index: int
) -> torch.Tensor:
    """The label of every position, flat: shifted already, or the next position's."""
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return shift_labels.reshape(-1)


def _warn_once(name: str, reason: str) -> None:
    if not torch.compiler.is_compiling():
        log_once(logging.WARNING, f"{name}: the loss is computed from logits: {reason}")
