"""Tiny checkpoints of every family, made by transformers, with every weight random."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import torch
import transformers
from flax import nnx
from safetensors.torch import load_file

from jax_liger.models import CausalLM, loss_fn

LENGTH = 128
SMALL = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    partial_rotary_factor=0.5,
    short_factor=[1.0 + 0.1 * i for i in range(4)],
    long_factor=[2.0 + 1.3 * i for i in range(4)],
)
MOE = dict(num_experts_per_tok=2, num_hidden_layers=2)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    model_type: str
    config: dict

    def hf_config(self):
        return transformers.AutoConfig.for_model(self.model_type, **(SMALL | self.config))


CASES = {
    "llama": Case("llama", dict(rms_norm_eps=1e-5)),
    # N H = D, so that a missing transpose would keep every shape of attention.
    "llama 3, square, with biases": Case(
        "llama",
        dict(
            rope_parameters=LLAMA3,
            num_key_value_heads=4,
            intermediate_size=64,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
        ),
    ),
    "mistral": Case("mistral", dict(sliding_window=40)),
    "qwen2": Case("qwen2", dict(num_attention_heads=8, head_dim=16)),
    "qwen2, sliding from layer 1": Case(
        "qwen2", dict(use_sliding_window=True, sliding_window=24, max_window_layers=1)
    ),
    "qwen3": Case("qwen3", dict(head_dim=32, tie_word_embeddings=True)),
    "phi3": Case("phi3", dict(sliding_window=50)),
    "phi3, longrope in half of a head": Case(
        "phi3",
        dict(
            rope_parameters=LONGROPE,
            max_position_embeddings=1024,
            original_max_position_embeddings=LENGTH // 2,
        ),
    ),
    "gemma": Case("gemma", dict(head_dim=16)),
    "gemma2": Case(
        "gemma2",
        dict(
            head_dim=16,
            query_pre_attn_scalar=24,
            sliding_window=24,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
    ),
    "gemma3": Case(
        "gemma3_text",
        dict(
            head_dim=16,
            query_pre_attn_scalar=24,
            sliding_window=24,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={
                "full_attention": dict(rope_type="linear", factor=8.0, rope_theta=1e6),
                "sliding_attention": dict(rope_type="default", rope_theta=1e4),
            },
        ),
    ),
    "granite": Case(
        "granite",
        dict(
            embedding_multiplier=12.0,
            attention_multiplier=0.3,
            residual_multiplier=0.22,
            logits_scaling=8.0,
        ),
    ),
    "olmo2": Case("olmo2", {}),
    "smollm3": Case("smollm3", dict(no_rope_layers=[1, 0], tie_word_embeddings=True)),
    "mixtral": Case("mixtral", dict(num_local_experts=4) | MOE),
    "qwen3 moe": Case(
        "qwen3_moe",
        dict(
            num_experts=4,
            moe_intermediate_size=32,
            head_dim=16,
            norm_topk_prob=True,
            mlp_only_layers=[0],
        )
        | MOE,
    ),
}


def build(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0):
    """The model of transformers, with every parameter random: norms and biases too."""
    torch.manual_seed(seed)
    config = case.hf_config()
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Around the value that leaves things as they are; else about what keeps their size.
            center = 1.0 if "norm" in name and "gemma" not in case.model_type else 0.0
            spread = 0.3 if parameter.ndim == 1 else 1.2 / parameter.shape[-1] ** 0.5
            parameter.copy_(center + spread * torch.randn(parameter.shape))
    return model.to(dtype).eval()


def checkpoint(case: Case, folder: Path, dtype: torch.dtype = torch.float32, **options):
    """The model, saved in the folder."""
    model = build(case, dtype)
    model.save_pretrained(folder, **options)
    return model


def tokens(rows: int = 2, length: int = LENGTH, vocab: int = 97, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, vocab, (rows, length)).astype(np.int32)


def hf_logits(model, ids: np.ndarray, **kwargs) -> np.ndarray:
    kwargs = {k: torch.as_tensor(v, dtype=torch.long) for k, v in kwargs.items()}
    with torch.no_grad():
        out = model(torch.as_tensor(ids, dtype=torch.long), use_cache=False, **kwargs)
    return out.logits.float().numpy()


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, read by the format's own library."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        assert not found.keys() & tensors.keys(), "a tensor is in two files"
        found |= tensors
    return found


def assert_same_files(ours: Path, theirs: Path) -> None:
    """The same tensors, bit for bit."""
    a, b = tensors_of(ours), tensors_of(theirs)
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    for key in a:
        assert (a[key].dtype, a[key].shape) == (b[key].dtype, b[key].shape), key
        bits = [t[key].contiguous().view(torch.uint8) for t in (a, b)]
        assert torch.equal(*bits), f"{key} differs"


def loads_cleanly(folder: Path):
    """The model as transformers loads it, which must miss nothing and find nothing else."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    for name in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not info[name], f"{name}: {info[name]}"
    return model.eval()


def save_gradients(model, folder: Path) -> None:
    """A checkpoint that has the gradients in the place of the parameters, as the model has then."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(folder)


def quick_jit(function, **options):
    """jax.jit that compiles for few runs of small arrays, where the compiler can be asked to."""
    settings = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    on_cpu = jax.default_backend() == "cpu"
    return jax.jit(function, compiler_options=settings if on_cpu else None, **options)


def relative(got, want) -> np.ndarray:
    """Largest error at each position (B, T), over the largest value of all."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.abs(got - want).max(-1) / np.abs(want).max()


def parameters(model) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): param[...] for path, param in flat}


# The loss and its gradients, of the model's own structure.
gradients = quick_jit(jax.value_and_grad(loss_fn))


def assert_close(a, b, bound: float) -> None:
    """Every leaf's largest error, over the leaf's largest value."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.abs(x - y).max() <= bound * np.abs(y).max()


def with_config(model: CausalLM, **settings) -> CausalLM:
    """The model's weights in a model of another way to compute."""
    config = dataclasses.replace(model.config, **settings)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: CausalLM(config, rngs=nnx.Rngs(0))))
    return nnx.merge(graphdef, nnx.state(model))
