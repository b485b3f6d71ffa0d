"""What attention reads: check the arguments, choose the implementation, run it."""

from collections.abc import Sequence

import torch

from liger_ops import backend_triton
from liger_ops.rms_norm_linear_rope import eager, rule
from liger_ops.rms_norm_linear_rope.check import Heads, Norm, check_arguments
from torch_liger.arguments import DTYPE_NAMES, check_device, described

if backend_triton.triton is not None:
    from liger_ops.rms_norm_linear_rope import triton_kernel


def rms_norm_linear_rope(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    qkv_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    bias: torch.Tensor | None = None,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a layer does before its attention, in one kernel: norm, projection, rotation.

        q, k, v = split(rms_norm(x, norm_weight) @ qkv_weight.T + bias)
        q, k = rope(rms_norm(q, q_norm_weight), rms_norm(k, k_norm_weight), cos, sin)

    Args:
        x: (B, T, D), float32, bfloat16 or float16 (float64 by the eager version only). Any strides;
            rows that no view can flatten are copied.
        norm_weight: (D,), of any of these dtypes, or None to leave the normed x unscaled.
        qkv_weight: ((N + 2 K) H, D), of any of these dtypes: the rows of q's N heads, then those of
            k's K heads, then those of v's. Where its dtype and x's differ the product is in the
            promoted one, and under autocast in autocast's.
        cos, sin: (T, R), (1, T, R) or (B, T, R), of any of these dtypes, for heads whose halves
            are rotated against each other, as in `rope` with layout "half". Features beyond R stay
            as they are.
        num_heads, num_kv_heads, head_dim: N, K and H.
        bias: ((N + 2 K) H,), of any of these dtypes.
        q_norm_weight, k_norm_weight: (H,), of any of these dtypes: norms of every head of q and of
            k before the rotation, as in Qwen3. None for no such norm.
        eps, offset, casting_mode: as in `rms_norm`, for the norms of the heads too. The fused
            kernel, which rounds in another order, takes the casting mode for its backward alone.
        implementation: "triton" for the one kernel; "composed" for the kernels of `rms_norm` and
            `rope` around the library's product; "eager"; or None for "triton" where it was measured
            to be faster on this GPU, "composed" elsewhere on a GPU, and eager on a CPU.

    Returns:
        q (B, T, N, H), k (B, T, K, H) and v (B, T, K, H), in the product's dtype. Differentiable
        any number of times; what asks for no gradient costs no work for one. The fused kernel keeps
        the arguments and nothing else for it: the normed x is computed again, and with norms of
        heads the part of the product that they see.

    Numerics: the fused kernel multiplies x, or the weight, by norm_weight and rounds it once, and
        keeps all else in float32 until q, k and v are rounded. The weight's gradient is summed over
        all rows in float32. Products of float32 follow torch.set_float32_matmul_precision.

    Raises:
        TypeError, ValueError: for an argument that does not fit, naming it and both values.
        RuntimeError: if the implementation asked for by name cannot run here, with the reason.

    Source: Zhang and Sennrich (2019), arXiv:1910.07467; Su et al. (2021), arXiv:2104.09864.
    """
    heads, norm = Heads(num_heads, num_kv_heads, head_dim), Norm(eps, offset, casting_mode)
    others = (norm_weight, qkv_weight, cos, sin, bias, q_norm_weight, k_norm_weight)
    check_arguments(described(x), *map(described, others), heads, norm)  # type: ignore[arg-type]
    names = ("norm_weight", "qkv_weight", "cos", "sin", "bias", "q_norm_weight", "k_norm_weight")
    for name, tensor in zip(names, others, strict=True):
        check_device(name, tensor, "x", x)
    chosen = backend_triton.choose(
        implementation, "rms_norm_linear_rope", x, *others, also=("composed",)
    )
    qkv_weight = qkv_weight.to(_product_dtype(x, qkv_weight))
    given = (x, norm_weight, qkv_weight, bias, q_norm_weight, k_norm_weight, cos, sin)
    if chosen == "eager":
        return eager.rms_norm_linear_rope(*given, heads, norm)
    config = None
    if implementation is None:
        found = choice_for(given, heads)
        chosen, config = "triton" if found.fused else "composed", found.config
    if chosen == "composed":
        return triton_kernel.composed(*given, heads=heads, norm=norm)
    return triton_kernel.rms_norm_linear_rope(*given, heads=heads, norm=norm, config=config)


def choice_for(
    given: Sequence[torch.Tensor | None], heads: Heads, *others: torch.Tensor
) -> rule.Choice:
    """What the rule says of arguments in the kernels' order.

    others: of which the weight given is a part, where a weight in parts is not joined yet.
    """
    x, _, weight = given[:3]
    assert x is not None and weight is not None
    needs = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (*given, *others)
    )
    return rule.choose(
        backend_triton.device_name(x.device), "triton", x.shape[0] * x.shape[1], x.shape[2], heads,
        dtype=DTYPE_NAMES[weight.dtype], as_measured=rule.is_as_measured(given, heads),
        trained=needs,
    )  # fmt: skip


def _product_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """As a linear layer's: autocast's where it is on, and else the promoted one."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return torch.promote_types(x.dtype, weight.dtype)
