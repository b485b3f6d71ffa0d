"""Trains one small LLaMA twice, in Flax and in PyTorch, and checks that the losses agree.

Both start from the same weights and see the same batches in the same order. The Flax model's norms,
rotations, activations and loss are those of `jax_liger`; in the transformers model each
LlamaRMSNorm is replaced by `torch_liger.nn.LigerRMSNorm`. Writes the two loss curves and their
difference as JSON and as a plot, and exits with status 1 when the curves part by more than a bound.

    python examples/quickstart.py
    python examples/quickstart.py --data my_tasks.jsonl --steps 200
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

# JAX would take most of a GPU's memory for itself, and PyTorch needs its share.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import optax
import torch
from flax import nnx
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import tiny_llama
from instruction_data import (
    IGNORE_INDEX,
    PAD,
    DataError,
    batch_rows,
    encode_examples,
    load_examples,
    train_tokenizer,
)
from jax_liger import cross_entropy
from torch_liger.nn import LigerRMSNorm

VOCAB_SIZE = 2048  # at most; a small file has fewer pairs to merge
MAX_LENGTH = 128

MODEL = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": MAX_LENGTH,
    "rms_norm_eps": 1e-6,
}

# The same numbers go to optax.adamw and torch.optim.AdamW. beta2 is LLaMA's.
ADAMW = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
PEAK_LEARNING_RATE, FINAL_LEARNING_RATE, WARMUP_STEPS = 5e-4, 5e-5, 10

# Full float32 matrix products on both sides. On a GPU the defaults differ: TF32 in JAX, full in
# PyTorch, and the curves would part because of that alone.
PRECISION = "highest"

# How far the losses may part. Only float32 rounding tells the two runs apart, and training grows
# the difference, most where the loss jumps. Measured on a CPU with the plain norms: at most 2.4e-6
# in the first 8 steps; in 150 steps at most 3.0e-5 in 11 runs on the bundled tasks and 3.0e-4 in
# 5 on tasks of 128 tokens. The bound is 4 times the first and 7 times the last. It still catches a
# norm eps of 2e-6 for 1e-6 and an interleaved RoPE at step 0, an AdamW eps of 1e-6 for 1e-8 and a
# learning rate 0.1% too high at step 1, and a missing weight decay within 10 steps. After 150 steps
# rounding alone goes on to 5e-3, so later steps are drawn and not judged.
CHECKED_STEPS, RISING_STEPS, FIRST_BOUND, LAST_BOUND = 150, 50, 1e-5, 2e-3

IMPLEMENTATIONS = {"auto": (None, None), "plain": ("xla", "eager"), "kernels": ("pallas", "triton")}
PACKAGES = ("flax", "jax", "numpy", "optax", "tokenizers", "torch", "transformers")


def learning_rates(steps: int) -> np.ndarray:
    """One float32 rate per step: linear warm-up, then a cosine down to the final rate."""
    step = np.arange(steps)
    warmup = np.minimum(1.0, (step + 1) / WARMUP_STEPS)
    cosine = 0.5 * (1.0 + np.cos(np.pi * step / steps))
    rates = FINAL_LEARNING_RATE + (PEAK_LEARNING_RATE - FINAL_LEARNING_RATE) * cosine
    return np.float32(warmup * rates)


def use_liger_norms(model: torch.nn.Module, implementation: str | None) -> None:
    """Replaces each LlamaRMSNorm in place; the weight stays the same Parameter."""
    for module in list(model.modules()):
        for name, norm in list(module.named_children()):
            if isinstance(norm, LlamaRMSNorm):
                replacement = LigerRMSNorm(
                    norm.weight.shape[0], eps=norm.variance_epsilon, implementation=implementation
                )
                replacement.weight = norm.weight
                setattr(module, name, replacement)


def torch_train_step(model: LlamaForCausalLM, rates: np.ndarray) -> Callable[..., float]:
    optimizer = torch.optim.AdamW(
        model.parameters(),
        betas=(ADAMW["b1"], ADAMW["b2"]),
        eps=ADAMW["eps"],
        weight_decay=ADAMW["weight_decay"],
    )

    def train_step(step: int, input_ids: np.ndarray, labels: np.ndarray) -> float:
        optimizer.param_groups[0]["lr"] = float(rates[step])
        # int64 is what PyTorch's loss takes; the attention needs no mask, see TinyLlama.
        input_ids, labels = (
            torch.from_numpy(ids).to(model.device, torch.int64) for ids in (input_ids, labels)
        )
        loss = model(input_ids=input_ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return train_step


def flax_train_step(
    model: nnx.Module, rates: np.ndarray, implementation: str | None = None
) -> Callable[..., float]:
    rates = jnp.asarray(rates)
    optimizer = nnx.Optimizer(model, optax.adamw(lambda step: rates[step], **ADAMW), wrt=nnx.Param)

    def loss_fn(model: nnx.Module, input_ids: jax.Array, labels: jax.Array) -> jax.Array:
        logits, targets = model(input_ids)[:, :-1], labels[:, 1:]
        return cross_entropy(
            logits, targets, ignore_index=IGNORE_INDEX, implementation=implementation
        )

    @nnx.jit
    def update(model, optimizer, input_ids, labels):
        loss, grads = nnx.value_and_grad(loss_fn)(model, input_ids, labels)
        optimizer.update(model, grads)
        return loss

    def train_step(step: int, input_ids: np.ndarray, labels: np.ndarray) -> float:
        return float(update(model, optimizer, input_ids, labels))

    return train_step


def train(
    name: str, train_step: Callable[..., float], batches: list[tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, float]:
    """Returns the loss of every step, and tokens per second without the padding."""
    losses = []
    with tqdm(batches, desc=name, unit="step") as bar:
        for step, (input_ids, labels) in enumerate(bar):
            losses.append(train_step(step, input_ids, labels))
            bar.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)
            if step == 0:
                start = time.perf_counter()  # the first step compiles, so it is not timed
    seconds = time.perf_counter() - start
    tokens = sum(int((input_ids != PAD).sum()) for input_ids, _ in batches[1:])
    return np.array(losses), tokens / seconds


def loss_bounds(steps: int) -> np.ndarray:
    """The largest difference allowed at each checked step: a geometric rise, then level."""
    rise = np.geomspace(FIRST_BOUND, LAST_BOUND, RISING_STEPS)
    return np.pad(rise, (0, CHECKED_STEPS - RISING_STEPS), mode="edge")[:steps]


def save_plot(path: Path, flax: np.ndarray, pytorch: np.ndarray, bounds: np.ndarray) -> None:
    figure, (top, bottom) = plt.subplots(2, sharex=True, figsize=(7, 6), height_ratios=(3, 2))
    top.plot(flax, label="Flax", linewidth=3, alpha=0.5)
    top.plot(pytorch, label="PyTorch", linewidth=1)
    top.set(ylabel="loss on the answer tokens", title="The same small LLaMA, trained twice")
    top.legend()
    # Equal losses have no place on a log axis; 1e-8 lies below any float32 difference seen here.
    bottom.semilogy(np.maximum(np.abs(flax - pytorch), 1e-8), ".", color="tab:green")
    bottom.semilogy(bounds, "--", color="tab:red", label="bound")
    bottom.set(xlabel="step", ylabel="difference")
    bottom.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def positive_int(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    data = Path(__file__).parent / "data" / "instructions.jsonl"
    parser.add_argument("--data", type=Path, default=data, help="instruction tasks, JSON lines")
    parser.add_argument("--out", type=Path, default=Path("quickstart-out"))
    parser.add_argument("--steps", type=positive_int, default=CHECKED_STEPS)
    parser.add_argument("--batch-size", type=positive_int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, default="auto")
    args = parser.parse_args(argv)
    try:
        pairs = load_examples(args.data)
        tokenizer = train_tokenizer(pairs, VOCAB_SIZE)
        input_ids, labels = encode_examples(tokenizer, pairs, MAX_LENGTH)
    except (OSError, DataError) as error:
        parser.error(str(error))
    rows = batch_rows(len(input_ids), args.batch_size, args.steps, args.seed)
    batches = [(input_ids[row], labels[row]) for row in rows]
    rates = learning_rates(args.steps)

    config = LlamaConfig(vocab_size=tokenizer.get_vocab_size(), **MODEL)
    torch.manual_seed(args.seed)
    torch_model = LlamaForCausalLM(config)
    weights = {name: tensor.numpy() for name, tensor in torch_model.state_dict().items()}
    flax_kernels, torch_norm = IMPLEMENTATIONS[args.implementation]
    flax_model = tiny_llama.from_hf_state_dict(config, weights, implementation=flax_kernels)
    use_liger_norms(torch_model, torch_norm)
    torch_model.to("cuda" if torch.cuda.is_available() else "cpu")

    torch.set_float32_matmul_precision(PRECISION)
    report = {
        "devices": {
            "flax": jax.devices()[0].device_kind,
            "torch": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        },
        "precision": {
            "dtype": "float32",
            "flax_matmul": PRECISION,
            "torch_matmul": torch.get_float32_matmul_precision(),
        },
        "versions": {"python": platform.python_version()} | {p: version(p) for p in PACKAGES},
        "settings": {
            "data": str(args.data),
            "examples": len(input_ids),
            "steps": args.steps,
            "batch_size": args.batch_size,
            "tokens_per_example": input_ids.shape[1],
            "seed": args.seed,
            "implementation": args.implementation,
            "parameters": torch_model.num_parameters(),
            "model": {"vocab_size": config.vocab_size, **MODEL},
            "adamw": {**ADAMW, "learning_rate": rates.tolist()},
        },
    }
    print(
        f"{torch_model.num_parameters() / 1e6:.1f} M parameters, {len(input_ids)} examples, "
        f"{args.steps} batches of {args.batch_size} x {input_ids.shape[1]} tokens\n"
        f"devices: {report['devices']}\nprecision: {report['precision']}"
    )
    with jax.default_matmul_precision(PRECISION):
        flax, flax_speed = train("Flax", flax_train_step(flax_model, rates, flax_kernels), batches)
    pytorch, torch_speed = train("PyTorch", torch_train_step(torch_model, rates), batches)

    difference = np.abs(flax - pytorch)
    bounds = loss_bounds(args.steps)
    checked = difference[: len(bounds)]
    inside = checked <= bounds  # False for a NaN too
    report |= {
        "within_bound": bool(inside.all()),
        "tokens_per_second": {"flax": flax_speed, "torch": torch_speed},
        "flax": flax.tolist(),
        "torch": pytorch.tolist(),
        "difference": difference.tolist(),
        "bounds": bounds.tolist(),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    json_path, plot_path = args.out / "losses.json", args.out / "losses.png"
    json_path.write_text(json.dumps(report, indent=1) + "\n")
    save_plot(plot_path, flax, pytorch, bounds)

    worst = int(np.argmax(checked))
    print(
        f"\n{'':8}{'first loss':>12}{'last loss':>12}{'tokens/s':>10}\n"
        f"{'Flax':8}{flax[0]:12.6f}{flax[-1]:12.6f}{flax_speed:10.0f}\n"
        f"{'PyTorch':8}{pytorch[0]:12.6f}{pytorch[-1]:12.6f}{torch_speed:10.0f}\n"
        f"largest difference in the first {len(checked)} steps: {checked[worst]:.1e}, "
        f"at step {worst}; bound: {bounds[0]:.1e} at step 0, {bounds[-1]:.1e} at the last\n"
        f"wrote {json_path} and {plot_path}"
    )
    if not inside.all():
        step = int(np.argmin(inside))
        raise SystemExit(
            f"The curves part at step {step}: Flax {flax[step]:.7f}, PyTorch {pytorch[step]:.7f}, "
            f"difference {difference[step]:.1e}, bound {bounds[step]:.1e}. At step 0 the forward "
            "passes differ; later, look at the gradients and the optimizers."
        )


if __name__ == "__main__":
    main()
