"""Heads that are more than a weight: what is honoured, and what is said where it is not fused."""

import logging

import pytest
import torch

import torch_liger
from liger_ops import backend_triton
from patching_models import DEVICE, VOCAB, assert_same, batch, made, results, twin
from torch_liger.patching.report import log_once


@pytest.fixture(autouse=True)
def plain_versions(monkeypatch):
    monkeypatch.setattr(backend_triton, "INTERPRET", False)
    log_once.cache_clear()


def pair(**settings):
    plain = made("llama", **settings)
    model = twin(plain)
    torch_liger.apply_liger_kernel(model)
    return plain, model


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def doubled(model):
    head = Doubled(64, VOCAB, bias=False, device=DEVICE)
    head.load_state_dict(model.lm_head.state_dict())
    model.lm_head = head


def replaced(model):
    stock = model.lm_head.forward
    model.lm_head.forward = lambda x: 2 * stock(x)


CHANGES = {
    "lm_head is a Doubled": doubled,
    "lm_head has hooks": lambda m: m.lm_head.register_forward_hook(lambda _, args, y: 2 * y),
    "lm_head has a forward that was replaced": replaced,
}


@pytest.mark.parametrize("reason", CHANGES)
def test_what_else_the_head_does_is_done(reason, caplog):
    plain, model = pair()
    for m in (plain, model):
        CHANGES[reason](m)
    with caplog.at_level(logging.WARNING, logger="torch_liger"):
        assert model(**batch()).logits is not None
        assert_same(results(model, **batch()), results(plain, **batch()))
    assert caplog.messages == [f"LlamaForCausalLM: the loss is computed from logits: {reason}"]


def test_a_quantised_head_is_used_as_it_is(caplog):
    """Of 8 bits with a scale, as quantisers put them into a subclass or into the weight."""

    class Linear8bit(torch.nn.Linear):
        def __init__(self, linear):
            super().__init__(1, 1, bias=False)
            self.scale = linear.weight.detach().abs().max() / 127
            quantised = (linear.weight.detach() / self.scale).round().to(torch.int8)
            self.weight = torch.nn.Parameter(quantised, requires_grad=False)

        def forward(self, x):
            return torch.nn.functional.linear(x, self.weight * self.scale)

    plain, model = pair()
    for m in (plain, model):
        m.lm_head = Linear8bit(m.lm_head)
    with caplog.at_level(logging.WARNING, logger="torch_liger"):
        assert_same(results(model, **batch()), results(plain, **batch()))
    assert "lm_head is a Linear8bit" in caplog.text


@pytest.mark.parametrize("shape", [(0,), (VOCAB * 64 // 2,)])
def test_a_shard_of_the_weight_is_an_error(shape):
    _, model = pair(tie_word_embeddings=False)
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(shape, device=DEVICE))
    with pytest.raises(ValueError, match=r"lm_head.weight must be \(vocabulary, hidden size\)"):
        model(**batch())


@pytest.fixture
def mesh(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(DEVICE == "cuda", reason="the mesh is of CPUs")
def test_dtensors(mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    plain, model = pair(tie_word_embeddings=False)
    weight = model.lm_head.weight.detach().clone()
    model.lm_head.weight = torch.nn.Parameter(distribute_tensor(weight, mesh, [Replicate()]))
    loss, expected = model(**batch()).loss, plain(**batch()).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    gradient = model.lm_head.weight.grad
    torch.testing.assert_close(gradient.full_tensor(), plain.lm_head.weight.grad)
    model.lm_head.weight = torch.nn.Parameter(distribute_tensor(weight[:100], mesh, [Shard(0)]))
    with pytest.raises(ValueError, match=r"got \(100, 64\), this process's part of \(100, 64\)"):
        model(**batch())


def test_hooks_of_accelerate():
    """They wrap the forwards of all modules, before the patch or after it."""
    pytest.importorskip("accelerate")
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_submodules

    plain = made("llama")
    expected = results(plain, **batch())
    for hooked_first in (True, False):
        model = twin(plain)
        before = {n: set(m.__dict__) for n, m in model.named_modules()}
        if not hooked_first:
            torch_liger.apply_liger_kernel(model)
        for module in model.modules():
            add_hook_to_module(module, AlignDevicesHook(execution_device=DEVICE))
        if hooked_first:
            torch_liger.apply_liger_kernel(model)
        assert torch_liger.report(model).applied["rms_norm"] == 5
        assert model(**batch()).logits is None
        assert_same(results(model, **batch()), expected)
        if hooked_first:
            torch_liger.unpatch(model)
            assert model(**batch()).logits is not None
            remove_hook_from_submodules(model)
        else:
            remove_hook_from_submodules(model)
            assert model(**batch()).logits is None
            torch_liger.unpatch(model)
        assert_same(results(model, **batch()), expected)
        left = {n: set(m.__dict__) - {"forward"} for n, m in model.named_modules()}
        assert left == before  # accelerate itself leaves the forward in the instance
