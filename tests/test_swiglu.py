"""swiglu and geglu: every implementation against the oracle, and what users do with them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_liger
import torch_liger
from compare import from_torch, judge, poisoned, to_torch
from liger_ops.drawing import DTYPES, draw_normal
from liger_ops.swiglu import cases, oracle, triton_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = ["pallas", "xla", "triton", "eager"]
APPROXIMATE = {"gelu_tanh": "tanh", "gelu": "none"}


def op_of(package, activation, implementation):
    if activation == "silu":
        return functools.partial(package.swiglu, implementation=implementation)
    return functools.partial(
        package.geglu, approximate=APPROXIMATE[activation], implementation=implementation
    )


def run(implementation, activation, inputs, dy, fused=False):
    """y, dgate and dup; from one tensor of both halves if `fused`."""
    given = [np.concatenate(list(inputs.values()), axis=-1)] if fused else list(inputs.values())
    if implementation in ("pallas", "xla"):
        y, vjp = jax.vjp(
            op_of(jax_liger, activation, implementation), *(jnp.asarray(a) for a in given)
        )
        results = [np.asarray(a) for a in (y, *vjp(jnp.asarray(dy)))]
    else:
        tensors = [to_torch(a, DEVICE).requires_grad_() for a in given]
        with poisoned():
            y = op_of(torch_liger, activation, implementation)(*tensors)
            gradients = torch.autograd.grad(y, tensors, to_torch(dy, DEVICE))
        results = [from_torch(t) for t in (y, *gradients)]
    if fused:
        results[1:] = np.split(results[1], 2, axis=-1)
    return dict(zip(("y", "dgate", "dup"), results, strict=True))


def upstream(case, inputs):
    y_dtype = jnp.promote_types(*(a.dtype for a in inputs.values())).name
    return draw_normal(np.random.default_rng(1), case.shape, y_dtype)


def check(case):
    inputs = case.draw()
    dy = upstream(case, inputs)
    exact = {
        **oracle.forward(**inputs, activation=case.activation),
        **oracle.backward(**inputs, dy=dy, activation=case.activation),
    }
    judge(
        lambda implementation: run(implementation, case.activation, inputs, dy, case.fused),
        exact,
        case.name,
    )


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_against_the_oracle(case):
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(1024, 14336), (131, 11008), (70001, 80)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_full_size_against_the_oracle(shape, dtype, activation):
    for fused in (False, True):
        check(cases.Case("full", shape, dtype, None, activation, fused))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_oracle_backward_by_finite_differences(activation):
    rng = np.random.default_rng(0)
    gate, up, dy = rng.standard_normal((3, 5, 7))
    gradients = oracle.backward(gate, up, dy, activation=activation)
    step = 1e-6
    for name, shift in (("dgate", (step, 0.0)), ("dup", (0.0, step))):
        ahead, behind = (
            oracle.forward(gate + s * shift[0], up + s * shift[1], activation=activation)["y"]
            for s in (1, -1)
        )
        numeric = dy * (ahead - behind) / (2 * step)
        np.testing.assert_allclose(gradients[name], numeric, rtol=1e-7, atol=1e-9)


# What is out of float16's range becomes infinite, of which the interpreter's NumPy warns.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("implementation", ["pallas", "triton"])
def test_edges(implementation, activation, dtype):
    inputs = cases.edges(dtype)
    dy = np.ones_like(inputs["gate"])
    results = run(implementation, activation, inputs, dy)
    exact = {
        **oracle.forward(**inputs, activation=activation),
        **oracle.backward(**inputs, dy=dy, activation=activation),
    }
    info = jnp.finfo(dtype)
    for name, wanted in exact.items():
        actual = results[name].astype(np.float64)
        assert not np.isnan(actual).any(), name
        in_range = np.abs(wanted) < float(info.max) / 2
        # Elementwise: each is off by a few units in its own last place. The kernels flush what is
        # below float32's normal numbers, and a product near it, to zero.
        tolerance = 2 * max(float(info.eps), 2.0**-20)
        smallest = max(float(info.tiny), 1e-36) * 1e4
        np.testing.assert_allclose(
            actual[in_range], wanted[in_range], rtol=tolerance, atol=smallest, err_msg=name
        )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_silu_of_minus_20_is_not_zero_and_its_slope_at_minus_10000_is(implementation):
    gate = np.array([[-20.0, -1e4]], DTYPES["bfloat16"])
    inputs = {"gate": gate, "up": np.ones_like(gate)}
    results = run(implementation, "silu", inputs, np.ones_like(gate))
    np.testing.assert_allclose(results["y"][0, 0].astype(float), -4.12e-8, rtol=1e-2)
    assert results["dgate"][0, 1] == 0


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


swiglu = functools.partial(torch_liger.swiglu, implementation="triton")
plain = functools.partial(torch_liger.swiglu, implementation="eager")


def assert_close(actual, expected, rtol=5e-6):
    for a, e in zip(actual, expected, strict=True):
        scale = e.detach().abs().amax().item() if e.numel() else 0.0
        torch.testing.assert_close(a, e, rtol=rtol, atol=rtol * scale)


def test_one_tensor_as_both_and_a_shared_branch():
    def run_with(fn):
        leaf = randn(4, 32).requires_grad_()
        x = leaf.exp()
        kept = x.detach().clone()
        (fn(x, x).sum() + x.square().sum()).backward()
        assert torch.equal(x.detach(), kept)
        return [leaf.grad]

    assert_close(run_with(swiglu), run_with(plain))


STRIDED = {
    "halves-by-chunk": lambda: randn(3, 5, 64).chunk(2, dim=-1),
    "transposed": lambda: (randn(4, 2, 32).transpose(0, 1), randn(2, 4, 32, seed=1)),
    "expanded": lambda: (randn(1, 32).expand(6, 32), randn(6, 1, seed=1).expand(6, 32)),
    "unaligned": lambda: (randn(5, 41)[:, 3:19], randn(5, 41, seed=1)[:, 1:17]),
    "every-second-column": lambda: (randn(5, 64)[:, ::2], randn(5, 32, seed=1)),
}


@pytest.mark.parametrize("name", STRIDED)
def test_strided_inputs_and_upstream_gradients(name):
    gate, up = STRIDED[name]()
    for dy in (torch.ones((), device=DEVICE).expand(gate.shape), randn(*gate.shape, seed=3)):
        results = []
        for make in (lambda t: t, lambda t: t.contiguous()):
            inputs = [make(t.detach()).requires_grad_() for t in (gate, up)]
            y = swiglu(*inputs)
            results.append([y, *torch.autograd.grad(y, inputs, make(dy))])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_gradients_where_asked_and_none_elsewhere(needs, monkeypatch):
    asked = []
    backward = triton_kernel._backward
    monkeypatch.setattr(
        triton_kernel,
        "_backward",
        lambda *a: asked.append(tuple(t is not None for t in a[3:5])) or backward(*a),
    )
    gate, up = (randn(4, 32, seed=s).requires_grad_(n) for s, n in enumerate(needs))
    y = swiglu(gate, up)
    assert y.requires_grad == any(needs)
    if any(needs):
        y.sum().backward()
        assert asked == [needs]
        assert [t.grad is not None for t in (gate, up)] == list(needs)


@pytest.mark.parametrize("fused", [False, True])
def test_second_derivatives_and_backward_twice(fused):
    def penalty(fn):
        inputs = [randn(4, 32, seed=s).requires_grad_() for s in range(1 if fused else 2)]
        y = fn(*inputs)
        first = torch.autograd.grad(y.sin().sum(), inputs, retain_graph=True)
        again = torch.autograd.grad(y.sin().sum(), inputs, create_graph=True)
        assert_close(first, again)
        return torch.autograd.grad(sum(g.square().sum() for g in again), inputs)

    assert_close(penalty(swiglu), penalty(plain), rtol=1e-4)


@pytest.mark.parametrize("fused", [False, True])
def test_jax_transformations(fused):
    arrays = [
        jax.random.normal(jax.random.key(seed), (3, 4, 32)) for seed in range(1 if fused else 2)
    ]

    def results(implementation):
        op = functools.partial(jax_liger.swiglu, implementation=implementation)
        loss = lambda *a: jnp.sum(jnp.sin(op(*a)))  # noqa: E731
        argnums = tuple(range(len(arrays)))
        second = lambda *a: sum(jnp.sum(g**2) for g in jax.grad(loss, argnums)(*a))  # noqa: E731
        return [
            jax.grad(jax.jit(jax.checkpoint(loss)), argnums)(*arrays),
            jax.vmap(jax.grad(loss, argnums))(*arrays),
            jax.grad(loss, 0)(*arrays),
            jax.grad(second, argnums)(*arrays),
        ]

    for a, e in zip(*map(jax.tree.leaves, (results("pallas"), results("xla"))), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)


def test_no_64_bit_value_in_64_bit_mode():
    with jax.enable_x64(True):
        fn = functools.partial(jax_liger.geglu, implementation="pallas")
        shapes = [jax.ShapeDtypeStruct((6, 48), jnp.float32)] * 2
        text = str(jax.make_jaxpr(jax.grad(lambda *a: jnp.sum(fn(*a)), (0, 1)))(*shapes))
        assert "pallas_call" in text and ":i64[" not in text and ":f64[" not in text


BAD = {
    "mismatched-up": ([((2, 8), "float32"), ((2, 7), "float32")], ValueError,
                      "up must have the shape of gate, (2, 8); got (2, 7)"),
    "odd-halves": ([((2, 7), "float32")], ValueError,
                   "without up, gate must hold both halves, (..., 2 F), in its last dimension; got "
                   "the odd 7 in (2, 7)"),
    "integer-gate": ([((2, 8), "int32")], TypeError,
                     "gate must have a dtype of 'float32', 'bfloat16', 'float16', 'float64'; got "
                     "int32"),
    "no-dimension": ([((), "float32")], ValueError,
                     "gate must have at least one dimension, (..., F); got shape ()"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    described, kind, message = BAD[name]
    for package, make in (
        (jax_liger, lambda shape, dtype: jnp.zeros(shape, dtype)),
        (torch_liger, lambda shape, dtype: torch.zeros(shape, dtype=getattr(torch, dtype))),
    ):
        arrays = [make(*d) for d in described]
        for op in (package.swiglu, package.geglu):
            with pytest.raises(kind) as caught:
                op(*arrays)
            assert str(caught.value) == message
        with pytest.raises(ValueError, match=r"approximate must be .* got 'erf'"):
            package.geglu(make((2, 8), "float32"), approximate="erf")


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    rows, dim = 2**20 + 1, 2048
    gate = torch.randn(rows, dim, device="cuda", dtype=torch.bfloat16)
    up = torch.randn_like(gate)
    take = lambda t: torch.cat([t[:8], t[-8:]])  # noqa: E731
    ends = [take(t).requires_grad_() for t in (gate, up)]
    inputs = [t.requires_grad_() for t in (gate, up)]
    y, alone = swiglu(*inputs), swiglu(*ends)
    assert torch.equal(take(y), alone)
    gradients = torch.autograd.grad(y, inputs, y.detach())
    for g, e in zip(gradients, torch.autograd.grad(alone, ends, alone.detach()), strict=True):
        assert torch.equal(take(g), e)
