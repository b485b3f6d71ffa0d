"""What users do with cross_entropy: strides, accumulation, transformations, modules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_liger
import torch_liger
from liger_ops.cross_entropy import triton_kernel
from test_rms_norm_torch import assert_close, randn
from torch_liger.nn import LigerCrossEntropyLoss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ce = functools.partial(torch_liger.cross_entropy, implementation="triton")
plain = functools.partial(torch_liger.cross_entropy, implementation="eager")
pallas = functools.partial(jax_liger.cross_entropy, implementation="pallas")
xla = functools.partial(jax_liger.cross_entropy, implementation="xla")


def labels_of(*shape, classes=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, classes, shape, generator=generator).to(DEVICE)


STRIDED = {
    "transposed": lambda: randn(4, 2, 8).transpose(0, 1),
    "all-but-the-last-token": lambda: randn(2, 5, 8)[:, :-1],
    "every-second-row": lambda: randn(12, 8)[::2],
    "a-part-of-wider-rows": lambda: randn(5, 20)[:, 3:11],
    "a-transposed-product": lambda: randn(8, 6).T,
    "expanded": lambda: randn(1, 8).expand(4, 8),
}


@pytest.mark.parametrize("name", STRIDED)
def test_strided_logits_labels_and_upstream_gradients(name):
    logits = STRIDED[name]()
    labels = labels_of(*logits.shape[:-1])
    wide = torch.stack([labels, labels + 100], dim=-1)[..., 0]  # labels at a distance of two
    one = torch.ones((), device=DEVICE)
    for d in (one.expand(labels.shape), randn(*labels.shape, seed=3)):
        results = []
        for make, y in ((lambda t: t, wide), (lambda t: t.contiguous(), labels)):
            x = make(logits.detach()).requires_grad_()
            loss = ce(x, y, reduction="none")
            results.append([loss, *torch.autograd.grad(loss, x, make(d))])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_logits_are_not_written_to_and_their_other_uses_see_their_own_gradient():
    def run(fn):
        raw = randn(6, 8).requires_grad_()
        logits = raw.tanh()
        kept = logits.detach().clone()
        loss = fn(logits, labels_of(6)) + 0.1 * logits.square().mean()
        loss.backward()
        assert torch.equal(logits.detach(), kept)
        return [loss, raw.grad]

    assert_close(run(ce), run(plain))


@pytest.mark.parametrize("as_items", [int, torch.tensor, lambda n: torch.tensor(n, device=DEVICE)])
def test_accumulated_batches_equal_one(as_items):
    logits, labels = randn(10, 8), labels_of(10)
    whole = logits.clone().requires_grad_()
    ce(whole, labels).backward()
    parts = logits.clone().requires_grad_()
    losses = [
        ce(parts[start:stop], labels[start:stop], num_items=as_items(10))
        for start, stop in ((0, 1), (1, 10))
    ]
    sum(losses).backward()
    assert_close([parts.grad, sum(losses)], [whole.grad, ce(logits, labels)])


def test_two_backwards_and_second_derivatives():
    labels = labels_of(5)
    settings = {"label_smoothing": 0.1, "z_loss": 1e-2, "return_z_loss": True}

    def run(fn):
        x = randn(5, 8).requires_grad_()
        loss, z = fn(x, labels, **settings)
        total = loss + z.sin()
        (first,) = torch.autograd.grad(total, x, retain_graph=True)
        (again,) = torch.autograd.grad(total, x, create_graph=True)
        assert_close([first], [again])
        return torch.autograd.grad(again.square().sum(), x)

    assert_close(run(ce), run(plain), rtol=1e-4)


@pytest.mark.parametrize("output", ["loss", "z_loss"])
def test_only_one_output_is_used(output):
    def run(fn):
        x = randn(5, 8).requires_grad_()
        loss, z = fn(x, labels_of(5), z_loss=0.1, return_z_loss=True)
        (loss if output == "loss" else z).backward()
        return [x.grad]

    assert_close(run(ce), run(plain))


def test_no_gradient_is_made_that_nobody_asked_for(monkeypatch):
    monkeypatch.setattr(triton_kernel, "_backward", None)
    x = randn(5, 8)
    loss = ce(x, labels_of(5))
    assert not loss.requires_grad
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            y = randn(5, 8).requires_grad_()
            assert torch.equal(ce(y, labels_of(5)), loss)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64])
def test_integer_types_of_labels(dtype):
    x, labels = randn(5, 8), labels_of(5)
    assert torch.equal(ce(x, labels.to(dtype)), ce(x, labels))
    logits = jnp.asarray(x.cpu().numpy())
    expected = pallas(logits, labels.cpu().numpy())
    assert pallas(logits, labels.to(dtype).cpu().numpy()) == expected


def test_inside_autocast_the_loss_is_float32():
    with torch.autocast(DEVICE, torch.bfloat16):
        x = randn(5, 8, dtype=torch.bfloat16).requires_grad_()
        loss = ce(x, labels_of(5))
    loss.backward()
    assert loss.dtype == torch.float32 and x.grad.dtype == torch.bfloat16


def test_equals_torchs_own():
    x, labels, weight = randn(7, 8), labels_of(7), randn(8, seed=2).abs() + 0.1
    labels[2] = -100
    for reduction in ("mean", "sum", "none"):
        for settings in ({}, {"label_smoothing": 0.2}):
            theirs = torch.nn.functional.cross_entropy(
                x, labels, weight, reduction=reduction, **settings
            )
            ours = ce(x, labels, class_weight=weight, reduction=reduction, **settings)
            assert_close([ours], [theirs])


def test_the_module_has_liger_kernels_arguments():
    x, labels = randn(7, 8).requires_grad_(), labels_of(7)
    loss = LigerCrossEntropyLoss()(x, labels)
    assert torch.equal(loss, torch_liger.cross_entropy(x, labels))
    weight = randn(8, seed=2).abs()
    module = LigerCrossEntropyLoss(
        weight=weight, ignore_index=3, lse_square_scale=1e-3, label_smoothing=0.1, reduction="sum",
        softcap=4.0, return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True,
    )  # fmt: skip
    out = module(x, labels)
    loss, z, metrics = torch_liger.cross_entropy(
        x, labels, class_weight=weight, ignore_index=3, z_loss=1e-3, label_smoothing=0.1,
        reduction="sum", softcap=4.0, return_z_loss=True, return_metrics=True,
    )  # fmt: skip
    assert torch.equal(out.loss, loss) and torch.equal(out.z_loss, z)
    assert torch.equal(out.token_accuracy, metrics.token_accuracy)
    assert torch.equal(out.predicted_tokens, metrics.predicted_tokens)
    only = LigerCrossEntropyLoss(return_z_loss=True)(x, labels)
    assert only.token_accuracy is None and only.predicted_tokens is None


LOGITS = jax.random.normal(jax.random.key(0), (3, 4, 40))
LABELS = jnp.asarray([[1, 2, -100, 39], [0, 5, 7, -100], [3, 3, 3, 3]])


@pytest.mark.parametrize(
    "transform", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "remat"]
)
def test_jax_gradients_under(transform):
    results = [
        jax.value_and_grad(transform(functools.partial(fn, labels=LABELS, z_loss=1e-2)))(LOGITS)
        for fn in (pallas, xla)
    ]
    for a, e in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)


def test_jax_vmap_scan_and_second_derivatives():
    def results(fn):
        loss = lambda x, y: fn(x, y, label_smoothing=0.1, z_loss=1e-2)  # noqa: E731
        second = jax.grad(lambda x: jnp.sum(jnp.square(jax.grad(loss)(x, LABELS))))
        scanned = lambda x: jax.lax.scan(lambda c, xy: (c + loss(*xy), None), 0.0, (x, LABELS))[0]  # noqa: E731
        return [jax.vmap(jax.value_and_grad(loss))(LOGITS, LABELS), second(LOGITS),
                jax.grad(scanned)(LOGITS)]  # fmt: skip

    for a, e in zip(*map(jax.tree.leaves, (results(pallas), results(xla))), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-6)


def test_jax_num_items_and_class_weight_may_be_traced():
    weight = jnp.linspace(0.5, 2.0, 40)

    def results(fn):
        loss = lambda x, n, w: fn(x, LABELS, num_items=n, class_weight=w)  # noqa: E731
        return jax.jit(jax.value_and_grad(loss))(LOGITS, 17, weight)

    for a, e in zip(*map(jax.tree.leaves, (results(pallas), results(xla))), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)
    # A constant by contract, also where a caller asks.
    gradient = jax.grad(lambda w: pallas(LOGITS, LABELS, class_weight=w))(weight)
    assert not gradient.any()


def test_jax_in_64_bit_mode_the_kernels_hold_no_64_bit_value():
    with jax.enable_x64(True):
        labels = LABELS.astype(jnp.int64)
        settings = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0, "return_metrics": True}
        fn = lambda x: pallas(x, labels, **settings)[0]  # noqa: E731
        jaxpr = jax.make_jaxpr(jax.grad(fn))(jax.ShapeDtypeStruct(LOGITS.shape, jnp.float32))
        kernels = [text for text in str(jaxpr).split("pallas_call[")[1:]]
        assert len(kernels) == 2
        for text in kernels:
            inside = text[: text.index("out_avals")] if "out_avals" in text else text
            assert ":i64[" not in inside and ":f64[" not in inside
        value = pallas(LOGITS.astype(jnp.float32), labels, **settings)[0]
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, pallas(LOGITS, LABELS, **settings)[0], rtol=1e-6)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    x = torch.randn(17000, 128256, device="cuda", dtype=torch.bfloat16)
    labels = labels_of(17000, classes=128256)
    take = lambda t: torch.cat([t[:8], t[-8:]])  # noqa: E731
    ends, dloss = take(x).requires_grad_(), randn(17000)
    x.requires_grad_()
    loss, alone = ce(x, labels, reduction="none"), ce(ends, take(labels), reduction="none")
    assert torch.equal(take(loss), alone)
    (dx,) = torch.autograd.grad(loss, x, dloss)
    (dx_alone,) = torch.autograd.grad(alone, ends, take(dloss))
    assert torch.equal(take(dx), dx_alone)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_without_a_graph_break():
    def loss(x, labels, implementation):
        return torch_liger.cross_entropy(
            x * 2, labels, z_loss=1e-3, num_items=7, implementation=implementation
        )

    compiled = torch.compile(loss, fullgraph=True)
    for rows in (64, 96, 128):
        results = []
        for fn, implementation in ((compiled, "triton"), (loss, "eager")):
            x = randn(rows, 256).requires_grad_()
            value = fn(x, labels_of(rows), implementation)
            value.backward()
            results.append([value, x.grad])
        assert_close(*results, rtol=1e-5)
