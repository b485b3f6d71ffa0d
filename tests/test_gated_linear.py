"""gated_linear: the activation and the linear layer behind it, which keeps nothing between."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import torch_liger
from test_rms_norm_torch import assert_close, randn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ACTIVATIONS = {
    "silu": torch_liger.swiglu,
    "gelu_tanh": torch_liger.geglu,
    "gelu": lambda *given, **how: torch_liger.geglu(*given, approximate="none", **how),
}


def example(dtype=torch.float32, needs=(True,) * 4):
    shapes = ((2, 5, 48), (2, 5, 48), (24, 48), (24,))
    given = [randn(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]
    return [t.requires_grad_(need) for t, need in zip(given, needs, strict=True)]


def fused(*given, **settings):
    return torch_liger.gated_linear(*given, implementation="triton", **settings)


def in_two_steps(gate, up, weight, bias=None, activation="silu"):
    return F.linear(ACTIVATIONS[activation](gate, up, implementation="triton"), weight, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_is_the_two_steps_bit_for_bit(activation, dtype):
    results = []
    for fn in (fused, in_two_steps):
        given = example(dtype)
        y = fn(*given, activation=activation)
        results.append([y, *torch.autograd.grad(y, given, randn(2, 5, 24, seed=9).to(dtype))])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("needs", list(itertools.product((True, False), repeat=4))[:-1])
def test_gradients_where_asked(needs):
    results = []
    for fn in (fused, in_two_steps):
        given = example(needs=needs)
        fn(*given).sum().backward()  # whose gradient is expanded
        results.append([t.grad for t in given])
    assert [g is not None for g in results[0]] == list(needs)
    assert_close(*[[g for g in grads if g is not None] for grads in results], rtol=1e-6)


def test_keeps_gate_up_and_the_weights_alone():
    given, kept = example(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, id):
        fused(*given)
    assert set(kept) <= {t.data_ptr() for t in given}


def test_checkpointed_and_differentiated_twice():
    def second(fn):
        gate, up, weight, bias = example()
        y = torch.utils.checkpoint.checkpoint(fn, gate, up, weight, bias, use_reentrant=False)
        first = torch.autograd.grad(y.square().sum(), (gate, weight))
        again = torch.autograd.grad(
            fn(gate, up, weight, bias).square().sum(), (gate, up, weight), create_graph=True
        )
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in again), (gate, weight))]

    assert_close(second(fused), second(in_two_steps), rtol=1e-4)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_under_autocast(weight_dtype):
    gate, up, weight, bias = example()
    weight, bias = weight.to(weight_dtype), bias.to(weight_dtype)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = fused(gate, up, weight, bias)
        expected = in_two_steps(gate, up, weight, bias)
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)


def test_strided_halves_and_eager():
    both = randn(3, 96).requires_grad_()
    weight = randn(24, 48, seed=1)
    gate, up = both.chunk(2, dim=-1)
    for implementation in ("triton", "eager"):
        y = torch_liger.gated_linear(gate, up, weight, implementation=implementation)
        assert_close([y], [F.linear(F.silu(gate) * up, weight)], rtol=1e-5)
    (gradient,) = torch.autograd.grad(fused(gate, up, weight).sum(), both)
    (expected,) = torch.autograd.grad(F.linear(F.silu(gate) * up, weight).sum(), both)
    assert_close([gradient], [expected], rtol=1e-5)


def test_errors_name_the_argument():
    gate, up, weight, _ = example()
    with pytest.raises(ValueError, match=r"activation must be .*; got 'relu'"):
        torch_liger.gated_linear(gate, up, weight, activation="relu")
    with pytest.raises(ValueError, match=r"up must .*\(2, 5, 48\).*\(2, 5, 47\)"):
        torch_liger.gated_linear(gate, up[..., :47], weight)
