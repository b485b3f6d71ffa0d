"""What the public functions do first with their arguments."""

from typing import Any

import jax
import jax.numpy as jnp

from liger_ops.checking import Described


def as_arrays(*given: Any) -> Any:
    """Each as a jax.Array; None stays None."""
    return jax.tree.map(jnp.asarray, given)


def described(array: jax.Array | None) -> Described | None:
    """Shape and dtype name, for the checks that both frameworks share."""
    return None if array is None else (array.shape, array.dtype.name)
