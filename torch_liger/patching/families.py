"""The table of model families: what is where in each, and which of our operations it is.

A row names classes of one transformers modelling file. Most have the names that LLaMA's have, with
the family's prefix, and the row needs nothing else. A class that the installed version of
transformers does not have is passed over, and the report says so.
"""

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_liger.patching import replacements as ours
from torch_liger.patching import residual, rotary
from torch_liger.patching.causal_lm import CrossEntropy, FusedLoss, Logits, transforms_named_in
from torch_liger.patching.patched import Replacement, record_of
from torch_liger.patching.qkv import FusedQKV, Projections

# What makes the replacement for a module of a class, or says why there is none.
Maker = Callable[[type, torch.nn.Module], Replacement | str]


def rms_norm(offset: float = 0.0, casting_mode: str = "llama", eps: str | None = None) -> Maker:
    """An RMSNorm; by default as LLaMA's. Gemma's has offset=1.0 and casting_mode="gemma"."""
    eps = eps or ("eps" if offset else "variance_epsilon")
    return lambda cls, module: ours.RMSNorm(cls, offset, casting_mode, eps)


def layer_norm(replacement: type[Replacement] = ours.LayerNorm) -> Maker:
    """A LayerNorm over one dimension."""

    def make(cls: type, module: Any) -> Replacement | str:
        if module.weight is not None and module.weight.dim() != 1:
            return f"its weight has {module.weight.dim()} dimensions"
        return replacement(cls)

    return make


def gated(replacement: Callable[..., Replacement] = ours.GatedMLP, **settings: Any) -> Maker:
    """A gated activation with its projections, or that of experts."""

    def make(cls: type, module: Any) -> Replacement | str:
        gate = ours.gate_of(module)
        if isinstance(gate, str):
            return gate
        return replacement(cls, *gate, **settings)

    return make


def experts(cls: type, module: Any) -> Replacement | str:
    """Experts with stacked weights, whose activation is a method where they run together."""
    if not hasattr(cls, "_apply_gate"):
        return "its activation is not a method of its own in this version of transformers"
    if getattr(module.config, "_experts_implementation", "eager") in (None, "eager"):
        return "experts_implementation is 'eager', which runs them one by one"
    return gated(ours.ExpertsGate)(cls, module)


def rope(function: Any = rotary.half, name: str = "apply_rotary_pos_emb", **others: Any) -> Maker:
    """An attention whose forward calls the global function `name`, or one of the others.

    Args:
        others: what to put in the place of functions that other versions of transformers call.
    """
    functions = {name: function} | others

    def make(cls: Any, module: Any) -> Replacement | str:
        for called in functions:
            if rotary.calls(cls.forward, called):
                return rotary.Rope(cls, called, functions[called])
        return f"its forward does not call {name} in this version of transformers"

    return make


def add_norm(cls: Any, module: Any) -> Replacement | str:
    """A decoder layer as LLaMA's, which adds to the residual stream and normalises the sum."""
    dropouts = residual.dropouts_of(cls.forward)
    if dropouts is None or not all(
        name is None or isinstance(getattr(module, name), torch.nn.Dropout) for name in dropouts
    ):
        return "its forward is not as LLaMA's in this version of transformers"
    if not isinstance(record_of(module.post_attention_layernorm).get("forward"), ours.RMSNorm):
        return "its norm is not patched"
    return residual.AddNorm(cls, dropouts)


def fused_qkv(projections: Projections) -> Maker:
    """A decoder layer that `add_norm` is for, with an attention that rotates halves of heads."""

    def make(cls: Any, module: Any) -> Replacement | str:
        attention = record_of(module.self_attn).get("forward")
        if not isinstance(record_of(module).get("forward"), residual.AddNorm):
            return "its layer is not patched"
        if not isinstance(attention, rotary.Rope) or attention.function is not rotary.half:
            return "its attention is not patched"
        if not projections.are_in(attention.owner.forward, attention.name):  # type: ignore[attr-defined]
            return "its attention's forward is not the one known in this version of transformers"
        return FusedQKV(cls, attention.owner, attention.name, projections)

    return make


def fused_loss(logits: Logits) -> Maker:
    """A causal language model with `lm_head`."""

    def make(cls: Any, module: Any) -> Replacement | str:
        changed_by = transforms_named_in(cls.forward)
        if changed_by != logits.names():
            return f"its logits are changed by {sorted(changed_by)}, not {sorted(logits.names())}"
        return FusedLoss(cls, logits)

    return make


def _cross_entropy(cls: type, module: Any) -> Replacement | str:
    from transformers.loss.loss_utils import ForCausalLMLoss

    if module.loss_function is not ForCausalLMLoss and "_loss_function" not in module.__dict__:
        return "its loss is not that of a causal language model"
    return CrossEntropy(cls)


@dataclass(frozen=True)
class Family:
    """One row. Class names are given without the prefix.

    Args:
        name: of the `apply_liger_kernel_to_<name>` function.
        prefix: of its classes.
        folder: of the modelling file; None for one called `name`.
        model_types: the values of config.model_type beside `name`.
        norms, layer_norms, mlps, attentions, layers, causal_lms: its classes.
        qkv: what its attention computes before the rotation, where that and the norm before can be
            one; None where they cannot.
        gate: the switch of its feed-forward layers, "swiglu" or "geglu".
        missing: switches for which there is no kernel, with the reason.
    """

    name: str
    prefix: str
    folder: str | None = None
    model_types: tuple[str, ...] = ()
    norms: Mapping[str, Maker] = field(default_factory=lambda: {"RMSNorm": rms_norm()})
    layer_norms: Mapping[str, Maker] = field(default_factory=dict)
    mlps: Mapping[str, Maker] = field(default_factory=lambda: {"MLP": gated()})
    attentions: Mapping[str, Maker] = field(default_factory=lambda: {"Attention": rope()})
    layers: Mapping[str, Maker] = field(default_factory=dict)
    causal_lms: Mapping[str, Logits] = field(default_factory=lambda: {"ForCausalLM": Logits()})
    qkv: Projections | None = None
    gate: str = "swiglu"
    missing: Mapping[str, str] = field(default_factory=dict)

    def switches(self) -> dict[str, bool]:
        """The operations this family has, in the order of a signature, and whether by default."""
        found = {
            "rms_norm": bool(self.norms),
            "layer_norm": bool(self.layer_norms),
            "rope": bool(self.attentions),
            self.gate: bool(self.mlps),
            "fused_add_rms_norm": bool(self.layers),
        }
        found = {name: True for name, there in found.items() if there}
        found |= dict.fromkeys(self.missing, False)
        if self.causal_lms:
            found |= {"cross_entropy": False, "fused_linear_cross_entropy": True}
        return found | ({"fused_qkv": False} if self.attentions else {})

    def why_missing(self) -> dict[str, str]:
        """The switches for which there is nothing in this family, with the reason."""
        if self.qkv is not None or "fused_qkv" not in self.switches():
            return dict(self.missing)
        able = ", ".join(family.name for family in FAMILIES if family.qkv is not None)
        reason = f"its layers or its attention are not as those of {able}"
        return {**self.missing, "fused_qkv": reason}

    def makers(self, switch: str) -> dict[str, Maker]:
        """By class name without the prefix, what an operation is applied to."""
        if switch == "fused_linear_cross_entropy":
            return {name: fused_loss(logits) for name, logits in self.causal_lms.items()}
        if switch == "cross_entropy":
            return dict.fromkeys(self.causal_lms, _cross_entropy)
        qkv = {} if self.qkv is None else dict.fromkeys(self.layers, fused_qkv(self.qkv))
        return dict(
            {
                "rms_norm": self.norms,
                "layer_norm": self.layer_norms,
                "rope": self.attentions,
                self.gate: self.mlps,
                "fused_add_rms_norm": self.layers,
                "fused_qkv": qkv,
            }.get(switch, {})
        )

    def classes(self, switch: str) -> dict[type, Maker]:
        """`makers` by class, without those that this version of transformers lacks."""
        found = {}
        for name, maker in self.makers(switch).items():
            cls = _class_of(self, name)
            if cls is not None:
                found[cls] = maker
        return found


def _class_of(family: Family, name: str) -> Any:
    if name == _TORCH:
        return torch.nn.LayerNorm
    module = _modelling_file(family.folder or family.name)
    return None if module is None else getattr(module, family.prefix + name, None)


@functools.cache
def _modelling_file(folder: str) -> Any:
    try:
        return importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    except ModuleNotFoundError:
        return None


# The operations, in the order in which reports name them.
OPS = ("rms_norm", "layer_norm", "rope", "swiglu", "geglu", "fused_add_rms_norm", "fused_qkv",
       "cross_entropy", "fused_linear_cross_entropy")  # fmt: skip

_TORCH = "torch.nn.LayerNorm"
_GEMMA = {"RMSNorm": rms_norm(1.0, "gemma")}
_FLOAT32 = {"RMSNorm": rms_norm(casting_mode="gemma")}  # rounded after the weight
_FUSED_GATE = {"MLP": gated(projections=("gate_up_proj",))}
_MROPE = rope(apply_multimodal_rotary_pos_emb=rotary.half_from_axes)
_SOFTCAP = Logits(softcap="final_logit_softcapping")
_TORCH_LAYER_NORM = {_TORCH: layer_norm()}
_LAYER = {"DecoderLayer": add_norm}  # as LLaMA's
_QKV = Projections()
_QKV_NORMED = Projections(norms=("q_norm", "k_norm"))
_NONE: Any = {}

FAMILIES = (
    Family("llama", "Llama", layers=_LAYER, qkv=_QKV),
    Family("mistral", "Mistral", layers=_LAYER, qkv=_QKV),
    Family("mixtral", "Mixtral", mlps={"Experts": experts}, layers=_LAYER, qkv=_QKV),
    Family("qwen2", "Qwen2", layers=_LAYER, qkv=_QKV),
    Family("qwen3", "Qwen3", layers=_LAYER, qkv=_QKV_NORMED),
    Family("qwen3_moe", "Qwen3Moe", mlps={"MLP": gated(), "Experts": experts},
           layers=_LAYER, qkv=_QKV_NORMED),
    # Also the vision tower's norms and, in 2.5, its feed-forward layers.
    Family("qwen2_vl", "Qwen2", model_types=("qwen2_vl_text",),
           norms={"VLRMSNorm": rms_norm(), "RMSNorm": rms_norm()}, layer_norms=_TORCH_LAYER_NORM,
           attentions={"VLAttention": _MROPE}, layers={"VLDecoderLayer": add_norm},
           causal_lms={"VLForConditionalGeneration": Logits()}),
    Family("qwen2_5_vl", "Qwen2", model_types=("qwen2_5_vl_text",),
           norms={"_5_VLRMSNorm": rms_norm(), "RMSNorm": rms_norm()},
           mlps={"MLP": gated(), "_5_VLMLP": gated()},
           attentions={"_5_VLAttention": _MROPE}, layers={"_5_VLDecoderLayer": add_norm},
           causal_lms={"_5_VLForConditionalGeneration": Logits()}),
    Family("phi3", "Phi3", mlps=_FUSED_GATE, layers=_LAYER, qkv=Projections(("qkv_proj",))),
    Family("gemma", "Gemma", norms=_GEMMA, gate="geglu", layers=_LAYER, qkv=_QKV),
    Family("gemma2", "Gemma2", norms=_GEMMA, gate="geglu", causal_lms={"ForCausalLM": _SOFTCAP}),
    Family("gemma3_text", "Gemma3", "gemma3", model_types=("gemma3",), norms=_GEMMA, gate="geglu",
           causal_lms={"ForCausalLM": _SOFTCAP, "ForConditionalGeneration": Logits()}),
    Family("granite", "Granite",
           causal_lms={"ForCausalLM": Logits(divided_by="logits_scaling")}),
    Family("olmo2", "Olmo2", norms=_FLOAT32),
    Family("olmo3", "Olmo3", norms=_FLOAT32),
    Family("smollm3", "SmolLM3", layers=_LAYER),
    Family("glm4", "Glm4", mlps=_FUSED_GATE,
           attentions={"Attention": rope(rotary.interleaved_from_halves)}),
    Family("llama4_text", "Llama4", "llama4", model_types=("llama4",),
           norms={"TextRMSNorm": rms_norm(eps="eps"), "TextL2Norm": rms_norm(eps="eps")},
           mlps={"TextMLP": gated(), "TextExperts": gated(ours.Llama4Experts)},
           attentions={
               "TextAttention": rope(rotary.interleaved_from_complex, "apply_rotary_emb")}),
    Family("gpt_oss", "GptOss", norms=_FLOAT32, mlps=_NONE,
           attentions={"Attention": rope(rotary.half_from_angles)},
           missing={"swiglu": "its gate is clamped and interleaved, which has no kernel"}),
    Family("nemotron", "Nemotron", norms=_NONE, mlps=_NONE,
           layer_norms={"LayerNorm1P": layer_norm(ours.LayerNorm1P)},
           missing={"relu_squared": "the squared ReLU has no kernel"}),
    Family("cohere", "Cohere", norms=_NONE,
           layer_norms={"LayerNorm": layer_norm(ours.CohereLayerNorm)},
           attentions={"Attention": rope(rotary.interleaved)},
           causal_lms={"ForCausalLM": Logits(multiplied_by="logit_scale")}),
    Family("phi", "Phi", norms=_NONE, layer_norms=_TORCH_LAYER_NORM, mlps=_NONE),
    Family("bert", "Bert", norms=_NONE, layer_norms=_TORCH_LAYER_NORM, mlps=_NONE,
           attentions=_NONE, causal_lms=_NONE),
    Family("t5", "T5", norms={"LayerNorm": lambda cls, module: ours.T5RMSNorm(cls)},
           mlps=_NONE, attentions=_NONE, causal_lms=_NONE),
)  # fmt: skip


def family_of(model_type: str | None) -> Family | None:
    """The row for a value of config.model_type."""
    for family in FAMILIES:
        if model_type == family.name or model_type in family.model_types:
            return family
    return None


class _AnyFamily(Family):
    """Every class of norm in the table, for models of other families."""

    def switches(self) -> dict[str, bool]:
        return {"rms_norm": True, "layer_norm": True}

    def classes(self, switch: str) -> dict[type, Maker]:
        return {cls: maker for family in FAMILIES for cls, maker in family.classes(switch).items()}


ANY_NORMS = _AnyFamily("norms", "")
MODEL_TYPES = tuple(name for family in FAMILIES for name in (family.name, *family.model_types))
