"""Run by test_patching_distributed.py: two processes train a patched model between them.

Prints one line a check: its name, then "ok" or what went wrong.
"""

import os
import sys
import traceback
import warnings

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_liger
from liger_ops import backend_triton
from patching_models import DEVICE, assert_same, batch, made, twin

RANK, DEVICES = int(sys.argv[1]), int(sys.argv[2])
TOKENS = (10, 2)  # that count, in the two processes' rows


def inputs_of(rank):
    inputs = {name: value[rank : rank + 1] for name, value in batch().items()}
    labels = inputs["input_ids"].clone()
    labels[:, 1 + TOKENS[rank] :] = -100
    labels[:, 0] = -100
    return {"input_ids": inputs["input_ids"], "labels": labels}


def expected_of(plain):
    """Loss and gradients of both rows in one process."""
    plain.zero_grad()
    both = [inputs_of(rank) for rank in (0, 1)]
    loss = plain(**{name: torch.cat([b[name] for b in both]) for name in both[0]}).loss
    loss.backward()
    return {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}


def trained(model):
    """A step with the mean over all tokens: processes average, so each loss counts twice."""
    loss = model(**inputs_of(RANK), num_items_in_batch=torch.tensor(sum(TOKENS))).loss * DEVICES
    loss.backward()


def assert_gradients(model, expected):
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            found[name.removeprefix("module.")] = whole
    assert_same(found, expected)


def sharded(model, *, head=False):
    for layer in model.model.layers:
        fully_shard(layer)
    if head:
        fully_shard(model.lm_head)
    return fully_shard(model)


def ddp():
    plain = made("llama")
    model = twin(plain)
    torch_liger.apply_liger_kernel(model)
    model = DistributedDataParallel(model)
    trained(model)
    assert_gradients(model, expected_of(plain))


def ddp_with_a_masked_process():
    """One process has no token that counts: it takes part with zeros, and none waits for it."""
    model = made("llama")
    torch_liger.apply_liger_kernel(model)
    model = DistributedDataParallel(model)
    inputs = inputs_of(RANK)
    if RANK == 1:
        inputs["labels"].fill_(-100)
    model(**inputs).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def fsdp2(patch_first=True, head=False, **settings):
    plain = made("llama", **settings)
    model = twin(plain)
    if patch_first:
        torch_liger.apply_liger_kernel(model)
    model = sharded(model, head=head)
    if not patch_first:
        report = torch_liger.apply_liger_kernel(model)
        assert report.applied["rms_norm"] == 5, report
    assert model(**inputs_of(RANK)).logits is None
    trained(model)
    assert_gradients(model, expected_of(plain))


def fsdp2_patched_after():
    fsdp2(patch_first=False)


def fsdp2_tied():
    fsdp2(tie_word_embeddings=True)


def fsdp2_head_by_itself():
    fsdp2(head=True)


def adapted(**settings):
    """A model with a random adapter, and the same one patched."""
    import peft

    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", **settings)
    found = []
    for patched in (False, True):
        model = made("llama")
        if patched:
            torch_liger.apply_liger_kernel(model)
        model = peft.get_peft_model(model, config).train()
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        found.append(model)
    return found


def fsdp2_with_lora():
    plain, model = adapted(target_modules=["q_proj", "up_proj"])
    expected = expected_of(plain)
    sharded(model.get_base_model())
    trained(model)
    assert_gradients(model, expected)


def fsdp1():
    plain = made("llama")
    model = twin(plain)
    torch_liger.apply_liger_kernel(model)
    model = FullyShardedDataParallel(
        model, use_orig_params=True, device_id=None if DEVICE == "cpu" else RANK
    )
    trained(model)
    norms = model.clip_grad_norm_(1e9)
    expected = torch.stack([g.norm() for g in expected_of(plain).values()]).norm()
    torch.testing.assert_close(norms, expected, rtol=1e-4, atol=0)


def run(checks):
    warnings.simplefilter("ignore")
    backend_triton.INTERPRET = False
    if DEVICE == "cuda":
        torch.cuda.set_device(RANK)
    dist.init_process_group(
        "nccl" if DEVICE == "cuda" else "gloo",
        init_method=f"file://{os.environ['STORE']}",
        rank=RANK,
        world_size=DEVICES,
    )
    for check in checks:
        name = check.__name__
        if name == "fsdp1" and DEVICE == "cpu":  # which it does not support
            continue
        try:
            check()
            print(name, "ok", flush=True)
        except Exception:
            print(name, traceback.format_exc().replace("\n", " | "), flush=True)
    dist.destroy_process_group()


CHECKS = [
    ddp,
    ddp_with_a_masked_process,
    fsdp2,
    fsdp2_patched_after,
    fsdp2_tied,
    fsdp2_head_by_itself,
    fsdp2_with_lora,
    fsdp1,
]

if __name__ == "__main__":
    run(CHECKS)
