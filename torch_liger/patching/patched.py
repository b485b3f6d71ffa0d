"""Putting a method of ours on one module, or on all that a class will make, and taking it off.

The method stands in the instance's own `__dict__`, where `nn.Module.__call__` finds it before the
class's. So the type, its name, the parameters, the hooks and every other instance stay as they
are. It is a plain bound method: torch.compile looks through one without tying a compiled layer to
one module, which it does not do for other callables, and `copy.deepcopy` binds it to the copy.
A module then refers to itself, so a patched model that is dropped goes at the next garbage
collection, and an unpatched one at once.
"""

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

RECORD = "_liger_patches"  # the key, beside the method, of what was put there
_REPLICATE = "_replicate_for_data_parallel"


@dataclass(frozen=True)
class Replacement:
    """What to put in the place of one method. The fields of its subclasses are its settings.

    Args:
        owner: the class whose method it replaces.
    """

    owner: type
    method: ClassVar[str] = "forward"

    @property
    def op(self) -> str:
        """The name under which it is counted in reports."""
        raise NotImplementedError

    def make(self) -> Callable[..., Any]:
        """The function, whose first argument is the module."""
        raise NotImplementedError

    def why_aside(self, module: torch.nn.Module) -> str | None:
        """Why the function does on this module, as it is now, what was done without it; or None."""
        return None


@functools.cache
def function_of(replacement: Replacement) -> Callable[..., Any]:
    """The same function for equal replacements, so that one compiled layer serves them all."""
    function = replacement.make()
    stock = getattr(replacement.owner, replacement.method, None)
    if stock is not None:  # the signature too: trainers and generate() look at it
        functools.update_wrapper(function, stock)
    function.__name__ = replacement.method  # by which pickle finds a bound method again
    return function


class Record(dict[str, Replacement]):
    """The replacements on one module by method name, and what stood in `__dict__` before.

    Unpickling puts the methods back in place. It stands before them in the module's `__dict__`, so
    when they are unpickled, as `getattr(module, name)`, they are found there.
    """

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module
        self.before: dict[str, Any] = {}
        self.functions: dict[str, Callable[..., Any]] = {}
        self.kept: dict[str, Any] = {}  # what functions keep between calls; not copied or saved

    def put(self, replacement: Replacement) -> None:
        self[replacement.method] = replacement
        function = self.functions[replacement.method] = function_of(replacement)
        attributes, slot = self.module.__dict__, slot_of(self.module, replacement.method)
        attributes.pop(slot, None)  # so that it comes to stand after the record
        attributes[slot] = types.MethodType(function, self.module)
        if _REPLICATE not in attributes:
            attributes[_REPLICATE] = types.MethodType(_replicate_for_data_parallel, self.module)

    def __reduce__(self) -> Any:
        return _record_of, (self.module, dict(self), self.before)


def _record_of(
    module: torch.nn.Module, replacements: dict[str, Replacement], before: dict[str, Any]
) -> Record:
    record = Record(module)
    record.before.update(before)
    for replacement in replacements.values():
        record.put(replacement)
    return record


def _replicate_for_data_parallel(module: Any) -> Any:
    """`nn.DataParallel` copies the `__dict__` for every device: its methods get the replica."""
    replica = type(module)._replicate_for_data_parallel(module)
    for name, value in module.__dict__.items():
        if isinstance(value, types.MethodType) and value.__self__ is module:
            replica.__dict__[name] = types.MethodType(value.__func__, replica)
    return replica


def record_of(module: torch.nn.Module) -> dict[str, Replacement]:
    """The replacements on a module by method name; empty for one that is as it was."""
    return module.__dict__.get(RECORD, {})


def still_ours(module: torch.nn.Module, kind: type, slot: str = "forward") -> Any:
    """The replacement of the module's forward, if it is of this kind and nothing else has come to
    stand in the slot since; else None.
    """
    record = record_of(module)
    ours = record.get("forward")
    if not isinstance(record, Record) or not isinstance(ours, kind):
        return None
    now = getattr(module.__dict__.get(slot), "__func__", None)
    return ours if now is record.functions["forward"] else None


def why_not(module: torch.nn.Module, replacement: Replacement) -> str | None:
    """The reason why the method on this module must stay, or None."""
    name = replacement.method
    current = module.__dict__.get(slot_of(module, name))
    stock = getattr(replacement.owner, name, None)
    if getattr(type(module), name, None) is not stock:
        return f"{type(module).__name__} has a {name} of its own"
    if current is not None and getattr(current, "__func__", None) is not stock:
        by = getattr(current, "__qualname__", type(current).__name__)
        return f"{name} was already replaced, by {by}"
    return None


def attach(module: torch.nn.Module, replacement: Replacement) -> None:
    """Replaces the method on this module alone."""
    record = module.__dict__.get(RECORD)
    if record is None:
        record = module.__dict__[RECORD] = Record(module)
    slot = slot_of(module, replacement.method)
    if slot in module.__dict__:
        record.before[replacement.method] = module.__dict__[slot]
    record.put(replacement)


def detach(module: torch.nn.Module, name: str) -> None:
    """Takes the method off again: afterwards the `__dict__` holds the very objects of before.

    If someone has wrapped it in the meantime, their wrapper stays; ours then does what the class's
    method does (see `causal_lm`).
    """
    record = module.__dict__[RECORD]
    del record[name]
    function = record.functions.pop(name)
    record.kept.clear()
    for slot in (name, "_old_" + name):  # accelerate may have come or gone since
        if getattr(module.__dict__.get(slot), "__func__", None) is not function:
            continue
        if name in record.before:
            module.__dict__[slot] = record.before.pop(name)
        elif slot == name:
            del module.__dict__[slot]
        else:
            module.__dict__[slot] = types.MethodType(getattr(type(module), name), module)
    if not record:
        del module.__dict__[RECORD], module.__dict__[_REPLICATE]


def slot_of(module: torch.nn.Module, name: str) -> str:
    """Where the method stands: accelerate's hooks wrap it and keep it under another name."""
    wrapped = name == "forward" and "_hf_hook" in module.__dict__
    return "_old_forward" if wrapped and "_old_forward" in module.__dict__ else name


# Constructors that are wrapped so that what they make is patched: what the class had of its own,
# and the patches by the operation's name.
_constructors: dict[type, tuple[Any, dict[str, Callable[[torch.nn.Module], None]]]] = {}


def attach_to_class(cls: type, op: str, patch: Callable[[torch.nn.Module], None]) -> bool:
    """Calls `patch` on every module that the class's constructor makes from now on.

    The class keeps all its methods, and modules made before are not touched. Several operations are
    patched in the order in which they came.
    """
    if cls in _constructors:
        patches = _constructors[cls][1]
        return patches.setdefault(op, patch) is patch
    constructor = cls.__init__  # type: ignore[misc]
    patches = {op: patch}
    _constructors[cls] = cls.__dict__.get("__init__"), patches

    @functools.wraps(constructor)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        constructor(self, *args, **kwargs)
        for patch in patches.values():
            patch(self)

    cls.__init__ = __init__  # type: ignore[misc]
    return True


def detach_from_class(cls: type) -> None:
    """Gives the class back the constructor it had."""
    own, _ = _constructors.pop(cls)
    if own is None:  # it was inherited
        del cls.__init__  # type: ignore[misc]
    else:
        cls.__init__ = own  # type: ignore[misc]


def patched_classes() -> list[type]:
    """The classes that `attach_to_class` has changed."""
    return list(_constructors)
