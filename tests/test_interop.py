"""The DLPack bridge: values, gradients, and no copy."""

import functools

import jax
import jax.numpy as jnp
import pytest
import torch

import jax_liger
import torch_liger
from jax_liger.interop import from_torch, to_torch
from torch_liger.interop import jax_function

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pallas_norm = jax_function(functools.partial(jax_liger.rms_norm, implementation="pallas"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32])
def test_round_trip(dtype):
    tensor = torch.arange(24, device=DEVICE).reshape(4, 6).to(dtype)
    array = from_torch(tensor)
    assert array.shape == (4, 6) and array.dtype.name == str(dtype).removeprefix("torch.")
    assert torch.equal(to_torch(array), tensor)
    assert torch.equal(to_torch(from_torch(tensor.t())), tensor.t())


def test_an_array_reaches_torch_without_a_copy():
    array = jnp.arange(8.0)
    assert to_torch(array).data_ptr() == array.unsafe_buffer_pointer()


@pytest.mark.gpu
def test_a_tensor_reaches_jax_without_a_copy():
    tensor = torch.ones(1024, device="cuda")
    assert from_torch(tensor).unsafe_buffer_pointer() == tensor.data_ptr()


def test_the_pallas_kernel_with_pytorch_gradients():
    x = torch.randn(5, 40, device=DEVICE).requires_grad_()
    weight = torch.randn(40, device=DEVICE).requires_grad_()
    results = []
    for fn in (pallas_norm, functools.partial(torch_liger.rms_norm, implementation="triton")):
        y = fn(x, weight)
        results.append([y, *torch.autograd.grad(y.sin().sum(), (x, weight))])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-5)


def test_gradients_only_where_asked():
    x, weight = torch.randn(5, 40, device=DEVICE), torch.randn(40, device=DEVICE).requires_grad_()
    pallas_norm(x, weight).sum().backward()
    assert x.grad is None and weight.grad is not None
    assert not pallas_norm(x, weight.detach()).requires_grad


def test_a_tuple_of_outputs_and_a_strided_gradient():
    fused = jax_function(functools.partial(jax_liger.fused_add_rms_norm, implementation="xla"))
    x = torch.randn(5, 40, device=DEVICE).requires_grad_()
    normed, h = fused(x, x.detach(), torch.ones(40, device=DEVICE))
    (normed.sum() + h.t().sum()).backward()
    assert x.grad is not None and x.grad.shape == x.shape


def test_second_derivatives_are_refused():
    x = torch.randn(5, 40, device=DEVICE).requires_grad_()
    square = jax_function(lambda a: a * a)
    (dx,) = torch.autograd.grad(square(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_a_jitted_function_is_taken_as_well():
    x = torch.randn(5, 40, device=DEVICE).requires_grad_()
    jax_function(jax.jit(lambda a: jnp.sin(a)))(x).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos(), rtol=1e-6, atol=1e-6)
