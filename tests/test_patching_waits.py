"""A training step of a patched model never waits for the device, for a number or for a size."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

import torch_liger
from liger_ops import backend_triton
from patching_models import DEVICE, batch, made

# What makes the host wait for the values of a tensor, by the name of the operation.
WAITS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique_dim",
         "_unique2", "_to_dense"}  # fmt: skip


class NoWaits(TorchDispatchMode):
    """Stands in for CUDA's check where there is no GPU: the plain versions must not wait either."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        masks = name in ("index", "index_put_") and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        assert name not in WAITS and not masks, f"the host waits for {name}"
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def without_waits():
    if DEVICE == "cpu":
        with NoWaits():
            yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def transformers_own(monkeypatch):
    """Without a mask, transformers looks at the positions for packed sequences, and waits there."""
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda *_: None)
    monkeypatch.setattr(backend_triton, "INTERPRET", False)


def inputs_of(**others):
    inputs = batch()
    del inputs["attention_mask"]  # transformers waits to see whether it masks anything
    return {**inputs, "use_cache": False, **others}


def step(model, optimizer, inputs):
    model(**inputs).loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def check(model, **others):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-3)
    if DEVICE == "cuda":
        optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    inputs = inputs_of(**others)
    for _ in range(2):  # kernels are compiled and what they need is kept
        step(model, optimizer, inputs)
    with without_waits():
        step(model, optimizer, inputs)


COUNTS = {"none": None, "int": 9, "tensor": torch.tensor(9)}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "cohere", "granite"])
def test_all_weights(family, count):
    model = made(family, attention="sdpa").to(torch.bfloat16)
    torch_liger.apply_liger_kernel(model)
    items = COUNTS[count]
    items = items.to(DEVICE) if isinstance(items, torch.Tensor) else items
    check(model, **({} if items is None else {"num_items_in_batch": items}))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("fuse", [True, False])
def test_adapters(fuse, dropout_p):
    """PEFT's float32 ones."""
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, lora_dropout=dropout_p)
    model = peft.get_peft_model(made("llama", attention="sdpa").to(torch.bfloat16), config).train()
    assert model.base_model.model.model.layers[0].mlp.up_proj.lora_A.default.weight.dtype == (
        torch.float32
    )
    torch_liger.apply_liger_kernel(model)
    if fuse:
        torch_liger.fuse_lora(model)
    check(model)


def test_the_measure_sees_a_wait():
    number = torch.ones(3, device=DEVICE)
    with pytest.raises((AssertionError, RuntimeError)), without_waits():
        number.sum().item()
    with pytest.raises((AssertionError, RuntimeError)), without_waits():
        number[number > 0]
