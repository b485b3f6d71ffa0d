"""What layer_norm accepts, said once for both frameworks."""

from liger_ops.checking import Described, check_eps, check_parameter, check_rows


def check_arguments(
    x: Described, weight: Described | None, bias: Described | None, eps: float
) -> None:
    """Raises ValueError or TypeError, naming the argument and both values."""
    check_rows(x)
    check_parameter("weight", weight, x)
    check_parameter("bias", bias, x)
    check_eps(eps)
