"""The language model's head: where its weights are, and whether they are all there is to it."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_liger.patching.patched import slot_of
from torch_liger.vocab_parallel import as_forward_of, is_dtensor

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Where the hooks are defined that only make a module's parameters whole around its forward and its
# backward, and have their gradients reduced: FSDP's and those of DeepSpeed's ZeRO-3.
_GATHERING = ("torch.distributed.fsdp.", "deepspeed.runtime.zero.", "deepspeed.utils.nvtx")


def why_not(model: Any) -> str | None:
    """The reason why the loss must be computed from the logits that the head puts out, or None."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    if model.loss_function is not ForCausalLMLoss:
        return "the model has a loss function of its own"
    *wrappers, head = _modules(model)
    hooks = _hooked_beyond_gathering
    reason = "has hooks" if any(map(hooks, wrappers)) else why_not_linear(head, hooks)
    if reason is not None:
        return f"lm_head {reason}"
    # Not head.weight: DeepSpeed would gather it for as long as the model's forward takes.
    weight = head._parameters.get("weight")
    weight = head.weight if weight is None else weight
    if weight.device.type == "meta":
        return "lm_head is offloaded"
    if not weight.dtype.is_floating_point:
        return f"lm_head's weight is {weight.dtype}"
    if not is_dtensor(weight) and type(weight.data) is not torch.Tensor:
        return f"lm_head's weight is a {type(weight.data).__name__}"
    return None


def why_not_linear(
    module: Any, hooked: Callable[[torch.nn.Module], bool] | None = None
) -> str | None:
    """Why a call of the module is not a linear layer of its weight and bias and no more."""
    linear = torch.nn.Linear.forward
    if not isinstance(module, torch.nn.Linear) or type(module).forward is not linear:
        return f"is a {type(module).__name__}"
    if (hooked or has_hooks)(module):
        return "has hooks"
    own = module.__dict__.get(slot_of(module, "forward"))
    if own is not None and getattr(own, "__func__", None) is not linear:
        return "has a forward that was replaced"
    return None


def in_place_of(
    model: Any, function: Callable[..., torch.Tensor], hidden: torch.Tensor
) -> torch.Tensor:
    """function(hidden) in the head's place, between the hooks that gather the head's weights."""
    for module in reversed(_modules(model)):
        if has_hooks(module):
            function = functools.partial(as_forward_of, module, function)
    return function(hidden)


def parameters(model: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight (V, D) and bias (V,) or None.

    Raises:
        ValueError: if this process holds only a part of one of them.
    """
    head = _modules(model)[-1]
    weight = _whole("weight", head.weight, 2)
    return weight, None if head.bias is None else _whole("bias", head.bias, 1)


def _whole(name: str, parameter: Any, dims: int) -> torch.Tensor:
    if is_dtensor(parameter):
        if all(placement.is_replicate() for placement in parameter.placements):
            return parameter.full_tensor()
        part, whole = parameter.to_local().shape, parameter.shape
    elif parameter.dim() != dims or parameter.numel() == 0:
        part, whole = parameter.shape, getattr(parameter, "ds_shape", None)  # DeepSpeed's
    else:
        return parameter
    shape = "(vocabulary, hidden size)" if dims == 2 else "(vocabulary,)"
    of = f" of {tuple(whole)}" if whole is not None else ""
    raise ValueError(
        f"lm_head.{name} must be {shape}; got {tuple(part)}, this process's part{of}: call the "
        "model through the wrapper that gathers it (DeepSpeed's engine, FSDP's root), or patch "
        "with fused_linear_cross_entropy=False"
    )


def _modules(model: Any) -> list[Any]:
    """The head, after PEFT's wrapper around it where there is one: `modules_to_save` has a copy."""
    head = model.lm_head
    if not hasattr(head, "modules_to_save") or not hasattr(head, "original_module"):
        return [head]
    active = head.active_adapters
    if head.disable_adapters or any(name not in head.modules_to_save for name in active):
        return [head, head.original_module]
    return [head, head.modules_to_save[active[0]]]


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a call of the module does more than its forward."""
    everywhere = torch.nn.modules.module._has_any_global_hook()
    return bool(everywhere) or any(getattr(module, name) for name in _HOOKS)


def _hooked_beyond_gathering(module: torch.nn.Module) -> bool:
    """Whether it does more than its forward and the gathering of its parameters for it."""
    if not has_hooks(module):
        return False
    # The compiler does not look into these hooks, which is no reason to stop it at the head.
    if torch.compiler.is_compiling() or torch.nn.modules.module._has_any_global_hook():
        return True
    return _casts(module) or not all(
        (getattr(hook, "__module__", None) or "").startswith(_GATHERING) for hook in _hooks(module)
    )


def _hooks(module: torch.nn.Module) -> Iterator[Any]:
    for name in _HOOKS:
        yield from getattr(module, name).values()


def _casts(module: Any) -> bool:
    """Whether FSDP's hook rounds what the module puts out, which a loss must not be."""
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    dtype = getattr(getattr(state, "_mp_policy", None), "output_dtype", None)
    return dtype not in (None, torch.float32)
