"""Float32 adapters beside bfloat16 rows: as exact as float32 products, by products of bfloat16."""

import pytest
import torch

import torch_liger
from liger_ops.lora_linear import cases, triton_parts, triton_terms
from liger_ops.lora_linear.triton_dropout import Dropout
from test_lora_linear_torch import example, lora, with_gradients
from test_rms_norm_torch import DEVICE, randn

ALL, LEFT, RIGHT = triton_terms._ALL, triton_terms._LEFT, triton_terms._RIGHT


def values():
    """Of all sizes, and such as round up to another power of two."""
    exponents = torch.linspace(-60, 60, 24 * 35, device=DEVICE).reshape(24, 35).round()
    given = randn(24, 35) * exponents.exp2()
    given[0, :4] = torch.tensor([0.0, -0.0, 2.0 - 2**-23, -(1.0 - 2**-24)], device=DEVICE)
    return given


def strided(a):
    return torch.cat([a, a], dim=1)[:, : a.shape[1]]


@pytest.mark.parametrize("lay", [lambda a: a, strided, lambda a: a.t().contiguous().t()])
def test_three_terms_add_up_to_the_number(lay):
    a = values()
    side = triton_terms.beside(lay(a), ALL)
    assert side.dtype == torch.bfloat16 and side.shape == (24, 105)
    hi, mid, lo = side.double().split(35, dim=1)
    assert torch.equal(hi + mid + lo, a.double())
    assert torch.equal(hi, a.bfloat16().double())
    assert (mid.abs() <= 2**-8 * hi.abs()).all() and (lo.abs() <= 2**-16 * hi.abs()).all()
    assert torch.equal(triton_terms._plain_split(lay(a), ALL, 1), side)
    below = triton_terms.below(lay(a), ALL)
    assert torch.equal(below, torch.cat(list(side.split(35, dim=1))))
    pairs = zip(LEFT, RIGHT, strict=True)
    assert sorted(pairs) == [(0, 0), (0, 1), (1, 0)]
    terms = [part.bfloat16() for part in (hi, mid, lo)]
    assert torch.equal(triton_terms.beside(a, LEFT), torch.cat([terms[i] for i in LEFT], dim=1))
    assert torch.equal(triton_terms.below(a, RIGHT), torch.cat([terms[i] for i in RIGHT]))


def error(actual, exact):
    return ((actual.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("drop", [None, 0.4])
def test_products_are_as_exact_as_float32(drop, monkeypatch):
    """Of two terms alone the error would be above 1e-6, and of one above 1e-3."""
    monkeypatch.setattr(cases, "SCRATCH", 1)  # parts of 128 rows
    dropout = None if drop is None else Dropout(drop, torch.tensor([5], device=DEVICE))
    x, dy = randn(300, 96, dtype=torch.bfloat16), randn(300, 80, seed=1, dtype=torch.bfloat16)
    a, b = randn(4, 96, seed=2), randn(80, 4, seed=3)
    u, du = randn(300, 4, seed=4), randn(300, 4, seed=5)
    kept = x.double()
    if dropout is not None:
        from liger_ops.lora_linear import eager

        kept = kept * eager.dropout_factors(dropout.seed, x.shape, drop, 0)
    (found,) = triton_parts.down(x, [a], dropout)
    assert error(found, kept @ a.double().t()) < 3e-7
    (found,) = triton_parts.down_backward(x, [du], dropout)
    assert error(found, du.double().t() @ kept) < 3e-7
    found = triton_parts.up_backward(dy, u, b, 0.7)
    for actual, exact in zip(
        found, (dy.double() @ b.double(), dy.double().t() @ u.double()), strict=True
    ):
        assert actual.dtype == torch.float32 and error(actual, 0.7 * exact) < 3e-7


def test_sums_in_bfloat16_lose_nothing_before_they_are_rounded():
    """y's and dx's: added to nothing they are the nearest number, but where two are as near."""
    u, b, a = randn(300, 4), randn(80, 4, seed=1), randn(4, 96, seed=2)
    y, dx = (torch.zeros(300, n, dtype=torch.bfloat16, device=DEVICE) for n in (80, 96))
    triton_parts.add_up(y, u, b, 1.0)
    triton_parts.add_down_backward(dx, [u], [a], [0], None)
    for found, exact in ((y, u.double() @ b.double().t()), (dx, u.double() @ a.double())):
        nearest = error(exact.bfloat16(), exact)
        assert error(found, exact) < 1.001 * nearest
        assert error((u.bfloat16() @ b.bfloat16().t()), u.double() @ b.double().t()) > 1.3 * nearest


def test_no_float32_of_the_size_of_x_or_y_is_made(monkeypatch):
    """Without dropout the rows are read as they lie."""
    made = []
    for name in ("empty", "zeros"):
        run = getattr(torch, name)

        def counted(*shape, run=run, **kwargs):
            tensor = run(*shape, **kwargs)
            made.append(tensor)
            return tensor

        monkeypatch.setattr(torch, name, counted)
    given = example((300,), dim=64, out=80, dtype=torch.bfloat16, adapter=torch.float32)
    given = {k: v.requires_grad_(k != "weight") for k, v in given.items()}
    lora(**given).float().sum().backward()
    wide = [t for t in made if t.dtype == torch.float32 and t.numel() >= 300 * 64]
    assert made and not wide


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_several_projections(dropout_p):
    x = randn(140, 64, dtype=torch.bfloat16)
    projections = [
        torch_liger.LoraProjection(
            randn(out, 64, seed=i, dtype=torch.bfloat16),
            randn(rank, 64, seed=10 + i).requires_grad_(),
            randn(out, rank, seed=20 + i).requires_grad_(),
            scaling=0.5 + i,
        )
        for i, (out, rank) in enumerate(((64, 8), (16, 8), (16, 4)))
    ]
    results = []
    for implementation in ("triton", "eager"):
        given = x.clone().requires_grad_()
        ys = torch_liger.lora_linears(
            given, projections, dropout_p=dropout_p, seed=3, implementation=implementation
        )
        wanted = [given, *(t for p in projections for t in (p.lora_a, p.lora_b))]
        dys = [randn(*y.shape, seed=30 + i, dtype=y.dtype) for i, y in enumerate(ys)]
        results.append([*ys, *torch.autograd.grad(ys, wanted, dys)])
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == expected.dtype
        limit = 1e-6 if actual.dtype == torch.float32 else 6e-3
        assert error(actual, expected.double()) < limit


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("rows", [(0,), (0, 3)])
def test_no_rows(rows, dropout_p):
    given = example(rows, dtype=torch.bfloat16, adapter=torch.float32)
    results = with_gradients(lora, given, dropout_p=dropout_p)
    assert results[0].shape == (*rows, 24)
    assert all(not g.any() and not g.isnan().any() for g in results[1:])
