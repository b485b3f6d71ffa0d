"""NumPy arrays as tensors of PyTorch and back, ml_dtypes' bfloat16 included."""

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from liger_ops.drawing import DTYPES


def to_torch(array: np.ndarray, device: str = "cpu") -> torch.Tensor:
    """A copy of a NumPy array, ml_dtypes' bfloat16 included."""
    if array.dtype == DTYPES["bfloat16"]:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16).to(device)
    return torch.from_numpy(array.copy()).to(device)


def from_torch(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's numbers on the host, in its dtype."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(DTYPES["bfloat16"])
    return tensor.numpy()


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fills every torch.empty with NaN, so that an element no kernel wrote is seen.

    Pallas's interpret mode fills its outputs with NaN by itself.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
