"""What the operations' argument checks share. Shapes and dtype names only, so no framework."""

from collections.abc import Iterable, Sequence

FLOAT_DTYPES = ("float32", "bfloat16", "float16", "float64")

Described = tuple[Sequence[int], str]  # shape and dtype name


def check_dtype(name: str, given: Described | None) -> None:
    """Raises TypeError, naming the argument, unless it is absent or of a float dtype."""
    if given is not None and given[1] not in FLOAT_DTYPES:
        raise TypeError(f"{name} must have a dtype of {listed(FLOAT_DTYPES)}; got {given[1]}")


def listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
