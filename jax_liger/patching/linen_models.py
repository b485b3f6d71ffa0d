"""Someone else's Flax linen model by the fused kernels: a copy of the module, whose calls are seen.

A linen module is a value, and its submodules come into being when it runs. So the copy is of a
class that extends the module's own and runs every method under `linen.intercept_methods`: each
norm, gated MLP and rotation is looked at as it is called, in the scope that it has, so that the
tree of parameters stays what it is.
"""

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from jax_liger import linen as fused
from jax_liger.flax_options import check_stock_options
from jax_liger.patching import gated, norms, rotations
from jax_liger.patching.report import PatchReport
from jax_liger.patching.trials import Unlike, hashable

STOCK_NORMS = {
    linen.RMSNorm: functools.partial(fused.rms_norm_of, offset=0.0, casting_mode="none"),
    linen.LayerNorm: fused.layer_norm_of,
}
OURS = (fused.RMSNorm, fused.LayerNorm, fused.SwiGLUMLP)


def patch(module: linen.Module, implementation: str | None) -> linen.Module:
    """The copy; a module that is one already is returned as it is."""
    kind: Any = type(module)
    if hasattr(kind, "stands_in_for"):
        return module
    if module.scope is not None:
        raise ValueError(f"the module must not be bound; got {kind.__name__} in a scope")
    sight = _Sight(implementation)
    marks = {"stands_in_for": kind, "sight": sight, "__module__": kind.__module__}
    methods = {name: _seen(sight, method) for name, method in _methods(kind).items()}
    extended = type(kind.__name__, (kind,), {**marks, **methods, "__doc__": kind.__doc__})
    copy = extended(**_fields(module), name=module.name)
    object.__setattr__(copy, "_patched_from", module)
    return copy


def unpatch(module: linen.Module) -> linen.Module:
    """The module that was patched; of a copy of the copy, one like it."""
    kind: Any = type(module)
    if not hasattr(kind, "stands_in_for"):
        return module
    original = vars(module).get("_patched_from")
    if original is None:
        original = kind.stands_in_for(**_fields(module), name=module.name)
    return original


def report(module: linen.Module) -> PatchReport:
    """What was seen while the patched module ran; nothing for another."""
    sight = getattr(type(module), "sight", None)
    return PatchReport() if sight is None else sight.report


def _fields(module: Any) -> dict[str, Any]:
    fields = (f.name for f in dataclasses.fields(module) if f.init)
    return {name: getattr(module, name) for name in fields if name not in ("parent", "name")}


def _methods(kind: type) -> dict[str, Any]:
    """The methods by which a module of this class may be run, the class's own before its bases'."""
    found: dict[str, Any] = {}
    for owner in kind.__mro__[: kind.__mro__.index(linen.Module)]:
        for name, member in vars(owner).items():
            public = name == "__call__" or not name.startswith("_")
            if public and inspect.isfunction(member) and not hasattr(member, "nowrap"):
                found.setdefault(name, member)
    found.pop("setup", None)
    return found


def _seen(sight: "_Sight", method: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if sight.here.watching:
            return method(self, *args, **kwargs)
        sight.here.watching = True
        try:
            with linen.intercept_methods(sight):
                return method(self, *args, **kwargs)
        finally:
            sight.here.watching = False

    run.__name__ = method.__name__
    run.__doc__ = method.__doc__
    return run


class _Here(threading.local):
    """Of each thread."""

    def __init__(self):
        self.watching = False
        self.trial = False  # while code is tried, its calls are its own
        self.calls: list[_Call] = []


@dataclasses.dataclass
class _Call:
    """A module's call that is under way, and what its layers have put out so far."""

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    put_out: dict[str, jax.Array] = dataclasses.field(default_factory=dict)


class _Sight:
    """The interceptor: it sees each call of a method of a submodule, and may answer it itself."""

    def __init__(self, implementation: str | None):
        self.implementation = implementation
        self.report = PatchReport()
        self.here = _Here()
        self.tried: dict[Any, Any] = {}

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module, here = context.module, self.here
        if here.trial or context.method_name == "setup" or isinstance(module, OURS):
            return next_fun(*args, **kwargs)
        if context.method_name == "__call__":
            answer = self._norm(module, args, kwargs)
            if answer is not None:
                return answer
        above = here.calls[-1] if here.calls else None
        if above is not None and (not module.path or module.path[:-1] != above.module.path):
            above = None
        if above is not None and args and context.method_name == "__call__":
            args = (self._hidden(above, module.name, args[0]), *args[1:])
        here.calls.append(_Call(module, args, kwargs))
        try:
            with rotations.standing(self._rotations(module), self.implementation):
                result = next_fun(*args, **kwargs)
        finally:
            here.calls.pop()
        if above is not None and isinstance(result, jax.Array):
            above.put_out[module.name] = result
        return result

    def _norm(self, module: Any, args: Any, kwargs: Any) -> jax.Array | None:
        """The kernel's result, or None where the module computes its own."""
        kind = type(module)
        if "norm" not in kind.__name__.lower():
            return None
        try:
            if kind in STOCK_NORMS:
                check_stock_options(module)
                given = dict(zip(("x", "mask"), args, strict=False)) | kwargs
                if given.get("mask") is None:
                    self._note(module, kind.__name__)
                    return STOCK_NORMS[kind](module, given["x"], implementation=self.implementation)
            elif len(args) == 1 and not kwargs and not module.is_initializing():
                recipe, weight = self._recipe(module)
                if recipe.applies(args[0], weight):
                    self._note(module, "RMSNorm")
                    return recipe(args[0], weight, self.implementation)
        except (Unlike, ValueError) as error:
            self._note(module, reason=str(error))
        return None

    def _recipe(self, module: Any) -> tuple[norms.RMSNormRecipe, jax.Array | None]:
        """What a norm of its own class computes, and its weight."""
        held = linen.meta.unbox(dict(module.variables))
        params = held.pop("params", {})
        if held or len(params) > 1 or not all(isinstance(p, jax.Array) for p in params.values()):
            raise Unlike(f"it is no RMSNorm: it has {', '.join([*params, *held])}")
        name, weight = next(iter(params.items()), (None, None))
        alone = module.clone(parent=None, name=None)

        def run(weight: jax.Array | None, x: jax.Array) -> Any:
            return alone.apply({} if name is None else {"params": {name: weight}}, x)

        eps = [v for v in _fields(module).values() if isinstance(v, float) and 0.0 < v < 0.1]
        size, dtype = (64, None) if weight is None else (weight.shape[-1], weight.dtype)
        recipe = self._tried(
            (alone, name, size, dtype), lambda: norms.recognise(run, size, dtype, eps)
        )
        return recipe, weight

    def _hidden(self, above: _Call, name: str | None, given: Any) -> Any:
        """What an MLP's last layer is given: by the kernel, where that is its gated activation."""
        layers = next((n for n in gated.LAYERS if n[2] == name), None)
        if layers is None or not {*layers[:2]} <= above.put_out.keys():
            return given
        gate, up = (above.put_out.pop(layer) for layer in layers[:2])
        try:
            recipe = self._mlp(above, layers)
        except Unlike as error:
            self._note(above.module, reason=str(error))
            return given
        if not recipe.applies(gate, up) or jnp.shape(given) != gate.shape:
            return given
        self._note(above.module, recipe.kind)
        return recipe(gate, up, self.implementation)

    def _mlp(self, call: _Call, layers: tuple[str, str, str]) -> gated.GatedRecipe:
        """What the module computes between its layers; its own code then runs in vain."""
        alone = call.module.clone(parent=None, name=None)
        x, *rest = call.args
        rest, kwargs = tuple(rest), tuple(call.kwargs.items())
        if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((rest, kwargs))):
            raise Unlike("it takes more arrays than one")

        def run(g: jax.Array, u: jax.Array) -> Any:
            put_out = dict(zip(layers, (g, u), strict=False))
            seen: list[str] = []

            def stub(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
                name = context.module.name
                if name not in layers or context.method_name != "__call__":
                    return next_fun(*args, **kwargs)
                seen.append(name)
                if name == layers[2]:
                    raise _Reached(args[0])
                return put_out[name]

            try:
                with linen.intercept_methods(stub):
                    alone.apply(
                        {}, jnp.zeros((*gated.ROWS, x.shape[-1]), g.dtype), *rest, **dict(kwargs)
                    )
            except _Reached as reached:
                if sorted(seen[:-1]) != sorted(layers[:2]):
                    raise Unlike(f"it calls {layers[0]} or {layers[1]} more than once") from None
                return reached.hidden
            raise Unlike(f"it does not reach {layers[2]}")

        return self._tried((alone, layers, rest, kwargs), lambda: gated.recognise(run))

    def _rotations(self, module: Any) -> list[rotations.Found]:
        """Those that the module's methods look up."""
        found = _rotations_of(type(module))
        if found:
            try:
                for one in found:
                    self._tried(one.function, lambda one=one: rotations.check(one.function))
            except Unlike as error:
                self._note(module, reason=str(error))
                return []
            self._note(module, "RoPE")
        return found

    def _tried(self, key: Any, recognise: Callable[[], Any]) -> Any:
        """What came of it the first time. Raises Unlike if that did."""
        if not hashable(key):
            key = object()
        if key not in self.tried:
            self.here.trial = True
            try:
                with jax.ensure_compile_time_eval():
                    self.tried[key] = recognise()
            except Unlike as error:
                self.tried[key] = error
            finally:
                self.here.trial = False
        result = self.tried[key]
        if isinstance(result, Unlike):
            raise result
        return result

    def _note(self, module: Any, patched: str | None = None, reason: str = "") -> None:
        path = ".".join(module.path)
        if patched is None:
            self.report.left_out[path] = reason
        else:
            self.report.patched[path] = patched


class _Reached(Exception):
    """Ends a trial at an MLP's last layer."""

    def __init__(self, hidden: Any):
        super().__init__()
        self.hidden = hidden


@functools.lru_cache(maxsize=1024)
def _rotations_of(kind: type) -> list[rotations.Found]:
    return rotations.used_by(kind)
