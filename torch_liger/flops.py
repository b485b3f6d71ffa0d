"""How many floating-point operations a decoder's training takes, and how many a GPU can do."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

# Dense products of bfloat16 with float32 sums, operations a second, as the vendor states them in
# data sheets, product pages and white papers; where those state it with sparsity alone (Hopper and
# later, L4), half of that. The L40's is what its sheet says, half of the L40S's with as many tensor
# cores. No page was found for the H200 NVL, A800, A10G, RTX 6000 Ada, RTX 3090, B300 and GB300,
# whose figures sources state differently or not at all. The first entry whose words are in the
# device's name is taken.
PEAK_FLOPS = {
    "GB300": 2.5e15,
    "B300": 2.25e15,
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX 6000 Ada": 364e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}


def peak_flops(device_name: str) -> float | None:
    """Operations a second of a device by its name, or None for one that is not in `PEAK_FLOPS`."""
    found = (p for n, p in PEAK_FLOPS.items() if re.search(rf"\b{re.escape(n)}\b", device_name))
    return next(found, None)


@dataclass(frozen=True)
class ModelFlops:
    """Operations of one training step, forward and backward, for every token.

        per_token + sum over layers of 12 N H min(T, window)

    for sequences of T tokens, N heads of size H. Recomputation for gradient checkpointing is not in
    it: it is what the model needs, not what the machine does.

    Attributes:
        per_token: of the products with weights. A product with a weight of n elements is 2 n in the
            forward, 2 n for its input's gradient and 2 n for its own: 6 n, and 4 n if it is frozen.
            So LoRA's base weights count 4 n and its adapters 6 n. The embedding is a look-up and
            counts nothing; the head counts, tied or not. Of experts those count that a token takes.
        attention: of each layer 12 N H and the window, None for no limit. The causal half that is
            masked counts, as is usual.

    Source: Chowdhery et al., PaLM (2022), arXiv:2204.02311, appendix B.
    """

    per_token: float
    attention: tuple[tuple[float, int | None], ...]

    def at(self, length: int) -> float:
        """For one token of a sequence of `length`."""
        scores = sum(
            factor * (length if window is None else min(length, window))
            for factor, window in self.attention
        )
        return self.per_token + scores


def model_flops(model: torch.nn.Module) -> ModelFlops:
    """The `ModelFlops` of a Hugging Face decoder, from its modules and its config.

    A frozen weight is taken to pass a gradient on, which it does not below the first trained one.
    """
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    share = _share_of_experts(config)
    per_token = sum(
        (6.0 if weight.requires_grad else 4.0) * elements * (share if routed else 1.0)
        for weight, elements, routed in _weights(model)
    )
    return ModelFlops(per_token, _attention(config))


def _weights(model: torch.nn.Module) -> Iterator[tuple[torch.Tensor, int, bool]]:
    """Each weight that multiplies, its elements, and whether only some tokens meet it."""
    skipped = tuple(_not_in_use(model))
    for name, module in model.named_modules():
        if f"{name}.".startswith(skipped):
            continue
        path = name.split(".")
        routed = "experts" in path
        weight = getattr(module, "weight", None)
        inner, outer = (getattr(module, f"{side}_features", None) for side in ("in", "out"))
        # PEFT's wrappers have the features of what is in them.
        wraps = hasattr(module, "base_layer") or hasattr(module, "original_module")
        if isinstance(inner, int) and isinstance(outer, int) and not wraps:
            # Not the weight's own size: a quantised one is packed.
            weight = weight if isinstance(weight, torch.Tensor) else torch.empty(0)
            yield weight, inner * outer, routed
        elif not wraps and not isinstance(module, torch.nn.Embedding):
            weight = module._parameters.get("weight")  # a Conv1D's, or a router's
            if weight is not None and weight.dim() == 2:
                yield weight, weight.numel(), routed
        for parameter in module.parameters(recurse=False):
            if routed and parameter.dim() == 3:
                yield parameter, parameter.numel(), True


def _not_in_use(model: torch.nn.Module) -> Iterator[str]:
    """Where PEFT keeps what the forward does not use: inactive adapters, replaced originals."""
    for name, module in model.named_modules():
        active = getattr(module, "active_adapters", None)
        if not isinstance(active, (list, tuple)):
            continue
        if hasattr(module, "original_module"):
            yield f"{name}.original_module."
        for kind in ("lora_A", "lora_B", "modules_to_save"):
            for adapter in getattr(module, kind, None) or ():
                if adapter not in active:
                    yield f"{name}.{kind}.{adapter}."


def _share_of_experts(config: Any) -> float:
    """The part of all experts that one token takes."""
    taken = getattr(config, "num_experts_per_tok", None)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    total = next((n for name in names if (n := getattr(config, name, None))), None)
    return taken / total if taken and total else 1.0


def _attention(config: Any) -> tuple[tuple[float, int | None], ...]:
    heads, layers = (
        getattr(config, name, None) for name in ("num_attention_heads", "num_hidden_layers")
    )
    if not heads or not layers:
        return ()
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    window = getattr(config, "sliding_window", None)
    limits: dict[str, int | None] = {
        "full_attention": None,
        "sliding_attention": window,
        "chunked_attention": getattr(config, "attention_chunk_size", None),
    }
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return ((12.0 * heads * size, window),) * layers
    # Layers of another kind, a state-space layer say, have no scores.
    return tuple((12.0 * heads * size, limits[kind]) for kind in kinds if kind in limits)
