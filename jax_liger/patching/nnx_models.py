"""Someone else's Flax nnx model by the fused kernels, in place and reversibly.

Each module that is changed gets a class that extends its own. It stays the same object with the
same attributes, so that checkpoints, optimizers and rules for sharding keep fitting.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from jax_liger import nnx as fused
from jax_liger.flax_options import check_stock_options
from jax_liger.patching import gated, norms, rotations
from jax_liger.patching.report import PatchReport
from jax_liger.patching.trials import Unlike, hashable

STOCK_NORMS: dict[type, type] = {nnx.RMSNorm: fused.RMSNorm, nnx.LayerNorm: fused.LayerNorm}
OURS = (fused.RMSNorm, fused.LayerNorm, fused.SwiGLUMLP)


def patch(model: nnx.Module, implementation: str | None) -> PatchReport:
    """Gives modules classes that compute by the kernels."""
    result = PatchReport()
    for path, module, kind in _survey(model, implementation, result):
        _set_class(module, kind)
        result.patched[path] = kind.computes
    return result


def report(model: nnx.Module) -> PatchReport:
    """What runs by the kernels now, and why the rest does not."""
    result = PatchReport()
    for path, module in _modules(model):
        kind = getattr(type(module), "computes", None)
        if kind is not None:
            result.patched[path] = kind
    for path, _, kind in _survey(model, None, result):
        result.left_out[path] = f"this {kind.computes} has not been patched"
    return result


def unpatch(model: nnx.Module) -> list[str]:
    """Gives all patched modules their own class back; returns their paths."""
    changed = []
    for path, module in _modules(model):
        stock = getattr(type(module), "stands_in_for", None)
        if stock is not None:
            _set_class(module, stock)
            changed.append(path)
    return changed


def _survey(
    model: nnx.Module, implementation: str | None, result: PatchReport
) -> Iterator[tuple[str, Any, Any]]:
    """What can be patched, with the class that does it; `result` is told what cannot."""
    tried: dict[Any, Any] = {}
    for path, module in _modules(model):
        kind = type(module)
        if isinstance(module, OURS) or hasattr(kind, "stands_in_for"):
            continue
        key = type(module), _settings(module), _parts(module)
        if key not in tried:
            tried[key] = _stand_in(module, implementation)
        found = tried[key]
        if isinstance(found, str):
            result.left_out[path] = found
        elif found is not None:
            yield path, module, found


def _stand_in(module: Any, implementation: str | None) -> type | str | None:
    """The class for a module; the reason why there is none; or None for what is not our matter."""
    kind = type(module)
    try:
        if kind in STOCK_NORMS:
            check_stock_options(module)
            return _stock_norm(kind, implementation)
        layers = next((n for n in gated.LAYERS if all(_is_layer(module, x) for x in n)), None)
        if layers is not None:
            found = _recognised_mlp(module, layers)
            return _gated_mlp(kind, *found, _settings(module), implementation)
        if "norm" in kind.__name__.lower() or isinstance(module, tuple(STOCK_NORMS)):
            return _rms_norm(kind, *_recognised_norm(module), _settings(module), implementation)
        found = rotations.used_by(kind)
        if found:
            for one in found:
                rotations.check(one.function)
            return _rotating(kind, implementation)
    except (Unlike, ValueError) as error:
        return str(error)
    return None


@functools.cache
def _stock_norm(kind: type, implementation: str | None) -> type:
    """Our class with settings of the class instead of the module, as the stock one computes."""
    ours = STOCK_NORMS[kind]
    settings = {"offset": 0.0, "casting_mode": "none"} if kind is nnx.RMSNorm else {}

    def call(self: Any, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        if mask is not None:
            return kind.__call__(self, x, mask=mask)
        return ours.__call__(self, x)

    settings |= {"implementation": implementation, "__call__": call}
    return _extended(ours, kind, ours.__name__, settings)


@functools.cache
def _rms_norm(
    kind: type,
    name: str | None,
    recipe: norms.RMSNormRecipe,
    settings: Any,
    implementation: str | None,
) -> type:
    """A norm of its own class, whose parameter is its attribute of this name.

    `settings` are those that it was tried with; where they have changed its own code runs.
    """

    def call(self: Any, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        weight = None if name is None else getattr(self, name)[...]
        as_tried = not args and not kwargs and _settings(self) == settings
        if not as_tried or not recipe.applies(x, weight):
            return kind.__call__(self, x, *args, **kwargs)
        return recipe(x, weight, implementation)

    return _extended(kind, kind, "RMSNorm", {"__call__": call})


@functools.cache
def _gated_mlp(
    kind: Any,
    recipe: gated.GatedRecipe,
    method: str,
    order: tuple[str, str],
    layers: tuple[str, str, str],
    settings: Any,
    implementation: str | None,
) -> type:
    """An MLP, of which `settings` are as for a norm."""
    own = getattr(kind, method)
    gate, up, down = layers

    def call(self: Any, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        if args or kwargs or _settings(self) != settings:
            return own(self, x, *args, **kwargs)
        put_out = {name: getattr(self, name)(x) for name in order}
        if not recipe.applies(put_out[gate], put_out[up]):
            return own(_with(self, **{n: _returning(y) for n, y in put_out.items()}), x)
        hidden = recipe(put_out[gate], put_out[up], implementation)
        constrain = _sharding_of_hidden(self, own)
        return getattr(self, down)(constrain(hidden))

    return _extended(kind, kind, recipe.kind, {method: call})


@functools.cache
def _rotating(kind: Any, implementation: str | None) -> type:
    """A class in whose calls the rotations that it looks up are ours."""
    found = rotations.used_by(kind)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with rotations.standing(found, implementation):
            return kind.__call__(self, *args, **kwargs)

    return _extended(kind, kind, "RoPE", {"__call__": call})


def _extended(base: type, stock: type, computes: str, settings: dict[str, Any]) -> type:
    marks = {"stands_in_for": stock, "computes": computes, "__module__": __name__}
    return type(base.__name__, (base,), {**marks, **settings})


def _recognised_norm(module: Any) -> tuple[str | None, norms.RMSNormRecipe]:
    """The name of a norm's parameter, and what it computes."""
    params = {n: v for n, v in vars(module).items() if isinstance(v, nnx.Variable)}
    children = [n for n, v in vars(module).items() if isinstance(v, nnx.Module)]
    if len(params) > 1 or children:
        raise Unlike(f"it is no RMSNorm: it has {', '.join([*params, *children])}")
    name, param = next(iter(params.items()), (None, None))

    def run(weight: jax.Array | None, x: jax.Array) -> Any:
        given = {} if name is None else {name: nnx.Param(weight)}
        return type(module).__call__(_with(module, **given), x)

    eps = [v for v in vars(module).values() if isinstance(v, float) and 0.0 < v < 0.1]
    size = 64 if param is None else param.shape[-1]
    return name, norms.recognise(run, size, None if param is None else param.dtype, eps)


def _recognised_mlp(
    module: Any, layers: tuple[str, str, str]
) -> tuple[gated.GatedRecipe, str, tuple[str, ...], tuple[str, str, str]]:
    """What an MLP computes, in which method, and in which order it calls gate and up."""
    kind, (gate, up, down) = type(module), layers
    others = [n for n, v in vars(module).items() if isinstance(v, nnx.Module) and n not in layers]
    if others:  # such as a dropout, which may be off while it is tried
        raise Unlike(f"it has other layers too: {', '.join(others)}")
    # Code that may rematerialise itself does so around its `block`.
    method = "block" if hasattr(kind, "block") else "__call__"
    order: list[str] = []

    def run(g: jax.Array, u: jax.Array) -> Any:
        x, y, seen = g + u, g - u, {}

        def layer(name: str, put_out: jax.Array) -> Callable[[jax.Array], jax.Array]:
            def called(given: jax.Array) -> jax.Array:
                if name in seen:
                    raise Unlike(f"it calls {name} more than once")
                seen[name] = given
                return put_out

            return called

        stubs = {gate: layer(gate, g), up: layer(up, u), down: layer(down, y)}
        out = getattr(kind, method)(_with(module, **stubs), x)
        if seen.keys() != {gate, up, down} or seen[gate] is not x or seen[up] is not x:
            raise Unlike(f"it does something else with x than {gate} and {up} of it")
        if out is not y:
            raise Unlike(f"it does something else with what {down} puts out than to return it")
        order[:] = [name for name in seen if name != down]
        return seen[down]

    recipe = gated.recognise(run)
    _sharding_of_hidden(module, getattr(kind, method))
    return recipe, method, tuple(order), layers


def _sharding_of_hidden(module: Any, own: Callable[..., Any]) -> Callable[[jax.Array], jax.Array]:
    """What the code does to the activation's result where there is a mesh.

    tunix and bonsai have settings `act_btf` for it, and a function `shard` of an array and these.
    """
    config = getattr(module, "config", None)
    held = (getattr(o, n, None) for o in (module, config) for n in ("shd_config", "shd_cfg"))
    specs = (getattr(settings, "act_btf", None) for settings in held)
    spec = next((spec for spec in specs if spec is not None), None)
    if spec is None:
        return lambda hidden: hidden
    names = inspect.unwrap(own).__globals__
    shard = names.get("shard") or getattr(names.get("sharding_utils"), "shard", None)
    if shard is None:
        raise Unlike("it shards its activations in an unknown way")
    return lambda hidden: shard(hidden, spec)


def _is_layer(module: Any, name: str) -> bool:
    return isinstance(vars(module).get(name), nnx.Module)


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _with(module: Any, **attributes: Any) -> Any:
    """A module that shares all but some attributes, which may be no modules."""
    other = object.__new__(type(module))
    vars(other).update(vars(module) | attributes)
    return other


def _settings(module: Any) -> tuple[tuple[str, Any], ...]:
    """The attributes that are neither parameters nor modules, as far as they can be compared."""
    return tuple(
        (name, value)
        for name, value in vars(module).items()
        if not isinstance(value, nnx.Variable | nnx.Module | jax.Array)
        and not name.startswith("_pytree")
        and hashable(value)
    )


def _parts(module: Any) -> tuple[Any, ...]:
    """Names and types of its modules, and what its parameters are but for their values.

    An attribute that cannot be compared makes it like no other module.
    """
    found = []
    for name, value in vars(module).items():
        if isinstance(value, nnx.Variable):
            found.append((name, value.shape, value.dtype))
        elif isinstance(value, nnx.Module):
            found.append((name, type(value)))
        elif not name.startswith("_pytree") and not hashable(value):
            found.append((name, id(module)))
    return tuple(found)


def _set_class(module: Any, kind: type) -> None:
    # Not by the module's own setattr, with which Flax would list the class among its attributes.
    object.__setattr__(module, "__class__", kind)


def _modules(model: Any) -> Iterator[tuple[str, Any]]:
    return ((".".join(map(str, path)), module) for path, module in nnx.iter_modules(model))
