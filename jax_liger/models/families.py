"""What tells the families apart: one row for each `model_type` of a Hugging Face config.

A row holds what the family's code in transformers fixes, and what its config class fills in where a
config.json is silent. Everything else is read from the config by the same lines for all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Names of a layer's norms: before attention, after it, before the feed-forward part, after it.
# They are those of the checkpoints, where "post_attention_layernorm" has two meanings.
PRE_NORMS = ("input_layernorm", None, "post_attention_layernorm", None)
POST_NORMS = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
SANDWICH_NORMS = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
GEMMA_DEFAULTS = {"tie_word_embeddings": True, "head_dim": 256}


@dataclass(frozen=True)
class Family:
    """What one family's models have that no field of their configs says."""

    norms: tuple[str | None, ...] = PRE_NORMS
    norm_offset: float = 0.0  # added to the norms' weights
    norm_casting_mode: str = "llama"
    qk_norm: str | None = None  # of queries and keys: "head", one head at a time; "width", all
    # True: on q, k and v alone; None: on these and o, as `attention_bias` says; False: never.
    qkv_bias: bool | None = None
    mlp_bias: bool = False  # whether the field of that name counts
    scaled_embedding: bool = False  # by sqrt(D), in the table's dtype
    fused_projections: bool = False  # the checkpoint has qkv_proj and gate_up_proj
    partial_rotary: bool = False  # whether heads may be rotated in part
    # Which layers have a sliding window, where there is one: "all"; "listed" by layer_types, and
    # by window_pattern where that is absent; "none".
    windows: str = "none"
    window_pattern: str | None = None
    experts: bool = False  # whether layers have a mixture of experts
    activation_field: str = "hidden_act"
    # Fields that only some families have, and defaults of others, for where config.json is silent.
    defaults: Mapping[str, Any] = field(default_factory=dict)


FAMILIES = {
    "llama": Family(mlp_bias=True),
    "mistral": Family(
        qkv_bias=False,
        windows="all",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family(
        qkv_bias=True,
        windows="listed",
        window_pattern="max_window_layers",
        defaults={"num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096},
    ),
    "qwen3": Family(
        qk_norm="head",
        windows="listed",
        window_pattern="max_window_layers",
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "use_sliding_window": False,
            "sliding_window": 4096,
        },
    ),
    "phi3": Family(
        qkv_bias=False,
        fused_projections=True,
        partial_rotary=True,
        windows="all",
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    ),
    "gemma": Family(
        norm_offset=1.0,
        norm_casting_mode="gemma",
        scaled_embedding=True,
        defaults={
            **GEMMA_DEFAULTS,
            "num_key_value_heads": 16,
            "hidden_act": "gelu_pytorch_tanh",
        },
    ),
    "gemma2": Family(
        norms=SANDWICH_NORMS,
        norm_offset=1.0,
        norm_casting_mode="gemma",
        scaled_embedding=True,
        windows="listed",
        window_pattern="every other",
        activation_field="hidden_activation",
        defaults={
            **GEMMA_DEFAULTS,
            "num_key_value_heads": 4,
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text": Family(
        norms=SANDWICH_NORMS,
        norm_offset=1.0,
        norm_casting_mode="gemma",
        qk_norm="head",
        scaled_embedding=True,
        windows="listed",
        window_pattern="sliding_window_pattern",
        activation_field="hidden_activation",
        defaults={
            **GEMMA_DEFAULTS,
            "num_key_value_heads": 4,
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 256,
            "final_logit_softcapping": None,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
    ),
    "granite": Family(
        mlp_bias=True,
        defaults={
            "embedding_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    ),
    "olmo2": Family(
        norms=POST_NORMS,
        norm_casting_mode="gemma",  # it multiplies by the weight in float32, then casts
        qk_norm="width",
        defaults={"rms_norm_eps": 1e-5},
    ),
    "smollm3": Family(
        mlp_bias=True,
        windows="listed",
        window_pattern="without rope",
        defaults={
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
            "use_sliding_window": False,
            "rope_theta": 2e6,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
    ),
    "mixtral": Family(
        qkv_bias=False,
        windows="all",
        experts=True,
        defaults={
            "num_key_value_heads": 8,
            "num_experts_per_tok": 2,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
    ),
    "qwen3_moe": Family(
        qk_norm="head",
        windows="all",
        experts=True,
        defaults={
            "num_key_value_heads": 4,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "num_experts_per_tok": 8,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
    ),
}

# The feed-forward activations that there are, by the names of transformers.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# Fields of configs that do not change what a model computes, or only what a tokenizer, a generation
# loop or an initialisation does. Any other that nothing reads, and that is not empty, is refused.
WITHOUT_EFFECT = {
    *("architectures", "auto_map", "model_type", "transformers_version", "torch_dtype", "dtype"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id"),
    *("initializer_range", "use_cache", "cache_implementation", "return_dict", "problem_type"),
    *("id2label", "label2id", "pretraining_tp", "is_llama_config"),
    *("max_window_layers", "transformers.js_config", "tokenizer_class", "default_theta"),
}
# Those that rope_frequencies reads.
ROPE_FIELDS = {
    *("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq"),
    *("partial_rotary_factor", "max_position_embeddings", "original_max_position_embeddings"),
}
