"""Inside a decoder layer: norm, projections and rotation in one, by `rms_norm_linear_rope`.

A layer that `residual.AddNorm` computes asks the method that is put there for attention's output.
Where the operation's rule finds the one kernel faster, that gets the residual stream itself, and
attention's own code runs from the rotation on: the cache, the interface to attention and the output
projection are transformers'. Everywhere else the layer's norm and attention are called as ever.
"""

import dis
import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from liger_ops import backend_triton
from liger_ops.rms_norm_linear_rope.check import Heads, Norm
from torch_liger import attention as operation
from torch_liger.patching import rotary
from torch_liger.patching.head import why_not_linear
from torch_liger.patching.patched import Record, Replacement, record_of, slot_of, still_ours
from torch_liger.patching.redecorating import redecorated
from torch_liger.patching.replacements import RMSNorm
from torch_liger.patching.residual import ATTEND, settings_of

if backend_triton.triton is not None:
    from liger_ops.rms_norm_linear_rope import triton_kernel


@dataclass(frozen=True)
class Projections:
    """Names of what an attention has before its rotation.

    Args:
        names: those of query, key and value; or one, whose output has these one after the other.
        norms: of every head of query and of key, if there are any.
    """

    names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    norms: tuple[str, str] | None = None

    def are_in(self, forward: Any, rope: str) -> bool:
        """Whether the code calls these alone before `rope`, and does not read its input after."""
        found, rotated = [], False
        for step in dis.get_instructions(inspect.unwrap(forward)):
            if rotated and step.opname.startswith("LOAD_FAST") and "hidden_states" in step.argval:
                return False
            if step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL") and not rotated:
                found.append(step.argval)
                rotated = step.argval == rope
        return found == [*self._steps(), rope]

    def _steps(self) -> list[str]:
        steps = ["shape", "head_dim"]
        if len(self.names) == 1:
            keys = ["num_key_value_heads", "head_dim"]
            steps += [*self.names, "config", "num_attention_heads", "head_dim", *keys, *keys]
            return steps + 3 * ["view", "transpose"]
        for name, norm in zip(self.names, (*(self.norms or ()), None, None, None), strict=False):
            steps += [*([norm] if norm else []), name, "view", "transpose"]
        return steps


@dataclass(frozen=True)
class FusedQKV(Replacement):
    """What stands for a layer's first norm and its attention.

    Args:
        attention: the class of the layer's attention.
        rope: the function that its code rotates by.
        projections: those that its code calls.
    """

    attention: type
    rope: str
    projections: Projections
    op: ClassVar[str] = "fused_qkv"
    method: ClassVar[str] = ATTEND

    def make(self) -> Callable[..., Any]:
        projections = self.projections
        after_rotation = _after_rotation(self.attention, self.rope)

        def _attend(layer: Any, x: torch.Tensor, given: dict[str, Any]) -> Any:
            attention, qkv = layer.self_attn, None
            # The compiler makes kernels of its own of what it can look into.
            if not torch.compiler.is_compiling():
                qkv = _projected(layer, x, given.get("position_embeddings"), self)
            if qkv is None:
                return attention(hidden_states=layer.input_layernorm(x), **given)
            stand_in = _stand_in(attention, qkv, projections, after_rotation)
            return stand_in(hidden_states=x, **given)

        return _attend

    def why_aside(self, module: Any) -> str | None:
        """Why the layer's norm and attention are called as ever, for as long as this is so."""
        attention = module.self_attn
        reason = _why_not_attention(attention)
        if reason is not None:
            return f"self_attn {reason}"
        norms = [module.input_layernorm]
        norms += [getattr(attention, name) for name in self.projections.norms or ()]
        settings = [_norm_of(norm) for norm in norms]
        if None in settings:
            return "a norm before it is not ours alone"
        if len(set(settings)) > 1:
            return f"its norms differ in eps, offset or casting mode: {set(settings)}"
        weights, biases = [], []
        for name in self.projections.names:
            layer = getattr(attention, name)
            reason = _why_not_projection(layer)
            if reason is not None:
                return f"{name} {reason}"
            weights.append(layer.weight)
            biases.append(layer.bias is not None)
        if len({weight.dtype for weight in weights}) > 1:
            return "its projections' weights differ in dtype"
        if any(biases) and not all(biases):
            return "some of its projections have a bias, and others have none"
        rows, columns = sum(weight.shape[0] for weight in weights), _heads(attention).columns
        if rows != columns:
            return f"its projections' weights have {rows} rows, not {columns}"
        return None


def _projected(layer: Any, x: torch.Tensor, angles: Any, replacement: FusedQKV) -> Any:
    """Query, key and value by the one kernel, (B, T, N or K, H), or None where it is not to be."""
    attention, projections = layer.self_attn, replacement.projections
    record: Any = record_of(layer)
    if x.dim() != 3 or x.shape[1] != 1:
        record.kept.pop("qkv", None)  # what follows a prompt may have other weights
    if angles is None or x.dim() != 3 or torch.is_autocast_enabled(x.device.type):
        return None
    norm = layer.input_layernorm
    norms = [getattr(attention, name) for name in projections.norms or ()]
    layers = [getattr(attention, name) for name in projections.names]
    scale, *weights = (_weight_of(module) for module in (norm, *layers))
    own = [_weight_of(module) for module in norms] or [None, None]
    if any(weight is None for weight in (scale, *weights)) or (
        backend_triton.choose(None, "rms_norm_linear_rope", x, scale, *weights) != "triton"
    ):
        return None
    # Before the weights are looked into and joined: most calls end here.
    heads = _heads(attention)
    choice = operation.choice_for((x, scale, weights[0], None, *own, *angles), heads, *weights)
    if not choice.fused or replacement.why_aside(layer) is not None:
        return None
    if any(weight.device != x.device or weight.dtype != x.dtype for weight in weights):
        return None
    weight, bias = _joined(record, x, layers)
    return triton_kernel.rms_norm_linear_rope(
        *(x, scale, weight, bias, *own, *angles),
        heads=heads,
        norm=_norm_of(norm),  # type: ignore[arg-type]
        config=choice.config,
    )


def _weight_of(module: Any) -> Any:
    return getattr(module, "weight", None)


class _Joined(NamedTuple):
    key: Any
    weight: torch.Tensor
    bias: torch.Tensor | None


def _joined(record: Record, x: torch.Tensor, layers: list[Any]) -> tuple[Any, Any]:
    """One weight and one bias of all layers: the model's own if it has one, else a copy.

    While tokens are drawn one by one, without gradients, the copy is kept. It is made anew after
    every prompt, and if a weight has been written to or is another tensor.
    """
    if len(layers) == 1:
        return layers[0].weight, layers[0].bias
    tensors = [layer.weight for layer in layers]
    if layers[0].bias is not None:
        tensors += [layer.bias for layer in layers]
    keep, key = x.shape[1] == 1 and not torch.is_grad_enabled(), None
    if keep:
        key = [(t.data_ptr(), None if t.is_inference() else t._version, t.dtype) for t in tensors]
        kept = record.kept.get("qkv")
        if kept is not None and kept.key == key:
            return kept.weight, kept.bias
    count = len(layers)
    weight = torch.cat(tensors[:count])
    bias = torch.cat(tensors[count:]) if tensors[count:] else None
    if keep:
        record.kept["qkv"] = _Joined(key, weight, bias)
    return weight, bias


def _stand_in(attention: Any, qkv: Any, projections: Projections, forward: Any) -> Any:
    """The attention with results in the place of its projections, as its code calls them; the
    parameters, hooks and everything else are the attention's own.
    """
    results = qkv if len(projections.names) == 3 else (_Parts(qkv),)
    modules: dict[str, Any] = dict(attention._modules)
    for name, result in zip(projections.names, results, strict=True):
        modules[name] = functools.partial(_given, result)
    for name in projections.norms or ():
        modules[name] = _itself
    stand_in = object.__new__(type(attention))
    stand_in.__dict__.update(attention.__dict__, _modules=modules)
    stand_in.__dict__["forward"] = types.MethodType(forward, stand_in)
    return stand_in


class _Parts:
    """Query, key and value as one output, of which Phi-3's code takes the features of each."""

    def __init__(self, qkv: Any):
        self.q, self.k, self.v = qkv

    def __getitem__(self, index: Any) -> torch.Tensor:
        features = index[-1]
        return self.q if features.start is None else self.v if features.stop is None else self.k


def _given(result: Any, x: torch.Tensor) -> Any:
    return result


def _itself(x: torch.Tensor) -> torch.Tensor:
    return x


@functools.cache
def _after_rotation(attention: Any, rope: str) -> Callable[..., Any]:
    """The attention's forward, in which query and key are rotated already."""
    stock = attention.forward
    return redecorated(stock, rotary.with_global(inspect.unwrap(stock), rope, _rotated_already))


def _rotated_already(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return q, k


def _heads(attention: Any) -> Heads:
    config = attention.config
    return Heads(config.num_attention_heads, config.num_key_value_heads, attention.head_dim)


def _norm_of(module: Any) -> Norm | None:
    """The settings of a norm that does nothing but what was put there."""
    ours: RMSNorm | None = settings_of(module)
    if ours is None:
        return None
    return Norm(getattr(module, ours.eps), ours.offset, ours.casting_mode)


def _why_not_attention(attention: Any) -> str | None:
    """Why attention has to be called with the normed x."""
    if (
        attention._forward_pre_hooks
        or attention._forward_hooks_with_kwargs
        or attention._backward_hooks
        or attention._backward_pre_hooks
    ):
        return "has hooks that see its input"
    if attention._compiled_call_impl is not None:
        return "is compiled by itself"
    if still_ours(attention, rotary.Rope, slot_of(attention, "forward")) is None:
        return "has a forward that was replaced"
    return None


def _why_not_projection(module: Any) -> str | None:
    if hasattr(module, "base_layer"):
        cls = type(module)
        return f"has an adapter ({cls.__module__}.{cls.__name__})"
    reason = why_not_linear(module)
    if reason is not None:
        return reason
    weight = module.weight
    if type(weight) not in (torch.Tensor, torch.nn.Parameter):
        return f"has a weight that is a {type(weight).__name__}"
    if weight.dtype not in backend_triton.KERNEL_DTYPES:
        return f"has a weight of {weight.dtype}"
    if weight.device.type == "meta":
        return "is offloaded"
    if weight.dim() != 2:
        return f"has a weight of shape {tuple(weight.shape)}"
    return None
