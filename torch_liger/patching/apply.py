"""The public functions: one for every row of the table, and those that read the model's type."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_liger.patching import patch
from torch_liger.patching.families import ANY_NORMS, FAMILIES, MODEL_TYPES, Family, family_of
from torch_liger.patching.report import Report
from torch_liger.patching.switches import resolve, signature

_DOCSTRING = """Computes {name} models of transformers by this library's functions.

    Args:
        model: a model, or anything around one (PEFT, DDP, torch.compile). Only this instance
            changes: its parameters, state-dict keys, hooks and type stay as they are. None: no
            model there is, but every one that is made afterwards.
{switches}

    Returns:
        What was applied and what was left out, with the reason: what `report(model)` returns too.
        The same is logged once, at INFO. Calling it again changes nothing more.

    Numerics: those of the functions, which round where the model rounds. In training, with labels,
    the loss is computed without logits and the output has none; skip_logits=False in the call of
    the model brings them back, and eval() has them always.

    Raises:
        TypeError: for a keyword that is none of these, or two spellings that disagree.
        ValueError: for a model of another family, a combination that excludes itself, or an
            operation that this family has no kernel for.
    """
_SWITCHES = {
    "rms_norm": "RMSNorm by `rms_norm`.",
    "layer_norm": "LayerNorm by `layer_norm`.",
    "rope": "the rotary embedding by `rope`.",
    "swiglu": "the gated activation by `swiglu`.",
    "geglu": "the gated activation by `geglu`.",
    "fused_add_rms_norm": "in a layer, adding to the residual stream and the norm in one.",
    "cross_entropy": "the loss over the model's logits by `cross_entropy`.",
    "fused_linear_cross_entropy": "head and loss in one by `fused_linear_cross_entropy`.",
    "fused_qkv": (
        "norm, projections and rotary embedding by `rms_norm_linear_rope` where it was\n"
        "            measured to be faster as one kernel, and one by one elsewhere and under\n"
        "            torch.compile and autocast. The report names layers that cannot have it, for\n"
        "            adapters, hooks or quantised weights. For it, weights of three projections\n"
        "            are copied into one, which is kept while tokens are generated."
    ),
}


def _function_for(name: str) -> Callable[..., Report]:
    family = next(family for family in FAMILIES if family.name == name)
    name = f"apply_liger_kernel_to_{name}"

    def apply(model: torch.nn.Module | None = None, **switches: Any) -> Report:
        return _apply(family, model, switches, name)[0]

    missing = dict.fromkeys(family.why_missing(), "not available; False.")
    texts = {**_SWITCHES, **missing}
    lines = [f"        {switch}: {texts[switch]}" for switch in family.switches()]
    spellings = "        Second spellings of these, such as use_fused_rmsnorm, are taken too."
    apply.__name__ = apply.__qualname__ = name
    apply.__doc__ = _DOCSTRING.format(name=family.prefix, switches="\n".join([*lines, spellings]))
    apply.__signature__ = signature(family)  # type: ignore[attr-defined]
    return apply


def _apply(family: Family, model: Any, given: dict[str, Any], caller: str) -> tuple[Report, Any]:
    """The report and what this call has changed: modules' methods, or classes."""
    switches = resolve(family, given, caller)
    if model is None:
        return patch.patch_classes(family, switches)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module or None; got {type(model).__name__}")
    return patch.patch_model(model, family, switches)


def _family_for(model: Any) -> Family:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    model_type = patch.type_of(model)
    family = family_of(model_type)
    if family is None:
        known = ", ".join(sorted(MODEL_TYPES))
        raise ValueError(
            f"model must be of a known family ({known}); got {type(model).__name__} of type "
            f"{model_type!r} (its norms alone: apply_liger_kernel_to_norms)"
        )
    return family


def apply_liger_kernel(model: torch.nn.Module, **switches: Any) -> Report:
    """Patches a model as its own type's `apply_liger_kernel_to_<family>` does, with its switches.

    Args:
        model: a model of transformers of one of the families in `MODEL_TYPES`, or anything around
            one.

    Raises:
        ValueError: if the model's type is in no row of the table, with the list of those that are.
    """
    return _apply(_family_for(model), model, switches, "apply_liger_kernel")[0]


@contextlib.contextmanager
def liger_kernel(model: torch.nn.Module, **switches: Any) -> Iterator[Report]:
    """Patches a model as `apply_liger_kernel` does, for the length of a with block.

    What had been patched before the block is so after it.
    """
    report, changes = _apply(_family_for(model), model, switches, "liger_kernel")
    try:
        yield report
    finally:
        patch.undo(changes)


def apply_liger_kernel_to_norms(
    model: torch.nn.Module, *, rms_norm: bool = True, layer_norm: bool = True
) -> Report:
    """Patches only the norms, of any model: torch.nn.LayerNorm and those of the known families.

    Raises:
        ValueError: if the model has none of them.
    """
    switches = {"rms_norm": rms_norm, "layer_norm": layer_norm}
    return _apply(ANY_NORMS, model, switches, "apply_liger_kernel_to_norms")[0]


def _apply_liger_kernel_to_instance(model: torch.nn.Module, **switches: Any) -> Report:
    """Liger-Kernel's name for `apply_liger_kernel`."""
    return apply_liger_kernel(model, **switches)


apply_liger_kernel_to_llama = _function_for("llama")
apply_liger_kernel_to_mistral = _function_for("mistral")
apply_liger_kernel_to_mixtral = _function_for("mixtral")
apply_liger_kernel_to_qwen2 = _function_for("qwen2")
apply_liger_kernel_to_qwen2_vl = _function_for("qwen2_vl")
apply_liger_kernel_to_qwen2_5_vl = _function_for("qwen2_5_vl")
apply_liger_kernel_to_qwen3 = _function_for("qwen3")
apply_liger_kernel_to_qwen3_moe = _function_for("qwen3_moe")
apply_liger_kernel_to_phi = _function_for("phi")
apply_liger_kernel_to_phi3 = _function_for("phi3")
apply_liger_kernel_to_gemma = _function_for("gemma")
apply_liger_kernel_to_gemma2 = _function_for("gemma2")
apply_liger_kernel_to_gemma3_text = _function_for("gemma3_text")
apply_liger_kernel_to_granite = _function_for("granite")
apply_liger_kernel_to_cohere = _function_for("cohere")
apply_liger_kernel_to_olmo2 = _function_for("olmo2")
apply_liger_kernel_to_olmo3 = _function_for("olmo3")
apply_liger_kernel_to_smollm3 = _function_for("smollm3")
apply_liger_kernel_to_glm4 = _function_for("glm4")
apply_liger_kernel_to_llama4_text = _function_for("llama4_text")
apply_liger_kernel_to_gpt_oss = _function_for("gpt_oss")
apply_liger_kernel_to_nemotron = _function_for("nemotron")
apply_liger_kernel_to_bert = _function_for("bert")
apply_liger_kernel_to_t5 = _function_for("t5")

# Qwen 2.5 is of the type qwen2; the others are Liger-Kernel's names for the whole models.
apply_liger_kernel_to_qwen2_5 = apply_liger_kernel_to_qwen2
apply_liger_kernel_to_gemma3 = apply_liger_kernel_to_gemma3_text
apply_liger_kernel_to_llama4 = apply_liger_kernel_to_llama4_text
