"""What a model's config says of its rotary embedding, in one spelling.

Configs have had two spellings, and both are on the hub: `rope_theta` beside `rope_scaling`, and
one `rope_parameters`, which may hold a dict for each type of layer. Some fields have moved between
the config and that dict, and a few families have names of their own.
"""

from collections.abc import Callable, Mapping
from typing import Any

from liger_ops.checking import listed

OLD_TYPES = {"su": "longrope", "mrope": "default"}
# In the old spelling `rope_scaling` means these families' full-attention layers alone; sliding ones
# are unscaled, with the base of this field.
SLIDING_BASE = {
    "gemma3_text": "rope_local_base_freq",
    "gemma3n_text": "rope_local_base_freq",
    "olmo3": "rope_theta",
}
# Families whose checkpoints pair neighbours, x[2j] with x[2j + 1], as Hugging Face stores them.
# `rope_interleave` in a config overrides it.
INTERLEAVED = (
    *("axk1", "axk2", "bailing_hybrid", "blt", "cohere", "cohere2", "cohere2_moe", "deepseek_v2"),
    *("deepseek_v3", "deepseek_v32", "dots3_note", "ernie4_5", "ernie4_5_moe", "ernie4_5_vl_moe"),
    *("glm", "glm4", "glm4_moe_lite", "glm4v", "glm_moe_dsa", "glm_ocr", "helium", "hy_v4_vl"),
    *("llama4", "longcat_flash", "mistral4", "mistral_large4", "youtu"),
)
# Multimodal families: how the axes share the frequencies, and the sections when none are given.
MULTIMODAL = {
    "qwen2_vl": ("chunked", (16, 24, 24)),
    "qwen2_5_vl": ("chunked", (16, 24, 24)),
    "qwen2_5_omni": ("chunked", (16, 24, 24)),
    "paddleocr_vl": ("chunked", (16, 24, 24)),
    "glm4v": ("chunked", (8, 12, 12)),
    "glm_image": ("chunked", (8, 12, 12)),
    "glm_ocr": ("chunked", (8, 12, 12)),
    "qwen3_vl": ("interleaved", (24, 20, 20)),
    "qwen3_omni_moe": ("interleaved", (24, 20, 20)),
    "cohere_compass": ("interleaved", (24, 20, 20)),
    "cosmos3_edge": ("interleaved", (24, 20, 20)),
    "hy_v4_vl": ("interleaved", (24, 20, 20)),
    "qwen3_5": ("interleaved", (11, 11, 10)),
    "qwen4_exp": ("interleaved", (11, 11, 10)),
    "ernie4_5_vl_moe": ("alternating", (22, 22, 20)),
}

Getter = Callable[[str], Any]


def rope_fields(config: Any, layer_type: str | None) -> dict[str, Any]:
    """The fields in the newest spelling and in one flat dict; an absent one is absent or None.

    Besides those of `rope_parameters`: head_dim, max_position_embeddings, layout, and for a
    multimodal model mrope_section and mrope_order.
    """
    get = _getter(config, layer_type)
    fields, per_layer = _parameters(get, layer_type)

    rope_type = fields.get("rope_type") or fields.get("type") or "default"
    if rope_type == "yarn" and "short_factor" in fields:  # early Phi-3 configs call longrope so
        rope_type = "longrope"
    fields["rope_type"] = OLD_TYPES.get(rope_type, rope_type)

    if fields.get("rope_theta") is None:
        fields["rope_theta"] = get("rope_theta")
    if fields["rope_theta"] is None and get("model_type") == "llama":
        fields["rope_theta"] = 10_000.0  # LLaMA 1 and 2, whose first configs do not write it down

    fields["max_position_embeddings"] = get("max_position_embeddings")
    window = "original_max_position_embeddings"
    # Phi-3 writes it beside the parameters, where it outranks one among them.
    beside = None if per_layer else get(window)
    fields[window] = beside or fields.get(window) or fields["max_position_embeddings"]

    fields["head_dim"] = _head_dim(get, layer_type)
    if get("qk_rope_head_dim") is not None:  # DeepSeek's attention gives the rotated size itself
        fields["partial_rotary_factor"] = 1.0
    elif fields.get("partial_rotary_factor") is None:
        fields["partial_rotary_factor"] = _rotated_part(get, fields["head_dim"])

    _family(get, fields)
    return fields


def need(fields: dict[str, Any], name: str) -> Any:
    """fields[name], or a ValueError that says what lacks it."""
    if fields.get(name) is None:
        raise ValueError(
            f"the config has no {name!r}, which the rope type {fields['rope_type']!r} needs; if "
            "the model's class has a default for it, load the config with transformers.AutoConfig"
        )
    return fields[name]


def _getter(config: Any, layer_type: str | None) -> Getter:
    """Reads a field of the language model's part, of a dict or an object; None if absent."""
    if isinstance(config, Mapping):
        return (config.get("text_config") or config).get
    config = getattr(config, "text_config", None) or config
    if layer_type is not None and getattr(config, "is_heterogeneous", False):
        config = config.per_layer_config[layer_type]
    return lambda name: getattr(config, name, None)


def _parameters(get: Getter, layer_type: str | None) -> tuple[dict[str, Any], bool]:
    """A copy of the parameters of `layer_type`, and whether each type of layer has its own."""
    parameters = get("rope_scaling") or get("rope_parameters") or {}
    layers = [name for name, value in parameters.items() if isinstance(value, Mapping)]
    if layers:
        if layer_type in parameters and parameters[layer_type] is None:
            raise ValueError(f"layers of the type {layer_type!r} have no rotary embedding")
        _check_layer_type(layer_type, layers)
        return dict(parameters[layer_type]), True

    sliding_base = SLIDING_BASE.get(get("model_type"))
    if sliding_base is None and get("rope_local_base_freq") is not None:
        sliding_base = "rope_local_base_freq"
    if sliding_base is None:
        return dict(parameters), False
    _check_layer_type(layer_type, ["full_attention", "sliding_attention"])
    if layer_type == "full_attention":
        return dict(parameters), True
    base = get(sliding_base)
    if base is None:
        raise ValueError(
            f"the config has no {sliding_base!r}, which layer_type='sliding_attention' needs"
        )
    return {"rope_theta": base}, True


def _check_layer_type(layer_type: str | None, layers: list[str]) -> None:
    if layer_type not in layers:
        raise ValueError(
            f"layer_type must be one of {listed(layers)}, as each has a rotary embedding of its "
            f"own in this config; got {layer_type!r}"
        )


def _head_dim(get: Getter, layer_type: str | None) -> int:
    if get("qk_rope_head_dim") is not None:
        return get("qk_rope_head_dim")
    if layer_type == "full_attention" and get("global_head_dim") is not None:  # Gemma 4
        return get("global_head_dim")
    # A dict written by transformers holds what single layers have of their own by their numbers.
    own = get("per_layer_config")
    if isinstance(own, Mapping):
        for layer, overrides in own.items():
            if get("layer_types")[int(layer)] == layer_type and "head_dim" in overrides:
                return overrides["head_dim"]
    for name in ("head_dim", "kv_channels"):  # the second is JetMoE's
        if get(name) is not None:
            return get(name)
    if get("hidden_size") is None or get("num_attention_heads") is None:
        raise ValueError(
            "the config has no 'head_dim', and not both 'hidden_size' and 'num_attention_heads' "
            f"to derive it from; got {get('hidden_size')!r} and {get('num_attention_heads')!r}"
        )
    return get("hidden_size") // get("num_attention_heads")


def _rotated_part(get: Getter, head_dim: int) -> float:
    for name in ("partial_rotary_factor", "rotary_pct"):
        if get(name) is not None:
            return get(name)
    return 1.0 if get("rotary_dim") is None else get("rotary_dim") / head_dim  # MiniMax-M2


def _family(get: Getter, fields: dict[str, Any]) -> None:
    """Adds what follows from the model's family: the layout, and the order of the sections."""
    model_type = get("model_type") or ""
    interleaved = get("rope_interleave")
    if interleaved is None:
        interleaved = model_type.removesuffix("_text") in INTERLEAVED
    fields["layout"] = "interleaved" if interleaved else "half"

    order, sections = None, None
    for family, known in MULTIMODAL.items():
        if model_type == family or model_type.startswith(f"{family}_"):
            order, sections = known
    if fields.get("mrope_section") is not None:
        if model_type.startswith("hunyuan_vl"):
            raise ValueError(
                "model_type 'hunyuan_vl' with 'mrope_section' turns the two numbers of a pair by "
                f"different angles, which is not supported; got {fields['mrope_section']}"
            )
        sections = tuple(fields["mrope_section"])
        order = order or ("interleaved" if fields.get("mrope_interleaved") else "chunked")
    fields["mrope_section"], fields["mrope_order"] = sections, order
