"""What the public functions do first with their arguments."""

import torch

from liger_ops.checking import Described

DTYPE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
}


def described(tensor: torch.Tensor | None) -> Described | None:
    """Shape and dtype name, for the checks that both frameworks share."""
    if tensor is None:
        return None
    return tensor.shape, DTYPE_NAMES.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")


def check_device(name: str, tensor: torch.Tensor | None, beside: str, other: torch.Tensor) -> None:
    """Raises ValueError unless `tensor`, the argument `name`, is absent or where `other` is."""
    if tensor is not None and tensor.device != other.device:
        raise ValueError(
            f"{name} must be on {beside}'s device, {other.device}; got {tensor.device}"
        )
