"""The norm, the projection and the rotation in plain PyTorch: the CPU path, the base, the
yardstick. Also the composition of the project's kernels, where those are given in place of the
plain ones.
"""

from collections.abc import Callable
from typing import Any

import torch

from liger_ops.rms_norm import eager as rms_norm_eager
from liger_ops.rms_norm_linear_rope.check import Heads, Norm
from liger_ops.rope import eager as rope_eager


def rms_norm_linear_rope(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    q_norm_weight: torch.Tensor | None,
    k_norm_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: Heads,
    norm: Norm,
    normed: Callable[..., torch.Tensor] = rms_norm_eager.rms_norm,
    rotated: Callable[..., Any] = rope_eager.rope,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v, in the dtype of the weight, in which the product is."""
    dtype = weight.dtype
    y = normed(x, norm_weight, *norm).to(dtype)
    qkv = torch.nn.functional.linear(y, weight, None if bias is None else bias.to(dtype))
    qkv = qkv.view(*x.shape[:-1], heads.q + 2 * heads.kv, heads.size)
    q, k, v = qkv.split((heads.q, heads.kv, heads.kv), dim=2)
    if q_norm_weight is not None:
        q = normed(q, q_norm_weight, *norm).to(dtype)
    if k_norm_weight is not None:
        k = normed(k, k_norm_weight, *norm).to(dtype)
    return *rotated(q, k, cos, sin, "half"), v
