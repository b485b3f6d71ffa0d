"""Tiny random models of every family that torch_liger patches, and what is compared of them."""

import copy
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 257
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {"depth": 1, "hidden_size": 32, "embed_dim": 32, "num_heads": 2, "intermediate_size": 32,
          "out_hidden_size": 64}  # fmt: skip
MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2,
       "moe_intermediate_size": 48, "output_router_logits": True}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}

# By name of the row: the config, its class and the model's, with settings beside SIZES.
MODELS = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {}),
    "mixtral": ("Mixtral", MOE),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_vl": ("Qwen2VL", {"rope_parameters": MROPE}),
    "qwen2_5_vl": ("Qwen2_5_VL", {"rope_parameters": MROPE}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3_moe": ("Qwen3Moe", {"mlp_only_layers": [0], "head_dim": 16, **MOE}),
    "phi3": ("Phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                          "partial_rotary_factor": 0.5}}),
    "phi": ("Phi", {}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "final_logit_softcapping": 3.0}),
    "gemma3_text": ("Gemma3", {"head_dim": 16, "final_logit_softcapping": 3.0}),
    "granite": ("Granite", {"logits_scaling": 8.0, "residual_multiplier": 0.5}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "llama4_text": ("Llama4", {"head_dim": 16, "intermediate_size_mlp": 96, **MOE,
                               "interleave_moe_layer_step": 2, "use_qk_norm": True}),
    "gpt_oss": ("GptOss", {"head_dim": 16, **MOE}),
    "nemotron": ("Nemotron", {}),
}  # fmt: skip


def config_of(family: str, **settings):
    prefix, extra = MODELS[family]
    values = {**SIZES, **extra, **settings}
    if family in ("qwen2_vl", "qwen2_5_vl"):
        config = getattr(transformers, prefix + "Config")
        return config(text_config=values, vision_config=VISION, pad_token_id=0)
    text = "Text" if family in ("gemma3_text", "llama4_text") else ""
    return getattr(transformers, prefix + text + "Config")(**values)


def made(family: str, *, attention: str = "eager", **settings):
    """The model, random in all its parameters and biases too, in float32."""
    torch.manual_seed(0)
    prefix = MODELS[family][0]
    config = config_of(family, **settings)
    config._attn_implementation = attention
    kind = "ForConditionalGeneration" if family in ("qwen2_vl", "qwen2_5_vl") else "ForCausalLM"
    model = getattr(transformers, prefix + kind)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model.to(DEVICE).train()


def batch(rows: int = 2, length: int = 12, vocab: int = VOCAB) -> dict[str, torch.Tensor]:
    """Ids with left padding in one row, and labels of which some do not count."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocab, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[-1, 4:6] = -100
    return {k: v.to(DEVICE) for k, v in
            {"input_ids": ids, "attention_mask": mask, "labels": labels}.items()}  # fmt: skip


def results(model, **inputs) -> dict[str, torch.Tensor]:
    """The loss and every gradient of a training step, and the logits in eval."""
    model.zero_grad(set_to_none=True)
    loss = model(**inputs).loss
    loss.backward()
    found = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad.clone()
    training = model.training
    with torch.no_grad():
        found["logits"] = model.eval()(**inputs).logits
    model.train(training)
    return found


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]):
    """To the last digits of float32, in units of each tensor's largest entry.

    A gradient that is nothing but rounding, as that of a bias that softmax takes out, is compared
    in units of the others'.
    """
    assert actual.keys() == expected.keys()
    gradients = [e.abs().max().item() for name, e in expected.items() if name.count(".")]
    for name, e in expected.items():
        scale = max(e.abs().max().item(), 1e-3 * max(gradients, default=0.0))
        torch.testing.assert_close(
            actual[name], e, rtol=1e-4, atol=1e-5 * scale, msg=lambda m, name=name: f"{name}: {m}"
        )


def twin(model):
    return copy.deepcopy(model)
