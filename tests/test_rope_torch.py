"""What PyTorch users do with rope: strided views, frozen inputs, second derivatives, compiling."""

import functools
import itertools

import pytest
import torch
import torch.utils.checkpoint

import torch_liger
from liger_ops.rope import cases, triton_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
triton_rope = functools.partial(torch_liger.rope, implementation="triton")
eager_rope = functools.partial(torch_liger.rope, implementation="eager")


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def angles_of(time, size, batch=None):
    """Not angles at all, so that nothing can lean on what is true of angles."""
    shape = (time, size) if batch is None else (batch, time, size)
    return randn(*shape, seed=7), randn(*shape, seed=8)


def assert_close(actual, expected, rtol=2e-6):
    for a, e in zip(actual, expected, strict=True):
        scale = e.detach().abs().amax().item() if e.numel() else 0.0
        torch.testing.assert_close(a, e, rtol=rtol, atol=rtol * scale)


def sentinel_view(shape, fill=None):
    """A view (B, T, N, H) into a larger buffer full of a sentinel, and that buffer."""
    batch, time, heads, size = shape
    buffer = torch.full((batch + 1, time + 2, heads + 3, size + 8), 77.0, device=DEVICE)
    view = buffer[:batch, 1 : time + 1, 2 : heads + 2, :size]
    if fill is not None:
        view.copy_(fill)
    return view, buffer


def sentinels(view, buffer):
    """The buffer without what the view covers."""
    inside = torch.zeros_like(buffer, dtype=torch.bool)
    inside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    return buffer[~inside]


@pytest.mark.parametrize("heads, kv_heads", [heads[:2] for heads in cases.HEADS])
@pytest.mark.parametrize("size, rotary_dim, layout", [
    (64, 64, "half"), (80, 80, "interleaved"), (96, 32, "half"), (128, 40, "interleaved"),
    (256, 256, "half"),
])  # fmt: skip
def test_nothing_is_written_beside_the_results(
    heads, kv_heads, size, rotary_dim, layout, monkeypatch
):
    shapes = [(1, 3, n, size) for n in (heads, kv_heads)]
    values = [randn(*shape, seed=i) for i, shape in enumerate(shapes)]
    inputs = [sentinel_view(*given) for given in zip(shapes, values, strict=True)]
    outputs = []

    def in_a_buffer(like):
        outputs.append(sentinel_view(like.shape))
        return outputs[-1][0]

    monkeypatch.setattr(triton_kernel, "_empty", in_a_buffer)
    angles = angles_of(3, rotary_dim)
    results = triton_rope(*(view for view, _ in inputs), *angles, layout=layout)
    assert_close(results, eager_rope(*values, *angles, layout=layout))
    for view, buffer in (*inputs, *outputs):
        assert (sentinels(view, buffer) == 77.0).all()
    for (view, _), value in zip(inputs, values, strict=True):
        assert torch.equal(view, value)


def test_results_are_new_tensors_in_the_order_in_memory_of_the_arguments():
    angles = angles_of(5, 16)
    q, k = randn(2, 5, 4, 16), randn(2, 2, 5, 16).transpose(1, 2)
    fused = randn(2, 5, 6 * 16)
    sliced = fused[..., : 4 * 16].view(2, 5, 4, 16)
    for given in ((q, k), (sliced, k)):
        for x, y in zip(given, triton_rope(*given, *angles), strict=True):
            assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert triton_rope(q, k, *angles)[0].is_contiguous()
    assert triton_rope(q, k, *angles)[1].transpose(1, 2).is_contiguous()
    assert triton_rope(sliced, k, *angles)[0].is_contiguous()


STRIDED = {
    "heads-first-in-memory": lambda: randn(2, 4, 5, 16).transpose(1, 2),
    "time-first-in-memory": lambda: randn(5, 2, 4, 16).transpose(0, 1),
    "expanded-heads": lambda: randn(2, 5, 1, 16).expand(2, 5, 4, 16),
    "expanded-everything": lambda: randn(1).expand(2, 5, 4, 16),
    "features-not-adjacent": lambda: randn(2, 5, 16, 4).transpose(2, 3),
    "every-second-feature": lambda: randn(2, 5, 4, 32)[..., ::2],
    "every-second-time": lambda: randn(2, 10, 4, 16)[:, ::2],
    "unaligned": lambda: randn(2, 5, 4, 19)[..., 3:],
}


@pytest.mark.parametrize("name", STRIDED)
def test_strided_inputs_and_upstream_gradients(name):
    odd = STRIDED[name]()
    results = []
    for x in (odd, odd.contiguous()):
        q, k = x.detach().requires_grad_(), randn(2, 5, 1, 16, seed=1).requires_grad_()
        outputs = triton_rope(q, k, *angles_of(5, 12, batch=2))
        kept = x.clone()
        gradients = torch.autograd.grad(outputs, (q, k), (x, randn(2, 5, 1, 16, seed=2)))
        assert torch.equal(x, kept)
        results.append([*outputs, *gradients])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("reduce", [torch.sum, torch.mean])
def test_a_loss_that_is_a_sum(reduce):
    """Its gradient is one number expanded, every stride 0."""
    gradients = []
    for rope in (triton_rope, eager_rope):
        q, k = randn(2, 5, 3, 16).requires_grad_(), randn(2, 5, 1, 16, seed=1).requires_grad_()
        a, b = rope(q, k, *angles_of(5, 16))
        (reduce(a) + 2 * reduce(b)).backward()
        gradients.append([q.grad, k.grad])
    assert_close(*gradients)


def test_strided_angles():
    q, k = randn(2, 5, 3, 16), randn(2, 5, 1, 16, seed=1)
    cos, sin = randn(16, 5, seed=2).t(), randn(2, 7, 16, seed=3)[0, 1:6]
    everywhere = cos.expand(2, 5, 16), sin.expand(2, 5, 16)
    expected = eager_rope(q, k, cos, sin)
    for angles in ((cos, sin), (cos[None], sin[None]), everywhere):
        assert_close(triton_rope(q, k, *angles), expected)


def test_views_of_one_fused_projection_and_their_gradients():
    heads, kv_heads, size = 14, 2, 16
    widths = [heads * size, kv_heads * size, kv_heads * size]

    def run(rope):
        qkv = randn(2, 5, sum(widths)).requires_grad_()
        q, k, v = (x.view(2, 5, -1, size) for x in (qkv * 1.0).split(widths, dim=-1))
        q, k = rope(q, k, *angles_of(5, size))
        (q.sin().sum() + k.cos().sum() + v.square().sum()).backward()
        return [qkv.grad]

    assert_close(run(triton_rope), run(eager_rope))


def test_results_may_be_changed_in_place():
    def run(rope):
        leaves = randn(2, 5, 4, 16).requires_grad_(), randn(2, 5, 2, 16, seed=1).requires_grad_()
        q, k = rope(*leaves, *angles_of(5, 16))
        q.mul_(2)
        k.add_(1)
        (q.sin().sum() + k.square().sum()).backward()
        return [leaf.grad for leaf in leaves]

    assert_close(run(triton_rope), run(eager_rope))


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=4)))
def test_gradients_where_asked_and_none_elsewhere(needs, monkeypatch):
    rotated = []
    rotate = triton_kernel._rotate
    monkeypatch.setattr(
        triton_kernel,
        "_rotate",
        lambda q, k, *a: rotated.append((q is not None, k is not None)) or rotate(q, k, *a),
    )
    gradients = []
    for rope in (triton_rope, eager_rope):
        tensors = [randn(2, 5, 4, 16), randn(2, 5, 2, 16, seed=1), *angles_of(5, 12)]
        tensors = [t.requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
        q, k = rope(*tensors)
        for y, need in ((q, needs[0]), (k, needs[1])):
            assert y.requires_grad == (need or any(needs[2:]))
        if any(needs):
            (q.sin().sum() + k.cos().sum()).backward()
        gradients.append([t.grad for t in tensors])
    for a, e, need in zip(*gradients, needs, strict=True):
        assert (a is not None) == need
        if need:
            assert_close([a], [e], rtol=5e-6)
    # Forward, and for what asks for it one backward.
    asked = [needs[:2]] if any(needs[:2]) else []
    assert [r for r in rotated if any(r)] == [(True, True), *asked]


@pytest.mark.parametrize("used", [0, 1])
def test_one_result_alone(used, monkeypatch):
    rotated = []
    rotate = triton_kernel._rotate
    monkeypatch.setattr(
        triton_kernel,
        "_rotate",
        lambda q, k, *a: rotated.append((q is not None, k is not None)) or rotate(q, k, *a),
    )
    gradients = []
    for rope in (triton_rope, eager_rope):
        tensors = [randn(2, 5, 4, 16), randn(2, 5, 2, 16, seed=1), *angles_of(5, 12)]
        tensors = [t.requires_grad_() for t in tensors]
        rope(*tensors)[used].sin().sum().backward()
        gradients.append([t.grad for i, t in enumerate(tensors) if i != 1 - used])
        assert tensors[1 - used].grad is None or not tensors[1 - used].grad.any()
    assert_close(*gradients, rtol=5e-6)
    assert rotated[1] == (used == 0, used == 1)


def test_only_the_angles_are_kept():
    saved = []
    q, k = randn(2, 5, 4, 16).requires_grad_(), randn(2, 5, 2, 16, seed=1).requires_grad_()
    angles = angles_of(5, 16)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        triton_rope(q, k, *angles)
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in angles]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    q, k = randn(2, 5, 4, 16).requires_grad_(), randn(2, 5, 2, 16, seed=1)
    expected = triton_rope(q, k, *angles_of(5, 16))
    with mode():
        actual = triton_rope(q, k, *angles_of(5, 16))
    assert not any(y.requires_grad for y in actual)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("asked", [2, 4])
def test_second_derivatives_and_backward_twice(asked, layout):
    def penalty(rope):
        tensors = [randn(2, 3, 4, 16), randn(2, 3, 2, 16, seed=1), *angles_of(3, 12)]
        inputs = [t.requires_grad_() for t in tensors[:asked]]
        q, k = rope(*tensors, layout=layout)
        loss = q.sin().sum() + k.square().sum() * k.sum()
        first = torch.autograd.grad(loss, inputs, retain_graph=True)
        again = torch.autograd.grad(loss, inputs, create_graph=True)
        assert_close(first, again)
        return torch.autograd.grad(sum(g.pow(3).sum() for g in again), inputs)

    assert_close(penalty(triton_rope), penalty(eager_rope), rtol=1e-4)


def test_checkpointed():
    def run(rope):
        leaves = randn(2, 5, 4, 16).requires_grad_(), randn(2, 5, 2, 16, seed=1).requires_grad_()
        fn = lambda q, k: sum(y.sin().sum() for y in rope(q, k, *angles_of(5, 16)))  # noqa: E731
        torch.utils.checkpoint.checkpoint(fn, *leaves, use_reentrant=False).backward()
        return [leaf.grad for leaf in leaves]

    assert_close(run(triton_rope), run(eager_rope))


# torch 2.11's own tracing of an autograd.Function instantiates it.
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("needs", [(True, True), (False, True)])
def test_compiles_without_a_graph_break(needs, layout):
    def loss(q, k, cos, sin, implementation):
        q, k = (x.view(2, -1, 4, 16).transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
        q, k = torch_liger.rope(q, k, cos, sin, layout=layout, implementation=implementation)
        return q.sin().sum() + k.cos().sum()

    compiled = torch.compile(loss, fullgraph=True)
    for time in (64, 96, 128):  # the second makes the length dynamic
        results = []
        for fn, implementation in ((compiled, "triton"), (loss, "eager")):
            inputs = [randn(2, time, 64, seed=i).requires_grad_(n) for i, n in enumerate(needs)]
            fn(*inputs, *angles_of(time, 16), implementation).backward()
            results.append([t.grad for t in inputs if t.requires_grad])
        assert_close(*results, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_more_than_two_to_the_31_elements(layout, transposed):
    time, heads, size = 2**18 + 5, 64, 128
    shape = (1, heads, time, size) if transposed else (1, time, heads, size)
    q = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    q = q.transpose(1, 2) if transposed else q
    k = torch.randn(1, time, 1, size, device="cuda", dtype=torch.bfloat16)
    angles = [torch.randn(time, size, device="cuda") for _ in range(2)]
    take = lambda x, dim: torch.cat([x.narrow(dim, 0, 300), x.narrow(dim, time - 300, 300)], dim)  # noqa: E731
    ends = [take(x, 1).requires_grad_() for x in (q, k)]
    inputs = [x.requires_grad_() for x in (q, k)]
    outputs = triton_rope(*inputs, *angles, layout=layout)
    alone = triton_rope(*ends, *(take(a, 0) for a in angles), layout=layout)
    assert all(torch.equal(take(y, 1), e) for y, e in zip(outputs, alone, strict=True))
    gradients = torch.autograd.grad(outputs, inputs, [y.detach() for y in outputs])
    expected = torch.autograd.grad(alone, ends, [y.detach() for y in alone])
    assert all(torch.equal(take(g, 1), e) for g, e in zip(gradients, expected, strict=True))
