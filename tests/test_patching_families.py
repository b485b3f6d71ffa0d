"""A tiny random model of each family computes the same patched and plain."""

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

import torch_liger
from liger_ops import backend_triton
from patching_models import DEVICE, MODELS, assert_same, batch, made, results, twin
from torch_liger.patching import families

# What stays as transformers has it, beside what is switched off.
LEFT_OUT = {"gpt_oss": {"swiglu"}, "nemotron": {"relu_squared"}}
OFF = {"cross_entropy", "fused_qkv"}


@pytest.fixture
def plain_versions(monkeypatch):
    """As on a CPU without Triton's interpreter, which is too slow for all of this."""
    monkeypatch.setattr(backend_triton, "INTERPRET", False)


def test_every_row_is_tested_and_has_its_function():
    names = {family.name for family in families.FAMILIES}
    assert names == set(MODELS) | {"bert", "t5"}
    for name in names:
        assert callable(getattr(torch_liger, f"apply_liger_kernel_to_{name}"))


@pytest.mark.parametrize("family", MODELS)
def test_same_loss_logits_and_gradients(plain_versions, family):
    model, inputs = made(family), batch()
    expected = results(model, **inputs)
    report = getattr(torch_liger, f"apply_liger_kernel_to_{family}")(model)
    unlike = {n for n, reason in report.left_out.items() if "in this version of" in reason}
    assert unlike <= {"fused_add_rms_norm"}
    assert set(report.left_out) - unlike == LEFT_OUT.get(family, set()) | OFF
    assert set(report.applied) | set(report.left_out) == set(families.family_of(family).switches())
    assert model(**inputs).logits is None
    assert_same(results(model, **inputs), expected)
    torch_liger.unpatch(model)
    for name, value in results(model, **inputs).items():
        assert torch.equal(value, expected[name]) or DEVICE == "cuda"


@pytest.mark.parametrize("family", ["llama", "gemma2", "glm4", "nemotron"])
def test_same_by_the_kernels(family):
    model, inputs = made(family), batch(length=6)
    plain = twin(model)
    torch_liger.apply_liger_kernel(model)
    assert_same(results(model, **inputs), results(plain, **inputs))


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "mixtral"])
def test_same_with_the_loss_over_logits(plain_versions, family):
    model, inputs = made(family), batch()
    expected = results(model, **inputs)
    report = torch_liger.apply_liger_kernel(
        model, cross_entropy=True, fused_linear_cross_entropy=False
    )
    assert report.applied["cross_entropy"] == 1
    assert model(**inputs).logits is not None
    assert_same(results(model, **inputs), expected)


@pytest.mark.parametrize("switch", ["rms_norm", "rope", "swiglu", "fused_linear_cross_entropy"])
def test_one_operation_alone(plain_versions, switch):
    model, inputs = made("llama"), batch()
    expected = results(model, **inputs)
    switches = dict.fromkeys(families.family_of("llama").switches(), False) | {switch: True}
    report = torch_liger.apply_liger_kernel_to_llama(model, **switches)
    assert list(report.applied) == [switch]
    assert_same(results(model, **inputs), expected)


@pytest.mark.parametrize(
    "family, fault",
    [
        ("gemma", ("norms", {"RMSNorm": families.rms_norm(0.0, "gemma", "eps")})),
        ("glm4", ("attentions", {"Attention": families.rope()})),
        ("gemma", ("mlps", {"MLP": lambda cls, m: families.ours.GatedMLP(cls, None)})),
    ],
)
def test_a_wrong_row_fails(plain_versions, monkeypatch, family, fault):
    row = families.family_of(family)
    monkeypatch.setitem(row.__dict__, *fault)
    model, inputs = made(family), batch()
    expected = results(model, **inputs)
    torch_liger.apply_liger_kernel(model)
    with pytest.raises(AssertionError):
        assert_same(results(model, **inputs), expected)


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "relu"])
def test_other_activations(plain_versions, activation):
    model, inputs = made("llama", hidden_act=activation), batch()
    expected = results(model, **inputs)
    report = torch_liger.apply_liger_kernel(model)
    if activation == "relu":
        assert report.left_out["swiglu"] == "the activation ReLU has no kernel"
    else:
        assert report.applied["geglu"] == 2
        assert "swiglu" not in report.left_out
    assert_same(results(model, **inputs), expected)


def test_experts_one_by_one_are_left_alone(plain_versions):
    model, inputs = made("mixtral"), batch()
    model.set_experts_implementation("eager")
    expected = results(model, **inputs)
    report = torch_liger.apply_liger_kernel(model)
    assert "experts_implementation is 'eager'" in report.left_out["swiglu"]
    assert_same(results(model, **inputs), expected)


def test_bert_and_t5(plain_versions):
    small = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    bert = BertForMaskedLM(BertConfig(**small, num_attention_heads=2)).to(DEVICE).eval()
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=101, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2,
                 decoder_start_token_id=0)
    ).to(DEVICE).eval()  # fmt: skip
    inputs = batch(vocab=101)
    for model, op in ((bert, "layer_norm"), (t5, "rms_norm")):
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        expected = results(model, **inputs)
        report = torch_liger.apply_liger_kernel(model)
        assert list(report.applied) == [op]
        assert not report.left_out
        assert_same(results(model, **inputs), expected)


def test_norms_of_a_model_of_no_family(plain_versions):
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True).to(DEVICE)
    layer.config = type("Config", (), {"model_type": "mine"})()
    x = torch.randn(2, 5, 16, device=DEVICE)
    expected = layer(x)
    with pytest.raises(ValueError, match=r"known family .*llama.* got Trans.* of type 'mine'"):
        torch_liger.apply_liger_kernel(layer)
    report = torch_liger.apply_liger_kernel_to_norms(layer, rms_norm=False)
    assert report.applied == {"layer_norm": 2}
    torch.testing.assert_close(layer(x), expected)
    with pytest.raises(ValueError, match="got Linear of type None, without any of its modules"):
        torch_liger.apply_liger_kernel_to_norms(torch.nn.Linear(2, 2))


def test_a_family_inside_another_model(plain_versions):
    """A model of no row whose text part is one."""
    text = made("llama").model

    class Around(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.language_model = text

    around = Around()
    report = torch_liger.apply_liger_kernel(around)
    assert report.applied == {"rms_norm": 5, "rope": 2, "swiglu": 2, "fused_add_rms_norm": 2}
    assert report.left_out["fused_linear_cross_entropy"] == "the model has no LlamaForCausalLM"
