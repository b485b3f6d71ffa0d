"""Every call of every module of a model: what goes into it and what comes out.

PyTorch's modules have hooks. Flax's have none, so their classes' `__call__` is wrapped for as long
as they are watched. Names are paths such as `layers.0.mlp`; the model's own is "".
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

# before(name, args, kwargs) gives the arguments to go on with; after(name, args, kwargs, output)
# the output.
Before = Callable[[str, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
After = Callable[[str, tuple[Any, ...], dict[str, Any], Any], Any]


def as_it_is(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A `Before` that changes nothing."""
    return args, kwargs


@contextlib.contextmanager
def torch_calls(model: Any, after: After, before: Before = as_it_is) -> Iterator[None]:
    """Watches an `nn.Module` and all in it."""
    handles = []
    for name, module in model.named_modules():
        if before is not as_it_is:
            handles.append(
                module.register_forward_pre_hook(
                    lambda _, args, kwargs, n=name: before(n, args, kwargs), with_kwargs=True
                )
            )
        handles.append(
            module.register_forward_hook(
                lambda _, args, kwargs, output, n=name: after(n, args, kwargs, output),
                with_kwargs=True,
            )
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def nnx_calls(model: Any, after: After, before: Before = as_it_is) -> Iterator[dict[int, str]]:
    """Watches an `nnx.Module` and all in it; gives the modules' names by their `id`."""
    from flax import nnx

    modules = [(".".join(map(str, path)), module) for path, module in nnx.iter_modules(model)]
    names = {id(module): name for name, module in modules}
    running: set[int] = set()  # a `__call__` may call that of the class above it

    def wrapped(call: Any) -> Any:
        @functools.wraps(call)
        def watched(self, *args, **kwargs):
            name = names.get(id(self))
            if name is None or id(self) in running:
                return call(self, *args, **kwargs)
            running.add(id(self))
            try:
                args, kwargs = before(name, args, kwargs)
                return after(name, args, kwargs, call(self, *args, **kwargs))
            finally:
                running.discard(id(self))

        return watched

    owners = [_owner_of_call(type(module)) for _, module in modules]
    originals = {owner: vars(owner)["__call__"] for owner in owners if owner is not None}
    try:
        for owner, call in originals.items():
            owner.__call__ = wrapped(call)
        yield names
    finally:
        for owner, call in originals.items():
            owner.__call__ = call


def _owner_of_call(kind: type) -> Any:
    """The class that defines the `__call__` of this one."""
    return next((owner for owner in kind.__mro__ if "__call__" in vars(owner)), None)
