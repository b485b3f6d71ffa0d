"""What rms_norm and fused_add_rms_norm accept, said once for both frameworks.

It sees shapes and dtype names only, so the same wrong call gets the same words in JAX and PyTorch.
"""

from liger_ops.checking import Described, check_dtype, listed

CASTING_MODES = ("llama", "gemma", "none")


def check_arguments(
    x: Described,
    weight: Described | None,
    residual: Described | None,
    eps: float,
    casting_mode: str,
) -> None:
    """Raises ValueError or TypeError, naming the argument and both values."""
    x_shape = x[0]
    check_dtype("x", x)
    if not x_shape:
        raise ValueError("x must have at least one dimension, (..., D); got shape ()")
    check_dtype("weight", weight)
    if weight is not None and (len(weight[0]) != 1 or weight[0][0] != x_shape[-1]):
        raise ValueError(
            f"weight must have shape (D,) with D = {x_shape[-1]}, the last dimension of x "
            f"{tuple(x_shape)}; got {tuple(weight[0])}"
        )
    check_dtype("residual", residual)
    if residual is not None and tuple(residual[0]) != tuple(x_shape):
        raise ValueError(
            f"residual must have the shape of x, {tuple(x_shape)}; got {tuple(residual[0])}"
        )
    if not eps >= 0.0:
        raise ValueError(f"eps must be at least 0; got {eps}")
    if casting_mode not in CASTING_MODES:
        raise ValueError(
            f"casting_mode must be one of {listed(CASTING_MODES)}; got {casting_mode!r}"
        )
