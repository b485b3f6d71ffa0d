"""What rope accepts, said once for both frameworks."""

from liger_ops.checking import Described, check_dtype, listed

LAYOUTS = ("half", "interleaved")


def check_arguments(
    q: Described, k: Described, cos: Described, sin: Described, layout: str
) -> None:
    """Raises ValueError or TypeError, naming the argument and both values."""
    for name, given in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        check_dtype(name, given)
    (q_shape, k_shape, cos_shape, sin_shape) = (tuple(given[0]) for given in (q, k, cos, sin))
    if len(q_shape) != 4:
        raise ValueError(f"q must have four dimensions, (B, T, N, H); got shape {q_shape}")
    batch, time, _, head_size = q_shape
    if len(k_shape) != 4 or (k_shape[:2], k_shape[3]) != (q_shape[:2], head_size):
        raise ValueError(
            f"k must have shape ({batch}, {time}, K, {head_size}), as q {q_shape} but for the "
            f"number of heads; got {k_shape}"
        )
    if len(cos_shape) not in (2, 3) or cos_shape[:-1] not in ((time,), (1, time), (batch, time)):
        raise ValueError(
            f"cos must have shape (T, R), (1, T, R) or (B, T, R) with B = {batch} and T = {time}, "
            f"those of q; got {cos_shape}"
        )
    if cos_shape[-1] % 2 or not 2 <= cos_shape[-1] <= head_size:
        raise ValueError(
            f"cos must have an even last dimension from 2 to the head size {head_size}; "
            f"got {cos_shape[-1]} in {cos_shape}"
        )
    if sin_shape != cos_shape:
        raise ValueError(f"sin must have the shape of cos, {cos_shape}; got {sin_shape}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {listed(LAYOUTS)}; got {layout!r}")
