"""What rms_norm and fused_add_rms_norm accept, said once for both frameworks.

It sees shapes and dtype names only, so the same wrong call gets the same words in JAX and PyTorch.
"""

from collections.abc import Sequence

CASTING_MODES = ("llama", "gemma", "none")
FLOAT_DTYPES = ("float32", "bfloat16", "float16", "float64")

Described = tuple[Sequence[int], str]  # shape and dtype name


def check_arguments(
    x: Described,
    weight: Described | None,
    residual: Described | None,
    eps: float,
    casting_mode: str,
) -> None:
    """Raises ValueError or TypeError, naming the argument and both values."""
    x_shape, x_dtype = x
    if x_dtype not in FLOAT_DTYPES:
        raise TypeError(f"x must have a dtype of {_listed(FLOAT_DTYPES)}; got {x_dtype}")
    if not x_shape:
        raise ValueError("x must have at least one dimension, (..., D); got shape ()")
    if weight is not None:
        if weight[1] not in FLOAT_DTYPES:
            raise TypeError(f"weight must have a dtype of {_listed(FLOAT_DTYPES)}; got {weight[1]}")
        if len(weight[0]) != 1 or weight[0][0] != x_shape[-1]:
            raise ValueError(
                f"weight must have shape (D,) with D = {x_shape[-1]}, the last dimension of x "
                f"{tuple(x_shape)}; got {tuple(weight[0])}"
            )
    if residual is not None:
        if residual[1] not in FLOAT_DTYPES:
            raise TypeError(
                f"residual must have a dtype of {_listed(FLOAT_DTYPES)}; got {residual[1]}"
            )
        if tuple(residual[0]) != tuple(x_shape):
            raise ValueError(
                f"residual must have the shape of x, {tuple(x_shape)}; got {tuple(residual[0])}"
            )
    if not eps >= 0.0:
        raise ValueError(f"eps must be at least 0; got {eps}")
    if casting_mode not in CASTING_MODES:
        raise ValueError(
            f"casting_mode must be one of {_listed(CASTING_MODES)}; got {casting_mode!r}"
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)
