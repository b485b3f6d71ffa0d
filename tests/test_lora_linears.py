"""lora_linears: several projections of one x in one call, and PEFT's layers by it."""

import itertools

import pytest
import torch

import torch_liger
from liger_ops.lora_linear import cases, triton_parts
from test_lora_linear_torch import DEVICE, example
from test_rms_norm_torch import assert_close, randn
from torch_liger import lora
from torch_liger.lora import fuse_lora, project


def several(seed=0, dtype=torch.float32, adapter=None):
    """A query's, key's and value's."""
    sizes = ((24, 4, 0.5), (8, 4, 2.0), (8, 2, -1.0))
    projections = []
    for i, (out, rank, scaling) in enumerate(sizes):
        given = example((1,), out=out, rank=rank, dtype=dtype, adapter=adapter)
        tensors = [t + 0.1 * i for k, t in given.items() if k != "x"]
        tensors = [t.detach().requires_grad_(i != 0) for i, t in enumerate(tensors)]
        if i == 1:
            tensors[3] = None
        projections.append(torch_liger.LoraProjection(*tensors, scaling))
    return projections


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16])
def test_several_projections_of_one_x(adapter, dropout_p, monkeypatch):
    monkeypatch.setattr(cases, "SCRATCH", 1)

    def results(implementation):
        projections = several(adapter=adapter)
        x = randn(200, 32).requires_grad_()
        ys = torch_liger.lora_linears(
            x, projections, dropout_p=dropout_p, seed=7, implementation=implementation
        )
        wanted = [x, *(t for p in projections for t in p[1:4] if t is not None)]
        dys = [randn(*y.shape, seed=5 + i) for i, y in enumerate(ys)]
        return [*ys, *torch.autograd.grad(ys, wanted, dys)]

    rtol = 2e-5 if adapter == torch.float32 else 2e-2
    assert_close(results("triton"), results("eager"), rtol=rtol)


def test_each_of_several_projections_drops_its_own_elements():
    one = torch.eye(32, device=DEVICE)
    projection = (torch.zeros_like(one), one, one)
    ys = torch_liger.lora_linears(
        torch.ones(64, 32, device=DEVICE), [projection] * 3, dropout_p=0.5, seed=1,
        implementation="triton",
    )  # fmt: skip
    assert all(set(y.unique().tolist()) == {0.0, 2.0} for y in ys)
    assert all(0.35 < (a == b).float().mean() < 0.65 for a, b in itertools.combinations(ys, 2))


def test_only_some_of_several_outputs_are_used():
    def gradients(implementation):
        projections = several()
        x = randn(20, 32).requires_grad_()
        ys = torch_liger.lora_linears(x, projections, implementation=implementation)
        ys[1].square().sum().backward()
        return [x.grad, projections[1].lora_a.grad, projections[0].lora_a.grad]

    *kernel, none = gradients("triton")
    *expected, _ = gradients("eager")
    assert none is None
    assert_close(kernel, expected, rtol=1e-5)


def test_the_first_products_of_several_are_one_product():
    us = triton_parts.down(randn(20, 32), [p.lora_a.detach() for p in several()], None)
    assert [u.shape[1] for u in us] == [4, 4, 2]
    assert len({u.untyped_storage().data_ptr() for u in us}) == 1


def test_peft_layers_that_share_x_run_as_one(monkeypatch):
    peft = pytest.importorskip("peft")
    calls = []
    for name in ("lora_linear", "lora_linears"):
        run = getattr(lora, name)
        monkeypatch.setattr(
            lora, name, lambda *a, run=run, name=name, **k: calls.append(name) or run(*a, **k)
        )
    layers = torch.nn.ModuleDict({name: torch.nn.Linear(16, 8) for name in ("q", "k", "v")})
    config = peft.LoraConfig(r=4, target_modules=["q", "k", "v"], init_lora_weights=False)
    model = peft.inject_adapter_in_model(config, layers).to(DEVICE)
    x, modules = randn(4, 16), list(model.children())
    expected = [module(x) for module in modules]
    assert_close(project(x, *modules), expected)
    assert calls == []  # not fused
    fuse_lora(model)
    assert_close(project(x, *modules), expected, rtol=1e-5)
    assert calls == ["lora_linears"]
    calls.clear()
    modules[1].register_forward_hook(lambda *a: a[-1] * 0)
    assert not project(x, *modules)[1].any()
    assert calls == ["lora_linear"] * 3
