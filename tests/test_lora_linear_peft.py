"""fuse_lora: PEFT's layers run by lora_linear give what PEFT gives, and are PEFT's afterwards."""

import copy
import functools
import io
import pickle
import warnings

import pytest
import torch

import torch_liger
from test_rms_norm_torch import assert_close, randn
from torch_liger import lora
from torch_liger.lora import fuse_lora, unfuse_lora

peft = pytest.importorskip("peft")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Block(torch.nn.Module):
    """A layer's projections, by the names of Hugging Face's."""

    def __init__(self, base_dtype=torch.float32):
        super().__init__()
        sizes = {"k_proj": (16, 8), "v_proj": (16, 8), "down_proj": (24, 16)}
        for name in TARGETS:
            wide = name in ("gate_proj", "up_proj")
            inner, out = sizes.get(name, (16, 24 if wide else 16))
            self.add_module(name, torch.nn.Linear(inner, out, bias=name != "o_proj"))
        self.to(base_dtype)

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        x = x + self.o_proj(q * torch.cat([k, v], -1).tanh())
        return x + self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def model_of(base_dtype=torch.float32, adapter_cast=True, seed=0, **settings):
    torch.manual_seed(seed)
    config = {"r": 4, "lora_alpha": 6, "target_modules": TARGETS, "lora_dropout": 0.0, **settings}
    model = peft.get_peft_model(
        Block(base_dtype), peft.LoraConfig(**config), autocast_adapter_dtype=adapter_cast
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.2)
    return model.to(DEVICE)


def gradients(model, x, autocast=False):
    x = x.detach().requires_grad_()
    model.zero_grad()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        y = model(x)
    y.backward(randn(*y.shape, seed=5, dtype=y.dtype))
    return {"y": y, "x": x.grad, **{n: p.grad for n, p in model.named_parameters()}}


def assert_same(fused, plain, rtol=1e-5):
    assert fused.keys() == plain.keys()
    for name, expected in plain.items():
        actual = fused[name]
        assert (actual is None) == (expected is None), name
        if expected is not None:
            assert actual.dtype == expected.dtype, name
            assert_close([actual.float()], [expected.float()], rtol=rtol)


@pytest.fixture
def calls(monkeypatch):
    """The names of PEFT's and of the fused forwards as they run."""
    seen = []
    for target, name in ((lora, "lora_linear"), (lora, "lora_linears")):
        run = getattr(target, name)
        monkeypatch.setattr(
            target, name, lambda *a, run=run, name=name, **k: seen.append(name) or run(*a, **k)
        )
    original = peft.tuners.lora.Linear.forward

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        seen.append("peft")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(peft.tuners.lora.Linear, "forward", forward)
    return seen


SETTINGS = {
    "float32": ({}, False, 1e-5),
    "rslora": ({"use_rslora": True}, False, 1e-5),
    "bfloat16-base-float32-adapters": ({"base_dtype": torch.bfloat16}, False, 3e-2),
    "bfloat16-both": ({"base_dtype": torch.bfloat16, "adapter_cast": False}, False, 3e-2),
    "autocast": ({}, True, 3e-2),
    "autocast-bfloat16-base": ({"base_dtype": torch.bfloat16}, True, 3e-2),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_output_and_every_gradient_are_pefts(name, calls):
    settings, autocast, rtol = SETTINGS[name]
    model = model_of(**settings)
    x = randn(3, 5, 16, dtype=settings.get("base_dtype", torch.float32))
    plain = gradients(model, x, autocast)
    assert calls == ["peft"] * 7
    report = fuse_lora(model)
    assert len(report.fused) == 7 and not report.left_out
    calls.clear()
    fused = gradients(model, x, autocast)
    assert calls == ["lora_linear"] * 7
    assert_same(fused, plain, rtol)
    trained = [n for n, g in fused.items() if g is not None and "lora_" in n]
    assert len(trained) == 14 and all(fused[n].any() for n in trained)
    assert not any(g is not None for n, g in fused.items() if "base_layer" in n)


def test_float32_adapters_beside_a_bfloat16_base_are_as_exact_as_pefts():
    """Against float64: a product of rounded adapters would be a hundred times worse."""
    model = model_of(torch.bfloat16).base_model.model.q_proj
    fuse_lora(model)
    x, dy = randn(400, 16, dtype=torch.bfloat16), randn(400, 16, seed=5, dtype=torch.bfloat16)
    model(x).backward(dy)
    a, b = (part["default"].weight for part in (model.lora_A, model.lora_B))
    du = 1.5 * dy.double() @ b.detach().double()
    exact = {a: du.t() @ x.double(), b: 1.5 * dy.double().t() @ (x.double() @ a.double().t())}
    for parameter, expected in exact.items():
        assert (parameter.grad - expected).norm() / expected.norm() < 1e-5


def test_dropout_has_the_layers_rate_and_its_gradient_is_of_the_same_mask():
    layer = model_of(lora_dropout=0.25).base_model.model.q_proj
    fuse_lora(layer)
    with torch.no_grad():
        layer.base_layer.weight.zero_()
        layer.base_layer.bias.zero_()
        # A and B copy eight of x's columns, four to a call, so that y shows the mask.
        layer.lora_A["default"].weight.copy_(torch.eye(16)[:4])
        layer.lora_B["default"].weight.copy_(torch.eye(16)[:, :4])
    x = torch.ones(4000, 16, device=DEVICE, requires_grad=True)
    y = layer(x)
    values = y[:, :4].detach()
    assert_close([values.unique()], [torch.tensor([0.0, 1.5 / 0.75], device=DEVICE)])
    kept = values != 0
    assert abs(kept.float().mean().item() - 0.75) < 4 * (0.25 * 0.75 / kept.numel()) ** 0.5
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx[:, :4] != 0, kept)
    assert not torch.equal(layer(x), y)  # another mask at the next call
    torch.manual_seed(1)
    first = layer(x)
    torch.manual_seed(1)
    assert torch.equal(layer(x), first)
    layer.eval()
    assert_close([layer(x)[:, :4]], [torch.full((4000, 4), 1.5, device=DEVICE)])


STATES = {
    "disabled": ("adapters are disabled", lambda m: m.base_model.disable_adapter_layers()),
    "merged": ("adapters are merged", lambda m: m.merge_adapter()),
    "two-adapters": ("2 adapters are active", lambda m: (
        m.add_adapter("other", peft.LoraConfig(r=2, target_modules=TARGETS)),
        m.base_model.set_adapter(["default", "other"]))),
    "no-adapter": ("0 adapters are active", lambda m: [
        setattr(layer, "_active_adapter", []) for _, layer in lora._lora_layers(m)]),
    "casting": ("the casting of its input is disabled", lambda m: [
        setattr(layer, "cast_input_dtype_enabled", False) for _, layer in lora._lora_layers(m)]),
    "base-hook": ("a hook is on its base layer", lambda m: [
        layer.base_layer.register_forward_hook(lambda *a: a[-1] * 2)
        for _, layer in lora._lora_layers(m)]),
    "adapter-hook": ("a hook is on its lora_B", lambda m: [
        layer.lora_B["default"].register_forward_pre_hook(lambda _, a: (a[0] * 2,))
        for _, layer in lora._lora_layers(m)]),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_what_the_fused_operation_does_not_do_is_pefts(name, calls):
    reason, change = STATES[name]
    plain, fused = model_of(), model_of()
    fuse_lora(fused)
    change(plain)
    change(fused)
    report = fuse_lora(fused)
    assert not report.fused and set(report.left_out.values()) == {reason}
    x = randn(4, 16)
    with torch.no_grad():
        expected = plain(x)
        calls.clear()
        assert torch.equal(fused(x), expected)
    assert calls == ["peft"] * 7


KINDS = {
    "dora": ({"use_dora": True}, "its adapter is a DoraLinearVariant"),
    "bias": ({"lora_bias": True}, "its adapter has a bias"),
}


@pytest.mark.parametrize("name", KINDS)
def test_other_kinds_of_adapter_are_left_out_by_name(name, calls):
    settings, reason = KINDS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_of(**settings)
    plain = gradients(model, randn(4, 16))
    report = fuse_lora(model)
    assert set(report.left_out.values()) == {reason} and len(report.left_out) == 7
    assert str(report) == f"lora_linear x0; left out x7: {reason}"
    assert_same(gradients(model, randn(4, 16)), plain, rtol=0.0)
    assert "lora_linear" not in calls


class Quantised(torch.nn.Linear):
    """Stands for a base layer whose forward is not that of its weight."""

    def forward(self, x):
        return super().forward(x) * 2.0


def test_special_base_layers_and_other_layers_are_left_out_by_name(calls):
    from transformers.pytorch_utils import Conv1D

    inner = torch.nn.ModuleDict(
        {"q_proj": Quantised(16, 16), "k_proj": Conv1D(16, 16), "v_proj": torch.nn.Linear(16, 16),
         "embed": torch.nn.Embedding(5, 16), "up_proj": torch.nn.Linear(16, 16)}
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "embed",
                                                      "up_proj"])  # fmt: skip
        model = peft.inject_adapter_in_model(config, inner).to(DEVICE)
    model["up_proj"].forward = lambda x: x
    report = fuse_lora(model)
    assert report.fused == ["v_proj"]
    assert report.left_out == {
        "q_proj": "its base layer, Quantised, has a forward of its own",
        "k_proj": "its base layer is a Conv1D",
        "embed": "lora.Embedding is not lora.Linear",
        "up_proj": "its forward has been replaced",
    }
    x = randn(4, 16)
    assert_close([model["q_proj"](x)], [model["q_proj"].base_layer(x)])
    assert torch.equal(model["up_proj"](x), x)
    assert unfuse_lora(model) == ["q_proj", "v_proj"]


def test_fused_again_once_the_reason_has_passed(calls):
    model = model_of()
    fuse_lora(model)
    x = randn(4, 16)
    expected = gradients(model, x)
    with model.disable_adapter():
        assert_close([model(x)], [model.get_base_model()(x)])
    model.merge_adapter()
    assert_close([model(x)], [expected["y"]], rtol=1e-4)
    model.unmerge_adapter()
    calls.clear()
    assert_same(gradients(model, x), expected, rtol=1e-4)
    assert calls == ["lora_linear"] * 7


def test_nothing_but_the_forward_changes_and_all_comes_back():
    model = model_of()
    before = {n: dict(m.__dict__) for n, m in model.named_modules()}
    keys, text = list(model.state_dict()), repr(model)
    report = fuse_lora(model)
    forwards = [m.forward for _, m in lora._lora_layers(model)]
    assert fuse_lora(model) == report
    assert all(f is m.forward for f, (_, m) in zip(forwards, lora._lora_layers(model), strict=True))
    assert list(model.state_dict()) == keys and repr(model) == text
    assert sorted(unfuse_lora(model)) == sorted(report.fused)
    assert unfuse_lora(model) == []
    for name, module in model.named_modules():
        assert module.__dict__.keys() == before[name].keys()
        assert all(module.__dict__[k] is v for k, v in before[name].items())


@pytest.mark.parametrize("copying", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_is_fused_and_independent(copying, calls):
    layer = model_of().base_model.model.q_proj
    fuse_lora(layer)
    x = randn(4, 16)
    expected = layer(x).detach()
    if copying == "deepcopy":
        other = copy.deepcopy(layer)
    elif copying == "pickle":
        other = pickle.loads(pickle.dumps(layer))
    else:
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    with torch.no_grad():
        layer.lora_B["default"].weight.zero_()
    calls.clear()
    assert torch.equal(other(x), expected)
    assert calls == ["lora_linear"] and other.forward.args[0] is other
    unfuse_lora(layer)
    assert lora._is_bound(other)


def test_a_wrapper_of_accelerate_stays_around_the_layers_own_forward():
    hooks = pytest.importorskip("accelerate.hooks")
    layer = model_of().base_model.model.q_proj
    fuse_lora(layer)
    hooks.add_hook_to_module(layer, hooks.ModelHook())
    x = randn(4, 16)
    expected = layer(x)
    assert unfuse_lora(layer) == [""]
    assert_close([layer(x)], [expected])
    hooks.remove_hook_from_module(layer)
    assert_close([layer(x)], [expected])


def test_hooks_on_the_layer_itself_run_as_before(calls):
    model = model_of()
    fuse_lora(model)
    seen = []
    for _, layer in lora._lora_layers(model):
        layer.register_forward_hook(lambda *_: seen.append(1))
    model(randn(4, 16))
    assert len(seen) == 7 and calls == ["lora_linear"] * 7


def test_gradient_checkpointing_and_dropout():
    model = model_of(lora_dropout=0.3)
    fuse_lora(model)
    results = []
    for run in (model, lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)):
        torch.manual_seed(3)
        x = randn(4, 16).requires_grad_()
        model.zero_grad()
        run(x).sum().backward()
        results.append([x.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_traces_without_a_graph_break():
    model = model_of()
    x = randn(4, 16)
    plain = gradients(model, x)
    fuse_lora(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    y.backward(randn(*y.shape, seed=5))
    assert_close([y], [plain["y"]], rtol=1e-5)


def test_without_triton_pefts_forward_runs(calls, monkeypatch):
    monkeypatch.setattr(lora.backend_triton, "triton", None)
    model = model_of()
    assert len(fuse_lora(model).fused) == 7  # they would run fused on a GPU
    model(randn(4, 16))
    assert calls == ["peft"] * 7


def test_the_report_is_logged(caplog):
    with caplog.at_level("INFO", logger="torch_liger"):
        fuse_lora(model_of())
    assert "Fused the adapters of PeftModel: lora_linear x7" in caplog.text


def test_an_input_of_another_dtype_is_refused_in_pefts_words():
    model = model_of()
    fuse_lora(model)
    with pytest.raises(RuntimeError, match="dtype"):
        model(randn(4, 16, dtype=torch.bfloat16))


def test_fuse_lora_is_exported():
    assert torch_liger.fuse_lora is fuse_lora and torch_liger.unfuse_lora is unfuse_lora
