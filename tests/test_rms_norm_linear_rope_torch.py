"""What PyTorch users do with rms_norm_linear_rope: strides, frozen inputs, autocast, compiling."""

import functools
import itertools

import pytest
import torch
import torch.utils.checkpoint

import torch_liger
from liger_ops import backend_triton
from liger_ops.rms_norm import triton_kernel as rms_norm_kernel
from liger_ops.rms_norm_linear_rope import rule, triton_kernel
from liger_ops.rms_norm_linear_rope.cases import Config
from liger_ops.rope import triton_kernel as rope_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS = {"num_heads": 3, "num_kv_heads": 2, "head_dim": 16}
COLUMNS, D, B, T = 7 * 16, 24, 2, 5
NAMES = ("x", "norm_weight", "qkv_weight", "bias", "q_norm_weight", "k_norm_weight", "cos", "sin")
op = functools.partial(torch_liger.rms_norm_linear_rope, **HEADS)
fused = functools.partial(op, implementation="triton")
eager = functools.partial(op, implementation="eager")


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def draw(needs=NAMES[:6], head_norms=True, time=T, dtype=torch.float32):
    shapes = [(B, time, D), (D,), (COLUMNS, D), (COLUMNS,), (16,), (16,), (time, 12), (time, 12)]
    given = {
        name: randn(*shape, seed=i, dtype=dtype if i < 4 else torch.float32)
        for i, (name, shape) in enumerate(zip(NAMES, shapes, strict=True))
    }
    if not head_norms:
        del given["q_norm_weight"], given["k_norm_weight"]
    return {name: tensor.requires_grad_(name in needs) for name, tensor in given.items()}


def loss_of(outputs):
    q, k, v = outputs
    return q.sin().sum() + k.cos().sum() + (v * v).sum()


def gradients(fn, given, loss=loss_of):
    loss(fn(**given)).backward()
    return {name: tensor.grad for name, tensor in given.items()}


def assert_close(actual, expected, rtol=1e-5):
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        if a is not None:
            scale = e.detach().abs().amax().item() if e.numel() else 0.0
            torch.testing.assert_close(a, e, rtol=rtol, atol=rtol * scale)


STRIDED = {
    "x of a wider buffer": ("x", lambda: randn(B, T, D + 9)[..., 4 : 4 + D]),
    "every second time": ("x", lambda: randn(B, 2 * T, D)[:, ::2]),
    "x expanded": ("x", lambda: randn(B, 1, D).expand(B, T, D)),
    "x with time first": ("x", lambda: randn(T, B, D).transpose(0, 1)),
    "features not adjacent": ("x", lambda: randn(B, D, T).transpose(1, 2)),
    "weight of a wider buffer": ("qkv_weight", lambda: randn(COLUMNS, D + 7)[:, 3 : 3 + D]),
    "weight transposed": ("qkv_weight", lambda: randn(D, COLUMNS).t()),
    "norm weight expanded": ("norm_weight", lambda: randn(1).expand(D)),
    "every second of the bias": ("bias", lambda: randn(2 * COLUMNS)[::2]),
    "angles of a wider buffer": ("cos", lambda: randn(B, T, 20)[..., :12]),
    "angles not adjacent": ("cos", lambda: randn(12, T).t()),
}


@pytest.mark.parametrize("name", STRIDED)
def test_strided_arguments(name):
    which, make = STRIDED[name]
    results = []
    for fn, change in ((fused, lambda t: t), (fused, torch.Tensor.contiguous), (eager, None)):
        given = draw()
        tensor = make()
        if which == "cos":
            given["sin"] = tensor.sin() if change is None else change(tensor).sin()
        given[which] = (tensor if change is None else change(tensor)).detach()
        given[which].requires_grad_(which != "cos")
        outputs = fn(**given)
        results.append([*outputs, *gradients(fn, given).values()])
    assert all(torch.equal(results[0][i], results[1][i]) for i in range(3))
    assert_close(results[0], results[1], rtol=2e-6)  # the library's products add up in other orders
    assert_close(results[0], results[2])


@pytest.mark.parametrize("layout", ["expanded", "heads first", "not adjacent"])
def test_strided_upstream_gradients(layout):
    def loss(outputs):
        if layout == "expanded":  # one number, every stride 0
            return sum(i * y.sum() for i, y in enumerate(outputs, 1))
        if layout == "heads first":
            return sum((y.transpose(1, 2).contiguous().sin()).sum() for y in outputs)
        return sum((y.transpose(2, 3).contiguous().sin()).sum() for y in outputs)

    assert_close(*(gradients(fn, draw(), loss).values() for fn in (fused, eager)))


@pytest.mark.parametrize("head_norms", [False, True])
@pytest.mark.parametrize("needs", [
    ("x",), ("norm_weight",), ("qkv_weight",), ("bias",), ("x", "norm_weight"), NAMES[:4], NAMES,
    ("cos",), ("q_norm_weight", "bias"), ("x", "sin"),
], ids=lambda needs: "-".join(needs))  # fmt: skip
def test_gradients_where_asked_and_no_work_elsewhere(needs, head_norms, monkeypatch):
    if not set(needs) & {*NAMES[:4], "cos", "sin"} and not head_norms:
        return
    normed, backwards = [], []
    forward, backward = rms_norm_kernel._forward, rms_norm_kernel._backward
    monkeypatch.setattr(rms_norm_kernel, "_forward", lambda *a: normed.append(1) or forward(*a))
    monkeypatch.setattr(
        rms_norm_kernel, "_backward",
        lambda x, *a: backwards.append((x.shape, a[-2:])) or backward(x, *a),
    )  # fmt: skip
    results = [gradients(fn, draw(needs, head_norms)) for fn in (fused, eager)]
    for name, gradient in results[0].items():
        assert (gradient is not None) == (name in needs)
    assert_close(*(result.values() for result in results))
    asked = set(needs) & set(NAMES[:6])
    assert bool(normed) == bool(asked and (head_norms or "qkv_weight" in needs))
    of_x = [need for shape, need in backwards if shape == (B, T, D)]
    assert of_x == ([("x" in needs, "norm_weight" in needs)]
                    if {"x", "norm_weight"} & asked else [])  # fmt: skip
    assert len(backwards) - len(of_x) == (2 if head_norms and asked else 0)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2)])
def test_some_results_alone(used, monkeypatch):
    turned = []
    rotate = rope_kernel._rotate
    monkeypatch.setattr(
        rope_kernel, "_rotate",
        lambda q, k, *a: turned.append((q is not None, k is not None)) or rotate(q, k, *a),
    )  # fmt: skip
    loss = lambda outputs: sum(outputs[i].sin().sum() for i in used)  # noqa: E731
    results = [gradients(fn, draw(), loss) for fn in (fused, eager)]
    for a, e in zip(*(result.values() for result in results), strict=True):
        assert_close([torch.zeros_like(a) if e is None and a is not None else a],
                     [torch.zeros_like(a) if e is None and a is not None else e])  # fmt: skip
    assert turned == ([(0 in used, 1 in used)] if {0, 1} & set(used) else [])


@pytest.mark.parametrize("scales", ["x", "weight"])
def test_only_the_arguments_are_kept(scales):
    """Not the normed x, and not the weight with the norm's in it."""
    saved, config = [], Config(16, 32, 16, 4, 2, scales)
    given = draw()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        triton_kernel.rms_norm_linear_rope(
            given["x"], given["norm_weight"], given["qkv_weight"], *list(given.values())[3:],
            heads=triton_kernel.Heads(*HEADS.values()),
            norm=triton_kernel.Norm(1e-6, 0.0, "llama"), config=config,
        )  # fmt: skip
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in given.values()}


def test_results_are_tensors_of_their_own_and_may_be_changed_in_place():
    def run(fn):
        given = draw()
        q, k, v = fn(**given)
        if fn is fused:
            assert len({t.untyped_storage().data_ptr() for t in (q, k, v)}) == 3
            assert all(t.is_contiguous() for t in (q, k, v))
            q.mul_(2)
            k.add_(1)
            v.sin_()
        else:
            q, k, v = q * 2, k + 1, v.sin()
        loss_of((q, k, v)).backward()
        return [tensor.grad for tensor in given.values()]

    assert_close(run(fused), run(eager))


@pytest.mark.parametrize("needs", [NAMES[:6], NAMES, ("x", "qkv_weight")])
def test_second_derivatives_and_backward_twice(needs):
    def penalty(fn):
        given = draw(needs)
        inputs = [tensor for tensor in given.values() if tensor.requires_grad]
        loss = loss_of(fn(**given))
        first = torch.autograd.grad(loss, inputs, retain_graph=True)
        again = torch.autograd.grad(loss, inputs, create_graph=True)
        assert_close(first, again)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in again), inputs)

    assert_close(penalty(fused), penalty(eager), rtol=1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant):
    def run(fn):
        given = draw()

        def layer(x):
            return fn(**{**given, "x": x})

        outputs = torch.utils.checkpoint.checkpoint(layer, given["x"], use_reentrant=reentrant)
        loss_of(outputs).backward()
        return [tensor.grad for tensor in given.values()]

    assert_close(run(fused), run(eager))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """The product and its results in autocast's dtype, each gradient in its argument's."""
    results = []
    for fn in (fused, eager):
        given = draw()
        with torch.autocast(DEVICE, dtype):
            outputs = fn(**given)
        assert all(y.dtype == dtype for y in outputs)
        loss_of([y.float() for y in outputs]).backward()
        results.append([y.float() for y in outputs] + [t.grad for t in given.values()])
        assert all(t.grad is None or t.grad.dtype == t.dtype for t in given.values())
    assert_close(*results, rtol=3e-2 if dtype == torch.bfloat16 else 4e-3)


def test_the_precision_of_float32_is_that_of_the_library(monkeypatch):
    seen = []
    launch = backend_triton.Launch.__init__
    monkeypatch.setattr(
        backend_triton.Launch, "__init__",
        lambda self, *a, **k: seen.append(a[3][-1]) or launch(self, *a, **k),
    )  # fmt: skip
    before = torch.get_float32_matmul_precision()
    given = draw((), time=T + 1)
    try:
        for precision, expected in (("highest", "ieee"), ("high", "tf32")):
            torch.set_float32_matmul_precision(precision)
            with torch.no_grad():
                fused(**given)
            assert seen[-1] == expected
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_rule_decides_where_nothing_is_asked_for(monkeypatch):
    ran, config = [], Config(16, 32, 16, 4, 2)
    for name in ("rms_norm_linear_rope", "composed"):
        original = getattr(triton_kernel, name)
        monkeypatch.setattr(triton_kernel, name, lambda *a, n=name, o=original, **k: (
            ran.append((n, k.get("config"))) or o(*a, **k)))  # fmt: skip
    expected, asked = eager(**draw()), []
    for choice, name in ((rule.Choice(True, config), "rms_norm_linear_rope"),
                         (rule.Choice(False), "composed")):  # fmt: skip
        monkeypatch.setattr(rule, "choose", lambda *a, c=choice, **k: asked.append((a, k)) or c)
        assert_close(op(**draw()), expected)
        assert ran[-1] == (name, choice.config)
    device, framework, rows, dim, heads = asked[0][0]
    assert (framework, rows, dim, heads) == ("triton", B * T, D, tuple(HEADS.values()))
    assert asked[0][1] == {"dtype": "float32", "as_measured": False, "trained": True}
    with torch.no_grad():
        given = draw(head_norms=False, dtype=torch.bfloat16)
        angles = torch.cat([given["cos"], given["cos"][:, :4]], 1)  # of heads rotated whole
        whole = {**given, "cos": angles, "sin": angles}
        for arguments, as_measured in (
            (whole, True), (given, False), ({**whole, "norm_weight": None}, False),
            ({**whole, "q_norm_weight": torch.ones(16, device=DEVICE)}, False),
        ):  # fmt: skip
            op(**arguments)
            expected = {"dtype": "bfloat16", "as_measured": as_measured, "trained": False}
            assert asked[-1][1] == expected
    if DEVICE == "cpu":
        assert device == "cpu"


def test_lora_adapters_train_through_it():
    """Their product added to the frozen weight, as peft merges it: the adapters get gradients."""

    def run(fn):
        given = draw(("x",))
        a, b = randn(4, D, seed=20).requires_grad_(), randn(COLUMNS, 4, seed=21).requires_grad_()
        loss_of(fn(**{**given, "qkv_weight": given["qkv_weight"] + 0.5 * b @ a})).backward()
        return [given["x"].grad, a.grad, b.grad, given["qkv_weight"].grad]

    assert_close(run(fused), run(eager))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    given = draw()
    expected = fused(**given)
    with mode():
        actual = fused(**given)
    assert not any(y.requires_grad for y in actual)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("implementation", ["eager", "triton", "composed"])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_traces_without_a_graph_break(implementation, monkeypatch):
    """The kernels' launches are left out here, and compiled in the test after this one."""
    if implementation != "eager":
        monkeypatch.setattr(backend_triton.Launch, "__call__", lambda self, *tensors: None)

    def loss(given):
        return loss_of(op(**given, implementation=implementation))

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    given = draw()
    compiled(given).backward()
    for name in NAMES[:6]:
        assert given[name].grad.shape == given[name].shape
    if implementation == "eager":
        expected = gradients(eager, draw())
        assert_close([t.grad for t in given.values()], expected.values())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("head_norms", [False, True])
def test_compiles_without_a_graph_break(head_norms):
    def loss(given, implementation):
        return loss_of(op(**given, implementation=implementation))

    compiled = torch.compile(loss, fullgraph=True)
    for time in (64, 96, 128):  # the second makes the length dynamic
        results = []
        for fn, implementation in ((compiled, "triton"), (loss, "eager")):
            given = draw(head_norms=head_norms, time=time)
            fn(given, implementation).backward()
            results.append([t.grad for t in given.values()])
        assert_close(*results, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [
    Config(128, 256, 64, 8, 3, "weight"), Config(128, 256, 64, 8, 3, "weight", persistent=True),
])  # fmt: skip
def test_more_than_two_to_the_31_elements(config):
    """x, q, and what is read of both at the end, are those of the last rows alone."""
    rows, dim = 2**20 + 5, 2048
    heads, norm = triton_kernel.Heads(32, 1, 64), triton_kernel.Norm(1e-6, 0.0, "llama")
    x = torch.randn(1, rows, dim, device="cuda", dtype=torch.bfloat16)
    norm_weight = torch.rand(dim, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(heads.columns, dim, device="cuda", dtype=torch.bfloat16) * dim**-0.5
    angles = [torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)]

    def run(part):
        given = (x[:, part], norm_weight, weight, None, None, None, *(a[part] for a in angles))
        return triton_kernel.rms_norm_linear_rope(*given, heads=heads, norm=norm, config=config)

    whole = run(slice(0, rows))
    for part in (slice(0, 300), slice(rows - 300, rows)):
        assert all(torch.equal(w[:, part], a) for w, a in zip(whole, run(part), strict=True))


def test_needs_say_what_is_differentiated():
    for size in (1, 2):
        for needs in itertools.combinations(NAMES[:4], size):
            given = draw(needs, head_norms=False)
            assert all(y.requires_grad for y in fused(**given))
    assert not any(y.requires_grad for y in fused(**draw(())))
