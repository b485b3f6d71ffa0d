"""Which RMSNorm a module computes."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_liger import norms
from jax_liger.patching.trials import (
    DTYPES,
    STEPS,
    Unlike,
    allowed,
    attempt,
    difference,
    is_float,
    step,
)

USUAL_EPS = (1e-6, 1e-5, 1e-8)


@dataclass(frozen=True)
class RMSNormRecipe:
    """The variant, and for each dtype of x its casting mode and the dtype of the result."""

    eps: float
    offset: float
    ways: tuple[tuple[str, tuple[str, str]], ...]

    def applies(self, x: Any, weight: jax.Array | None) -> bool:
        """Whether the module was tried with such arguments."""
        known = isinstance(x, jax.Array) and x.ndim > 0 and x.dtype.name in dict(self.ways)
        return known and (weight is None or weight.shape == x.shape[-1:])

    def __call__(
        self, x: jax.Array, weight: jax.Array | None, implementation: str | None
    ) -> jax.Array:
        casting_mode, dtype = dict(self.ways)[x.dtype.name]
        y = norms.rms_norm(
            x,
            weight,
            eps=self.eps,
            offset=self.offset,
            casting_mode=casting_mode,
            implementation=implementation,
        )
        return y.astype(dtype)


def recognise(
    run: Callable[[jax.Array | None, jax.Array], Any],
    size: int,
    weight_dtype: Any,
    eps: Iterable[float] = (),
) -> RMSNormRecipe:
    """The recipe of a norm over the last axis.

    Args:
        run: the module's own code, of a weight (size,), or None where it has none, and x.
        size: D.
        weight_dtype: the dtype of its weight; None where it has none.
        eps: what may be its epsilon.

    Raises:
        Unlike: where it is no RMSNorm that the kernel computes.
    """
    given = np.random.default_rng(0)
    # Rows from far below every epsilon to far above, with a mean that a LayerNorm would take off.
    sizes = np.array([3e-5, 1e-3, 1.0, 40.0])[:, None]
    x64 = (sizes * (given.standard_normal((8, 4, size)) + 0.5)).astype(np.float32)
    w64 = None
    if weight_dtype is not None:
        w64 = np.asarray(jnp.asarray(given.uniform(0.2, 1.7, size), weight_dtype), np.float64)

    def weight(dtype: Any) -> jax.Array | None:
        return None if w64 is None else jnp.asarray(w64, dtype)

    y = attempt(run, weight(jnp.float32), jnp.asarray(x64, jnp.float32))
    if not is_float(y):
        raise Unlike("it returns no array of numbers")
    bound = 1e-5 + STEPS / 2 * (step(y.dtype) if y.dtype != jnp.float32 else 0.0)
    offsets = (0.0,) if w64 is None else (0.0, 1.0)
    for candidate, offset in itertools.product(dict.fromkeys((*eps, *USUAL_EPS)), offsets):
        if difference(y, _exact(x64, w64, candidate, offset)) < bound:
            ways = _ways(run, weight(weight_dtype), x64, candidate, offset)
            if ways:
                return RMSNormRecipe(candidate, offset, ways)
    raise Unlike("it computes no RMSNorm over the last axis that the kernel has")


def _ways(run, weight, x64, eps, offset) -> tuple[tuple[str, tuple[str, str]], ...]:
    """The casting mode that comes closest to the module's own result, for each dtype."""
    found = []
    for name in DTYPES:
        x = jnp.asarray(x64, name)
        try:
            y = attempt(run, weight, x)
        except Unlike:
            continue  # not in this dtype
        errors = {}
        for mode in ("llama", "gemma", "none"):
            recipe = RMSNormRecipe(eps, offset, ((name, (mode, y.dtype.name)),))
            errors[mode] = difference(recipe(x, weight, "xla"), y)
        mode = min(errors, key=errors.__getitem__)
        widths = (x.dtype, y.dtype) if weight is None else (x.dtype, y.dtype, weight.dtype)
        if errors[mode] < allowed(*widths):
            found.append((name, (mode, y.dtype.name)))
    return tuple(found)


def _exact(x, weight, eps: float, offset: float) -> np.ndarray:
    x = np.asarray(x, np.float64)
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return y if weight is None else y * (weight + offset)
