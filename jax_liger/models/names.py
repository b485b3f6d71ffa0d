"""Which tensors of a Hugging Face checkpoint a parameter is made of.

A parameter `a.b.kernel` (inputs, outputs) is the tensor `a.b.weight` (outputs, inputs), transposed;
everything else lies as it is. Nothing is permuted: the halves that the rotary embedding pairs are
those of the checkpoints.
"""

import re
from typing import NamedTuple

from jax_liger.models.config import Config

# A parameter's path, its key in a checkpoint, and whether it is transposed. The first match counts.
TABLE = (
    (r"(.*)\.embedding", r"\1.weight", False),
    (r"(.*)\.scale", r"\1.weight", False),
    (r"(.*)\.bias", r"\1.bias", False),
    (r"(.*)\.mlp\.router\.kernel", r"\1.{moe}.gate.weight", True),
    (r"(.*)\.mlp\.experts\.(\w+_proj)\.kernel", r"\1.{moe}.experts.{{expert}}.{\2}.weight", True),
    (r"(.*)\.kernel", r"\1.weight", True),
)
# How a checkpoint names the experts' parts.
EXPERTS = {
    "mixtral": {
        "moe": "block_sparse_moe",
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
    },
    "qwen3_moe": {
        "moe": "mlp",
        "gate_proj": "gate_proj",
        "up_proj": "up_proj",
        "down_proj": "down_proj",
    },
}


class Piece(NamedTuple):
    """One tensor of a checkpoint, or some of its rows, that is part of a parameter."""

    key: str
    rows: slice  # of the tensor's first axis
    transposed: bool
    # A parameter's pieces follow each other along `axis`; with `stacked`, each is one entry there.
    axis: int
    part: slice
    stacked: bool = False


def pieces_of(path: str, config: Config) -> list[Piece]:
    """The pieces of the parameter at this path, in order."""
    key, transposed = _key_of(path, config)
    axis = 1 if transposed and path.endswith("kernel") else 0
    if ".experts." in path:
        return [
            Piece(key.format(expert=e), slice(None), True, 0, slice(e, e + 1), stacked=True)
            for e in range(config.num_experts)
        ]
    for fused, parts in _fused(config).items():
        spans = _spans(parts)
        for name, span in spans.items():
            if f".{name}." in path and config.family.fused_projections:
                whole = key.replace(f".{name}.", f".{fused}.")
                return [Piece(whole, span, transposed, axis, slice(None))]
        if f".{fused}." in path and not config.family.fused_projections:
            return [
                Piece(key.replace(f".{fused}.", f".{n}."), slice(None), transposed, axis, span)
                for n, span in spans.items()
            ]
    if path in ("model.embed_tokens.embedding", "lm_head.kernel"):
        # Some checkpoints pad the vocabulary with rows that stand for no token.
        return [Piece(key, slice(0, config.vocab_size), transposed, axis, slice(None))]
    return [Piece(key, slice(None), transposed, axis, slice(None))]


def _key_of(path: str, config: Config) -> tuple[str, bool]:
    for pattern, key, transposed in TABLE:
        match = re.fullmatch(pattern, path)
        if match:
            key = match.expand(key)
            names = EXPERTS.get(config.model_type, {})
            return (key.format(**names) if "{" in key else key), transposed
    raise ValueError(f"{path} is in no checkpoint")


def _fused(config: Config) -> dict[str, dict[str, int]]:
    """Fused projections, and what lies in them with its size, in order."""
    q, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    mlp = config.intermediate_size
    return {
        "qkv_proj": {"q_proj": q, "k_proj": kv, "v_proj": kv},
        "gate_up_proj": {"gate_proj": mlp, "up_proj": mlp},
    }


def _spans(parts: dict[str, int]) -> dict[str, slice]:
    spans, start = {}, 0
    for name, size in parts.items():
        spans[name] = slice(start, start + size)
        start += size
    return spans
