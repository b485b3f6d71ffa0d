"""Linear layers with low-rank adapters: check the arguments, choose the implementation, run it."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from liger_ops import backend_triton
from liger_ops.lora_linear import eager
from liger_ops.lora_linear.check import check_arguments, check_dropout
from torch_liger.arguments import check_device, described

if backend_triton.triton is not None:
    from liger_ops.lora_linear import triton_kernel


class LoraProjection(NamedTuple):
    """One of `lora_linears`' projections: the arguments of `lora_linear` of the same names."""

    weight: torch.Tensor
    lora_a: torch.Tensor
    lora_b: torch.Tensor
    bias: torch.Tensor | None = None
    scaling: float = 1.0


def lora_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scaling: float = 1.0,
    dropout_p: float = 0.0,
    seed: int | torch.Tensor | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """A linear layer with a low-rank adapter, without a copy of x or of y between the two.

        y = x @ weight.T + bias + scaling * (dropout(x) @ lora_a.T) @ lora_b.T

    Args:
        x: (..., D), float32, bfloat16 or float16 (float64 by the eager version only).
        weight: (O, D), of any of these dtypes. Where it and x differ, and under autocast, they are
            cast as a linear layer casts them, and each gradient comes back in its own dtype.
            Frozen, it gets no gradient, and none is computed.
        lora_a: (r, D), of any of these dtypes.
        lora_b: (O, r), of any of these dtypes.
        bias: (O,), of any of these dtypes.
        scaling: alpha / r; alpha / sqrt(r) for rank-stabilised LoRA.
        dropout_p: the probability that an element of the adapter's x is dropped; the others are
            multiplied by 1 / (1 - dropout_p). In [0, 1); 0 in evaluation.
        seed: with dropout, what chooses the elements: a number below 2^63, or a tensor of one on
            x's device. None draws one from PyTorch's generator, without waiting for the device. The
            same seed drops the same elements in every implementation and in JAX.
        implementation: "triton", "eager", or None for the kernel on a supported GPU and eager
            elsewhere.

    Returns:
        (..., O), in the dtype of the base product. Differentiable any number of times in x and all
        weights. Kept for it are x, the weights and x @ lora_a.T; x is not if weight and lora_a are
        frozen, and then lora_b's gradient cannot be differentiated in x.

    Numerics: products are the library's. The adapter's are as exact as in the dtype of lora_a and
        lora_b, in which PEFT makes them. Float32 adapters beside a bfloat16 x are split into
        three bfloat16 terms each, whose products with x are exact and summed in float32; in what is
        added to y and to x's gradient, which are bfloat16, terms below 2^-16 are left out. Beside
        float16, and float16 or bfloat16 adapters beside others, rows are cast in parts. The base
        product is rounded to its dtype, and the sum with the adapter's once more.

    Raises:
        TypeError, ValueError: for an argument that does not fit, naming it and both values.
        RuntimeError: if the implementation asked for by name cannot run here, with the reason.

    Source: Hu et al. (2021), arXiv:2106.09685; Kalajdzievski (2023), arXiv:2312.03732.
    """
    projection = LoraProjection(weight, lora_a, lora_b, bias, scaling)
    return _lora_linears("lora_linear", x, [projection], ("",), dropout_p, seed, implementation)[0]


def lora_linears(
    x: torch.Tensor,
    projections: Sequence[LoraProjection | tuple],
    *,
    dropout_p: float = 0.0,
    seed: int | torch.Tensor | None = None,
    implementation: str | None = None,
) -> tuple[torch.Tensor, ...]:
    """Several `lora_linear` of one x, as those of query, key and value or of gate and up.

    The adapters' first products are one product, and x's gradient is summed in one buffer.

    Args:
        x: (..., D).
        projections: of each a `LoraProjection`, or a tuple (weight, lora_a, lora_b, bias, scaling)
            whose last two may be left out. O and r may differ between them; the adapters are cast
            to one dtype if they do in theirs.
        dropout_p, seed: as in `lora_linear`; each projection drops elements of its own.
        implementation: that of `lora_linear`.

    Returns:
        A (..., O) for each projection.

    Numerics, errors and source: as `lora_linear`.
    """
    given = [LoraProjection(*projection) for projection in projections]  # type: ignore[arg-type]
    if not given:
        raise ValueError("projections must hold at least one projection; got none")
    labels = tuple(f"projections[{i}]." for i in range(len(given)))
    return _lora_linears("lora_linears", x, given, labels, dropout_p, seed, implementation)


def _lora_linears(op, x, projections, labels, dropout_p, seed, implementation):
    for label, p in zip(labels, projections, strict=True):
        tensors = {"weight": p.weight, "lora_a": p.lora_a, "lora_b": p.lora_b, "bias": p.bias}
        given = [described(tensor) for tensor in (x, *tensors.values())]
        check_arguments(*given, scaling=p.scaling, label=label)  # type: ignore[arg-type]
        for name, tensor in tensors.items():
            check_device(label + name, tensor, "x", x)
    check_dropout(dropout_p)
    base, adapter = _dtypes(x, projections)
    x = x.to(base)
    cast = [
        LoraProjection(
            p.weight.to(base),
            p.lora_a.to(adapter),
            p.lora_b.to(adapter),
            None if p.bias is None else p.bias.to(base),
            p.scaling,
        )
        for p in projections
    ]
    tensors = [tensor for p in cast for tensor in p[:4]]
    chosen = backend_triton.choose(implementation, op, x, *tensors)
    seed = _seed(seed, x.device) if dropout_p > 0.0 else None
    with torch.autocast(x.device.type, enabled=False):
        if chosen == "triton":
            return tuple(
                triton_kernel.lora_linears(
                    x,
                    [triton_kernel.Weights(*p[:4]) for p in cast],
                    tuple(p.scaling for p in cast),
                    dropout_p,
                    seed,
                )
            )
        return tuple(
            eager.lora_linear(x, *p, dropout_p, seed, stream) for stream, p in enumerate(cast)
        )


def _dtypes(x: torch.Tensor, projections: list[LoraProjection]) -> tuple[torch.dtype, torch.dtype]:
    """Of the base products and of the adapters': autocast's where it is on."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return dtype, dtype
    base = functools.reduce(torch.promote_types, (p.weight.dtype for p in projections), x.dtype)
    adapters = [t.dtype for p in projections for t in (p.lora_a, p.lora_b)]
    return base, functools.reduce(torch.promote_types, adapters)


def _seed(seed: int | torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """(1,) int64, there, without waiting for the device."""
    if isinstance(seed, torch.Tensor):
        return seed.detach().reshape(1).to(device, torch.int64, non_blocking=True)
    if seed is not None:
        return torch.full((1,), seed, dtype=torch.int64, device=device)
    return torch.randint(2**63 - 1, (1,), device=device)
