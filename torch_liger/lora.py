"""PEFT's LoRA layers by the fused operation, in place and reversibly.

    model = get_peft_model(model, LoraConfig(...))
    print(fuse_lora(model))
    ...
    unfuse_lora(model)

Each `peft.tuners.lora.Linear` gets a forward of its own, as an attribute of the instance. Its
class, its weights and its names in the state dict stay, and whatever the fused operation does not
do is done by PEFT's own forward: the choice is made anew at each call.
"""

import functools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from liger_ops import backend_triton
from torch_liger.adapters import LoraProjection, lora_linear, lora_linears

_logger = logging.getLogger("torch_liger")


@dataclass(frozen=True)
class LoraReport:
    """What `fuse_lora` has done.

    Attributes:
        fused: names of the layers that run by the fused operation wherever its kernels can run; on
            a CPU PEFT's forward does.
        left_out: the other LoRA layers, and why PEFT's forward runs in them. Those whose reason
            passes (merged or disabled adapters, say) run fused as soon as it has.
    """

    fused: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        reasons = Counter(self.left_out.values())
        why = "".join(f"; left out x{count}: {reason}" for reason, count in reasons.items())
        return f"lora_linear x{len(self.fused)}{why}"


def fuse_lora(model: torch.nn.Module) -> LoraReport:
    """Lets the LoRA layers of a PEFT model run by `torch_liger.lora_linear`.

    Args:
        model: a model that holds layers of `peft.tuners.lora`. Only this instance is changed, and
            it is called, saved, copied and trained as before. A second call changes nothing but
            layers that are new.

    Returns:
        A `LoraReport`, which is also logged at INFO.

    PEFT's own forward runs where adapters are merged, disabled or several at once, for DoRA and
    other variants, biases in the adapter, quantised or otherwise special base layers, Conv1D,
    `adapter_names`, where a hook is on the base layer or on a part of the adapter, and on a CPU.
    """
    fused, left_out = [], {}
    for name, module in _lora_layers(model):
        reason = _why_not_ever(module)
        if reason is None and not _is_bound(module):
            module.forward = functools.partial(fused_forward, module)
        reason = reason or _why_not_now(module)
        if reason is None:
            fused.append(name)
        else:
            left_out[name] = reason
    report = LoraReport(fused, left_out)
    _logger.info("Fused the adapters of %s: %s", type(model).__name__, report)
    return report


def unfuse_lora(model: torch.nn.Module) -> list[str]:
    """Gives all LoRA layers of `model` their own forward back; returns the names of those changed.

    A layer whose forward another library has wrapped since keeps the wrapper, around its own.
    """
    changed = []
    for name, module in _lora_layers(model):
        if _is_bound(module):
            del module.forward
        elif _is_fused(module.__dict__.get("_old_forward")):  # as accelerate keeps it
            module._old_forward = type(module).forward.__get__(module)  # type: ignore[assignment]
        else:
            continue
        changed.append(name)
    return changed


def project(x: torch.Tensor, *modules: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """Each module's output for x, as `tuple(module(x) for module in modules)`.

    Where all of them are fused LoRA layers they run as one `torch_liger.lora_linears`, as for the
    query, key and value of an attention or the gate and up of an MLP.
    """
    ys = together(x, modules) if all(map(is_fused, modules)) else None
    return tuple(module(x) for module in modules) if ys is None else ys


def is_fused(module: Any) -> bool:
    """Whether a call of the module is the fused forward, where its state allows it, and no more."""
    return isinstance(module, torch.nn.Module) and _is_bound(module) and not _has_hooks(module)


def together(x: torch.Tensor, layers: Sequence[Any]) -> tuple[torch.Tensor, ...] | None:
    """Fused layers' outputs by one `torch_liger.lora_linears`, or None where it does not do it."""
    if len(layers) < 2:
        return None
    given = [_arguments(layer, x) for layer in layers]
    shared = {(p.lora_a.dtype, dropout_p) for p, dropout_p in filter(None, given)}
    if None in given or len(shared) != 1:
        return None
    projections = [projection for projection, _ in given]  # type: ignore[misc]
    return lora_linears(x, projections, dropout_p=shared.pop()[1])


def fused_forward(module: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The forward of a fused `peft.tuners.lora.Linear`."""
    given = None if args or kwargs else _arguments(module, x)
    if given is None:
        return type(module).forward(module, x, *args, **kwargs)
    projection, dropout_p = given
    weight, lora_a, lora_b, bias, scaling = projection
    return lora_linear(x, weight, lora_a, lora_b, bias=bias, scaling=scaling, dropout_p=dropout_p)


def _arguments(module: Any, x: torch.Tensor) -> tuple[LoraProjection, float] | None:
    """The adapter that is active and its dropout, or None where PEFT's forward has to run."""
    if _why_not_now(module) is not None:
        return None
    (adapter,) = _active(module)
    base, dropout = module.base_layer, module.lora_dropout[adapter]
    weight, bias = base.weight, base.bias
    lora_a, lora_b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        return None  # an error, in PEFT's own words
    if backend_triton.choose(None, "lora_linear", x, weight, lora_a, lora_b, bias) != "triton":
        return None
    dropping = isinstance(dropout, torch.nn.Dropout) and dropout.training
    projection = LoraProjection(weight, lora_a, lora_b, bias, float(module.scaling[adapter]))
    return projection, dropout.p if dropping else 0.0


def _lora_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    return ((name, m) for name, m in model.named_modules() if isinstance(m, LoraLayer))


def _is_fused(forward: Any) -> bool:
    return isinstance(forward, functools.partial) and forward.func is fused_forward


def _is_bound(module: torch.nn.Module) -> bool:
    return _is_fused(module.__dict__.get("forward"))


def _why_not_ever(module: Any) -> str | None:
    """Why a layer of this kind keeps PEFT's forward."""
    from peft.tuners.lora import Linear

    if not isinstance(module, Linear):
        return f"lora.{type(module).__name__} is not lora.Linear"
    if type(module).forward is not Linear.forward:
        return f"{type(module).__name__} has a forward of its own"
    if "forward" in module.__dict__ and not _is_bound(module):
        return "its forward has been replaced"
    if module.is_target_conv_1d_layer or module.fan_in_fan_out:
        return "its base layer is a Conv1D"
    return None


def _why_not_now(module: Any) -> str | None:
    """Why PEFT's forward has to run in the state that the layer is in."""
    if module.disable_adapters:
        return "adapters are disabled"
    if module.merged:
        return "adapters are merged"
    active = _active(module)
    if len(active) != 1:
        return f"{len(active)} adapters are active"
    adapter = active[0]
    if adapter in module.lora_variant:
        return f"its adapter is a {type(module.lora_variant[adapter]).__name__}"
    if module.lora_bias.get(adapter, False):
        return "its adapter has a bias"
    if not module.cast_input_dtype_enabled:
        return "the casting of its input is disabled"
    lora_a, lora_b = module.lora_A[adapter], module.lora_B[adapter]
    dropout = module.lora_dropout[adapter]
    if type(dropout) not in (torch.nn.Identity, torch.nn.Dropout) or getattr(dropout, "p", 0) == 1:
        return f"its dropout is {dropout}"
    for name, part in (("base layer", module.base_layer), ("lora_A", lora_a), ("lora_B", lora_b)):
        if type(part).forward is not torch.nn.Linear.forward or "forward" in part.__dict__:
            return f"its {name}, {type(part).__name__}, has a forward of its own"
        if type(part.weight) not in (torch.nn.Parameter, torch.Tensor) or part.weight.dim() != 2:
            return f"its {name} has a weight of type {type(part.weight).__name__}"
        if _has_hooks(part):
            return f"a hook is on its {name}"
    if _has_hooks(dropout):
        return "a hook is on its dropout"
    if lora_a.weight.dtype != lora_b.weight.dtype:
        return "lora_A and lora_B differ in dtype"
    return None


def _active(module: Any) -> list[str]:
    return [name for name in module.active_adapters if name in module.lora_A]


def _has_hooks(module: torch.nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
