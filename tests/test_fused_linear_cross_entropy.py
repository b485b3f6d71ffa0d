"""fused_linear_cross_entropy in PyTorch against the oracle, and what users do with it."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

import torch_liger
from compare import assert_matches_oracle, from_torch, poisoned, to_torch
from liger_ops.cross_entropy.oracle import Arguments
from liger_ops.fused_linear_cross_entropy import cases, oracle, triton_products
from liger_ops.fused_linear_cross_entropy.cases import Plan
from test_rms_norm_torch import randn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GIB = 2**30
PARTS = 80 * 24 * 4 + 128 * 80 * 2  # bytes in which 300 rows of 80 classes and D = 24 take parts


@pytest.fixture(autouse=True)
def _kernel_of_the_products_at_any_size(monkeypatch):
    monkeypatch.setattr(triton_products, "LEAST_WORK", 0)


def flce(*args, implementation="triton", **settings):
    return torch_liger.fused_linear_cross_entropy(*args, implementation=implementation, **settings)


def run(implementation, case, inputs, dloss):
    tensors = {name: to_torch(value, DEVICE) for name, value in inputs.items()}
    names = [name for name in ("hidden", "weight", "bias") if name in tensors]
    for name in names:
        tensors[name].requires_grad_()
    with poisoned():
        loss, z = flce(
            *(tensors[name] for name in ("hidden", "weight", "labels")),
            bias=tensors.get("bias"),
            class_weight=tensors.get("class_weight"),
            logit_scale=case.logit_scale,
            memory=case.memory,
            return_z_loss=True,
            implementation=implementation,
            **dataclasses.asdict(case.arguments),
        )
        assert not z.requires_grad
        given = [tensors[name] for name in names]
        gradients = torch.autograd.grad(loss, given, to_torch(dloss, DEVICE))
    results = {f"d{name}": g for name, g in zip(names, gradients, strict=True)}
    return {k: from_torch(v) for k, v in {"loss": loss, "z_loss": z, **results}.items()}


def check(case):
    inputs = case.draw()
    shape = case.rows if case.arguments.reduction == "none" else ()
    dloss = np.asarray(np.random.default_rng(1).standard_normal(shape), np.float32)
    given = [inputs.get(k) for k in ("hidden", "weight", "labels", "class_weight", "bias")]
    exact = {
        **oracle.forward(*given, case.arguments, case.logit_scale),
        **oracle.backward(*given, case.arguments, dloss, case.logit_scale),
    }
    kernel, plain = (run(name, case, inputs, dloss) for name in ("triton", "eager"))
    assert_matches_oracle(kernel, plain, exact, case.name)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: f"{case.name}-{case.dtype}")
def test_against_the_oracle(case):
    check(case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("memory", ["fast", "least", 120 * 2**20, 24 * 2**20])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("vocab", [32000, 32003])  # the products' kernel, the library
def test_full_size_against_the_oracle(dtype, memory, reduction, vocab):
    arguments = Arguments(reduction=reduction, z_loss=1e-3)
    ignored = tuple(range(0, 1031, 3))
    case = cases.Case("full", (1031,), 512, vocab, dtype, arguments, dtype, memory=memory)
    check(dataclasses.replace(case, ignored=ignored))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_oracle_backward_by_finite_differences(reduction):
    rng = np.random.default_rng(0)
    inputs = {"hidden": rng.standard_normal((5, 4)), "weight": rng.standard_normal((7, 4))}
    inputs["bias"] = rng.standard_normal(7)
    labels = np.array([1, -100, 0, 6, 3])
    arguments = Arguments(reduction=reduction, label_smoothing=0.1, softcap=5.0, z_loss=1e-2)
    dloss = np.asarray(rng.standard_normal(labels.shape if reduction == "none" else ()))

    def total(**changed):
        given = {**inputs, **changed}
        out = oracle.forward(
            given["hidden"], given["weight"], labels, None, given["bias"], arguments, 0.7
        )
        return np.sum(out["loss"] * dloss)

    gradients = oracle.backward(
        inputs["hidden"], inputs["weight"], labels, None, inputs["bias"], arguments, dloss, 0.7
    )
    for name, value in inputs.items():
        direction, step = rng.standard_normal(value.shape), 1e-6
        ahead, behind = (total(**{name: value + s * step * direction}) for s in (1, -1))
        numeric = (ahead - behind) / (2 * step)
        assert np.sum(gradients[f"d{name}"] * direction) == pytest.approx(numeric, rel=1e-6)


def test_the_plan_is_a_function_of_shapes_and_memory():
    def plan(rows, dim=4096, vocab=128256, itemsize=2, sum_itemsize=4, needs=True, memory="fast"):
        return Plan.for_shape(
            rows, dim, vocab, itemsize, sum_itemsize=sum_itemsize, needs_weight=needs, memory=memory
        )

    def beside(plan, rows, dim=4096, vocab=128256, sum_itemsize=4):
        """Bytes beside the inputs and the gradients."""
        used = 0 if plan.in_gradient else plan.rows * vocab * 2
        if plan.classes is not None:
            return max(used, rows * plan.classes * 2)
        return used + (vocab * dim * 4 if sum_itemsize == 4 and not plan.keeps_logits else 0)

    assert plan(4096) == Plan(4096, True, False, None, True)
    assert plan(16384) == Plan(4096, False, True, None)
    for rows, shape in itertools.product(
        (1, 4096, 16384, 65536, 70001),
        ((4096, 128256), (2048, 128256), (3584, 152064), (2304, 256000), (4096, 32000)),
    ):
        sum_bytes = shape[0] * shape[1] * 4
        assert beside(plan(rows, *shape), rows, *shape) <= sum_bytes + 0.25 * GIB
        in_bfloat16 = plan(rows, *shape, sum_itemsize=2)
        assert beside(in_bfloat16, rows, *shape, sum_itemsize=2) <= 0.4 * GIB
        assert beside(plan(rows, *shape, memory="least"), rows, *shape) <= 0.6 * GIB
        assert plan(rows, *shape, memory="least").rows <= rows
        frozen = plan(rows, *shape, needs=False)
        assert frozen.rows * shape[1] * 2 <= 0.4 * GIB and frozen.classes is None
    assert plan(16384, 2048) == Plan(2048, False, True, None)  # 16 x 8 tiles, a wave
    assert plan(16384, 3584, 152064).rows == 3328  # 26 x 14 tiles for 3 x 132 multiprocessors
    assert plan(16384, memory=2**40).keeps_logits
    assert plan(300, 24, 80, memory=PARTS).rows == 128


@pytest.mark.parametrize("implementation", ["triton", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [257, 1000, 32003])
def test_no_class_beyond_the_last_is_counted(implementation, vocab, dtype):
    """Equal logits far below 0: a padded column's would outweigh them all."""
    hidden = torch.eye(64, device=DEVICE, dtype=dtype)[:1].repeat(5, 1).requires_grad_()
    weight = torch.zeros(vocab, 64, device=DEVICE, dtype=dtype)
    weight[:, 0] = -20.0
    weight.requires_grad_()
    labels = torch.full((5,), vocab - 1, device=DEVICE)
    loss = flce(hidden, weight, labels, implementation=implementation)
    (dweight,) = torch.autograd.grad(loss, weight)
    assert loss.item() == pytest.approx(math.log(vocab), rel=1e-6)
    torch.testing.assert_close(
        dweight[:-1, 0].float(),
        torch.full_like(dweight[:-1, 0].float(), 1 / vocab),
        rtol=1e-2,
        atol=0.0,
    )


@pytest.mark.parametrize("implementation", ["triton", "eager"])
def test_a_bias_of_known_probabilities(implementation):
    p = np.random.default_rng(0).dirichlet(np.ones(1000))
    bias = to_torch(np.log(p).astype(np.float32), DEVICE).requires_grad_()
    hidden, weight = randn(4, 16), torch.zeros(1000, 16, device=DEVICE)
    labels = torch.tensor([-100, 3, 700, -100], device=DEVICE)
    loss = flce(hidden, weight, labels, bias=bias, implementation=implementation)
    (dbias,) = torch.autograd.grad(loss, bias)
    assert loss.item() == pytest.approx(-(np.log(p[3]) + np.log(p[700])) / 2, rel=1e-5)
    target = np.bincount([3, 700], minlength=1000) / 2
    np.testing.assert_allclose(from_torch(dbias), p - target, atol=1e-6)


@pytest.mark.parametrize("implementation", ["triton", "eager"])
@pytest.mark.parametrize("memory", ["fast", 1])
@pytest.mark.parametrize("rows", [0, 1, 300])
@pytest.mark.parametrize("settings", [{}, {"num_items": 0}, {"z_loss": 1e-3}])
def test_nothing_supervised_gives_zero_and_zeros(implementation, memory, rows, settings):
    given = [randn(rows, 24).requires_grad_(), randn(80, 24, seed=1).requires_grad_()]
    bias = randn(80, seed=2).requires_grad_()
    labels = torch.full((rows,), -100, device=DEVICE)
    loss = flce(*given, labels, bias=bias, memory=memory, implementation=implementation, **settings)
    gradients = torch.autograd.grad(loss, (*given, bias))
    assert loss.item() == 0.0
    assert all(not g.any() and not g.isnan().any() for g in gradients)


@pytest.mark.parametrize("implementation", ["triton", "eager"])
@pytest.mark.parametrize("memory", ["fast", PARTS, 1])
@pytest.mark.parametrize("label", [-1, 80, 2**31 - 1])
def test_an_invalid_label_is_seen(implementation, memory, label):
    hidden, weight = randn(300, 24).requires_grad_(), randn(80, 24, seed=1)
    labels = torch.zeros(300, dtype=torch.int64, device=DEVICE)
    labels[7] = label
    loss = flce(
        hidden, weight, labels, reduction="none", memory=memory, implementation=implementation
    )
    (dhidden,) = torch.autograd.grad(loss.sum(), hidden)
    assert loss.isnan().nonzero().flatten().tolist() == [7]
    assert dhidden.isnan().any(1).nonzero().flatten().tolist() == [7]


BAD = {
    "weight": ({"weight": (5, 7)}, "weight must have shape (V, D) with D = 8, the last dimension "
               "of hidden (2, 8); got (5, 7)"),
    "empty-weight": ({"weight": (0,)}, "weight must have shape (V, D) with D = 8, the last "
                     "dimension of hidden (2, 8); got (0,); an empty weight is what a sharded "
                     "parameter looks like outside its module"),
    "bias": ({"bias": (4,)}, "bias must have shape (V,) with V = 5 of weight (5, 8); got (4,)"),
    "labels": ({"labels": (3,)}, "labels must have the shape of hidden (2, 8) without its last "
               "dimension; got (3,)"),
    "accum": ({"accum_dtype": torch.float16}, "accum_dtype must be one of 'float32', 'bfloat16'; "
              "got 'float16'"),
    "memory": ({"memory": "little"}, "memory must be 'fast', 'least' or a number of bytes; got "
               "'little'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    changed, message = BAD[name]
    given = {"hidden": (2, 8), "weight": (5, 8), "labels": (2,), **changed}
    for key, value in given.items():
        if isinstance(value, tuple):
            given[key] = torch.zeros(value, dtype=torch.int64 if key == "labels" else None)
    positional = [given.pop(key) for key in ("hidden", "weight", "labels")]
    with pytest.raises(ValueError) as caught:
        torch_liger.fused_linear_cross_entropy(*positional, **given)
    assert str(caught.value) == message
