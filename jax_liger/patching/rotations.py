"""Functions that rotate queries and keys: which they are, and ours in their place.

Code looks such a function up in its module's namespace. Ours stands there only while a patched
module runs, so that nobody else ever sees it, and takes over where a call is the rotation

    y = x * cos + rotate(x) * sin

with cos and sin as the function itself makes them: its results for an x of zeros and ones.
"""

import functools
import inspect
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_liger.patching.trials import (
    DTYPES,
    Unlike,
    allowed,
    attempt,
    difference,
    hashable,
    is_float,
)
from jax_liger.rotary import rope

NAMES = ("apply_rope", "apply_rotary_embedding", "apply_rotary_emb", "apply_rotary_pos_emb")
POSITIONS = ("positions", "position_ids", "segment_pos", "pos")
ANGLES = ("cos", "sin")
THETAS = ("rope_theta", "theta", "base", "base_frequency", "max_wavelength")
# Of the arrays on trial: rows, positions, heads and head size.
B, T, N, H = 2, 6, 3, 16


@dataclass(frozen=True)
class Found:
    """A function in the namespace that a class's code looks it up in."""

    name: str
    namespace: Mapping[str, Any]

    @property
    def function(self) -> Callable[..., Any]:
        return self.namespace[self.name]


def used_by(kind: type) -> list[Found]:
    """The rotations that methods of a class call by their names."""
    found = {}
    for owner in kind.__mro__:
        for member in vars(owner).values():
            method = inspect.unwrap(member) if callable(member) else None
            if not inspect.isfunction(method):
                continue
            for name in _names(method.__code__):
                if name in NAMES and callable(method.__globals__.get(name)):
                    found[name, id(method.__globals__)] = Found(name, method.__globals__)
    return list(found.values())


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


# Of each name in each namespace that ours stands in: how often, and what was there.
_lock = threading.RLock()
_depths: Counter[tuple[int, str]] = Counter()
_originals: dict[tuple[int, str], Any] = {}


@contextmanager
def standing(found: list[Found], implementation: str | None) -> Iterator[None]:
    """Ours in the place of these functions, for as long as the context lasts."""
    entered = []
    try:
        for one in found:
            with _lock:
                namespace: Any = one.namespace
                key = id(namespace), one.name
                if not _depths[key]:
                    _originals[key] = namespace[one.name]
                    namespace[one.name] = fused(_originals[key], implementation)
                _depths[key] += 1
                entered.append((namespace, key))
        yield
    finally:
        for namespace, key in entered:
            with _lock:
                _depths[key] -= 1
                if not _depths[key]:
                    namespace[key[1]] = _originals.pop(key)


@functools.lru_cache(maxsize=64)
def fused(function: Callable[..., Any], implementation: str | None) -> Callable[..., Any]:
    """The function, by the kernel wherever a call of it is a rotation."""
    signature = inspect.signature(function)
    tried: dict[Any, Recipe | None] = {}

    @functools.wraps(function)
    def rotate(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        x, rest = _split(bound)
        settings = tuple(item for item in rest.items() if item[0] not in (*POSITIONS, *ANGLES))
        if not is_float(x) or x.ndim != 4 or x.size == 0 or not hashable(settings):
            return function(*args, **kwargs)
        arrays = tuple((k, np.shape(v)) for k, v in rest.items() if k in (*POSITIONS, *ANGLES))
        key = settings, arrays, x.shape
        if key not in tried:
            with jax.ensure_compile_time_eval():
                try:
                    tried[key] = recognise(function, signature, rest, x.shape)
                except Unlike:
                    tried[key] = None
        recipe = tried[key]
        if recipe is None or x.dtype.name not in dict(recipe.ways):
            return function(*args, **kwargs)
        return recipe(function, bound, x, implementation)

    return rotate


@dataclass(frozen=True)
class Recipe:
    """The layout, and for each dtype of x those of the angles and of the result."""

    layout: str
    ways: tuple[tuple[str, tuple[str, str]], ...]

    def __call__(
        self, function: Any, bound: Any, x: jax.Array, implementation: str | None
    ) -> jax.Array:
        angle_dtype, dtype = dict(self.ways)[x.dtype.name]
        batch, time, _, size = x.shape
        # x_1 = 1 and x_2 = 0 in every pair: the result is that pair's cos and sin.
        ones = np.zeros(size, np.float32)
        ones[slice(0, size // 2) if self.layout == "half" else slice(0, size, 2)] = 1.0
        unit = jnp.broadcast_to(jnp.asarray(ones, angle_dtype), (batch, time, 1, size))
        angles = _with_x(function, bound, unit)()[:, :, 0]
        if self.layout == "half":
            cos, sin = (jnp.concatenate([half, half], -1) for half in jnp.split(angles, 2, -1))
        else:
            cos, sin = (jnp.repeat(angles[..., i::2], 2, -1) for i in (0, 1))
        x = x.astype(dtype)
        settings: dict[str, Any] = {"layout": self.layout, "implementation": implementation}
        return rope(x, x[:, :, :0], cos, sin, **settings)[0]


def check(function: Callable[..., Any]) -> None:
    """Raises Unlike, with the reason, where calls of a function are not known to be a rotation."""
    signature = inspect.signature(function)
    given = {}
    for name, parameter in list(signature.parameters.items())[1:]:
        if name in POSITIONS:
            given[name] = np.empty((B, T))
        elif name in ANGLES:
            given[name] = np.empty((B, T, H // 2))
        elif parameter.default is not parameter.empty:
            given[name] = parameter.default
        elif name == "head_dim":
            given[name] = H
        elif name in THETAS:
            given[name] = 10000
        elif parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise Unlike(f"{_name(function)} has an unknown argument, {name}")
    recognise(function, signature, given, (B, T, N, H))


def recognise(
    function: Callable[..., Any],
    signature: inspect.Signature,
    given: Mapping[str, Any],
    shape: tuple[int, ...],
) -> Recipe:
    """How a function rotates heads.

    Args:
        function: of x and what is given.
        signature: its.
        given: its other arguments, by name. Of positions and angles the shapes alone count.
        shape: of x.

    Raises:
        Unlike: where it does something else.
    """
    batch, time, _, size = shape
    drawn, rest = np.random.default_rng(0), dict(given)
    for name in rest.keys() & {*POSITIONS, *ANGLES}:
        # A few rows and positions stand for all.
        *leading, last = (
            (*np.shape(given[name]), None) if name in POSITIONS else np.shape(rest[name])
        )
        few = {(batch, time): (B, T), (1, time): (1, T), (time,): (T,)}.get(tuple(leading))
        if few is None or last not in (None, size // 2):
            raise Unlike(f"{name} has an unknown shape, {np.shape(given[name])}")
        if last is None:
            rest[name] = jnp.asarray(drawn.integers(0, 2000, few), jnp.int32)
        else:
            rest[name] = jnp.asarray(drawn.uniform(-1.0, 1.0, (*few, last)), jnp.float32)
    if size % 2 or not rest.keys() & {*POSITIONS, *ANGLES}:
        raise Unlike(f"{_name(function)} is of no known kind")
    bound = signature.bind_partial()
    bound.arguments |= {next(iter(signature.parameters)): None, **rest}
    x = drawn.standard_normal((B, T, N, size))
    for layout in ("half", "interleaved"):
        ways = _ways(function, bound, layout, x)
        if "float32" in dict(ways):
            return Recipe(layout, ways)
    raise Unlike(f"{_name(function)} is not the rotation that the kernel computes")


def _ways(function, bound, layout, x64) -> tuple[tuple[str, tuple[str, str]], ...]:
    """The dtype of the angles that comes closest, for each dtype."""
    found = []
    for name in DTYPES:
        x = jnp.asarray(x64, name)
        y = attempt(_with_x(function, bound, x))
        if not is_float(y) or y.shape != x.shape:
            raise Unlike(f"{_name(function)} returns something else than one array")
        errors = {}
        for angle_dtype in dict.fromkeys(("float32", name)):
            recipe = Recipe(layout, ((name, (angle_dtype, y.dtype.name)),))
            errors[angle_dtype] = difference(attempt(recipe, function, bound, x, "xla"), y)
        angle_dtype = min(errors, key=errors.__getitem__)
        if errors[angle_dtype] < allowed(name):
            found.append((name, (angle_dtype, y.dtype.name)))
    return tuple(found)


def _with_x(function: Callable[..., Any], bound: Any, x: jax.Array) -> Callable[[], Any]:
    """The call of the function with another first argument."""
    own = inspect.BoundArguments(bound.signature, OrderedDict(bound.arguments))
    own.arguments[next(iter(own.arguments))] = x
    return lambda: function(*own.args, **own.kwargs)


def _split(bound: inspect.BoundArguments) -> tuple[Any, dict[str, Any]]:
    """The first argument, and the others by name."""
    (_, x), *rest = bound.arguments.items()
    return x, dict(rest)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", repr(function))
