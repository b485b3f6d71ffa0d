"""What rms_norm and fused_add_rms_norm accept, said once for both frameworks.

It sees shapes and dtype names only, so the same wrong call gets the same words in JAX and PyTorch.
"""

from liger_ops.checking import (
    Described,
    check_dtype,
    check_eps,
    check_parameter,
    check_rows,
    listed,
)

CASTING_MODES = ("llama", "gemma", "none")


def check_arguments(
    x: Described,
    weight: Described | None,
    residual: Described | None,
    eps: float,
    casting_mode: str,
) -> None:
    """Raises ValueError or TypeError, naming the argument and both values."""
    check_rows(x)
    check_parameter("weight", weight, x)
    check_dtype("residual", residual)
    if residual is not None and tuple(residual[0]) != tuple(x[0]):
        raise ValueError(
            f"residual must have the shape of x, {tuple(x[0])}; got {tuple(residual[0])}"
        )
    check_eps(eps)
    if casting_mode not in CASTING_MODES:
        raise ValueError(
            f"casting_mode must be one of {listed(CASTING_MODES)}; got {casting_mode!r}"
        )
