"""Patching an instance or the classes: what changes, what does not, and how it is undone."""

import copy
import gc
import inspect
import io
import logging
import pickle
import types
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

import torch_liger
from liger_ops import backend_triton
from patching_models import assert_same, batch, made, results, twin
from torch_liger import apply_liger_kernel_to_llama
from torch_liger.patching import patched


@pytest.fixture(autouse=True)
def plain_versions(monkeypatch):
    monkeypatch.setattr(backend_triton, "INTERPRET", False)
    yield
    torch_liger.unpatch()


def state_of(model):
    """Everything that could have changed in any module, by identity."""
    return {
        name: (type(module), repr(module), dict(module.__dict__))
        for name, module in model.named_modules()
    }


def globals_of(module):
    return {name: value for name, value in vars(module).items() if not name.startswith("__")}


def assert_identical(before, after):
    assert before.keys() == after.keys()
    for name, (kind, text, attributes) in before.items():
        assert after[name][0] is kind
        assert after[name][1] == text
        assert after[name][2].keys() == attributes.keys()
        for key, value in attributes.items():
            assert after[name][2][key] is value, (name, key)


def test_the_call_as_it_is_advertised():
    model, inputs = made("llama"), batch()
    expected = results(model, **inputs)
    report = apply_liger_kernel_to_llama(
        model, use_fused_rmsnorm=True, use_fused_rope=True, use_fused_linear_cross_entropy=True
    )
    assert report.applied == {
        "rms_norm": 5, "rope": 2, "swiglu": 2, "fused_add_rms_norm": 2,
        "fused_linear_cross_entropy": 1,
    }  # fmt: skip
    assert_same(results(model, **inputs), expected)


def test_an_instance_keeps_what_it_is_and_gets_it_all_back():
    model = made("llama")
    before, parameters = state_of(model), dict(model.named_parameters())
    signature = inspect.signature(model.forward)
    apply_liger_kernel_to_llama(model)
    after = state_of(model)
    for name, (kind, text, attributes) in before.items():
        assert after[name][:2] == (kind, text)
        assert attributes.items() <= after[name][2].items()
    assert list(model.state_dict()) == list(parameters)
    assert all(model.get_parameter(name) is value for name, value in parameters.items())
    assert inspect.signature(model.forward) == signature
    assert isinstance(model.model.norm.forward, types.MethodType)
    torch_liger.unpatch(model)
    assert_identical(before, state_of(model))


def test_no_other_model_and_nothing_global_changes():
    functions, loss = globals_of(modeling_llama), torch.nn.functional.cross_entropy
    methods = {
        (cls, name): value
        for cls in functions.values() if isinstance(cls, type)
        for name, value in vars(cls).items()
    }  # fmt: skip
    other, model = made("llama"), made("llama")
    before = state_of(other)
    apply_liger_kernel_to_llama(model)
    assert_identical(before, state_of(other))
    assert not torch_liger.report(made("llama")).applied
    assert globals_of(modeling_llama).items() == functions.items()
    assert torch.nn.functional.cross_entropy is loss
    for (cls, name), value in methods.items():
        if name != "__doc__":
            assert vars(cls)[name] is value
    assert_same(results(other, **batch()), results(model, **batch()))


def test_twice_is_once(caplog):
    model = made("llama")
    before = state_of(model)
    with caplog.at_level(logging.INFO, logger="torch_liger"):
        first = apply_liger_kernel_to_llama(model)
        once = state_of(model)
        assert apply_liger_kernel_to_llama(model) == first
    assert_identical(once, state_of(model))
    assert caplog.messages == [
        "Applied Liger kernel to llama: rms_norm x5, rope x2, swiglu x2, "
        "fused_add_rms_norm x2, fused_linear_cross_entropy x1. "
        "Left out: cross_entropy (switched off); fused_qkv (switched off)"
    ]
    torch_liger.unpatch(model)
    assert_identical(before, state_of(model))
    torch_liger.unpatch(model)


def test_a_second_call_adds_what_is_missing():
    model = made("llama")
    apply_liger_kernel_to_llama(model, rope=False, swiglu=False)
    assert torch_liger.report(model).left_out["rope"] == "switched off"
    apply_liger_kernel_to_llama(model)
    assert torch_liger.report(model).applied["rope"] == 2


def test_in_a_with_block():
    model = made("llama")
    apply_liger_kernel_to_llama(model, rope=False)
    before = state_of(model)
    with torch_liger.liger_kernel(model) as report:
        assert report.applied["rope"] == 2
        assert torch_liger.report(model) == report
    assert_identical(before, state_of(model))
    with pytest.raises(KeyError), torch_liger.liger_kernel(model):
        raise KeyError
    assert_identical(before, state_of(model))


def rebuilt(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), rebuilt],
    ids=["deepcopy", "pickle", "torch.save"],
)  # fmt: skip
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_copy_is_patched_by_itself(copied, family):
    # Router logits are collected by hooks of transformers that cannot be pickled.
    settings = {"output_router_logits": False} if family == "mixtral" else {}
    model, inputs = made(family, **settings), batch()
    expected, before = results(model, **inputs), state_of(model)
    torch_liger.apply_liger_kernel(model)
    other = copied(model)
    assert torch_liger.report(other) == torch_liger.report(model)
    for module in other.modules():
        for name in patched.record_of(module):
            assert module.__dict__[name].__self__ is module
    with torch.no_grad():
        other.model.norm.weight.zero_()
    assert_same(results(model, **inputs), expected)
    assert other(**inputs).loss != model(**inputs).loss
    torch_liger.unpatch(other)
    assert torch_liger.report(model).applied
    assert not torch_liger.report(other).applied
    assert {n: set(a) for n, (_, _, a) in state_of(other).items()} == {
        n: set(a) for n, (_, _, a) in before.items()
    }


def test_replicas_of_data_parallel_use_their_own_parameters():
    norm = made("llama").model.norm
    torch_liger.apply_liger_kernel_to_norms(norm)
    replica = norm._replicate_for_data_parallel()
    assert replica.forward.__self__ is replica
    assert norm.forward.__self__ is norm


def test_saved_and_loaded(tmp_path):
    model, inputs = made("llama"), batch()
    expected = results(model, **inputs)
    apply_liger_kernel_to_llama(model)
    model.save_pretrained(tmp_path)
    settings = {"attn_implementation": "eager"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **settings).to(model.device).train()
    assert not torch_liger.report(loaded).applied
    assert_same(results(loaded, **inputs), expected)
    ours = torch_liger.AutoLigerKernelForCausalLM.from_pretrained(
        tmp_path, use_fused_rope=False, **settings
    )
    assert torch_liger.report(ours).applied == {
        "rms_norm": 5, "swiglu": 2, "fused_add_rms_norm": 2, "fused_linear_cross_entropy": 1,
    }  # fmt: skip
    assert_same(results(ours.to(model.device).train(), **inputs), expected)
    of_config = torch_liger.AutoLigerKernelForCausalLM.from_config(model.config)
    assert torch_liger.report(of_config).applied["rope"] == 2


def test_hooks_are_called():
    model, seen = made("llama"), []
    norm = model.model.layers[1].input_layernorm
    norm.register_forward_hook(lambda module, args, y: seen.append("before") or 2 * y)
    expected = model(**batch()).loss
    apply_liger_kernel_to_llama(model)
    model.model.norm.register_forward_pre_hook(lambda module, args: seen.append("after"))
    seen.clear()
    torch.testing.assert_close(model(**batch()).loss, expected)
    assert seen == ["before", "after"]


def test_models_made_afterwards():
    constructors = {
        cls: vars(cls).get("__init__")
        for cls in vars(modeling_llama).values() if isinstance(cls, type)
    }  # fmt: skip
    earlier = made("llama")
    report = apply_liger_kernel_to_llama()
    assert report.applied == {
        "rms_norm": 1, "rope": 1, "swiglu": 1, "fused_add_rms_norm": 1,
        "fused_linear_cross_entropy": 1,
    }  # fmt: skip
    assert apply_liger_kernel_to_llama() == report
    later = made("llama")
    torch_liger.unpatch()
    for cls, constructor in constructors.items():
        assert vars(cls).get("__init__") is constructor
    assert not torch_liger.report(earlier).applied
    assert not torch_liger.report(made("llama")).applied
    assert torch_liger.report(later).applied["rms_norm"] == 5
    assert_same(results(later, **batch()), results(earlier, **batch()))
    torch_liger.unpatch(later)
    assert not torch_liger.report(later).applied


def test_a_subclass_with_a_forward_of_its_own_is_left_alone():
    class Doubled(modeling_llama.LlamaRMSNorm):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    model = made("llama")
    model.model.norm = Doubled(64).to(model.device)
    expected = results(model, **batch())
    report = apply_liger_kernel_to_llama(model)
    assert report.left_out["rms_norm"] == "1 of 5: Doubled has a forward of its own"
    assert_same(results(model, **batch()), expected)
    apply_liger_kernel_to_llama()
    assert "forward" not in vars(Doubled(64))


def test_a_forward_that_someone_replaced_is_left_alone():
    model = made("llama")
    norm = model.model.norm
    norm.forward = lambda hidden_states: 2 * hidden_states
    report = apply_liger_kernel_to_llama(model)
    assert report.left_out["rms_norm"].startswith("1 of 5: forward was already replaced, by test_a")
    torch_liger.unpatch(model)
    assert norm.forward(1) == 2


def test_unpatched_below_a_wrapper():
    """Trainers wrap the model's forward, and keep ours inside."""
    model, inputs = made("llama"), batch()
    apply_liger_kernel_to_llama(model)
    ours = model.forward
    model.forward = lambda **kwargs: ours(**kwargs)
    assert model(**inputs).logits is None
    torch_liger.unpatch(model)
    assert model(**inputs).logits is not None


def test_an_unpatched_model_is_freed_at_once():
    model = made("llama")
    apply_liger_kernel_to_llama(model)
    torch_liger.unpatch(model)
    norm = weakref.ref(model.model.norm)
    gc.disable()
    try:
        del model
        assert norm() is None
    finally:
        gc.enable()


def test_wrong_calls():
    model = made("llama")
    with pytest.raises(TypeError, match=r"apply_liger_kernel_to_llama\(\) got .* 'rms_nrom'; it"):
        apply_liger_kernel_to_llama(model, rms_nrom=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'layer_norm'"):
        torch_liger.apply_liger_kernel(model, layer_norm=True)
    with pytest.raises(TypeError, match=r"use_fused_rope and rope are the same .* False and True"):
        apply_liger_kernel_to_llama(model, use_fused_rope=False, rope=True)
    with pytest.raises(TypeError, match="rope must be True or False; got 'yes'"):
        apply_liger_kernel_to_llama(model, rope="yes")
    with pytest.raises(ValueError, match="cross_entropy and fused_linear_cross_entropy exclude"):
        apply_liger_kernel_to_llama(model, cross_entropy=True)
    with pytest.raises(ValueError, match="swiglu must be False for gpt_oss: its gate is clamped"):
        torch_liger.apply_liger_kernel_to_gpt_oss(swiglu=True)
    with pytest.raises(ValueError, match="family mistral; got LlamaForCausalLM of type 'llama'"):
        torch_liger.apply_liger_kernel_to_mistral(model)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module or None; got bool"):
        apply_liger_kernel_to_llama(True)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module; got str"):
        torch_liger.apply_liger_kernel("meta-llama/Llama-3.2-1B")
    for given in (model, None):
        with pytest.raises(ValueError, match=r"fused_qkv=True needs rms_norm, .* False for rope"):
            apply_liger_kernel_to_llama(given, fused_qkv=True, rope=False)
    with pytest.raises(ValueError, match="model must be given for bert, since no class"):
        torch_liger.apply_liger_kernel_to_bert()
    assert not torch_liger.report(model).applied
    assert not patched.patched_classes()


def test_signatures():
    parameters = inspect.signature(apply_liger_kernel_to_llama).parameters
    assert {n: p.default for n, p in list(parameters.items())[:8]} == {
        "model": None, "rms_norm": True, "rope": True, "swiglu": True,
        "fused_add_rms_norm": True, "cross_entropy": False,
        "fused_linear_cross_entropy": True, "fused_qkv": False,
    }  # fmt: skip
    assert "use_fused_rmsnorm" in parameters
    gemma = inspect.signature(torch_liger.apply_liger_kernel_to_gemma).parameters
    assert gemma["geglu"].default is True
    assert gemma["swiglu"].default is None
    model = twin(made("gemma"))
    report = torch_liger.apply_liger_kernel_to_gemma(model, swiglu=False)
    assert report.left_out["geglu"] == "switched off"


def test_the_language_model_of_another_that_makes_the_loss():
    class SomeForConditionalGeneration(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.language_model = made("llama")

    report = torch_liger.apply_liger_kernel(SomeForConditionalGeneration())
    assert report.left_out["fused_linear_cross_entropy"] == (
        "the model around it computes the loss, from its logits"
    )


def test_liger_kernels_own_name():
    model = made("llama")
    torch_liger._apply_liger_kernel_to_instance(model=model, rope=True, rms_norm=False)
    assert torch_liger.report(model).left_out["rms_norm"] == "switched off"
