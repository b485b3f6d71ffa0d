"""A linear layer with a low-rank adapter in plain PyTorch: the CPU path and the yardstick."""

import torch
import torch.nn.functional as F


def lora_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    bias: torch.Tensor | None,
    scaling: float,
    dropout_p: float,
    seed: torch.Tensor | None,
    stream: int,
) -> torch.Tensor:
    """x, weight and bias have one dtype, and so have lora_a and lora_b."""
    y = F.linear(x, weight, bias)
    kept = x.to(lora_a.dtype)
    if seed is not None:
        factors = dropout_factors(seed, x.shape, dropout_p, stream)
        kept = (kept * factors).to(kept.dtype)
    return (y + F.linear(F.linear(kept, lora_a), lora_b) * scaling).to(y.dtype)


def dropout_factors(
    seed: torch.Tensor, shape: torch.Size, dropout_p: float, stream: int
) -> torch.Tensor:
    """0 or 1 / (1 - p) for every element, float32, counted as oracle.py says."""
    dim = shape[-1]
    group = torch.arange(-(-dim // 4), device=seed.device)
    row = torch.arange(shape[:-1].numel(), device=seed.device)[:, None]
    words = torch.cat(_philox(seed, group, row, stream), dim=1)[:, :dim]
    kept = (words >> 8) >= round(dropout_p * 2**24)
    return kept.reshape(shape).to(torch.float32) * (1.0 / (1.0 - dropout_p))


def _philox(
    seed: torch.Tensor, group: torch.Tensor, row: torch.Tensor, stream: int
) -> list[torch.Tensor]:
    """Four words of 32 bits for every group and row, in int64."""
    low = 2**32 - 1
    zeros = torch.zeros_like(group + row)
    c = [zeros + group, zeros + row, zeros + stream, zeros]
    keys = [seed & low, seed >> 32]
    for _ in range(10):
        high_a, low_a = _product(c[0], 0xD2511F53)
        high_b, low_b = _product(c[2], 0xCD9E8D57)
        c = [high_b ^ c[1] ^ keys[0], low_b, high_a ^ c[3] ^ keys[1], low_a]
        keys = [(keys[0] + 0x9E3779B9) & low, (keys[1] + 0xBB67AE85) & low]
    return c


def _product(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper and lower 32 bits of a product of 32-bit numbers; int64 does not hold all 64."""
    upper, lower = (a >> 16) * b, (a & 0xFFFF) * b
    return (upper + (lower >> 16)) >> 16, (((upper & 0xFFFF) << 16) + lower) & (2**32 - 1)
