"""Configs: what is read, what is refused by name, and options of the feed-forward part."""

import json

import jax
import numpy as np
import pytest
import torch

import model_cases
from jax_liger.models import Config, from_pretrained, loss_fn
from model_cases import CASES, SMALL, Case, quick_jit

LLAMA = {**SMALL, "model_type": "llama"}


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def config_of(**fields) -> Config:
    return Config.from_hf(LLAMA | fields)


REFUSED = {
    "another family": (dict(model_type="cohere", logit_scale=0.0625), "model_type.*'cohere'"),
    "a head with a bias": (dict(model_type="phi"), "model_type.*'phi'"),
    "a vision tower": (dict(model_type="gemma3"), "model_type.*'gemma3'"),
    "an activation": (dict(hidden_act="relu2"), "hidden_act must be one of .*'relu2'"),
    "dropout": (dict(attention_dropout=0.1), "attention_dropout=0.1"),
    "dropout of phi3": (dict(model_type="phi3", resid_pdrop=0.1), "resid_pdrop=0.1"),
    "a field of another family": (dict(logits_scaling=8.0), "'logits_scaling': 8.0"),
    "a multiplier of another": (dict(logit_scale=0.5), "'logit_scale': 0.5"),
    "a cap of another family": (dict(final_logit_softcapping=30.0), "'final_logit_softcapping'"),
    "a cap that gemma3 does not use": (
        dict(model_type="gemma3_text", attn_logit_softcapping=50.0),
        "'attn_logit_softcapping': 50.0",
    ),
    "windows of another family": (dict(sliding_window=16), "'sliding_window': 16"),
    "biases of another family": (dict(model_type="mistral", mlp_bias=True), "'mlp_bias': True"),
    "attention both ways": (
        dict(model_type="gemma2", use_bidirectional_attention=True),
        "'use_bidirectional_attention': True",
    ),
    "quantised weights": (
        dict(quantization_config={"quant_method": "fp8"}),
        "'quantization_config'",
    ),
    "pairs of neighbours": (dict(rope_interleaved=True), "'rope_interleaved': True"),
    "something unheard of": (dict(use_hyper_connections=True), "'use_hyper_connections': True"),
    "a part of a head": (dict(partial_rotary_factor=0.5), "whole heads, of 16 .* asks for 8"),
    "a rope type": (
        dict(rope_scaling={"rope_type": "spiral", "factor": 2.0}),
        "rope_type must be one of .*'spiral'",
    ),
    "a field that is absent": (dict(vocab_size=None), "no 'vocab_size'"),
    "heads that do not divide": (dict(num_key_value_heads=3), "a multiple .* got 4 and 3"),
    "layer types": (
        dict(model_type="qwen2", layer_types=["full_attention", "linear_attention"]),
        "layer_types has 'linear_attention'",
    ),
    "too few layer types": (
        dict(model_type="qwen2", layer_types=["full_attention"]),
        "each of the 2 layers; got 1 and 2",
    ),
    "the balance of experts that there are not": (
        dict(model_type="llama", output_router_logits=True),
        "'output_router_logits': True",
    ),
    "noise for the router": (
        dict(model_type="mixtral", num_local_experts=4, router_jitter_noise=0.1),
        "router_jitter_noise=0.1",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_supported_is_refused_by_name(what):
    fields, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        config_of(**fields)


def test_fields_to_pass_over():
    fields = LLAMA | {"made_with": "care", "_name_or_path": "here", "quantization_config": None}
    with pytest.raises(ValueError, match=r"ignore=\['made_with'\]"):
        Config.from_hf(fields)
    assert Config.from_hf(fields, ignore=["made_with"]).vocab_size == 97


@pytest.mark.parametrize(
    "setting", [{"remat": "some"}, {"implementation": "triton"}, {"attention": "flash"}]
)
def test_settings_that_there_are_not(setting):
    (name,) = setting
    with pytest.raises(ValueError, match=f"{name} must be one of"):
        Config.from_hf(LLAMA, **setting)


def test_configs_are_values():
    assert config_of() == config_of() and hash(config_of()) == hash(config_of())
    assert config_of() != config_of(rope_theta=5e5)
    assert Config.from_hf(LLAMA, dtype=jax.numpy.bfloat16).dtype == "bfloat16"


def test_what_old_configs_leave_out():
    """As on the hub: no rope_theta, no head size, and names that have changed since."""
    assert config_of().frequencies("full_attention", None).inv_freq[1] == np.float32(10 ** (-4 / 8))
    gemma3 = Config.from_hf(
        {
            **{k: v for k, v in SMALL.items() if k != "num_hidden_layers"},
            "model_type": "gemma3_text",
            "num_hidden_layers": 7,
            "sliding_window": 32,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 6,
            "cache_implementation": "hybrid",
        }
    )
    assert gemma3.head_dim == 256 and gemma3.tie_word_embeddings
    assert [layer.window for layer in gemma3.layers] == [32] * 5 + [None, 32]
    full, sliding = (gemma3.frequencies(f"{t}_attention", None) for t in ("full", "sliding"))
    assert full.inv_freq[0] == 0.125 and sliding.inv_freq[0] == 1.0
    gemma = Config.from_hf(LLAMA | dict(model_type="gemma", hidden_act="gelu", head_dim=16))
    assert gemma.activation == "gelu_tanh"
    smollm = Config.from_hf(LLAMA | dict(model_type="smollm3", num_hidden_layers=8))
    assert [layer.rope for layer in smollm.layers] == [True, True, True, False] * 2
    mixtral = Config.from_hf(LLAMA | dict(model_type="mixtral", num_local_experts=4))
    assert mixtral.rms_norm_eps == 1e-5 and mixtral.norm_topk_prob


@pytest.mark.parametrize("name", CASES)
def test_a_config_object_and_its_json_say_the_same(name, tmp_path):
    config = CASES[name].hf_config()
    config.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    a, b = Config.from_hf(config), Config.from_hf(fields)
    assert a.layers == b.layers
    for layer in a.layers:
        if layer.rope:
            assert a.frequencies(layer.layer_type, 100) == b.frequencies(layer.layer_type, 100)
    for field in a.__dataclass_fields__.keys() - {"hf_json"}:
        assert getattr(a, field) == getattr(b, field), field


# The feed-forward part's options, and what is done to logits: nothing of them may get lost.


def assert_equal_losses(case, tmp_path):
    theirs = model_cases.checkpoint(case, tmp_path)
    ids = model_cases.tokens(1, 24)
    longs = torch.as_tensor(ids).long()
    want = theirs(longs, labels=longs, use_cache=False).loss
    want.backward()
    loss, grads = quick_jit(jax.value_and_grad(loss_fn))(
        from_pretrained(tmp_path), {"input_ids": ids}
    )
    np.testing.assert_allclose(float(loss), want.item(), rtol=2e-6)
    got = np.asarray(grads.model.embed_tokens.embedding[...])
    table = theirs.model.embed_tokens.weight.grad.numpy()
    assert np.abs(got - table).max() < 1e-4 * np.abs(table).max()


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh"])
def test_activations_and_biases_of_the_feed_forward_part(act, tmp_path):
    assert_equal_losses(Case("llama", dict(hidden_act=act, mlp_bias=True)), tmp_path)


@pytest.mark.parametrize("act", ["silu", "gelu"])
def test_the_gate_is_the_half_that_the_model_says(act, tmp_path):
    assert_equal_losses(Case("phi3", dict(hidden_act=act)), tmp_path)
    model, ids = from_pretrained(tmp_path), model_cases.tokens(1, 24)
    want = model(ids)
    for block in model.model.layers:  # swapped halves are another model, and it shows
        kernel = block.mlp.gate_up_proj.kernel
        kernel[...] = np.roll(np.asarray(kernel[...]), 96, axis=1)
    assert model_cases.relative(model(ids), want).max() > 1e-2


@pytest.mark.parametrize(
    "case",
    [
        Case("granite", dict(logits_scaling=8.0)),
        Case(
            "granite", dict(logits_scaling=0.1, attention_multiplier=0.5, tie_word_embeddings=True)
        ),
        # Logits that reach far beyond the cap.
        Case("gemma2", dict(head_dim=16, final_logit_softcapping=0.5)),
        Case("gemma3_text", dict(head_dim=16, final_logit_softcapping=1.0)),
    ],
    ids=lambda case: case.model_type,
)
def test_what_is_done_to_logits_is_in_the_loss(case, tmp_path):
    assert_equal_losses(case, tmp_path)
