"""What PyTorch users do with layer_norm: autograd, frozen inputs, strides, autocast, compile."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_liger
import torch_liger
from compare import to_torch
from liger_ops.layer_norm import cases, triton_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("affine", [True, False])
def test_dtypes_and_values_are_torchs_own(dtype, affine):
    case = cases.Case("torch", (7, 48), dtype, *[dtype if affine else None] * 2)
    tensors = {name: to_torch(value, DEVICE) for name, value in case.draw().items()}
    x, weight, bias = (tensors.get(name) for name in ("x", "weight", "bias"))
    for implementation in ("triton", "eager"):
        y = torch_liger.layer_norm(x, weight, bias, eps=1e-3, implementation=implementation)
        expected = torch.nn.functional.layer_norm(x, (48,), weight, bias, 1e-3)
        assert y.dtype == expected.dtype
        ulp = torch.finfo(y.dtype).eps
        torch.testing.assert_close(y, expected, rtol=2 * ulp, atol=2 * ulp)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def asking(*needs, shape=(5, 48)):
    """x, weight and bias, each with or without requires_grad."""
    shapes = (shape, shape[-1:], shape[-1:])
    return [
        randn(*s, seed=i).requires_grad_(n)
        for i, (s, n) in enumerate(zip(shapes, needs, strict=True))
    ]


norm = functools.partial(torch_liger.layer_norm, implementation="triton")
plain = functools.partial(torch_liger.layer_norm, implementation="eager")


def assert_close(actual, expected, rtol=5e-6):
    for a, e in zip(actual, expected, strict=True):
        scale = e.detach().abs().amax().item() if e.numel() else 0.0
        torch.testing.assert_close(a, e, rtol=rtol, atol=rtol * scale)


NEEDS = list(itertools.product([False, True], repeat=3))


@pytest.mark.parametrize("dim", [48, 9001])
@pytest.mark.parametrize("needs", NEEDS)
def test_gradients_where_asked_and_none_elsewhere(needs, dim, monkeypatch):
    asked = []
    backward = triton_kernel._backward
    monkeypatch.setattr(
        triton_kernel, "_backward", lambda *args: asked.append(args[-3:]) or backward(*args)
    )
    inputs = asking(*needs, shape=(5, dim))
    y = norm(*inputs)
    assert y.requires_grad == any(needs)
    if not any(needs):
        return
    y.square().sum().backward()
    assert asked == [needs]
    copies = [t.detach().requires_grad_() for t in inputs]
    plain(*copies).square().sum().backward()
    for tensor, copy, needed in zip(inputs, copies, needs, strict=True):
        assert (tensor.grad is not None) == needed
        if needed:
            assert_close([tensor.grad], [copy.grad])


@pytest.mark.parametrize("dim", [48, 9001, 16385])
def test_statistics_are_kept_only_for_a_backward(dim, monkeypatch):
    kept = []
    forward = triton_kernel._forward

    def recording(*args):
        y, statistics = forward(*args)
        kept.append(statistics)
        return y, statistics

    monkeypatch.setattr(triton_kernel, "_forward", recording)
    inputs = asking(False, False, True, shape=(3, dim))
    with torch.no_grad():
        alone = norm(*inputs)
    frozen = norm(*(t.detach() for t in inputs))
    y = norm(*inputs)
    assert torch.equal(y, alone) and torch.equal(y, frozen)
    assert kept[:2] == [None, None]
    x = inputs[0]
    r = (x.var(-1, correction=0) + 1e-5).rsqrt()
    assert_close([kept[2]], [torch.stack([x.mean(-1), r], -1)])


@pytest.mark.parametrize("needs", NEEDS[1:])
def test_second_derivatives_and_backward_twice(needs):
    def penalty(fn):
        inputs = asking(*needs, shape=(4, 32))
        wanted = [t for t in inputs if t.requires_grad]
        # The bias enters the second derivatives through the sine only.
        y = fn(*inputs).sin().sum()
        first = torch.autograd.grad(y, wanted, retain_graph=True)
        again = torch.autograd.grad(y, wanted, create_graph=True)
        assert_close(first, again, rtol=1e-5)
        return torch.autograd.grad(sum(g.square().sum() for g in again), wanted)

    assert_close(penalty(norm), penalty(plain), rtol=1e-4)


def test_second_derivatives_of_mixed_dtypes():
    def penalty(fn):
        x, weight, bias = asking(True, True, True, shape=(4, 32))
        y = fn(x.bfloat16(), weight.half(), bias)
        gradients = torch.autograd.grad(y.sin().sum(), (x, weight, bias), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in gradients), (x, weight, bias))

    # What is rounded to bfloat16 on the way may fall to either side.
    assert_close(penalty(norm), penalty(plain), rtol=2.0**-7)


STRIDED = {
    "transposed": lambda: randn(4, 2, 8).transpose(0, 1),
    "without-the-last-token": lambda: randn(2, 6, 16)[:, :-1],
    "columns-of-a-wider-buffer": lambda: randn(5, 40)[:, 8:24],
    "unaligned-columns": lambda: randn(5, 41)[:, 3:19],
    "every-second-column": lambda: randn(5, 32)[:, ::2],
    "expanded-rows": lambda: randn(1, 16).expand(5, 16),
    "expanded-columns": lambda: randn(5, 1).expand(5, 16),
    "one-dimension": lambda: randn(16),
    "two-pass": lambda: randn(5, 9100)[:, 50:9051],
    "wide": lambda: randn(4, 17100)[::2, :17000],
}


@pytest.mark.parametrize("name", STRIDED)
def test_strided_inputs_and_upstream_gradients(name):
    x = STRIDED[name]()
    dim = x.shape[-1]
    parameters = [randn(2 * dim, seed=1)[::2], randn(1, seed=2).expand(dim)]
    upstreams = [
        torch.ones((), device=DEVICE).expand(x.shape),
        randn(*x.shape[:-1], 1, seed=3).expand(x.shape),
        randn(*reversed(x.shape), seed=4).permute(*reversed(range(x.dim()))),
    ]
    for dy in upstreams if dim < 1000 else upstreams[2:]:
        kept = dy.clone()
        results = []
        for make in (lambda t: t, lambda t: t.clone(memory_format=torch.contiguous_format)):
            inputs = [make(t.detach()).requires_grad_() for t in (x, *parameters)]
            y = norm(*inputs)
            results.append([y, *torch.autograd.grad(y, inputs, make(dy))])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        assert torch.equal(dy, kept)


def test_no_write_beyond_the_output(monkeypatch):
    buffers = []

    def inside_sentinels(like, dtype):
        buffers.append(torch.full((like.numel() + 256,), 7.0, dtype=dtype, device=like.device))
        return buffers[-1][128:-128].view(like.shape)

    monkeypatch.setattr(triton_kernel, "empty", inside_sentinels)
    for shape in [(1, 1), (2, 3), (31, 17), (33, 80), (3, 1000), (3, 8193), (2, 16385)]:
        norm(*asking(True, True, True, shape=shape)).sum().backward()
    assert len(buffers) == 14
    for buffer in buffers:
        assert (buffer[:128] == 7.0).all() and (buffer[-128:] == 7.0).all()


def test_in_place_changes():
    inputs = asking(True, True, True)
    y = norm(*inputs)
    y.add_(1).mul_(2)  # the output's own are allowed
    y.sum().backward()
    copies = [t.detach().requires_grad_() for t in inputs]
    (2 * (plain(*copies) + 1)).sum().backward()
    assert_close([t.grad for t in inputs], [t.grad for t in copies])
    x, weight, bias = asking(False, True, True)
    y = norm(x, weight, bias)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_dtypes_follow_eager_also_under_autocast(x_dtype, weight_dtype):
    def results(fn):
        x, weight, bias = asking(True, True, True)
        with torch.autocast(DEVICE, torch.bfloat16):
            y = fn(x.to(x_dtype), weight.to(weight_dtype), bias)
        y.float().square().sum().backward()
        return y, x.grad, weight.grad, bias.grad

    ours, eager = results(norm), results(plain)
    assert [a.dtype for a in ours] == [e.dtype for e in eager]
    assert_close(ours, eager, rtol=2e-2)


def test_float64_and_transforms_run_the_plain_version():
    x = randn(3, 8, dtype=torch.float64)
    assert torch_liger.layer_norm(x).dtype == torch.float64
    with pytest.raises(RuntimeError, match=r"takes float32, bfloat16 and float16, not torch\.f"):
        norm(x)
    with pytest.raises(RuntimeError, match=r"takes float32, bfloat16 and float16, not torch\.f"):
        norm(x.float(), None, x[0])
    with jax.enable_x64(True):
        assert jax_liger.layer_norm(np.ones((3, 8))).dtype == jnp.float64
        with pytest.raises(RuntimeError, match="takes float32, bfloat16 and float16, not float64"):
            jax_liger.layer_norm(np.ones((3, 8)), implementation="pallas")
    inputs = asking(False, False, False)
    batched = torch.func.vmap(torch_liger.layer_norm, (0, None, None))(*inputs)
    assert_close([batched], [plain(*inputs)])


def test_the_plain_version_compiles_without_a_graph_break():
    fn = torch.compile(lambda *a: plain(*a).sin().sum(), fullgraph=True, backend="aot_eager")
    inputs = asking(True, True, True)
    fn(*inputs).backward()
    copies = [t.detach().requires_grad_() for t in inputs]
    plain(*copies).sin().sum().backward()
    assert_close([t.grad for t in inputs], [t.grad for t in copies])


# torch 2.11's own tracing of an autograd.Function instantiates it.
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_kernel_compiles_without_a_graph_break():
    def loss(x, weight, bias, fn):
        return fn(x * 2, weight, bias).sin().sum()

    compiled = torch.compile(loss, fullgraph=True)
    for rows in (64, 96, 128):  # the second makes the number of rows dynamic
        results = []
        for run_loss, fn in ((compiled, norm), (loss, plain)):
            inputs = asking(True, True, True, shape=(rows, 256))
            run_loss(*inputs, fn).backward()
            results.append([t.grad for t in inputs])
        assert_close(*results, rtol=1e-5)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    rows, dim = 524289, 4096
    x = torch.randn(rows, dim, device="cuda", dtype=torch.bfloat16)
    parameters = [randn(dim, seed=s, dtype=torch.bfloat16) for s in (1, 2)]
    take = lambda t: torch.cat([t[:8], t[-8:]])  # noqa: E731
    ends = take(x).requires_grad_()
    x.requires_grad_()
    y, alone = norm(x, *parameters), norm(ends, *parameters)
    assert torch.equal(take(y), alone)
    (dx,) = torch.autograd.grad(y, x, y.detach())
    (dx_alone,) = torch.autograd.grad(alone, ends, alone.detach())
    assert torch.equal(take(dx), dx_alone)


@pytest.mark.gpu
def test_two_runs_give_the_same_bits():
    results = []
    for _ in range(2):
        inputs = asking(True, True, True, shape=(4096, 4096))
        y = norm(*inputs)
        results.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
