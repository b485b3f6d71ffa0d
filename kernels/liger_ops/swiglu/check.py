"""What swiglu and geglu accept, said once for both frameworks."""

from liger_ops.checking import Described, check_dtype, listed

ACTIVATIONS = {"tanh": "gelu_tanh", "none": "gelu"}


def check_arguments(gate: Described, up: Described | None) -> None:
    """Raises ValueError or TypeError, naming the argument and both values."""
    check_dtype("gate", gate)
    check_dtype("up", up)
    if not gate[0]:
        raise ValueError("gate must have at least one dimension, (..., F); got shape ()")
    if up is None and gate[0][-1] % 2:
        raise ValueError(
            "without up, gate must hold both halves, (..., 2 F), in its last dimension; got "
            f"the odd {gate[0][-1]} in {tuple(gate[0])}"
        )
    if up is not None and tuple(up[0]) != tuple(gate[0]):
        raise ValueError(f"up must have the shape of gate, {tuple(gate[0])}; got {tuple(up[0])}")


def activation_of(approximate: str) -> str:
    """The GELU meant by `approximate`."""
    if approximate not in ACTIVATIONS:
        raise ValueError(f"approximate must be one of {listed(ACTIVATIONS)}; got {approximate!r}")
    return ACTIVATIONS[approximate]
