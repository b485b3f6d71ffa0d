"""Tiny checkpoints for liger_validate, smaller still than model_cases', and faults planted in them.

A fault is planted in one of the three models after loading; the checkpoint stays right.
"""

import contextlib
import dataclasses
import functools
import json
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
from flax import nnx

import model_cases
from jax_liger.models import decoder
from jax_liger.nnx import RMSNorm
from jax_liger.rotary import rope
from liger_ops import backend_triton
from liger_validate.batches import Batch
from liger_validate.model import FLAX, PATCHED, PLAIN
from model_cases import CASES, Case

SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=48, max_position_embeddings=64)
LENGTH = 20


@contextlib.contextmanager
def plain_versions(monkeypatch):
    """No kernel's interpreter, and products in full precision."""
    monkeypatch.setattr(backend_triton, "INTERPRET", False)
    monkeypatch.setenv("PALLAS_INTERPRET", "0")
    with jax.default_matmul_precision("highest"):
        yield


def folders(cases, tmp_path_factory):
    """A function of a case's name: the folder of its checkpoint, written once."""

    @functools.cache
    def make(name):
        path = tmp_path_factory.mktemp("checkpoint")
        model_cases.checkpoint(cases[name], path)
        return str(path)

    return make


def batch(padded: bool = True) -> Batch:
    ids = model_cases.tokens(2, LENGTH, SIZES["vocab_size"])
    mask = jnp.ones_like(ids).at[0, :3].set(0) if padded else None
    return Batch.of(ids, mask)


def small(name: str, **changed: Any) -> Case:
    return Case(CASES[name].model_type, CASES[name].config | SIZES | changed)


CHECKPOINTS = {
    "llama": small("llama", rms_norm_eps=1e-6),
    "llama, tied": small("llama", tie_word_embeddings=True),
    "mistral": small("mistral", sliding_window=7),
    "qwen2": small("qwen2", num_attention_heads=4, head_dim=8),
    "gemma2": small("gemma2", query_pre_attn_scalar=24, sliding_window=7),
    "granite": small("granite"),
    "phi3": small("phi3"),
}
# All families; beside those above, with no fault planted in them.
CLEAN = CHECKPOINTS | {
    "llama 3, square, with biases": small(
        "llama 3, square, with biases", max_position_embeddings=128
    ),
    "qwen2, sliding from layer 1": small("qwen2, sliding from layer 1", sliding_window=7),
    "qwen3": small("qwen3", head_dim=16),
    "phi3, longrope in half of a head": small(
        "phi3, longrope in half of a head",
        rope_parameters=model_cases.LONGROPE | {"short_factor": [1.0, 1.2], "long_factor": [2, 3]},
        max_position_embeddings=1024,
        original_max_position_embeddings=LENGTH // 2,
    ),
    "gemma": small("gemma"),
    "gemma3": small("gemma3", sliding_window=7),
    "olmo2": small("olmo2"),
    "smollm3": small("smollm3"),
    "mixtral": small("mixtral"),
    "qwen3 moe": small("qwen3 moe"),
}


@dataclass(frozen=True)
class Fault:
    """plant: of the model with the label, and pytest's monkeypatch."""

    checkpoint: str
    label: str
    station: str
    diagnosis: str
    plant: Any
    detail: str = ""
    dtype: str = "float32"
    hides: bool = False  # too small for the drift, or without an effect on it


def _torch_layer(model, i):
    return model.model.layers[i]


def _interleaved(model, patch):
    def turned(q, k, cos, sin, implementation=None):
        half = cos.shape[-1] // 2
        cos, sin = (jnp.repeat(a[..., :half], 2, -1) for a in (cos, sin))
        return rope(q, k, cos, sin, layout="interleaved", implementation=implementation)

    patch.setattr(decoder, "rope", turned)


def _rows_for_neighbours(model, patch):
    weight = _torch_layer(model, 1).self_attn.q_proj.weight
    heads = weight.data.reshape(-1, 2, weight.shape[0] // 8, 32)
    weight.data = heads.transpose(1, 2).reshape(weight.shape).clone()


def _configured(part, **settings):
    """One Flax module computes by another config."""

    def plant(model, patch):
        module = part(model)
        module.config = dataclasses.replace(module.config, **settings)

    return plant


def _attribute(part, name, value):
    def plant(model, patch):
        setattr(part(model), name, value)

    return plant


def _everything_seen(model, patch):
    original = decoder.attention
    patch.setattr(decoder, "attention", lambda *a, **kw: original(*a, **{**kw, "is_causal": False}))


def _window(model, patch):
    attn = model.model.layers[1].self_attn
    attn.layer = dataclasses.replace(attn.layer, window=8)


def _other_embedding(model, patch):
    model.config = dataclasses.replace(model.config, tie_word_embeddings=False)
    table = model.model.embed_tokens.embedding[...]
    model.lm_head = nnx.data(nnx.Linear(32, 61, use_bias=False, rngs=nnx.Rngs(0)))
    model.lm_head.kernel[...] = table.T * 1.5


def _head_is_table(model, patch):
    model.lm_head.weight = model.model.embed_tokens.weight


def _tf32(model, patch):
    linear = _torch_layer(model, 1).mlp.down_proj

    def cut(a):
        bits = a.contiguous().view(torch.int32)
        return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)

    linear.forward = lambda x: torch.nn.functional.linear(cut(x), cut(linear.weight))


def _swapped(model, patch):
    mlp = model.model.layers[0].mlp
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj


def _activation_of_up(model, patch):
    mlp = _torch_layer(model, 1).mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.up_proj(x)) * mlp.gate_proj(x))


def _halves_swapped(model, patch):
    linear = _torch_layer(model, 0).mlp.gate_up_proj
    linear.weight.data = torch.cat(linear.weight.data.chunk(2)[::-1])


def _no_bias(model, patch):
    _torch_layer(model, 1).self_attn.k_proj.bias = None


def _one_later(model, patch):
    rotary = model.model.rotary_emb
    original = rotary.forward
    rotary.forward = lambda x, position_ids: original(x, position_ids + 1)


def _theta(model, patch):
    json_of = json.loads(model.config.hf_json)
    json_of["rope_parameters"] = {**json_of["rope_parameters"], "rope_theta": 5e5}
    config = dataclasses.replace(model.config, hf_json=json.dumps(json_of))
    model.config = model.model.config = config


def _odd_theta(model, patch):
    rotary = model.model.rotary_emb
    size = 2 * rotary.inv_freq.numel()
    rotary.inv_freq = 12345.0 ** (-torch.arange(0, size, 2) / size)


def _layer(i):
    return lambda model: model.model.layers[i]


FAULTS = {
    "rotation layout": Fault(
        "llama", FLAX, "model.layers.0.self_attn.core", "rotation layout", _interleaved
    ),
    "rotation layout in the weights": Fault(
        "llama", PLAIN, "model.layers.1.self_attn.q_proj", "rotation layout", _rows_for_neighbours
    ),
    "norm offset": Fault(
        "llama", FLAX, "model.layers.1.input_layernorm", "norm offset",
        _attribute(lambda m: m.model.layers[1].input_layernorm, "offset", 1.0),
    ),
    "norm offset in gemma": Fault(
        "gemma2", FLAX, "model.layers.0.post_feedforward_layernorm", "norm offset",
        _attribute(lambda m: m.model.layers[0].post_feedforward_layernorm, "offset", 0.0),
    ),
    "cast order": Fault(
        "llama", FLAX, "model.layers.1.input_layernorm", "cast order",
        _attribute(lambda m: m.model.layers[1].input_layernorm, "casting_mode", "gemma"),
        dtype="bfloat16", hides=True,
    ),
    "non-causal mask": Fault(
        "llama", FLAX, "model.layers.0.self_attn.core", "mask", _everything_seen,
        "what comes after",
    ),
    "window one too long": Fault(
        "mistral", FLAX, "model.layers.1.self_attn.core", "mask", _window, "is 8 and not 7"
    ),
    "scores' scale": Fault(
        "llama", FLAX, "model.layers.1.self_attn.core", "scale",
        _configured(lambda m: m.model.layers[1].self_attn, attention_scale=1 / 8), "0.125",
    ),
    "scores' scale in transformers": Fault(
        "gemma2", PLAIN, "model.layers.0.self_attn.core", "scale",
        _attribute(lambda m: m.model.layers[0].self_attn, "scaling", 16**-0.5), "0.25",
    ),
    "residual multiplier": Fault(
        "granite", FLAX, "model.layers.0", "scale",
        _configured(_layer(0), residual_multiplier=1.0), "residual",
    ),
    "embedding multiplier": Fault(
        "granite", FLAX, "model.embed_tokens", "scale",
        _configured(lambda m: m.model, embedding_multiplier=1.0), "embedding",
    ),
    "logits' scale": Fault(
        "granite", FLAX, "logits", "scale", _configured(lambda m: m, logit_scale=1.0), "logits"
    ),
    "softcap of the logits": Fault(
        "gemma2", FLAX, "logits", "softcap", _configured(lambda m: m, final_softcap=None)
    ),
    "softcap of the scores": Fault(
        "gemma2", FLAX, "model.layers.1.self_attn.core", "softcap",
        _configured(lambda m: m.model.layers[1].self_attn, attention_softcap=None),
    ),
    "tied head": Fault("llama", PLAIN, "logits", "tied head", _head_is_table, "is the embedding"),
    "untied head": Fault(
        "llama, tied", FLAX, "logits", "tied head", _other_embedding, "is not the embedding"
    ),
    "TF32": Fault("llama", PLAIN, "model.layers.1.mlp.down_proj", "precision", _tf32, "TF32"),
    "eps": Fault(
        "llama", FLAX, "model.layers.1.post_attention_layernorm", "eps",
        _attribute(lambda m: m.model.layers[1].post_attention_layernorm, "epsilon", 1e-4),
        "0.0001",
    ),
    "eps of no usual size": Fault(
        "llama", PLAIN, "model.norm", "eps",
        _attribute(lambda m: m.model.norm, "variance_epsilon", 3.3e-3), "0.0033",
    ),
    "gate and up swapped": Fault(
        "llama", FLAX, "model.layers.0.mlp.gate_proj", "swapped gate/up", _swapped
    ),
    "activation of up": Fault(
        "llama", PLAIN, "model.layers.1.mlp.act_fn", "swapped gate/up", _activation_of_up
    ),
    "halves of gate_up_proj swapped": Fault(
        "phi3", PLAIN, "model.layers.0.mlp.gate_up_proj", "swapped gate/up", _halves_swapped
    ),
    "another activation": Fault(
        "gemma2", FLAX, "model.layers.1.mlp.act_fn", "activation",
        _configured(lambda m: m.model.layers[1].mlp, activation="gelu"), "gelu and not",
    ),
    "missing bias": Fault(
        "qwen2", PLAIN, "model.layers.1.self_attn.k_proj", "missing bias", _no_bias
    ),
    "position offset": Fault(
        "llama", PLAIN, "model.rotary_emb (full_attention)", "position offset", _one_later,
        "off by 1", hides=True,
    ),
    "wrong theta": Fault(
        "llama", FLAX, "model.rotary_emb (full_attention)", "wrong theta", _theta, "500000"
    ),
    "theta of no usual size": Fault(
        "llama", PLAIN, "model.rotary_emb (full_attention)", "wrong theta", _odd_theta, "12345"
    ),
}  # fmt: skip


class _Scaled(torch.autograd.Function):
    """x going forward, and a factor going back."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *gradients):
        return ctx.factor * gradients[0], None


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _scaled(x, factor):
    return x


_scaled.defvjp(lambda x, factor: (x, None), lambda factor, _, g: (factor * g,))


def _scaled_behind(name, factor):
    """What this module of PyTorch returns has a gradient that is off by a factor."""

    def plant(model, patch):
        def hook(module, args, output):
            if isinstance(output, tuple):
                return _Scaled.apply(output[0], factor), *output[1:]
            return _Scaled.apply(output, factor)

        model.get_submodule(name).register_forward_hook(hook)

    return plant


def _flax_calls(kind, change):
    """Flax's modules of this class compute by `change(call, self, args)`."""

    def plant(model, patch):
        call = kind.__call__
        patch.setattr(kind, "__call__", lambda self, *args: change(call, self, args))

    return plant


def _detached_residual(call, self, args):
    """Of all layers: what goes past attention and the feed-forward part has no gradient."""
    x, *rest = args
    still = jax.lax.stop_gradient(x)
    out, *others = call(self, x, *rest)
    return out - x + still, *others


def _detached_before_attention(model, patch):
    layer = _torch_layer(model, 1)

    def forward(hidden_states, **kwargs):
        h, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
        h = hidden_states.detach() + h
        return h + layer.mlp(layer.post_attention_layernorm(h))

    layer.forward = forward


def _constant_size(model, patch):
    """A norm of PyTorch whose backward takes the size for a constant."""
    norm = model.model.layers[1].post_attention_layernorm

    def forward(x):
        size = x.detach().pow(2).mean(-1, keepdim=True) + norm.variance_epsilon
        return norm.weight * (x * torch.rsqrt(size))

    norm.forward = forward


def _not_turned_back(model, patch):
    """The rotation of Flax has the identity for its gradient."""

    @jax.custom_vjp
    def turned(q, k, cos, sin):
        return rope(q, k, cos, sin)

    turned.defvjp(
        lambda *args: (turned(*args), args[2:]),
        lambda kept, gs: (*gs, *(jnp.zeros_like(a) for a in kept)),
    )
    patch.setattr(decoder, "rope", lambda *args, **_: turned(*args))


def _detached_values(model, patch):
    projection = model.model.layers[0].self_attn.v_proj
    projection.register_forward_hook(lambda module, args, output: output.detach())


# The forward is right. Each is found at the place whose backward is off.
BACKWARD_FAULTS = {
    "gradient of a projection": Fault(
        "llama", PATCHED, "model.layers.1.mlp.down_proj (backward)", "gradient scale",
        _scaled_behind("model.layers.1.mlp.down_proj", 0.5), "times 0.5",
    ),
    "gradient of attention": Fault(
        "llama", PLAIN, "model.layers.0.self_attn.o_proj (backward)", "gradient scale",
        _scaled_behind("model.layers.0.self_attn", 1.02), "times 1.02",
    ),
    "gradient in bfloat16": Fault(
        "llama", PATCHED, "model.layers.0.mlp.up_proj (backward)", "gradient scale",
        _scaled_behind("model.layers.0.mlp.up_proj", 1.5), "times 1.5", dtype="bfloat16",
    ),
    "gradient of a norm in Flax": Fault(
        "llama", FLAX, "model.norm (backward)", "gradient scale",
        _flax_calls(RMSNorm, lambda call, self, args: _scaled(call(self, *args), -1.0)), "times -1",
    ),
    "detached residual": Fault(
        "llama", FLAX, "model.layers.1, input (backward)", "detached residual",
        _flax_calls(decoder.Block, _detached_residual), "the residual is missing",
    ),
    "residual detached before attention": Fault(
        "llama", PLAIN, "model.layers.1, input (backward)", "detached residual",
        _detached_before_attention, "the residual and model.layers.1.post_attention_layernorm is",
    ),
    "the size of a norm": Fault(
        "llama", PLAIN, "model.layers.1.post_attention_layernorm (backward)", "norm backward",
        _constant_size,
    ),
    "rotation not undone": Fault(
        "llama", FLAX, "model.layers.1.self_attn.core, k (backward)", "rotation missing",
        _not_turned_back, "not rotated back",
    ),
    "detached values": Fault(
        "llama", PLAIN, "model.layers.0.self_attn.core, v (backward)", "detached",
        _detached_values, "no gradient",
    ),
}  # fmt: skip
