"""Training steps of whole models on this machine's GPU: tokens a second, memory, FLOP utilisation.

    python benchmarks/training.py full_torch --out benchmarks/results/training_full_torch_h200.json

    full_torch  a LLaMA of 1.24 B parameters (3.2 1B's shape), all of them trained, 8 x 2048 tokens
    full_jax    the same in Flax
    lora_torch  a Qwen2 of 7.6 B (2.5 7B's shape), LoRA of rank 64 on all linears, 4 x 2048 tokens
    lora_jax    the same in Flax
    utilisation_torch  full_torch's LLaMA patched, for a minute or more, with fresh batches from the
                host: how busy NVML says the GPU was

All candidates of one call run in one process, each on a model of its own with fresh random weights
and tokens. Everything is bfloat16 with AdamW, but for LoRA's adapters, which are PEFT's float32
where a candidate's name does not say otherwise. A step's loss must be near ln V, which it is where
nothing has been learnt; what candidates do to the loss is for the tests.
"""

import argparse
import contextlib
import gc
import json
import math
import os
import pathlib
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from run import check_only, versions

LLAMA = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
}  # fmt: skip
QWEN2 = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
}  # fmt: skip
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LENGTH = 2048
WARMUP, STEPS = 3, 10

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--only", help="candidates, separated by commas")
    parser.add_argument("--out", type=pathlib.Path, help="JSON to write")
    args = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import torch

    if not torch.cuda.is_available():
        sys.exit("benchmarks/training.py needs an NVIDIA GPU, and torch sees none")
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "command": shlex.join(["python", *sys.argv]),
        "versions": versions(),
        "rows": [],
    }
    for row in WORKS[args.work](args.only.split(",") if args.only else None):
        result["rows"].append(row)
        print(
            f"{row['work']:11} {row['implementation']:28} {row['tokens_per_second']:9.0f} tok/s"
            f"  {row['gibibytes']:6.1f} GiB  mfu {row['mfu']:.3f}  loss {row['loss']:.3f}"
            + (f"  GPU busy {row['gpu_utilization']:.1f} %" if "gpu_utilization" in row else ""),
            flush=True,
        )
        if args.out:  # with each row, so that what was measured is kept where a later one ends it
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n")


def full_torch(only: list[str] | None) -> Iterator[Row]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import torch_liger

    def liger(model: Any) -> None:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=model)

    ours = torch_liger.apply_liger_kernel_to_llama
    candidates: dict[str, tuple[Any, bool, bool]] = {
        "eager": (None, False, False),
        "torch_liger": (ours, False, False),
        "torch_liger + torch.compile": (ours, True, False),
        "torch_liger + cuDNN attention": (ours, False, True),
        "eager + cuDNN attention": (None, False, True),
        "torch.compile": (None, True, False),
        # The last, since some of what it changes is the module's and not the model's.
        "liger-kernel": (liger, False, False),
    }
    for name, (patch, compiles, cudnn) in _chosen(candidates, only).items():

        def build(patch=patch) -> Any:
            with torch.device("cuda"):
                model = LlamaForCausalLM(LlamaConfig(**LLAMA)).bfloat16()
            if patch is not None:
                patch(model)
            return model

        row = _torch_steps(build, 8, compiles, cudnn)
        yield {"work": "full_torch", "implementation": name, **row}


def lora_torch(only: list[str] | None) -> Iterator[Row]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    import torch_liger

    def ours(model: Any) -> None:
        torch_liger.apply_liger_kernel_to_qwen2(model)

    def liger(model: Any) -> None:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2

        apply_liger_kernel_to_qwen2(model=model)

    candidates: dict[str, tuple[Any, Any]] = {
        "eager": (None, None),
        "torch_liger": (ours, torch_liger.fuse_lora),
        "torch_liger + PEFT LoRA": (ours, None),
        "liger-kernel": (liger, None),
    }
    for name, (patch, fuse) in _chosen(candidates, only).items():

        def build(patch=patch, fuse=fuse) -> Any:
            torch.set_default_dtype(torch.bfloat16)  # float32 first would be 30 GB
            with torch.device("cuda"):
                model = Qwen2ForCausalLM(Qwen2Config(**QWEN2))
            torch.set_default_dtype(torch.float32)
            if patch is not None:
                patch(model)
            # As PEFT has them unless told otherwise, the adapters are float32.
            lora = LoraConfig(r=64, lora_alpha=128, target_modules=LINEARS)
            model = get_peft_model(model, lora)
            if fuse is not None:
                fuse(model)
            return model

        yield {"work": "lora_torch", "implementation": name, **_torch_steps(build, 4, False)}


def full_jax(only: list[str] | None) -> Iterator[Row]:
    from flax import nnx

    from jax_liger.models import CausalLM

    kernels, plain = {"implementation": "pallas"}, {"implementation": "xla"}
    candidates = {
        "jax_liger": kernels,
        "jax_liger + remat activation": {**kernels, "remat": "activation"},
        "jax_liger + remat cheap": {**kernels, "remat": "cheap"},
        "jax_liger + remat dots": {**kernels, "remat": "dots"},
        "jax_liger + remat full": {**kernels, "remat": "full"},
        "XLA": plain,
        "XLA + remat activation": {**plain, "remat": "activation"},
        "XLA + remat cheap": {**plain, "remat": "cheap"},
        "XLA + remat full": {**plain, "remat": "full"},
    }
    for name, settings in _chosen(candidates, only).items():

        def build(settings=settings) -> Any:
            return CausalLM(_jax_config("llama", LLAMA, **settings), rngs=nnx.Rngs(0))

        yield {"work": "full_jax", "implementation": name, **_jax_steps(build, 8, nnx.Param)}


def lora_jax(only: list[str] | None) -> Iterator[Row]:
    from flax import nnx

    from jax_liger.models import CausalLM, LoRAParam, add_lora

    kernels, plain = {"implementation": "pallas"}, {"implementation": "xla"}
    candidates: dict[str, tuple[str, dict[str, Any]]] = {
        "jax_liger": ("float32", kernels),
        "jax_liger + bfloat16 adapters": ("bfloat16", kernels),
        "jax_liger + bfloat16 adapters + remat activation": (
            "bfloat16", {**kernels, "remat": "activation"},
        ),
        "jax_liger + bfloat16 adapters + remat cheap": ("bfloat16", {**kernels, "remat": "cheap"}),
        # Another model: q, k and v have one lora_a, and so have gate and up.
        "jax_liger + bfloat16 adapters + fused projections": (
            "bfloat16", {**kernels, "fused_projections": True},
        ),
        "XLA": ("float32", plain),
        "XLA + bfloat16 adapters": ("bfloat16", plain),
    }  # fmt: skip
    for name, (adapters, settings) in _chosen(candidates, only).items():

        def build(adapters=adapters, settings=settings) -> Any:
            model = CausalLM(_jax_config("qwen2", QWEN2, **settings), rngs=nnx.Rngs(0))
            add_lora(model, rank=64, alpha=128, param_dtype=adapters, rngs=nnx.Rngs(1))
            return model

        yield {"work": "lora_jax", "implementation": name, **_jax_steps(build, 4, LoRAParam)}


def utilisation_torch(only: list[str] | None) -> Iterator[Row]:
    import utilisation

    for name, train in _chosen(utilisation.LOOPS, only).items():
        row = utilisation.window(train, LLAMA, batch=8, length=LENGTH)
        yield {"work": "utilisation_torch", "implementation": name, **row}


WORKS: dict[str, Callable[[list[str] | None], Iterator[Row]]] = {
    "full_torch": full_torch,
    "full_jax": full_jax,
    "lora_torch": lora_torch,
    "lora_jax": lora_jax,
    "utilisation_torch": utilisation_torch,
}


def _chosen(candidates: dict[str, Any], only: list[str] | None) -> dict[str, Any]:
    check_only(only or (), candidates)
    return {name: one for name, one in candidates.items() if not only or name in only}


def _jax_config(model_type: str, sizes: dict[str, Any], **settings: Any) -> Any:
    from jax_liger.models import Config

    fixed = {"model_type": model_type, "hidden_act": "silu", "initializer_range": 0.02}
    return Config.from_hf({**fixed, **sizes}, dtype="bfloat16", param_dtype="bfloat16", **settings)


def _jax_steps(build: Callable[[], Any], batch: int, trained: Any) -> Row:
    """`trained` is the type of the parameters that are: the others get no gradient and no state."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    from jax_liger.models import loss_fn

    gc.collect()  # the last candidate's model
    model = build()
    optimizer = nnx.Optimizer(model, optax.adamw(1e-5), wrt=trained)
    graph, own, frozen = nnx.split(model, trained, ...)
    optimizer_graph, moments = nnx.split(optimizer)
    config, flops_per_token = model.config, _jax_flops(model, trained)
    del model, optimizer

    def step(carried: Any, frozen: Any, tokens: Any) -> Any:
        model = nnx.merge(graph, carried[0], frozen)
        optimizer = nnx.merge(optimizer_graph, carried[1])
        gradient = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, trained))
        loss, gradients = gradient(model, {"input_ids": tokens})
        optimizer.update(model, gradients)
        return loss, (nnx.state(model, trained), nnx.state(optimizer))

    keys = jax.random.split(jax.random.key(0), WARMUP + STEPS)
    batches = [
        jax.random.randint(key, (batch, LENGTH), 0, config.vocab_size, jnp.int32) for key in keys
    ]
    start = time.perf_counter()
    lowered = jax.jit(step, donate_argnums=0).lower((own, moments), frozen, batches[0])
    compiled = lowered.compile()
    compile_seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    peak = memory.temp_size_in_bytes + memory.argument_size_in_bytes
    peak += memory.output_size_in_bytes - memory.alias_size_in_bytes
    carried = [(own, moments)]
    del own, moments, lowered

    def run(i: int) -> float:
        loss, carried[0] = compiled(carried[0], frozen, batches[i])
        return float(loss)

    row = _timed(run, batch, flops_per_token, config.vocab_size)
    return {**row, "gibibytes": peak / 2**30, "compile_seconds": compile_seconds}


def _jax_flops(model: Any, trained: Any) -> float:
    """As `torch_liger.flops` counts them: 6 for an element of a trained matrix, 4 for a frozen one,
    the embedding only where it is the head too, and the whole square of scores.
    """
    from flax import nnx

    config, total = model.config, 0.0
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if param.ndim == 2 and (config.tie_word_embeddings or path[-1] != "embedding"):
            total += (6.0 if isinstance(param, trained) else 4.0) * param.size
    heads = config.num_attention_heads * config.head_dim
    return total + 12.0 * len(config.layers) * heads * LENGTH


def _torch_steps(build: Callable[[], Any], batch: int, compiles: bool, cudnn: bool = False) -> Row:
    """`cudnn`: attention by cuDNN instead of what PyTorch chooses by itself."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from torch_liger.flops import model_flops

    gc.collect()  # the last candidate's model
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    model = build()
    model.train()
    flops_per_token = model_flops(model).at(LENGTH)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    call = torch.compile(model) if compiles else model
    vocab = model.config.vocab_size
    batches = torch.randint(vocab, (WARMUP + STEPS, batch, LENGTH), device="cuda")

    def run(i: int) -> float:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if cudnn else contextlib.nullcontext():
            loss = call(input_ids=batches[i], labels=batches[i], use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if i == 0:
            torch.cuda.reset_peak_memory_stats()  # after the optimizer's state has been made
        return loss.item()

    row = _timed(run, batch, flops_per_token, vocab)
    row["gibibytes"] = torch.cuda.max_memory_allocated() / 2**30
    return row


def _timed(run: Callable[[int], float], batch: int, flops_per_token: float, vocab: int) -> Row:
    """`run(i)` makes step i, waits for it and returns its loss."""
    import torch

    from torch_liger.flops import peak_flops

    first = run(0)
    if not abs(first - math.log(vocab)) < 2.0:
        raise ArithmeticError(
            f"the first loss must be near ln V = {math.log(vocab):.1f}; got {first}"
        )
    seconds, loss = [], first
    for i in range(1, WARMUP + STEPS):
        start = time.perf_counter()
        loss = run(i)
        if i >= WARMUP:
            seconds.append(time.perf_counter() - start)
    speed = batch * LENGTH / statistics.median(seconds)
    peak = peak_flops(torch.cuda.get_device_name())
    return {
        "tokens_per_second": speed,
        "seconds": seconds,
        "loss": loss,
        "mfu": speed * flops_per_token / peak if peak else float("nan"),
    }


if __name__ == "__main__":
    main()
