"""Writes a random checkpoint of a LLaMA, by default of 1.24 billion parameters, in bfloat16.

python tests/random_llama.py FOLDER
liger-validate model FOLDER --dtype bfloat16 --grads
"""

import argparse
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file


def write(folder: Path, seed: int = 0, **settings: int) -> int:
    """A checkpoint with this config, and how many parameters it has."""
    config = transformers.LlamaConfig(
        **{
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            "dtype": "bfloat16",
            **settings,
        },
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        architectures=["LlamaForCausalLM"],
    )
    with torch.device("meta"):
        shapes = dict(transformers.LlamaForCausalLM(config).named_parameters())
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, parameter in shapes.items():
        # Sizes of activations stay what they are, from layer to layer.
        center, spread = (1.0, 0.1) if parameter.ndim == 1 else (0.0, parameter.shape[-1] ** -0.5)
        value = torch.randn(parameter.shape, generator=random)
        tensors[name] = value.mul_(spread).add_(center).bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config.save_pretrained(folder)
    return sum(t.numel() for t in tensors.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=128256)
    arguments = parser.parse_args()
    count = write(
        arguments.folder,
        num_hidden_layers=arguments.layers,
        hidden_size=arguments.hidden,
        intermediate_size=4 * arguments.hidden,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=max(1, arguments.hidden // 256),
        vocab_size=arguments.vocab,
    )
    print(f"{count} parameters in {arguments.folder}")
