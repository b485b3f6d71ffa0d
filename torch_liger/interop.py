"""JAX functions inside PyTorch programs, with gradients. Needs both frameworks."""

from collections.abc import Callable
from typing import Any

import jax
import torch

from jax_liger.interop import from_torch, to_torch


def jax_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function of JAX arrays callable on tensors and differentiable by PyTorch.

        pallas_rms_norm = jax_function(partial(jax_liger.rms_norm, implementation="pallas"))
        y = pallas_rms_norm(x, weight)      # x, weight: tensors; y.backward() works

    Args:
        fn: takes arrays, returns an array or a tuple of arrays. It is not jitted here.

    Returns:
        The same function on tensors. Memory passes by DLPack, without a copy on a GPU. Only first
        derivatives: differentiating them again raises RuntimeError.
    """

    class _JaxFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: torch.Tensor) -> Any:
            arrays = [from_torch(tensor) for tensor in tensors]
            if not any(ctx.needs_input_grad):
                outputs = fn(*arrays)
            else:
                # Arrays that need no gradient are closed over, so that none is computed for them.
                wanted = [i for i, needed in enumerate(ctx.needs_input_grad) if needed]

                def of_wanted(*chosen: jax.Array) -> Any:
                    given = dict(zip(wanted, chosen, strict=True))
                    return fn(*(given.get(i, array) for i, array in enumerate(arrays)))

                outputs, ctx.vjp = jax.vjp(of_wanted, *(arrays[i] for i in wanted))
            ctx.is_tuple = isinstance(outputs, tuple)
            return jax.tree.map(to_torch, outputs)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            cotangents = tuple(from_torch(gradient) for gradient in gradients)
            found = iter(ctx.vjp(cotangents if ctx.is_tuple else cotangents[0]))
            return tuple(to_torch(next(found)) if need else None for need in ctx.needs_input_grad)

    return _JaxFunction.apply
