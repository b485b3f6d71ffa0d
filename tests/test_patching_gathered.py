"""Heads whose weight is whole only inside their own forward, as DeepSpeed's ZeRO-3 has them.

Stands in for it where it is not installed: the same attributes on parameters, and hooks on every
module that fill a parameter before the forward and the backward, and empty it after them.
"""

import logging
import types

import pytest
import torch

import torch_liger
from liger_ops import backend_triton
from patching_models import DEVICE, VOCAB, assert_same, batch, made, results, twin
from torch_liger.patching import head
from torch_liger.patching.report import log_once

# Of transformers, about names that peft uses.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(autouse=True)
def plain_versions(monkeypatch):
    monkeypatch.setattr(backend_triton, "INTERPRET", False)
    log_once.cache_clear()


def empty(parameter):
    parameter.ds_shape = parameter.shape
    parameter.ds_tensor = parameter.data
    parameter.data = parameter.data.new_empty(0)


def split(model):
    for parameter in model.parameters():
        empty(parameter)
    for module in model.modules():
        gather_around(module)


def gather_around(module):
    """DeepSpeed's hooks: two before the forward, two after it."""

    def gather():
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.ds_tensor

    def release():
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.new_empty(0)

    def on_backward(tensor, action):
        class Marked(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.detach()

            @staticmethod
            def backward(ctx, gradient):
                action()
                return gradient

        return Marked.apply(tensor) if torch.is_tensor(tensor) else tensor

    def before(module, args):
        gather()
        return tuple(on_backward(x, release) for x in args)

    def after(module, args, output):
        release()
        return on_backward(output, gather)

    for hook in (before, after):
        hook.__module__ = "deepspeed.runtime.zero.parameter_offload"
    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def pair(**settings):
    plain = made("llama", **settings)
    model = twin(plain)
    torch_liger.apply_liger_kernel(model)
    return plain, model


@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_is_computed_where_the_weight_is_whole(tied, monkeypatch):
    plain, model = pair(tie_word_embeddings=tied)
    split(model)
    seen = []
    whole = head.parameters
    monkeypatch.setattr(head, "parameters", lambda m: seen.append(whole(m)[0].shape) or whole(m))
    assert model(**batch()).logits is None
    assert seen == [(VOCAB, 64)] and model.lm_head.weight.shape == (0,)
    assert "forward" not in model.lm_head.__dict__
    assert_same(results(model, **batch()), results(plain, **batch()))


@pytest.mark.parametrize("order", ["patch first", "adapter first"])
def test_inside_peft(order):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    found = []
    for patched in (False, True):
        model = made("llama", tie_word_embeddings=False)
        if patched and order == "patch first":
            torch_liger.apply_liger_kernel(model)
        model = peft.get_peft_model(model, config).train()
        if patched:
            torch_liger.apply_liger_kernel(model)
            split(model)
        found.append(model)
    plain, model = found
    assert model(**batch()).logits is None
    expected = results(plain, **batch())
    assert any("lm_head" in name for name in expected)
    assert_same(results(model, **batch()), expected)


def test_a_hook_that_does_more_is_honoured(caplog):
    plain, model = pair()
    split(model)
    for m in (plain, model):
        m.lm_head.register_forward_hook(lambda module, args, y: 2 * y)
    with caplog.at_level(logging.WARNING, logger="torch_liger"):
        assert_same(results(model, **batch()), results(plain, **batch()))
    assert caplog.messages == [
        "LlamaForCausalLM: the loss is computed from logits: lm_head has hooks"
    ]


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_fsdp_must_not_round_the_loss(dtype, monkeypatch):
    _, model = pair()
    split(model)
    state = types.SimpleNamespace(_mp_policy=types.SimpleNamespace(output_dtype=dtype))
    model.lm_head._get_fsdp_state = lambda: state
    assert (model(**batch()).logits is None) is (dtype is not torch.bfloat16)


@pytest.mark.parametrize("name, shape", [("weight", (VOCAB, 64)), ("bias", (VOCAB,))])
def test_a_part_of_it_without_those_hooks_is_an_error(name, shape):
    _, model = pair(tie_word_embeddings=False)
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCAB, device=DEVICE))
    empty(getattr(model.lm_head, name))
    with pytest.raises(ValueError) as caught:
        model(**batch())
    assert f"lm_head.{name} must be" in str(caught.value)
    assert f"got (0,), this process's part of {shape}: call the model" in str(caught.value)


def test_a_norm_without_its_weight_is_an_error():
    _, model = pair()
    empty(model.model.norm.weight)
    with pytest.raises(ValueError, match=r"weight must have shape .*D = 64.*got \(0,\)"):
        model(**batch())
