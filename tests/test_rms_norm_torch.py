"""What PyTorch users do with rms_norm: autograd, strides, autocast, compile, checkpointing."""

import itertools

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torch_liger
from liger_ops import backend_triton
from liger_ops.rms_norm import triton_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def norm(x, weight=None, **settings):
    return torch_liger.rms_norm(x, weight, implementation="triton", **settings)


def plain(x, weight=None, **settings):
    return torch_liger.rms_norm(x, weight, implementation="eager", **settings)


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def gradients(fn, inputs, upstream):
    outputs = fn(*inputs)
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    return [outputs, *torch.autograd.grad(outputs, wanted, upstream)]


def assert_close(actual, expected, rtol=2e-6):
    for a, e in zip(actual, expected, strict=True):
        scale = e.detach().abs().amax().item() if e.numel() else 0.0
        torch.testing.assert_close(a, e, rtol=rtol, atol=rtol * scale)


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=2)))
def test_gradients_where_asked_and_none_elsewhere(needs, monkeypatch):
    asked = []
    backward = triton_kernel._backward
    monkeypatch.setattr(
        triton_kernel, "_backward", lambda *args: asked.append(args[-2:]) or backward(*args)
    )
    x = randn(5, 48).requires_grad_(needs[0])
    weight = randn(48, seed=1).requires_grad_(needs[1])
    y = norm(x, weight)
    assert y.requires_grad == any(needs)
    if not any(needs):
        return
    y.square().sum().backward()
    assert asked == [needs]
    x2, weight2 = x.detach().requires_grad_(), weight.detach().requires_grad_()
    plain(x2, weight2).square().sum().backward()
    for tensor, reference, needed in ((x, x2, needs[0]), (weight, weight2, needs[1])):
        assert (tensor.grad is not None) == needed
        if needed:
            assert_close([tensor.grad], [reference.grad])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    x, weight = randn(5, 48), randn(48, seed=1).requires_grad_()
    expected = norm(x, weight)
    with mode():
        y = norm(x, weight)
    assert not y.requires_grad
    assert torch.equal(y, expected)


def test_backward_twice_gives_the_same_and_leaves_the_upstream_gradient():
    x, weight = randn(5, 48).requires_grad_(), randn(48, seed=1).requires_grad_()
    dy = randn(5, 48, seed=2)
    kept = dy.clone()
    y = norm(x, weight)
    first = torch.autograd.grad(y, (x, weight), dy, retain_graph=True)
    second = torch.autograd.grad(y, (x, weight), dy)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(dy, kept)


@pytest.mark.parametrize("casting_mode", ["llama", "gemma", "none"])
def test_second_derivatives(casting_mode):
    def penalty(fn):
        x, weight = randn(4, 32).requires_grad_(), randn(32, seed=1).requires_grad_()
        (dx,) = torch.autograd.grad(
            fn(x, weight, casting_mode=casting_mode).sin().sum(), x, create_graph=True
        )
        return torch.autograd.grad(dx.square().sum(), (x, weight))

    assert_close(penalty(norm), penalty(plain), rtol=1e-5)


@pytest.mark.parametrize("used", ["normed", "residual", "both"])
def test_fused_add_gradients_of_one_output_or_both(used):
    def run(implementation):
        x, residual = randn(5, 48).requires_grad_(), randn(5, 48, seed=3).requires_grad_()
        weight = randn(48, seed=1).requires_grad_()
        normed, h = torch_liger.fused_add_rms_norm(
            x, residual, weight, implementation=implementation
        )
        loss = {"normed": normed.sin(), "residual": h.cos(), "both": normed.sin() + h.cos()}[used]
        loss.sum().backward()
        return [t.grad for t in (x, residual, weight)]

    triton, eager = run("triton"), run("eager")
    for a, e in zip(triton, eager, strict=True):
        assert (a is None) == (e is None)
        if e is not None:
            assert_close([a], [e])


def test_double_norm_around_a_residual():
    def model(fn):
        h = randn(6, 40).requires_grad_()
        w1, w2 = randn(40, seed=1).requires_grad_(), randn(40, seed=2).requires_grad_()
        z = h + fn(fn(h, w1).sin() * 2.0, w2)
        (z + fn(z, w1)).square().sum().backward()
        return [h.grad, w1.grad, w2.grad]

    assert_close(model(norm), model(plain), rtol=1e-5)


def _expanded(shape):
    return randn(1, seed=5).expand(shape)


@pytest.mark.parametrize(
    "upstream",
    [
        lambda shape: _expanded(shape),
        lambda shape: torch.ones((), device=DEVICE).expand(shape),
        lambda shape: randn(*shape[:-1], 1, seed=6).expand(shape),
        lambda shape: randn(shape[1], shape[0], shape[2], seed=7).transpose(0, 1),
        lambda shape: randn(shape[2], shape[1], shape[0], seed=8).permute(2, 1, 0),
    ],
    ids=["one-value", "ones", "one-a-row", "transposed", "columns-first"],
)
def test_strided_upstream_gradients(upstream):
    shape = (2, 5, 24)
    dy = upstream(shape)
    x, weight = randn(*shape).requires_grad_(), randn(24, seed=1).requires_grad_()
    strided = gradients(norm, (x, weight), dy)
    contiguous = gradients(norm, (x, weight), dy.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(strided, contiguous, strict=True))


STRIDED = {
    "transposed": lambda: randn(4, 2, 8).transpose(0, 1),
    "without-the-last-token": lambda: randn(2, 6, 16)[:, :-1],
    "every-second-row": lambda: randn(10, 16)[::2],
    "columns-of-a-wider-buffer": lambda: randn(5, 40)[:, 8:24],
    "unaligned-columns": lambda: randn(5, 41)[:, 3:19],
    "expanded-rows": lambda: randn(1, 16).expand(5, 16),
    "expanded-columns": lambda: randn(5, 1).expand(5, 16),
    "one-dimension": lambda: randn(16),
    # q heads out of a fused qkv projection of 14 query and 2 key-value heads
    "heads-of-qkv": lambda: randn(2, 3, 18 * 16)[..., : 14 * 16].view(2, 3, 14, 16),
    "heads-first": lambda: randn(2, 3, 18 * 16)[..., : 14 * 16].view(2, 3, 14, 16).transpose(1, 2),
}


@pytest.mark.parametrize("name", STRIDED)
def test_strided_inputs(name):
    x = STRIDED[name]()
    weight = randn(x.shape[-1], seed=1).requires_grad_()
    dy = randn(*x.shape, seed=2)
    strided = gradients(norm, (x.requires_grad_(), weight), dy)
    copy = x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    contiguous = gradients(norm, (copy, weight), dy)
    assert all(torch.equal(a, b) for a, b in zip(strided, contiguous, strict=True))
    assert torch.equal(x, copy)


@pytest.mark.parametrize(
    "weight", [lambda: randn(32, seed=1)[::2], lambda: randn(1, seed=1).expand(16)]
)
def test_strided_weight(weight):
    x, weight, dy = randn(5, 16), weight().requires_grad_(), randn(5, 16, seed=2)
    strided = gradients(norm, (x, weight), dy)
    assert_close(strided, gradients(norm, (x, weight.detach().clone().requires_grad_()), dy))


def test_gradients_of_qk_norm_land_in_their_slices():
    def run(fn):
        qkv = randn(2, 3, 18 * 16).requires_grad_()
        q, k, _ = qkv.split([14 * 16, 2 * 16, 2 * 16], dim=-1)
        weight = randn(16, seed=1)
        q = fn(q.view(2, 3, 14, 16).transpose(1, 2), weight)
        k = fn(k.view(2, 3, 2, 16).transpose(1, 2), weight)
        (q.sin().sum() + k.cos().sum()).backward()
        return [qkv.grad]

    assert_close(run(norm), run(plain))


def test_no_write_beyond_the_output(monkeypatch):
    buffers = []

    def inside_sentinels(like, dtype):
        buffers.append(torch.full((like.numel() + 256,), 7.0, dtype=dtype, device=like.device))
        return buffers[-1][128:-128].view(like.shape)

    monkeypatch.setattr(triton_kernel, "empty", inside_sentinels)
    for rows, dim in [(1, 1), (2, 3), (31, 17), (33, 80), (3, 1000)]:
        x, weight = randn(rows, dim).requires_grad_(), randn(dim, seed=1).requires_grad_()
        norm(x, weight).sum().backward()
    assert len(buffers) == 10
    for buffer in buffers:
        assert (buffer[:128] == 7.0).all() and (buffer[-128:] == 7.0).all()


def test_in_place_changes_of_the_output_are_allowed():
    x, weight = randn(5, 48).requires_grad_(), randn(48, seed=1).requires_grad_()
    y = norm(x, weight)
    y.add_(1).mul_(2)
    y.sum().backward()
    x2, weight2 = x.detach().requires_grad_(), weight.detach().requires_grad_()
    (2 * (plain(x2, weight2) + 1)).sum().backward()
    assert_close([x.grad, weight.grad], [x2.grad, weight2.grad])


def test_in_place_change_of_the_input_is_noticed():
    x, weight = randn(5, 48), randn(48, seed=1).requires_grad_()
    y = norm(x, weight)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    def run(fn):
        x, weight = randn(5, 48).requires_grad_(), randn(48, seed=1).requires_grad_()
        y = checkpoint(lambda a: fn(a, weight).sin(), x, use_reentrant=use_reentrant)
        y.sum().backward()
        return [y, x.grad, weight.grad]

    assert_close(run(norm), run(plain))


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_dtypes_follow_eager_also_under_autocast(x_dtype, weight_dtype, autocast):
    def run(fn):
        x = randn(5, 48, dtype=x_dtype).requires_grad_()
        weight = randn(48, dtype=weight_dtype, seed=1).requires_grad_()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            y = fn(x, weight)
        y.float().square().sum().backward()
        return y, x.grad, weight.grad

    ours, eager = run(norm), run(plain)
    assert [a.dtype for a in ours] == [e.dtype for e in eager]
    assert_close([a.float() for a in ours], [e.float() for e in eager], rtol=2e-2)


def test_float64_runs_in_eager_and_not_by_name():
    x = randn(3, 8, dtype=torch.float64)
    assert torch_liger.rms_norm(x).dtype == torch.float64
    with pytest.raises(
        RuntimeError, match=r"takes float32, bfloat16 and float16, not torch\.float64"
    ):
        norm(x)


def test_torch_func_transforms_run_the_eager_version():
    x, weight = randn(3, 4, 8), randn(8, seed=1)

    def loss(x, weight):
        return torch_liger.rms_norm(x, weight).sin().sum()

    gradients = torch.func.grad(loss, (0, 1))(x, weight)
    x2, weight2 = x.clone().requires_grad_(), weight.clone().requires_grad_()
    plain(x2, weight2).sin().sum().backward()
    assert_close(gradients, (x2.grad, weight2.grad))
    batched = torch.func.vmap(torch_liger.rms_norm, (0, None))(x, weight)
    assert_close([batched], [plain(x, weight)])


def test_tensor_subclasses_run_the_eager_version():
    class Labelled(torch.Tensor):
        pass

    x = randn(3, 8).as_subclass(Labelled)
    assert type(torch_liger.rms_norm(x)) is Labelled
    with pytest.raises(RuntimeError, match="Labelled is a subclass of Tensor"):
        norm(x)


def test_no_triton_is_said_by_name_and_passed_over_by_default(monkeypatch):
    monkeypatch.setattr(backend_triton, "triton", None)
    x = randn(3, 8)
    assert torch.equal(torch_liger.rms_norm(x), plain(x))
    with pytest.raises(RuntimeError, match=r"rms_norm: .* triton is not installed"):
        norm(x)


def test_compiles_without_a_graph_break():
    fn = torch.compile(lambda x, w: plain(x, w).sin().sum(), fullgraph=True, backend="aot_eager")
    x, weight = randn(4, 64).requires_grad_(), randn(64, seed=1).requires_grad_()
    fn(x, weight).backward()
    x2, weight2 = x.detach().requires_grad_(), weight.detach().requires_grad_()
    plain(x2, weight2).sin().sum().backward()
    assert_close([x.grad, weight.grad], [x2.grad, weight2.grad])


def test_random_shapes():
    rng = np.random.default_rng(0)
    for _ in range(6):
        rows, dim = int(rng.integers(0, 40)), int(rng.integers(1, 300))
        x, weight = randn(rows, dim).requires_grad_(), randn(dim, seed=1).requires_grad_()
        dy = randn(rows, dim, seed=2)
        assert_close(gradients(norm, (x, weight), dy), gradients(plain, (x, weight), dy), rtol=5e-6)
