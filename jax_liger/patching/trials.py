"""Other people's code on trial: what it computes is found out by calling it, not from its name.

A module or function stands in for a kernel's operation only where its own code gives that
operation's results, for arrays that tell apart every variant that there is: in float32 up to
rounding, and in each narrower dtype up to a few of its steps. A dtype in which it does not is
passed on to the code that was there.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Dtypes that patched code is tried in.
DTYPES = ("float32", "bfloat16", "float16")
# In steps of the coarsest dtype at work: the order of roundings may differ, the formula may not.
STEPS = 4.0


class Unlike(Exception):
    """Raised where code is not what a kernel computes, with the reason as a report gives it."""


def attempt(call: Callable[..., Any], *args: Any) -> Any:
    """What the code under trial returns. Raises Unlike where it fails, with its own words."""
    try:
        return call(*args)
    except Unlike:
        raise
    except Exception as error:  # other people's code may raise anything
        words = str(error).partition("\n")[0] or type(error).__name__
        raise Unlike(f"its own code fails on trial: {words}") from error


def step(*dtypes: Any) -> float:
    """The largest relative step of the dtypes."""
    return max(float(jnp.finfo(dtype).eps) for dtype in dtypes)


def allowed(*dtypes: Any) -> float:
    """The difference up to which code in these dtypes computes the same."""
    return max(1e-5, STEPS * step(*dtypes))


def difference(got: Any, want: Any) -> float:
    """The largest error, each over the largest value of its last axis; inf where shapes differ."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape or not np.isfinite(got).all():
        return np.inf
    size = np.abs(want).max(-1, keepdims=True)
    return float((np.abs(got - want) / np.where(size == 0.0, 1.0, size)).max())


def hashable(value: Any) -> bool:
    """Whether it can be a key, or a part of one."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


def is_float(array: Any) -> bool:
    """Whether it is a jax.Array of floating-point numbers."""
    return isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jnp.floating)
