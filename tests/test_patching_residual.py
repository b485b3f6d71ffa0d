"""The addition to the residual stream and the norm after it in one, inside decoder layers."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

import torch_liger
from liger_ops import backend_triton
from patching_models import assert_same, batch, made, results, twin
from torch_liger import norms
from torch_liger.patching.residual import dropouts_of


@pytest.fixture(autouse=True)
def plain_versions(monkeypatch):
    monkeypatch.setattr(backend_triton, "INTERPRET", False)


@pytest.fixture
def calls(monkeypatch):
    """How often the fused function was called."""
    found = []

    def counted(*args, **kwargs):
        found.append(args)
        return fused(*args, **kwargs)

    fused = norms.fused_add_rms_norm
    monkeypatch.setattr(norms, "fused_add_rms_norm", counted)
    return found


def pair():
    plain = made("llama")
    model = twin(plain)
    torch_liger.apply_liger_kernel(model)
    return plain, model


def test_once_a_layer(calls):
    plain, model = pair()
    model(**batch())
    assert len(calls) == 2
    assert_same(results(model, **batch()), results(plain, **batch()))


def test_which_layers_are_as_llamas():
    assert dropouts_of(LlamaDecoderLayer.forward) is not None
    assert dropouts_of(Qwen2DecoderLayer.forward) is not None
    assert dropouts_of(Olmo2DecoderLayer.forward) is None

    def scaled(self, hidden_states, **kwargs):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states=hidden_states, **kwargs)
        hidden_states = residual + hidden_states * 0.5
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        return residual + hidden_states

    assert dropouts_of(scaled) is None


def hooked(norm):
    norm.register_forward_hook(lambda module, args, y: 2 * y)


def replaced(norm):
    stock = norm.forward
    norm.forward = lambda x: 2 * stock(x)


@pytest.mark.parametrize("change", [hooked, replaced])
def test_a_norm_that_does_more_is_called(calls, change):
    plain, model = pair()
    for m in (plain, model):
        change(m.model.layers[1].post_attention_layernorm)
    model(**batch())
    assert len(calls) == 1
    assert_same(results(model, **batch()), results(plain, **batch()))


def test_without_the_norms(calls):
    model = made("llama")
    report = torch_liger.apply_liger_kernel(model, rms_norm=False)
    assert report.left_out["fused_add_rms_norm"] == "its norm is not patched"
    report = torch_liger.apply_liger_kernel(model, fused_add_rms_norm=False)
    assert "fused_add_rms_norm" not in report.applied
    model(**batch())
    assert not calls


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_are_still_checkpointed(calls, reentrant):
    plain, model = pair()
    expected = results(plain, **batch())
    model.enable_input_require_grads()
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    loss = model(**batch()).loss
    assert len(calls) == 2
    loss.backward()
    assert len(calls) == 4  # recomputed
    assert_same(results(model, **batch()), expected)


def test_a_layer_whose_class_was_changed_is_still_checkpointed(calls):
    """As FSDP2 changes it."""
    _, model = pair()
    layer = model.model.layers[1]
    layer.__class__ = type("FSDPLlamaDecoderLayer", (LlamaDecoderLayer,), {})
    seen = []
    layer.mlp.register_forward_pre_hook(lambda module, args: seen.append(module))
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    model(**batch()).loss.backward()
    assert len(seen) == 2  # once more for the backward


def test_in_bfloat16_the_sum_is_rounded_as_before():
    plain, model = (m.to(torch.bfloat16) for m in pair())
    for m in (plain, model):
        m.model.layers[0].mlp.forward = torch.zeros_like
    layer = [m.model.layers[0] for m in (plain, model)]
    x = torch.randn(1, 5, 64, dtype=torch.bfloat16, device=plain.device)
    angles = plain.model.rotary_emb(x, torch.arange(5, device=x.device)[None])
    for m in (plain, model):
        m.model.layers[0].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    ours, theirs = (one(x, position_embeddings=angles) for one in reversed(layer))
    assert torch.equal(ours, theirs)
