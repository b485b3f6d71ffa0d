"""What lora_linear accepts, said once for both frameworks."""

import math

from liger_ops.checking import Described, check_dtype


def check_arguments(
    x: Described,
    weight: Described,
    lora_a: Described,
    lora_b: Described,
    bias: Described | None,
    scaling: float,
    transposed: bool = False,
    label: str = "",
) -> None:
    """Raises ValueError or TypeError, naming the argument and both values.

    Args:
        transposed: whether weight is (D, O), lora_a (D, r) and lora_b (r, O).
        label: put before the names, where there are several of each.
    """
    given = {"weight": weight, "lora_a": lora_a, "lora_b": lora_b}
    check_dtype("x", x)
    for name, described in (*given.items(), ("bias", bias)):
        check_dtype(label + name, described)
    if not x[0]:
        raise ValueError("x must have at least one dimension, (..., D); got shape ()")
    dim = x[0][-1]
    of_x = f"D = {dim}, the last dimension of x {tuple(x[0])}"
    # From the output's side to the input's.
    turned = {n: tuple(d[0])[::-1] if transposed else tuple(d[0]) for n, d in given.items()}

    def refuse(name: str, wanted: str, why: str) -> None:
        letters = f"({', '.join(reversed(wanted)) if transposed else ', '.join(wanted)})"
        shape = tuple(given[name][0])
        empty = "; an empty weight is what a sharded parameter looks like outside its module"
        raise ValueError(
            f"{label}{name} must have shape {letters} with {why}; got {shape}"
            f"{empty if shape == (0,) else ''}"
        )

    if len(turned["weight"]) != 2 or turned["weight"][1] != dim:
        refuse("weight", "OD", of_x)
    if len(turned["lora_a"]) != 2 or turned["lora_a"][1] != dim or turned["lora_a"][0] == 0:
        refuse("lora_a", "rD", of_x + ", and r at least 1")
    out, rank = turned["weight"][0], turned["lora_a"][0]
    if turned["lora_b"] != (out, rank):
        refuse("lora_b", "Or", f"O = {out} of {label}weight and r = {rank} of {label}lora_a")
    if bias is not None and tuple(bias[0]) != (out,):
        raise ValueError(
            f"{label}bias must have shape (O,) with O = {out} of {label}weight; got "
            f"{tuple(bias[0])}"
        )
    if not math.isfinite(scaling):
        raise ValueError(f"{label}scaling must be finite; got {scaling}")


def check_dropout(dropout_p: float) -> None:
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1); got {dropout_p}")
