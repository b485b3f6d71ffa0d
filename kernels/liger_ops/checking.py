"""What the operations' argument checks share. Shapes and dtype names only, so no framework."""

from collections.abc import Iterable, Sequence

FLOAT_DTYPES = ("float32", "bfloat16", "float16", "float64")

Described = tuple[Sequence[int], str]  # shape and dtype name


def check_dtype(name: str, given: Described | None) -> None:
    """Raises TypeError, naming the argument, unless it is absent or of a float dtype."""
    if given is not None and given[1] not in FLOAT_DTYPES:
        raise TypeError(f"{name} must have a dtype of {listed(FLOAT_DTYPES)}; got {given[1]}")


def check_rows(x: Described) -> None:
    """Raises TypeError or ValueError unless x is (..., D) of a float dtype."""
    check_dtype("x", x)
    if not x[0]:
        raise ValueError("x must have at least one dimension, (..., D); got shape ()")


def check_parameter(name: str, given: Described | None, x: Described) -> None:
    """Raises TypeError or ValueError unless it is absent or (D,), as x is (..., D)."""
    check_dtype(name, given)
    dim = x[0][-1]
    if given is not None and tuple(given[0]) != (dim,):
        raise ValueError(
            f"{name} must have shape (D,) with D = {dim}, the last dimension of x "
            f"{tuple(x[0])}; got {tuple(given[0])}"
        )


def check_eps(eps: float) -> None:
    if not eps >= 0.0:
        raise ValueError(f"eps must be at least 0; got {eps}")


def listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
