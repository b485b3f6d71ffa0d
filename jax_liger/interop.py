"""JAX arrays and PyTorch tensors as one memory, by DLPack. Needs both frameworks.

On a GPU nothing is copied: each side sees the other's memory, ordered by their streams. JAX arrays
are immutable, so do not write to a tensor that shares memory with one.
"""

import jax
import torch


def from_torch(tensor: torch.Tensor) -> jax.Array:
    """The tensor's memory as a JAX array; a copy where its strides are not row-major.

    The result is outside PyTorch's graph: `torch_liger.interop.jax_function` carries gradients.
    """
    return jax.dlpack.from_dlpack(tensor.detach().contiguous())


def to_torch(array: jax.Array) -> torch.Tensor:
    """The array's memory as a PyTorch tensor on the same device."""
    return torch.from_dlpack(array)
