"""PEFT around a patched model and inside one, in either order."""

import logging

import pytest
import torch

import torch_liger
from liger_ops import backend_triton
from patching_models import assert_same, batch, made, results
from torch_liger.patching.report import log_once

peft = pytest.importorskip("peft")
# Of transformers, about names that peft uses.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(autouse=True)
def plain_versions(monkeypatch):
    monkeypatch.setattr(backend_triton, "INTERPRET", False)
    log_once.cache_clear()


def adapted(order, **settings):
    """A patched model with an adapter whose weights are all random, and one that is not patched."""
    config = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **settings)
    found = []
    for patched in (False, True):
        model = made("llama")
        if patched and order == "patch first":
            torch_liger.apply_liger_kernel(model)
        model = peft.get_peft_model(model, config).train()
        if patched and order == "adapter first":
            torch_liger.apply_liger_kernel(model)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.add_(0.1 * noise.to(parameter.device))
        found.append(model)
    return found


ORDERS = pytest.mark.parametrize("order", ["patch first", "adapter first"])


@ORDERS
def test_adapters_of_every_projection(order):
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    plain, model = adapted(order, target_modules=targets)
    assert model(**batch()).logits is None
    expected = results(plain, **batch())
    assert sum("lora" in name for name in expected) == 2 * 2 * len(targets)
    assert_same(results(model, **batch()), expected)
    assert isinstance(model(**batch(), return_dict=False), tuple)
    assert torch_liger.report(model).applied["swiglu"] == 2
    torch_liger.unpatch(model)
    assert model(**batch()).logits is not None
    assert_same(results(model, **batch()), expected)


@ORDERS
def test_modules_that_are_trained_whole(order):
    plain, model = adapted(
        order, target_modules=["q_proj"], modules_to_save=["norm", "lm_head", "embed_tokens"]
    )
    assert model(**batch()).logits is None
    expected = results(plain, **batch())
    for module in ("norm", "lm_head", "embed_tokens"):
        assert any(f"{module}.modules_to_save" in name for name in expected)
    assert_same(results(model, **batch()), expected)
    assert repr(model) == repr(plain)
    with model.disable_adapter(), plain.disable_adapter():
        off = model(**batch()).loss
        torch.testing.assert_close(off, plain(**batch()).loss)
    assert off != expected["loss"]
    torch.testing.assert_close(model(**batch()).loss, expected["loss"])


@ORDERS
def test_an_adapter_of_the_head(order, caplog):
    plain, model = adapted(order, target_modules=["q_proj", "lm_head"])
    with caplog.at_level(logging.WARNING, logger="torch_liger"):
        assert_same(results(model, **batch()), results(plain, **batch()))
    assert caplog.messages == [
        "LlamaForCausalLM: the loss is computed from logits: lm_head is a Linear"
    ]
    assert model.base_model.model.lm_head.lora_A["default"].weight.grad.any()


@ORDERS
def test_checkpointing_with_a_frozen_base(order):
    plain, model = adapted(order, target_modules=["q_proj", "up_proj"])
    expected = results(plain, **batch())
    base = model.get_base_model()
    base.enable_input_require_grads()
    for reentrant in (True, False):
        enable = getattr(
            base, "activation_checkpointing_enable", base.gradient_checkpointing_enable
        )
        enable({"use_reentrant": reentrant})
        assert_same(results(model, **batch()), expected)


def test_merged():
    plain, model = adapted("patch first", target_modules=["q_proj", "down_proj"])
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(**batch()).loss, plain(**batch()).loss)
    assert torch_liger.report(merged).applied["rms_norm"] == 5
