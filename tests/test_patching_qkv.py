"""Norm, projections and rotary embedding in one inside the attention of patched models."""

import copy
import inspect
import logging
import pickle

import pytest
import torch

import torch_liger
from compare import assert_matches_oracle, from_torch
from liger_ops.rms_norm_linear_rope import rule, triton_kernel
from patching_models import DEVICE, assert_same, batch, made, results, twin
from patching_qkv import copies as copies
from patching_qkv import fused as fused
from patching_qkv import other_operations_plain as other_operations_plain
from patching_qkv import pair
from torch_liger import apply_liger_kernel_to_llama
from torch_liger.patching import families

FAMILIES = [family.name for family in families.FAMILIES if family.qkv is not None]
THE_FIVE = ["llama", "mistral", "qwen2", "qwen3", "phi3"]


def test_which_families_have_it():
    assert set(THE_FIVE) <= set(FAMILIES)
    for family in families.FAMILIES:
        if family.qkv is None and family.attentions:
            apply = getattr(torch_liger, f"apply_liger_kernel_to_{family.name}")
            with pytest.raises(ValueError, match=r"fused_qkv must be False for .*: its l.* llama,"):
                apply(fused_qkv=True)
    model = made("gemma2")
    with pytest.raises(ValueError, match="fused_qkv must be False for gemma2"):
        torch_liger.apply_liger_kernel(model, use_fused_qkv=True)
    assert "llama, mistral" in torch_liger.report(model).left_out["fused_qkv"]
    for name in ("bert", "t5"):
        with pytest.raises(TypeError, match="unexpected keyword argument 'fused_qkv'"):
            getattr(torch_liger, f"apply_liger_kernel_to_{name}")(fused_qkv=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_same_loss_logits_and_gradients(fused, family):
    plain, model = pair(family)
    inputs = batch(length=7)
    assert_same(results(model, **inputs), results(plain, **inputs))
    assert len(fused) == 2 * 2  # two layers, in training and in eval
    x, norm, weight, bias, *own = fused[0][:6]
    layer = model.model.layers[0]
    assert norm is layer.input_layernorm.weight and weight.shape[1] == x.shape[-1] == 64
    assert (bias is not None) == (family in ("llama", "qwen2"))
    assert [w is not None for w in own] == 2 * [family in ("qwen3", "qwen3_moe")]


@pytest.mark.parametrize("family", THE_FIVE)
def test_the_same_tokens_are_generated(fused, copies, family):
    plain, model = pair(family)
    inputs = batch(length=5)
    del inputs["labels"]
    settings = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    want = plain.eval().generate(**inputs, **settings)
    got = model.eval().generate(**inputs, **settings)
    assert want.shape == (2, 8) and torch.equal(got, want)
    assert len(fused) == 2 * 3
    # For the prompt and, kept from then on, for the first of the tokens.
    assert copies == ([] if family == "phi3" else [3] * 2 * 2)


@pytest.mark.parametrize("write", [
    lambda w: w.data.mul_(-1), lambda w: w.mul_(-1), lambda w: setattr(w, "data", -w.data),
], ids=["behind autograd's back", "in place", "another tensor"])  # fmt: skip
@torch.no_grad()
def test_weights_that_change_between_prompts(fused, write):
    plain, model = (m.eval() for m in pair())
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    prompt, token = batch(length=3)["input_ids"], batch(length=1)["input_ids"]
    for _ in range(2):
        found = []
        for m in (plain, model):
            cache = None
            for ids in (prompt, token, token):
                out = m(ids, use_cache=True, **({} if cache is None else {name: cache}))
                cache = out[name]
            found.append({"logits": out.logits})
            for layer in m.model.layers:
                write(layer.self_attn.k_proj.weight)
        assert_same(*reversed(found))
    assert len(fused) == 2 * 3 * 2


@torch.no_grad()
def test_weights_that_change_between_tokens(fused, copies):
    _, model = pair()
    model.eval()
    layer = model.model.layers[0]
    x = torch.randn(2, 1, 64, device=DEVICE)
    given = {"position_embeddings": angles_of(model, x), "attention_mask": None}
    outputs = [layer(x, **given), layer(x, **given)]
    assert copies == [3] and torch.equal(*outputs)
    layer.self_attn.v_proj.weight.mul_(-1)
    outputs += [layer(x, **given), layer(x, **given)]
    assert copies == [3, 3] and torch.equal(*outputs[2:])
    assert not torch.allclose(*outputs[1:3])
    torch_liger.unpatch(model)
    torch.testing.assert_close(layer(x, **given), outputs[3])


def test_nothing_is_copied_where_the_rule_says_no(copies, monkeypatch):
    plain, model = pair()
    asked = []
    choose = rule.choose
    monkeypatch.setattr(rule, "choose", lambda *a, **k: asked.append((a, k)) or choose(*a, **k))
    monkeypatch.setattr(triton_kernel, "rms_norm_linear_rope", None)
    monkeypatch.setattr(triton_kernel, "composed", None)
    assert_same(results(model, **batch()), results(plain, **batch()))
    assert not copies
    (_, framework, rows, dim, heads), settings = asked[0]
    assert (framework, rows, dim, tuple(heads)) == ("triton", 24, 64, (4, 2, 16))
    assert settings == {"dtype": "float32", "as_measured": True, "trained": True}
    assert not asked[-1][1]["trained"]  # the logits


def angles_of(model, x):
    return model.model.rotary_emb(x, torch.arange(x.shape[1], device=x.device)[None])


def attended(layer, x, angles, upstream):
    """Attention's output of the layer, from x on, and its gradients."""
    attend = layer.__dict__.get("_attend")
    given = {"position_embeddings": angles, "attention_mask": None}
    x = x.clone().requires_grad_()
    y, _ = (
        layer.self_attn(hidden_states=layer.input_layernorm(x), **given)
        if attend is None
        else attend(x, given)
    )
    named = {"x": x, "norm": layer.input_layernorm.weight} | {
        name: p for name, p in layer.self_attn.named_parameters() if "o_proj" not in name
    }
    gradients = torch.autograd.grad(y, list(named.values()), upstream.to(y.dtype))
    return {"y": y} | dict(zip(named, gradients, strict=True))


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
@pytest.mark.parametrize("rows", [1, 9])
def test_outliers_are_no_worse_than_in_the_plain_model(fused, family, rows):
    """Of a thousand times the median, in bfloat16, by the judge of the operations."""
    plain = made(family, attention="sdpa").to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "norm" in name:
                parameter.add_(1)
    exact, model = twin(plain).double(), twin(plain)
    torch_liger.apply_liger_kernel(model, fused_qkv=True)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(1, rows, 64, generator=generator)
    x[..., [3, 40]] *= 1000
    x, upstream = (t.to(DEVICE, torch.bfloat16) for t in (x, torch.randn(1, rows, 64)))
    cos, sin = angles_of(plain, x)
    found = [
        {
            name: from_torch(t.detach())
            for name, t in attended(
                m.model.layers[0], x.to(dtype), (cos.to(dtype), sin.to(dtype)), upstream
            ).items()
        }
        for m, dtype in ((model, x.dtype), (plain, x.dtype), (exact, torch.float64))
    ]
    assert len(fused) == 1
    actual, plain, exact = found
    assert_matches_oracle(actual, plain, exact, family)


def modules_of(model):
    return {name: dict(module.__dict__) for name, module in model.named_modules()}


def assert_identical(before, after):
    for name, attributes in before.items():
        assert after[name].keys() == attributes.keys()
        assert all(after[name][key] is value for key, value in attributes.items())


def test_reported_and_taken_off(fused, caplog):
    model = made("llama")
    before, keys, text = modules_of(model), list(model.state_dict()), repr(model)
    with caplog.at_level(logging.INFO, logger="torch_liger"):
        report = apply_liger_kernel_to_llama(model, fused_qkv=True)
        once = modules_of(model)
        assert apply_liger_kernel_to_llama(model, use_fused_qkv=True) == report
    assert caplog.messages == [
        "Applied Liger kernel to llama: rms_norm x5, rope x2, swiglu x2, fused_add_rms_norm x2, "
        "fused_qkv x2, fused_linear_cross_entropy x1. Left out: cross_entropy (switched off)"
    ]
    assert_identical(once, modules_of(model))
    assert torch_liger.report(model) == report
    assert list(model.state_dict()) == keys and repr(model) == text
    model(**batch(length=4))
    torch_liger.unpatch(model)
    assert_identical(before, modules_of(model))
    model(**batch(length=4))
    assert len(fused) == 2


def test_added_by_a_second_call_and_for_a_with_block(fused):
    model = made("llama")
    apply_liger_kernel_to_llama(model)
    before = modules_of(model)
    assert torch_liger.report(model).left_out["fused_qkv"] == "switched off"
    with torch_liger.liger_kernel(model, fused_qkv=True) as report:
        assert report.applied["fused_qkv"] == 2
        model(**batch(length=4))
    assert_identical(before, modules_of(model))
    model(**batch(length=4))
    assert len(fused) == 2


def test_models_made_afterwards(fused):
    apply_liger_kernel_to_llama()
    report = apply_liger_kernel_to_llama(fused_qkv=True)
    assert report.applied["fused_qkv"] == 1 and "fused_qkv" not in report.left_out
    later = made("llama")
    torch_liger.unpatch()
    assert torch_liger.report(later).applied["fused_qkv"] == 2
    plain = made("llama")
    assert not torch_liger.report(plain).applied
    inputs = batch(length=4)
    assert_same(results(later, **inputs), results(plain, **inputs))
    assert len(fused) == 4


def test_it_needs_what_it_is_made_of():
    model = made("llama")
    for name in ("rms_norm", "rope", "fused_add_rms_norm"):
        with pytest.raises(ValueError, match=f"fused_qkv=True needs .* got False for {name}"):
            apply_liger_kernel_to_llama(model, fused_qkv=True, **{name: False})
    assert not torch_liger.report(model).applied


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_is_patched_by_itself(fused, copied):
    plain, model = pair()
    with torch.no_grad():  # something is kept then
        model.eval()(batch(length=1)["input_ids"])
    size = len(pickle.dumps(plain))
    assert len(pickle.dumps(model)) < 1.1 * size
    other = copied(model.train())
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.zero_()
    inputs = batch(length=4)
    assert_same(results(other, **inputs), results(plain, **inputs))
    assert torch_liger.report(other).applied["fused_qkv"] == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_are_still_checkpointed(fused, reentrant):
    plain, model = pair()
    inputs = batch(length=4)
    expected = results(plain, **inputs)
    model.enable_input_require_grads()
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    model(**inputs).loss.backward()
    assert len(fused) == 4  # each layer twice
    assert_same(results(model, **inputs), expected)


def test_frozen_weights(fused):
    plain, model = pair("qwen3")
    for m in (plain, model):
        for name, parameter in m.named_parameters():
            parameter.requires_grad_("embed" in name or "k_norm" in name)
    inputs = batch(length=4)
    assert_same(results(model, **inputs), results(plain, **inputs))
    assert len(fused) == 4


def test_hidden_states_and_attentions_are_put_out(fused):
    plain, model = (m.eval() for m in pair())
    inputs = batch(length=4)
    for settings in ({}, {"output_hidden_states": True, "output_attentions": True}, {}):
        with torch.no_grad():
            ours, theirs = (m(**inputs, **settings) for m in (model, plain))
        for name in ("hidden_states", "attentions"):
            assert (ours.get(name) is None) == (theirs.get(name) is None)
            for a, b in zip(ours.get(name) or (), theirs.get(name) or (), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert len(fused) == 2 * 3
