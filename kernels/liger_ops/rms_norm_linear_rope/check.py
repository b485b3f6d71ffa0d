"""What rms_norm_linear_rope accepts, said once for both frameworks, and its numbers' names."""

from typing import NamedTuple

from liger_ops.checking import Described, check_dtype
from liger_ops.rms_norm.check import check_arguments as check_rms_norm
from liger_ops.rope.check import check_arguments as check_rope


class Heads(NamedTuple):
    """How many of them q has, how many k and v have each, and their size."""

    q: int
    kv: int
    size: int

    @property
    def columns(self) -> int:
        """Of the product."""
        return (self.q + 2 * self.kv) * self.size


class Norm(NamedTuple):
    """The settings of the norm of x, and of those of the heads."""

    eps: float
    offset: float
    casting_mode: str


def check_arguments(
    x: Described,
    norm_weight: Described | None,
    qkv_weight: Described,
    cos: Described,
    sin: Described,
    bias: Described | None,
    q_norm_weight: Described | None,
    k_norm_weight: Described | None,
    heads: Heads,
    norm: Norm,
    out_axis: int = 0,
) -> None:
    """Raises ValueError or TypeError, naming the argument and both values."""
    check_dtype("x", x)
    if len(x[0]) != 3:
        raise ValueError(f"x must have three dimensions, (B, T, D); got shape {tuple(x[0])}")
    named = zip(("num_heads", "num_kv_heads", "head_dim"), heads, (1, 1, 2), strict=True)
    for name, given, least in named:
        if given < least:
            raise ValueError(f"{name} must be at least {least}; got {given}")
    check_dtype("norm_weight", norm_weight)
    dim = x[0][-1]
    if norm_weight is not None and tuple(norm_weight[0]) != (dim,):
        raise ValueError(
            f"norm_weight must have shape (D,) with D = {dim}, the last dimension of x "
            f"{tuple(x[0])}; got {tuple(norm_weight[0])}"
        )
    check_rms_norm(x, None, None, norm.eps, norm.casting_mode)
    check_dtype("qkv_weight", qkv_weight)
    if out_axis not in (0, 1):
        raise ValueError(f"out_axis must be one of 0, 1; got {out_axis}")
    shape, wanted = tuple(qkv_weight[0]), (heads.columns, dim)
    if shape != (wanted if out_axis == 0 else wanted[::-1]) or 0 in shape:
        layout = "((N + 2 K) H, D)" if out_axis == 0 else "(D, (N + 2 K) H)"
        empty = "; an empty weight is what a sharded parameter looks like outside its module"
        raise ValueError(
            f"qkv_weight must have shape {layout} with N = {heads.q}, K = {heads.kv}, "
            f"H = {heads.size} and D = {dim}, the last dimension of x {tuple(x[0])}; "
            f"got {shape}{empty if 0 in shape else ''}"
        )
    check_dtype("bias", bias)
    if bias is not None and tuple(bias[0]) != (heads.columns,):
        raise ValueError(
            f"bias must have shape ((N + 2 K) H,) = ({heads.columns},); got {tuple(bias[0])}"
        )
    for name, given in (("q_norm_weight", q_norm_weight), ("k_norm_weight", k_norm_weight)):
        check_dtype(name, given)
        if given is not None and tuple(given[0]) != (heads.size,):
            raise ValueError(
                f"{name} must have shape (H,) with H = {heads.size}, the head_dim; "
                f"got {tuple(given[0])}"
            )
    batch, time = x[0][:2]
    q, k = (((batch, time, n, heads.size), x[1]) for n in (heads.q, heads.kv))
    check_rope(q, k, cos, sin, "half")
