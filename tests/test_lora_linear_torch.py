"""What PyTorch users do with lora_linear: what is kept, frozen weights, dtypes, checkpointing."""

import functools
import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import torch_liger
from compare import poisoned
from liger_ops.lora_linear import cases
from test_rms_norm_torch import assert_close, randn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NAMES = ("x", "weight", "lora_a", "lora_b", "bias")
lora = functools.partial(torch_liger.lora_linear, implementation="triton", scaling=0.5, seed=7)
plain = functools.partial(torch_liger.lora_linear, implementation="eager", scaling=0.5, seed=7)


def example(rows=(6, 5), dim=32, out=24, rank=4, dtype=torch.float32, adapter=None):
    return {
        "x": randn(*rows, dim, dtype=dtype),
        "weight": randn(out, dim, seed=1, dtype=dtype) * dim**-0.5,
        "lora_a": randn(rank, dim, seed=2, dtype=adapter or dtype) * dim**-0.5,
        "lora_b": randn(out, rank, seed=3, dtype=adapter or dtype),
        "bias": randn(out, seed=4, dtype=dtype),
    }


def with_gradients(fn, given, asked=NAMES, **settings):
    """y and the gradients of what is asked."""
    given = {k: v.detach().requires_grad_(k in asked) for k, v in given.items()}
    with poisoned():
        y = fn(**given, **settings)
        wanted = [v for k, v in given.items() if k in asked]
        dy = randn(*y.shape, seed=5, dtype=y.dtype)
        return [y, *torch.autograd.grad(y, wanted, dy)] if wanted else [y]


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("needs", list(itertools.product((True, False), repeat=5)))
def test_gradients_where_asked_and_none_elsewhere(needs, adapter, dropout_p):
    asked = [name for name, need in zip(NAMES, needs, strict=True) if need]
    given = {k: v.detach().requires_grad_(k in asked) for k, v in example(adapter=adapter).items()}
    y = lora(**given, dropout_p=dropout_p)
    assert y.requires_grad == any(needs)
    if asked:
        y.backward(randn(*y.shape, seed=5))
    assert [v.grad is not None for v in given.values()] == list(needs)
    expected = with_gradients(plain, example(adapter=adapter), asked, dropout_p=dropout_p)
    rtol = 2e-5 if adapter == torch.float32 else 2e-2
    assert_close([y, *(given[k].grad for k in asked)], expected, rtol=rtol)


def kept_beside_the_arguments(fn, given, **settings):
    """Sizes of all tensors kept for the backward that are not in an argument's memory."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = fn(**given, **settings)
    for tensor in given.values():
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    return y, sum(kept.values())


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16])
def test_nothing_of_the_size_of_x_or_y_is_kept_beside_x(adapter, dropout_p):
    given = example((100,), dtype=torch.bfloat16, adapter=adapter)
    for name in ("x", "lora_a", "lora_b"):
        given[name].requires_grad_()
    y, kept = kept_beside_the_arguments(lora, given, dropout_p=dropout_p)
    assert kept <= 100 * 4 * adapter.itemsize + 8  # u, and the seed
    _, plain_kept = kept_beside_the_arguments(plain, given, dropout_p=dropout_p)
    if dropout_p or adapter == torch.float32:
        assert plain_kept >= given["x"].numel() * 2  # the measure sees a copy of x where there is
    # What is kept is enough for all the gradients.
    assert len(torch.autograd.grad(y.sum(), [given[k] for k in ("x", "lora_a", "lora_b")])) == 3


def test_x_is_let_go_where_weight_and_lora_a_are_frozen():
    given = example((100,))
    given["x"].requires_grad_()
    given["lora_b"].requires_grad_()
    seen = []
    pack = lambda tensor: seen.append(tensor.data_ptr()) or tensor  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        lora(**given)
    assert given["x"].data_ptr() not in seen and given["weight"].data_ptr() in seen


def test_a_frozen_weight_costs_no_product():
    counts = {}
    for trained in (False, True):
        given = example((512,), dim=64, out=48)
        for name in ("x", "lora_a", "lora_b", *(["weight"] if trained else [])):
            given[name].requires_grad_()
        with FlopCounterMode(display=False) as counter:
            y = lora(**given)
            y.backward(torch.ones_like(y))
        counts[trained] = counter.get_total_flops()
    base, rank = 2 * 512 * 64 * 48, 2 * 512 * 4
    # Two products of rank r more are sums in place, which the counter does not see.
    assert counts[False] == 2 * base + rank * (2 * 64 + 2 * 48)
    assert counts[True] == counts[False] + base


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_no_argument_is_written_to(dropout_p):
    given = example(dtype=torch.bfloat16, adapter=torch.float32)
    before = {k: v.clone() for k, v in given.items()}
    y = given | {}
    y = {k: v.requires_grad_() for k, v in y.items()}
    out = lora(**y, dropout_p=dropout_p)
    dy = randn(*out.shape, seed=5, dtype=out.dtype)
    kept = dy.clone()
    first = torch.autograd.grad(out, list(y.values()), dy, retain_graph=True)
    again = torch.autograd.grad(out, list(y.values()), dy)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(dy, kept) and all(torch.equal(given[k], before[k]) for k in given)


STRIDED = {
    "all-but-the-last-token": lambda: randn(2, 6, 32)[:, :-1],
    "transposed": lambda: randn(5, 3, 32).transpose(0, 1),
    "every-second-column": lambda: randn(4, 64)[:, ::2],
    "expanded": lambda: randn(1, 32).expand(6, 32),
    "unaligned": lambda: randn(5, 41)[:, 3:35],
}


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("name", STRIDED)
def test_strided_inputs_and_upstream_gradients(name, dropout_p):
    given = example() | {"x": STRIDED[name]()}
    weight, lora_b = given["weight"], given["lora_b"]
    given["weight"] = weight.t().contiguous().t()
    given["lora_b"] = torch.cat([lora_b, lora_b], 1)[:, :4]
    results = []
    for make in (lambda t: t, lambda t: t.contiguous()):
        inputs = {k: make(v.detach()).requires_grad_() for k, v in given.items()}
        y = lora(**inputs, dropout_p=dropout_p)
        for dy in (torch.ones((), device=DEVICE).expand(y.shape), randn(*y.shape, seed=3)):
            results.append([y, *torch.autograd.grad(y, list(inputs.values()), make(dy),
                                                    retain_graph=True)])  # fmt: skip
    for a, b in zip(results[:2], results[2:], strict=True):
        assert_close(a, b, rtol=5e-6)


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_second_derivatives(dropout_p):
    def penalty(fn):
        given = {k: v.requires_grad_() for k, v in example().items()}
        y = fn(**given, dropout_p=dropout_p)
        wanted = list(given.values())
        first = torch.autograd.grad(y.sin().sum(), wanted, retain_graph=True)
        again = torch.autograd.grad(y.sin().sum(), wanted, create_graph=True)
        assert_close(first, again, rtol=1e-5)
        return torch.autograd.grad(sum(g.sin().sum() for g in again), wanted)

    assert_close(penalty(lora), penalty(plain), rtol=1e-4)


def test_second_derivatives_beside_a_frozen_a():
    given = example()
    given["lora_b"].requires_grad_()
    y = lora(**given)
    (dlora_b,) = torch.autograd.grad(y.square().sum(), given["lora_b"], create_graph=True)
    (second,) = torch.autograd.grad(dlora_b.square().sum(), given["lora_b"])
    z = plain(**given)
    (expected,) = torch.autograd.grad(z.square().sum(), given["lora_b"], create_graph=True)
    assert_close([second], torch.autograd.grad(expected.square().sum(), given["lora_b"]), 1e-4)
    given["x"].requires_grad_()
    y = lora(**given)
    with pytest.raises(RuntimeError, match="x is not kept where lora_a and weight are frozen"):
        torch.autograd.grad(y.square().sum(), given["lora_b"], create_graph=True)


def test_the_gradient_is_that_of_the_forwards_own_mask():
    """Finite differences in a direction, with a seed and with one drawn from the generator."""
    given = example()
    for seed in (7, None):
        torch.manual_seed(3)
        fn = functools.partial(lora, dropout_p=0.4, seed=seed)
        results = with_gradients(fn, given)
        y, gradients = results[0], dict(zip(NAMES, results[1:], strict=True))
        dy = randn(*y.shape, seed=5)
        for name in NAMES:
            direction, step, values = randn(*given[name].shape, seed=9), 1e-2, []
            for sign in (1, -1):
                torch.manual_seed(3)
                moved = given | {name: given[name] + sign * step * direction}
                values.append((fn(**moved).double() * dy).sum())
            numeric = (values[0] - values[1]) / (2 * step)  # y is linear in each
            expected = (gradients[name].double() * direction).sum()
            torch.testing.assert_close(numeric, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_draws_the_same_seed(reentrant):
    given = {k: v.requires_grad_() for k, v in example().items()}
    fn = lambda *a: lora(*a[:4], bias=a[4], dropout_p=0.4, seed=None).sin()  # noqa: E731
    results = []
    for run in (fn, functools.partial(checkpoint, fn, use_reentrant=reentrant)):
        torch.manual_seed(11)
        y = run(*given.values())
        y.sum().backward()
        results.append([y, *(v.grad for v in given.values())])
        for tensor in given.values():
            tensor.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not torch.equal(results[0][0], fn(*given.values()))  # the next draw is another


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("x_dtype, adapter", list(itertools.product(DTYPES, DTYPES)))
def test_mixed_dtypes_and_autocast(x_dtype, adapter, dropout_p, autocast, monkeypatch):
    monkeypatch.setattr(cases, "SCRATCH", 1)
    given = example((150,), dtype=torch.bfloat16, adapter=adapter)
    given["x"] = given["x"].to(x_dtype)
    results = []
    for fn in (lora, plain):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            results.append(with_gradients(fn, given, dropout_p=dropout_p))
    kernel, expected = results
    assert [k.dtype for k in kernel] == [p.dtype for p in expected]
    assert [k.dtype for k in kernel[1:]] == [v.dtype for v in given.values()]
    y_dtype = torch.bfloat16 if autocast else torch.promote_types(x_dtype, torch.bfloat16)
    assert kernel[0].dtype == y_dtype
    assert_close([k.float() for k in kernel], [p.float() for p in expected], rtol=2e-2)


def test_float64_and_transforms_take_the_plain_version():
    given = {k: v.double() for k, v in example().items()}
    y = torch_liger.lora_linear(**given)
    assert y.dtype == torch.float64
    with pytest.raises(RuntimeError, match="implementation='triton' cannot run here"):
        lora(**given)
    given = example()
    each = torch.func.vmap(lambda x: torch_liger.lora_linear(**(given | {"x": x})))(given["x"])
    assert_close([each], [torch_liger.lora_linear(**given)])


@pytest.mark.parametrize("rows", [(0,), (0, 3)])
def test_no_rows(rows):
    for dropout_p in (0.0, 0.4):
        results = with_gradients(lora, example(rows), dropout_p=dropout_p)
        assert results[0].shape == (*rows, 24)
        assert all(not g.any() and not g.isnan().any() for g in results[1:])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", [lora, plain], ids=["triton", "eager"])
def test_traces_without_a_graph_break(fn, adapter):
    given = example(dtype=torch.bfloat16, adapter=adapter)
    given = {k: v.requires_grad_(k != "weight") for k, v in given.items()}
    loss = lambda given: fn(**given).float().sin().sum()  # noqa: E731
    results = []
    for run in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        value = run(given)
        wanted = [v for v in given.values() if v.requires_grad]
        results.append([value, *torch.autograd.grad(value, wanted)])
    assert_close(*([r.float() for r in rs] for rs in results), rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16])
def test_compiles_without_a_graph_break(adapter, dropout_p):
    loss = lambda given: lora(**given, dropout_p=dropout_p).float().sin().sum()  # noqa: E731
    compiled = torch.compile(loss, fullgraph=True)
    for rows in (300, 301):
        given = example((rows,), dtype=torch.bfloat16, adapter=adapter)
        given = {k: v.requires_grad_(k != "weight") for k, v in given.items()}
        wanted = [v for v in given.values() if v.requires_grad]
        results = []
        for run in (loss, compiled):
            value = run(given)
            results.append([value, *torch.autograd.grad(value, wanted)])
        assert_close(*([r.float() for r in rs] for rs in results), rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16])
def test_peak_memory_and_no_wait_for_the_device(adapter, dropout_p):
    given = example((16384,), 4096, 14336, 64, torch.bfloat16, adapter)
    given = {k: v.requires_grad_(k in ("x", "lora_a", "lora_b")) for k, v in given.items()}
    wanted = [v for v in given.values() if v.requires_grad]
    dy = torch.randn(16384, 14336, device="cuda", dtype=torch.bfloat16)

    def step():
        return torch.autograd.grad(lora(**given, dropout_p=dropout_p, seed=None), wanted, dy)

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    y_and_dx = 2 * 16384 * (4096 + 14336)
    small = 16384 * 64 * 4 * 3 + 8 * 64 * (4096 + 14336)
    # Without dropout no rows are copied, in any dtype; the library's products have a workspace.
    others = 3 * cases.SCRATCH if dropout_p else 2 * small + 64 * 2**20
    assert torch.cuda.max_memory_allocated() - before <= y_and_dx + small + others
