"""Patched models on two GPUs: shared out between processes, or between the layers of one model.

python -m pytest -q -m gpu tests/test_patching_two_gpus.py
"""

import functools

import pytest
import torch

import torch_liger
from patching_models import assert_same, batch, made, results, twin
from test_patching_distributed import NAMES, NAMES_ZERO3, NEEDS_DEEPSPEED, outcomes
from test_rms_norm_torch import assert_close, randn

FIRST, SECOND = "cuda:0", "cuda:1"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2,
        reason=f"needs two NVIDIA GPUs, and torch sees {torch.cuda.device_count()}",
    ),
]


@pytest.mark.parametrize("name", NAMES)
def test_two_processes(name):
    """DDP and FSDP over NCCL."""
    assert [found[name] for found in outcomes("patching_distributed_checks.py")] == ["ok", "ok"]


@NEEDS_DEEPSPEED
@pytest.mark.parametrize("name", NAMES_ZERO3)
def test_two_processes_of_deepspeed(name):
    assert [found[name] for found in outcomes("patching_zero3_checks.py")] == ["ok", "ok"]


def on(device, tensors):
    return {name: value.to(device) for name, value in tensors.items()}


def dispatched(model):
    """The first layer on the first GPU, the rest on the second."""
    from accelerate import dispatch_model

    devices = {"model.embed_tokens": FIRST, "model.rotary_emb": FIRST, "model.layers.0": FIRST,
               "model.layers.1": SECOND, "model.norm": SECOND, "lm_head": SECOND}  # fmt: skip
    return dispatch_model(model, devices)


@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_layers_and_head_on_different_gpus(family, patch_first):
    """Labels are with the ids on the first GPU, and the head is on the second."""
    plain = made(family, tie_word_embeddings=False).to(FIRST)
    inputs = on(FIRST, batch())
    expected = results(plain, **inputs)
    model = twin(plain)
    if patch_first:
        torch_liger.apply_liger_kernel(model)
    model = dispatched(model)
    if not patch_first:
        torch_liger.apply_liger_kernel(model)
    assert {p.device.index for p in model.parameters()} == {0, 1}
    assert model.lm_head.weight.device == torch.device(SECOND)
    for current in (0, 1, 0):  # the second time by launches that were kept
        with torch.cuda.device(current):
            assert model(**inputs).logits is None
            assert_same(on(FIRST, results(model, **inputs)), expected)


@pytest.mark.parametrize("items", [7, torch.tensor(7), "on the first GPU", "on the second GPU"])
def test_the_count_of_tokens_may_be_anywhere(items):
    plain = made("llama", tie_word_embeddings=False).to(FIRST)
    model = dispatched(twin(plain))
    torch_liger.apply_liger_kernel(model)
    if isinstance(items, str):
        items = torch.tensor(7, device=FIRST if "first" in items else SECOND)
    inputs = on(FIRST, batch())
    loss = model(**inputs, num_items_in_batch=items).loss
    expected = plain(**inputs, num_items_in_batch=7).loss
    torch.testing.assert_close(loss.to(FIRST), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "phi3"])
def test_a_model_on_another_gpu_than_the_current_one(family):
    plain = made(family).to(FIRST)
    inputs = batch()
    expected = results(plain, **on(FIRST, inputs))
    torch_liger.apply_liger_kernel(plain)
    models = {FIRST: plain, SECOND: twin(plain).to(SECOND)}
    for device in (FIRST, SECOND, SECOND, FIRST):
        for current in (0, 1):
            with torch.cuda.device(current):
                found = results(models[device], **on(device, inputs))
                assert torch.cuda.current_device() == current
            assert_same(on(FIRST, found), expected)


def adapter(x, weight, lora_a, lora_b):
    return torch_liger.lora_linear(x, weight, lora_a, lora_b, dropout_p=0.25, seed=3)


def angles(x):
    angle = torch.arange(24 * 16, device=x.device).reshape(24, 16) / 100.0
    return angle.cos(), angle.sin()


def rotated(q, k):
    return torch.cat(torch_liger.rope(q[None], k[None], *angles(q)), dim=2)


def projected(x, norm, weight, implementation=None):
    heads = torch_liger.rms_norm_linear_rope(
        x[None], norm, weight, *angles(x), num_heads=2, num_kv_heads=1, head_dim=16,
        implementation=implementation,
    )  # fmt: skip
    return torch.cat(heads, dim=2)


def class_losses(x, labels):
    return torch_liger.cross_entropy(x, labels, reduction="none")


def class_losses_of_a_head(x, weight, labels):
    return torch_liger.fused_linear_cross_entropy(x, weight, labels, reduction="none")


OPERATIONS = {
    "rms_norm": (torch_liger.rms_norm, [(24, 32), (32,)]),
    "fused_add_rms_norm": (
        lambda x, r, w: torch.cat(torch_liger.fused_add_rms_norm(x, r, w)),
        [(24, 32), (24, 32), (32,)],
    ),
    "layer_norm": (torch_liger.layer_norm, [(24, 32), (32,), (32,)]),
    "swiglu": (torch_liger.swiglu, [(24, 32), (24, 32)]),
    "geglu": (torch_liger.geglu, [(24, 32), (24, 32)]),
    "cross_entropy": (class_losses, [(24, 32), 24]),
    "fused_linear_cross_entropy": (class_losses_of_a_head, [(24, 32), (40, 32), 24]),
    "rope": (rotated, [(24, 2, 16), (24, 1, 16)]),
    "rms_norm_linear_rope": (projected, [(24, 32), (32,), (64, 32)]),
    "rms_norm_linear_rope, one kernel": (
        functools.partial(projected, implementation="triton"),
        [(24, 32), (32,), (64, 32)],
    ),
    "lora_linear": (adapter, [(24, 32), (48, 32), (4, 32), (48, 4)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_on_another_gpu_than_the_current_one(name, dtype):
    run, shapes = OPERATIONS[name]
    found = []
    for device in (FIRST, SECOND, SECOND):
        inputs = [
            torch.arange(shape, device=device)
            if isinstance(shape, int)
            else randn(*shape, seed=i, dtype=dtype).to(device).requires_grad_()
            for i, shape in enumerate(shapes)
        ]
        with torch.cuda.device(0):
            y = run(*inputs)
            wanted = [x for x in inputs if x.requires_grad]
            gradients = torch.autograd.grad(y, wanted, torch.ones_like(y))
        assert y.device == torch.device(device)
        found.append([t.to(FIRST) for t in (y, *gradients)])
    for other in found[1:]:
        assert_close(other, found[0], rtol=2e-6 if dtype == torch.float32 else 1e-2)
