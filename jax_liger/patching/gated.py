"""Which gated activation an MLP computes between its three layers."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_liger import activations
from jax_liger.patching.trials import DTYPES, Unlike, allowed, attempt, is_float

# What models call the layers of gate and up, whose outputs meet, and the one that takes the result.
LAYERS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("wi_0", "wi_1", "wo"),
)
KINDS = {"silu": "SwiGLU", "gelu_tanh": "GeGLU", "gelu": "GeGLU"}
ROWS, WIDTH = (16, 8), 64  # of the arrays on trial: divisible, should the code shard them


@dataclass(frozen=True)
class GatedRecipe:
    """The activation, and the dtypes of gate and up in which it is the kernel's."""

    activation: str
    dtypes: tuple[str, ...]

    @property
    def kind(self) -> str:
        return KINDS[self.activation]

    def applies(self, gate: Any, up: Any) -> bool:
        """Whether the MLP was tried with such arrays."""
        both = is_float(gate) and is_float(up) and gate.ndim > 0
        alike = both and (gate.shape, gate.dtype) == (up.shape, up.dtype)
        return alike and gate.dtype.name in self.dtypes

    def __call__(self, gate: jax.Array, up: jax.Array, implementation: str | None) -> jax.Array:
        if self.activation == "silu":
            return activations.swiglu(gate, up, implementation=implementation)
        approximate = "tanh" if self.activation == "gelu_tanh" else "none"
        return activations.geglu(gate, up, approximate=approximate, implementation=implementation)


def recognise(run: Callable[[jax.Array, jax.Array], Any]) -> GatedRecipe:
    """The recipe of an MLP.

    Args:
        run: the MLP's own code up to its last layer: of what the layers of gate and up put out,
            to what the last layer is given.

    Raises:
        Unlike: where that is no gated activation that the kernels compute.
    """
    for activation in KINDS:
        if _computes(run, "float32", activation):
            return GatedRecipe(
                activation, tuple(n for n in DTYPES if _computes(run, n, activation))
            )
    raise Unlike("its last layer is given no silu or gelu of gate times up")


def _computes(run: Callable[..., Any], name: str, activation: str) -> bool:
    """Whether it computes the activation in this dtype."""
    given = np.random.default_rng(0)
    # From where an activation is flat to where a bound on the values would show.
    spread = np.array([1.0, 4.0, 12.0, 40.0] * (WIDTH // 4))
    gate, up = (jnp.asarray(spread * given.standard_normal((*ROWS, WIDTH)), name) for _ in "gu")
    h = attempt(run, gate, up)
    if not is_float(h) or (h.shape, h.dtype) != (gate.shape, gate.dtype):
        return False
    g, u, h = (np.asarray(array, np.float64) for array in (gate, up, h))
    with np.errstate(over="ignore"):
        want = _EXACT[activation](g) * u
    # Where the activation has all but vanished, 1 + tanh and its like keep no digits.
    return bool((np.abs(h - want) <= allowed(name) * (np.abs(want) + np.abs(u))).all())


def _gelu_tanh(g: np.ndarray) -> np.ndarray:
    return g * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (g + 0.044715 * g**3))) / 2.0


_EXACT = {
    "silu": lambda g: g / (1.0 + np.exp(-g)),
    "gelu_tanh": _gelu_tanh,
    "gelu": lambda g: g * (1.0 + np.vectorize(math.erf)(g / math.sqrt(2.0))) / 2.0,
}
