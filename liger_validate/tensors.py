"""NumPy arrays as tensors of PyTorch and back, ml_dtypes' bfloat16 included."""

import contextlib
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import torch

from liger_ops.drawing import DTYPES
from liger_validate.devices import default_of_torch

_PIECES = {"cpu": 1 << 20, "cuda": 1 << 26}  # numbers that are in float64 at a time


def to_torch(array: np.ndarray | torch.Tensor, device: str = "cpu") -> torch.Tensor:
    """A copy of a NumPy array, ml_dtypes' bfloat16 included; of a tensor the device's."""
    if isinstance(array, torch.Tensor):
        return array.detach().to(device)
    if array.dtype == DTYPES["bfloat16"]:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16).to(device)
    return torch.from_numpy(array.copy()).to(device)


def from_torch(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's numbers on the host, in its dtype."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(DTYPES["bfloat16"])
    return tensor.numpy()


def product(x: np.ndarray, matrix: torch.Tensor) -> np.ndarray:
    """x @ matrix, taken where the matrix is."""
    return (torch.from_numpy(np.ascontiguousarray(x)).to(matrix.device) @ matrix).cpu().numpy()


def changed(matrix: torch.Tensor, change: Callable[[np.ndarray], np.ndarray]) -> torch.Tensor:
    """The matrix after a change that is written for NumPy's arrays."""
    return torch.from_numpy(change(matrix.cpu().numpy())).to(matrix.device)


def squares(a: np.ndarray | torch.Tensor, b: np.ndarray | torch.Tensor | None = None) -> float:
    """The sum of the squares of a, or of a - b, in float64, piece by piece: nothing is held.

    On a GPU where there is one: a model's gradients are billions of numbers.
    """
    device = default_of_torch()
    size = _PIECES[torch.device(device).type]
    arrays = [_viewed(x).reshape(-1) for x in ((a,) if b is None else (a, b))]
    total = 0.0
    for start in range(0, arrays[0].numel(), size):
        pieces = [x[start : start + size].to(device).double() for x in arrays]
        difference = pieces[0] if b is None else pieces[0] - pieces[1]
        total += torch.dot(difference, difference).item()
    return total


def _viewed(array: np.ndarray | torch.Tensor) -> torch.Tensor:
    """The array's own memory, to be read."""
    if isinstance(array, torch.Tensor):
        return array.detach()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        if array.dtype == DTYPES["bfloat16"]:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)


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
