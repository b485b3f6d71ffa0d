"""The language model's head: where its weights are, and whether they are all there is to it."""

from typing import Any

import torch

from torch_liger.patching.patched import slot_of

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def why_not(model: Any) -> str | None:
    """The reason why the loss must be computed from the logits that the head puts out, or None."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    if model.loss_function is not ForCausalLMLoss:
        return "the model has a loss function of its own"
    head = model.lm_head
    wrapper = _saved(head)
    if wrapper is not head and hooked(head):
        return "lm_head has hooks"
    head = wrapper
    reason = why_not_linear(head)
    if reason is not None:
        return f"lm_head {reason}"
    weight = head.weight
    if weight.device.type == "meta":
        return "lm_head is offloaded"
    if not weight.dtype.is_floating_point:
        return f"lm_head's weight is {weight.dtype}"
    if not _is_dtensor(weight) and type(weight.data) is not torch.Tensor:
        return f"lm_head's weight is a {type(weight.data).__name__}"
    return None


def why_not_linear(module: Any) -> str | None:
    """Why a call of the module is not a linear layer of its weight and bias and no more."""
    linear = torch.nn.Linear.forward
    if not isinstance(module, torch.nn.Linear) or type(module).forward is not linear:
        return f"is a {type(module).__name__}"
    if hooked(module):
        return "has hooks"
    own = module.__dict__.get(slot_of(module, "forward"))
    if own is not None and getattr(own, "__func__", None) is not linear:
        return "has a forward that was replaced"
    return None


def parameters(model: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight (V, D) and bias (V,) or None.

    Raises:
        ValueError: if this process holds only a part of the weight.
    """
    head = _saved(model.lm_head)
    weight, bias = _whole("weight", head.weight), head.bias
    if weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(
            f"lm_head.weight must be (vocabulary, hidden size); got {tuple(weight.shape)}, which "
            "is a shard of it: call the model through the wrapper that gathers it (DeepSpeed's "
            "engine, FSDP's root), or patch with fused_linear_cross_entropy=False"
        )
    return weight, None if bias is None else _whole("bias", bias)


def _whole(name: str, parameter: Any) -> torch.Tensor:
    if not _is_dtensor(parameter):
        return parameter
    if not all(placement.is_replicate() for placement in parameter.placements):
        raise ValueError(
            f"lm_head.{name} must be whole; got a DTensor placed as {parameter.placements}: call "
            "the model through FSDP's root, or patch with fused_linear_cross_entropy=False"
        )
    return parameter.full_tensor()


def _is_dtensor(parameter: Any) -> bool:
    return hasattr(parameter, "placements")  # its class takes long to import


def _saved(head: Any) -> Any:
    """The module that PEFT's `modules_to_save` has put in the head's place, or the head."""
    if not hasattr(head, "modules_to_save") or not hasattr(head, "original_module"):
        return head
    active = head.active_adapters
    if head.disable_adapters or any(name not in head.modules_to_save for name in active):
        return head.original_module
    return head.modules_to_save[active[0]]


def hooked(module: torch.nn.Module) -> bool:
    """Whether a call of the module does more than its forward."""
    everywhere = torch.nn.modules.module._has_any_global_hook()
    return bool(everywhere) or any(getattr(module, name) for name in _HOOKS)
