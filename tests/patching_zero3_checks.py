"""Run by test_patching_distributed.py: two processes train a patched model by DeepSpeed's ZeRO-3.

Prints one line a check: its name, then "ok" or what went wrong.
"""

import os
import sys

from patching_models import DEVICE, assert_same, batch, made, twin

os.environ |= {"DS_ACCELERATOR": DEVICE, "LOCAL_RANK": sys.argv[1]}

import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad

import torch_liger
from patching_distributed_checks import (
    DEVICES,
    RANK,
    TOKENS,
    adapted,
    expected_of,
    inputs_of,
    run,
)  # fmt: skip


def engine_of(model):
    """With every parameter split, however small. Its steps change nothing."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.0)
    return deepspeed.initialize(
        model=model,
        model_parameters=trained,
        optimizer=optimizer,
        config=config,
        dist_init_required=False,
    )[0]


def assert_trains(engine, expected):
    """Twice, since DeepSpeed follows in the second step what it has recorded in the first."""
    for _ in range(2):
        output = engine(**inputs_of(RANK), num_items_in_batch=torch.tensor(sum(TOKENS)))
        assert output.logits is None
        engine.backward(output.loss * DEVICES)  # processes average, so each loss counts twice
        found = {n: safe_get_full_grad(p) for n, p in engine.module.named_parameters()}
        assert_same({n: g for n, g in found.items() if g is not None}, expected)
        engine.step()
        assert all(p.numel() == 0 for p in engine.module.parameters())


def zero3(patch_first=True, **settings):
    plain = made("llama", **settings)
    expected = expected_of(plain)
    model = twin(plain)
    if patch_first:
        torch_liger.apply_liger_kernel(model)
    engine = engine_of(model)
    if not patch_first:
        torch_liger.apply_liger_kernel(engine)
    assert_trains(engine, expected)
    engine.eval()
    with torch.no_grad():
        found, logits = engine(**batch()).logits, plain.eval()(**batch()).logits
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5)


def zero3_patched_after():
    zero3(patch_first=False)


def zero3_tied():
    zero3(tie_word_embeddings=True)


def zero3_with_lora_and_a_head_that_is_trained():
    plain, model = adapted(target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head"])
    expected = expected_of(plain)
    assert any("lm_head" in name for name in expected)
    assert_trains(engine_of(model), expected)


CHECKS = [
    zero3,
    zero3_patched_after,
    zero3_tied,
    zero3_with_lora_and_a_head_that_is_trained,
]

if __name__ == "__main__":
    run(CHECKS)
