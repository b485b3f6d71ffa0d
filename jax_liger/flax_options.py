"""Options of the stock Flax norms that the fused kernels do not have."""

from typing import Any


def check_stock_options(module: Any) -> None:
    """Raises ValueError where a stock norm's option asks for what the kernel does not do."""
    for name, wanted in (("reduction_axes", -1), ("feature_axes", -1), ("axis_name", None)):
        given = getattr(module, name)
        if given not in (wanted, (wanted,), [wanted]):
            raise ValueError(f"{name} must be {wanted}; got {given!r}")


def check_no_mask(mask: Any) -> None:
    """Raises ValueError if a call passes the mask of what statistics are taken over."""
    if mask is not None:
        raise ValueError(f"mask must be None; got an array of shape {mask.shape}")
