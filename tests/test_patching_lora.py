"""fuse_lora inside patched models: an attention's adapters as one operation, and an MLP's."""

import pytest
import torch

import torch_liger
from liger_ops import backend_triton
from patching_models import DEVICE, assert_same, batch, made, results
from torch_liger import lora

peft = pytest.importorskip("peft")
# Of transformers, about names that peft uses.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
# LLaMA's code, norms of heads, norms of all of q and of k, no rotation in one layer, Gemma's, and
# code that reshapes before it has all three.
FAMILIES = ["llama", "qwen3", "olmo2", "smollm3", "gemma2", "llama4_text", "cohere"]


@pytest.fixture(autouse=True)
def plain_versions(monkeypatch):
    """But for the adapters' operation, most of which is products of the library's."""
    choose = backend_triton.choose

    def chosen(implementation, op, *tensors, **others):
        if DEVICE == "cpu":
            return "triton" if op.startswith("lora") else "eager"
        return choose(implementation, op, *tensors, **others)

    monkeypatch.setattr(backend_triton, "choose", chosen)


@pytest.fixture
def calls(monkeypatch):
    """Of the two functions, as they run: how many projections in each call."""
    seen = []

    def counted(name):
        run = getattr(lora, name)

        def function(x, given, *args, **kwargs):
            seen.append(len(given) if name == "lora_linears" else 1)
            return run(x, given, *args, **kwargs)

        monkeypatch.setattr(lora, name, function)

    counted("lora_linear")
    counted("lora_linears")
    return seen


def adapted(family, targets=ALL, fuse=True, patch=True, **settings):
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, **settings)
    model = peft.get_peft_model(made(family), config).train()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.1 * noise)
    if patch:
        torch_liger.apply_liger_kernel(model)
    if fuse:
        torch_liger.fuse_lora(model)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_pefts(family, calls):
    targets = ATTENTION if family == "llama4_text" else ALL  # its experts are not linear layers
    expected = results(adapted(family, targets, fuse=False, patch=False), **batch())
    assert sum("lora_" in name for name in expected) == 2 * 2 * len(targets)
    model = adapted(family, targets)
    model(**batch())
    mlp = [] if family == "llama4_text" else [2, 1]  # gate and up, then down
    assert calls == [3, 1, *mlp] * 2
    assert_same(results(model, **batch()), expected)


def test_only_those_with_an_adapter_are_in_it(calls):
    expected = results(adapted("llama", ["q_proj", "v_proj"], False, False), **batch())
    model = adapted("llama", ["q_proj", "v_proj"])
    model(**batch())
    assert calls == [2, 2]
    assert_same(results(model, **batch()), expected)


def test_one_of_them_that_is_not_fused_now_runs_as_pefts(calls):
    expected = results(adapted("llama", ATTENTION, False, False), **batch())
    model = adapted("llama", ATTENTION)
    for layer in model.base_model.model.model.layers:
        layer.self_attn.k_proj.register_forward_hook(lambda *args: None)
    model(**batch())
    assert calls == [2, 1, 1] * 2  # q and v; k, whose hook sees its call; o
    assert_same(results(model, **batch()), expected)


def test_a_layer_that_is_given_something_else_computes_that(calls):
    """As from a hook that casts, or code that changes what it projects."""
    plain, model = adapted("llama", ATTENTION, False, False), adapted("llama", ATTENTION)
    for m in (plain, model):
        for layer in m.base_model.model.model.layers:
            attention = layer.self_attn
            inner, outer = attention.k_proj, torch.nn.Module()
            outer.inner = inner
            outer.forward = lambda x, inner=inner: inner(2 * x)
            attention.k_proj = outer
    expected = {k.replace(".inner", ""): v for k, v in results(plain, **batch()).items()}
    found = {k.replace(".inner", ""): v for k, v in results(model, **batch()).items()}
    assert_same(found, expected)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(2, 64, device=DEVICE)
    assert torch.equal(layer(x), layer(x))


def test_forwards_are_as_before_also_after_an_error(calls):
    model = adapted("llama", ATTENTION)
    attention = model.base_model.model.model.layers[0].self_attn
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    before = [layer.forward for layer in layers]

    def fail(*args):
        raise KeyError("stop")

    model(**batch())
    handle = attention.o_proj.register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        model(**batch())
    handle.remove()
    assert all(layer.forward is b for layer, b in zip(layers, before, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(reentrant, calls):
    expected = results(adapted("llama", ATTENTION, False, False), **batch())
    model = adapted("llama", ATTENTION)
    base = model.get_base_model()
    base.enable_input_require_grads()
    enable = getattr(base, "activation_checkpointing_enable", base.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    model(**batch()).loss.backward()
    assert calls == [3, 1] * 4
    assert_same(results(model, **batch()), expected)


def test_dropout_is_drawn_anew_for_each_projection(calls):
    model = adapted("llama", ATTENTION, lora_dropout=0.5)
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(model(**batch()).loss.item())
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_whole(calls):
    plain, model = adapted("llama", ATTENTION, False, False), adapted("llama", ATTENTION)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(**batch()).loss
    torch.testing.assert_close(loss, plain(**batch()).loss, rtol=1e-5, atol=1e-5)


def test_unfused_and_unpatched(calls):
    expected = results(adapted("llama", ATTENTION, False, False), **batch())
    model = adapted("llama", ATTENTION)
    torch_liger.unfuse_lora(model)
    model(**batch())
    assert calls == []
    torch_liger.fuse_lora(model)
    torch_liger.unpatch(model)
    model(**batch())
    assert calls == [1] * 8
    assert_same(results(model, **batch()), expected)
