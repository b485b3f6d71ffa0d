"""What users of PyTorch do with fused_linear_cross_entropy: frozen inputs, dtypes, memory."""

import itertools

import pytest
import torch

import torch_liger
from liger_ops.fused_linear_cross_entropy import triton_kernel
from test_fused_linear_cross_entropy import (
    DEVICE,
    GIB,
    PARTS,
    _kernel_of_the_products_at_any_size,  # noqa: F401
    flce,
)
from test_rms_norm_torch import assert_close, randn
from torch_liger.nn import LigerFusedLinearCrossEntropyLoss


def example(rows=300, dim=24, vocab=80, dtype=torch.float32, ignored=5):
    hidden = randn(rows, dim, dtype=dtype).requires_grad_()
    weight = (randn(vocab, dim, seed=1) * 0.5).to(dtype).requires_grad_()
    bias = randn(vocab, seed=2).requires_grad_()
    labels = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(0))
    labels[::ignored] = -100
    return hidden, weight, bias, labels.to(DEVICE)


@pytest.mark.parametrize("memory", ["fast", PARTS, 128 * 80 * 4, 1])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("needs", list(itertools.product((True, False), repeat=3)))
def test_gradients_where_asked_and_none_elsewhere(memory, reduction, needs):
    def gradients(implementation):
        *given, labels = example()
        for tensor, need in zip(given, needs, strict=True):
            tensor.requires_grad_(need)
        hidden, weight, bias = given
        loss = flce(
            hidden, weight, labels, bias=bias, reduction=reduction, memory=memory,
            implementation=implementation,
        )  # fmt: skip
        assert loss.requires_grad == any(needs)
        if any(needs):
            (loss * torch.arange(loss.numel(), device=DEVICE).view(loss.shape)).sum().backward()
        return [t.grad for t in given]

    kernel, plain = gradients("triton"), gradients("eager")
    assert [g is not None for g in kernel] == list(needs)
    wanted = [(k, p) for k, p in zip(kernel, plain, strict=True) if p is not None]
    if wanted:
        assert_close(*zip(*wanted, strict=True), rtol=2e-5)


@pytest.mark.parametrize("memory", ["fast", PARTS, 1])
def test_a_second_backward_and_second_derivatives(memory):
    def run_with(implementation):
        hidden, weight, bias, labels = example()
        loss = flce(hidden, weight, labels, bias=bias, memory=memory, implementation=implementation)
        wanted = (hidden, weight, bias)
        first = torch.autograd.grad(3.0 * loss, wanted, retain_graph=True)
        kept = [g.clone() for g in first]
        again = torch.autograd.grad(loss, wanted, retain_graph=True)
        assert all(torch.equal(g, k) for g, k in zip(first, kept, strict=True))
        assert_close(first, [3.0 * g for g in again], rtol=1e-5)
        graph = torch.autograd.grad(loss, wanted, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in graph), wanted)

    assert_close(run_with("triton"), run_with("eager"), rtol=1e-4)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, None])
@pytest.mark.parametrize("memory", ["fast", 1])
def test_without_gradients_the_loss_is_the_same_and_no_buffer_is_made(mode, memory, monkeypatch):
    hidden, weight, bias, labels = example()
    expected = flce(hidden, weight, labels, bias=bias, memory=memory).detach()
    monkeypatch.setattr(triton_kernel, "Gradients", None)
    if mode is None:
        given = [t.detach() for t in (hidden, weight, bias)]
        loss = flce(*given[:2], labels, bias=given[2], memory=memory)
    else:
        with mode():
            loss = flce(hidden, weight, labels, bias=bias, memory=memory)
    assert not loss.requires_grad
    assert_close([loss], [expected])


def test_sums_do_not_depend_on_the_number_of_parts():
    """A bfloat16 running sum of equal terms stops growing after 256 of them."""
    dim, vocab = 32, 64
    for rows in (256, 1024):
        hidden = randn(1, dim, dtype=torch.bfloat16).repeat(rows, 1)
        weight = (randn(vocab, dim, seed=1) * 0.1).bfloat16().requires_grad_()
        labels = torch.full((rows,), 7, device=DEVICE)
        p = torch.softmax((hidden[:1] @ weight.t()).double(), -1)
        p[0, 7] -= 1.0
        exact = rows * p.T @ hidden[:1].double()
        for memory in ("fast", vocab * dim * 4 + 128 * vocab * 2, 1):
            loss = flce(hidden, weight, labels, reduction="sum", memory=memory)
            (gradient,) = torch.autograd.grad(loss, weight)
            torch.testing.assert_close(gradient.double(), exact, rtol=2.0**-6, atol=1e-3)


def test_float16_gradients_survive_a_loss_scale():
    """A mean over many tokens makes each one's part too small for float16."""
    hidden, weight, _, labels = example(600, dtype=torch.float16, ignored=7)
    scale = 65536.0
    for memory in ("fast", PARTS, 1):
        (gradient,) = torch.autograd.grad(
            scale * flce(hidden, weight, labels, num_items=60000, memory=memory), weight
        )
        h, w = hidden.detach().double(), weight.detach().double().requires_grad_()
        loss = torch.nn.functional.cross_entropy(h @ w.t(), labels, reduction="sum") / 60000
        (exact,) = torch.autograd.grad(scale * loss, w)
        relative = (gradient.double() - exact).norm() / exact.norm()
        assert relative < 5e-3, (memory, relative)


DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("hidden_dtype, weight_dtype", list(itertools.product(DTYPES, DTYPES)))
def test_mixed_dtypes_and_autocast(hidden_dtype, weight_dtype, autocast):
    def run_with(implementation):
        hidden, weight, bias, labels = example(40)
        hidden = hidden.detach().to(hidden_dtype).requires_grad_()
        weight = weight.detach().to(weight_dtype).requires_grad_()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            loss = flce(hidden, weight, labels, bias=bias, implementation=implementation)
        loss.backward()
        return loss, hidden.grad, weight.grad, bias.grad

    kernel, plain = run_with("triton"), run_with("eager")
    assert [k.dtype for k in kernel] == [p.dtype for p in plain]
    assert kernel[0].dtype == torch.float32 and kernel[1].dtype == hidden_dtype
    assert_close([k.float() for k in kernel], [p.float() for p in plain], rtol=2e-2)


STRIDED = {
    "all-but-the-last-token": lambda: randn(2, 6, 24)[:, :-1],
    "every-second-row": lambda: randn(20, 24)[::2],
    "transposed": lambda: randn(5, 3, 24).transpose(0, 1),
}


@pytest.mark.parametrize("name", STRIDED)
def test_strided_hidden_and_labels_and_a_transposed_weight(name):
    hidden = STRIDED[name]()
    weight = (randn(24, 33, seed=1) * 0.5).t()
    labels = torch.randint(0, 33, (*hidden.shape[:-1], 2)).to(DEVICE)[..., 0]
    results = []
    for make in (lambda t: t, lambda t: t.contiguous()):
        h, w = (make(t.detach()).requires_grad_() for t in (hidden, weight))
        loss = flce(h, w, make(labels), reduction="none")
        d = torch.ones((), device=DEVICE).expand(loss.shape)
        results.append([loss, *torch.autograd.grad(loss, (h, w), make(d))])
    assert_close(*results, rtol=1e-6)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    def run_with(wrapped):
        hidden, weight, bias, labels = example()
        fn = lambda h: flce(h, weight, labels, bias=bias, memory=PARTS)  # noqa: E731
        x = hidden * 2.0
        loss = checkpoint(fn, x, use_reentrant=use_reentrant) if wrapped else fn(x)
        loss.backward()
        return [loss, hidden.grad, weight.grad, bias.grad]

    assert_close(run_with(True), run_with(False))


@pytest.mark.parametrize("implementation", ["triton", "eager"])
def test_per_token_logps(implementation):
    hidden, weight, bias, labels = example(40)
    settings = {"logit_scale": 0.5, "softcap": 3.0, "temperature": 0.7}
    logps = torch_liger.per_token_logps(
        hidden, weight, labels, bias=bias, implementation=implementation, **settings
    )
    logits = 3.0 * torch.tanh((0.5 * (hidden @ weight.t()) + bias) / 3.0) / 0.7
    expected = torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    expected = torch.where(labels == -100, 0.0, expected)
    weights = randn(40, seed=5)
    wanted = (hidden, weight, bias)
    results = [
        [y, *torch.autograd.grad(y, wanted, weights, retain_graph=True)] for y in (logps, expected)
    ]
    assert_close(*results, rtol=2e-5)
    with pytest.raises(ValueError, match=r"temperature must be above 0; got 0\.0"):
        torch_liger.per_token_logps(hidden, weight, labels, temperature=0.0)


def test_the_module_has_liger_kernels_arguments():
    hidden, weight, bias, labels = example(40)
    loss = LigerFusedLinearCrossEntropyLoss()(weight, hidden, labels, bias)
    assert_close([loss], [flce(hidden, weight, labels, bias=bias)])
    module = LigerFusedLinearCrossEntropyLoss(
        ignore_index=3, lse_square_scale=1e-3, label_smoothing=0.1, reduction="sum", softcap=4.0,
        return_z_loss=True, accum_dtype=torch.bfloat16, return_token_accuracy=True,
    )  # fmt: skip
    out = module(weight, hidden, labels.clamp(min=0), bias)
    assert out.z_loss is not None and out.predicted_tokens is None
    assert 0.0 <= out.token_accuracy.item() <= 1.0
    with pytest.raises(ValueError, match="use_token_scaling must be False; got True"):
        LigerFusedLinearCrossEntropyLoss(use_token_scaling=True)


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["fast", PARTS])
def test_two_runs_give_the_same_bits(memory):
    first, second = (
        torch.autograd.grad(flce(*given[:2], given[3], memory=memory), given[:2])
        for given in (example(dtype=torch.bfloat16), example(dtype=torch.bfloat16))
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
def test_in_a_cuda_graph_and_without_waiting():
    hidden, weight, bias, labels = example(dtype=torch.bfloat16)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def step():
        loss = flce(hidden, weight, labels, bias=bias, memory=PARTS, num_items=7)
        return [loss, *torch.autograd.grad(loss, (hidden, weight, bias))]

    with torch.cuda.stream(stream):
        expected = step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):  # capturing fails if the host waits
        results = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [4096, 16384])
def test_memory_stays_within_the_plan(rows):
    dim, vocab = 2048, 65536
    hidden = randn(rows, dim, dtype=torch.bfloat16).requires_grad_()
    weight = (randn(vocab, dim, seed=1) * 0.02).bfloat16().requires_grad_()
    labels = torch.randint(0, vocab, (rows,), device=DEVICE)
    gradients = 2 * (hidden.numel() + weight.numel())
    for memory, limit in (("fast", vocab * dim * 4 + 256 * 2**20), ("least", 0.6 * GIB)):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(flce(hidden, weight, labels, memory=memory), (hidden, weight))
        peak = torch.cuda.max_memory_allocated() - before - gradients
        assert peak <= limit, (memory, peak / GIB)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("memory", ["fast", PARTS, 1])
def test_compiles_without_a_graph_break(memory):
    def loss(hidden, weight, labels, implementation):
        return flce(hidden * 2.0, weight, labels, memory=memory, implementation=implementation)

    compiled = torch.compile(loss, fullgraph=True)
    for rows in (300, 301):
        results = []
        for fn, implementation in ((compiled, "triton"), (loss, "eager")):
            hidden, weight, _, labels = example(rows)
            value = fn(hidden, weight, labels, implementation)
            value.backward()
            results.append([value, hidden.grad, weight.grad])
        assert_close(*results, rtol=1e-4)
