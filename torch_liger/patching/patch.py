"""Applying the table to a model, or to all models made from now on, and undoing it."""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from torch_liger.patching import patched
from torch_liger.patching.causal_lm import FusedLoss
from torch_liger.patching.families import ANY_NORMS, OPS, Family, Maker, family_of
from torch_liger.patching.patched import Replacement
from torch_liger.patching.report import Report, log_once

_LOGGER = logging.getLogger("torch_liger")

Change = tuple[torch.nn.Module, Replacement]


def patch_model(
    model: torch.nn.Module, family: Family, switches: dict[str, bool]
) -> tuple[Report, list[Change]]:
    """Patches one instance; logs what was done, unless it had been done before.

    Returns:
        The report on the model as it is now, and what this call has changed in it.

    Raises:
        ValueError: if the model has no module of this family.
    """
    model_type = type_of(model)
    if not any(found for switch in switches for found, _ in _matches(model, family, switch)):
        raise ValueError(
            f"the model must be of the family {family.name}; got {type(model).__name__} of type "
            f"{model_type!r}, without any of its modules"
        )
    changes: list[Change] = []
    for switch in (switch for switch, on in switches.items() if on):
        plan = [(m, r) for m, r in _plan(model, family, switch) if isinstance(r, Replacement)]
        for module, replacement in plan:
            patched.attach(module, replacement)
        changes += plan
    report = report_on(model, family, switches)
    if changes:
        _LOGGER.info("%s", report)
    return report, changes


def patch_classes(family: Family, switches: dict[str, bool]) -> tuple[Report, list[type]]:
    """Has every model of the family that is made from now on patched as it is made.

    Returns:
        The report, which counts classes, and the classes that this call has changed.
    """
    changed, applied, left_out = [], Counter[str](), {}
    for switch, on in switches.items():
        classes = family.classes(switch) if on else {}
        # A class of PyTorch's own would change far more than this family's models.
        classes = {cls: maker for cls, maker in classes.items() if cls is not torch.nn.LayerNorm}
        for cls, maker in classes.items():
            applied[switch] += 1
            if patched.attach_to_class(cls, switch, _patch_when_made(cls, maker)):
                changed.append(cls)
        if not classes:
            left_out[switch] = family.why_missing().get(switch) or (
                "switched off" if not on else "of no class that is this family's alone"
            )
    if not applied:
        raise ValueError(
            f"model must be given for {family.name}, since no class of its own is patched; got None"
        )
    report = Report(family.name, dict(applied), left_out)
    if changed:
        _LOGGER.info("%s (models made from now on)", report)
    return report, changed


def _patch_when_made(cls: type, maker: Maker) -> Any:
    def patch(module: torch.nn.Module) -> None:
        replacement = maker(cls, module)
        if isinstance(replacement, Replacement):
            reason = patched.why_not(module, replacement)
            if reason is None:
                patched.attach(module, replacement)
                return
        else:
            reason = replacement
        log_once(logging.INFO, f"{type(module).__name__} is left as it is: {reason}")

    return patch


def unpatch(model: torch.nn.Module | None = None) -> None:
    """Takes everything off: from one model, or, without one, from the classes.

    Afterwards methods, functions and constructors are the very objects they were before. Models
    made while their classes were patched stay as they are until they are unpatched themselves.
    """
    if model is None:
        undo_classes(patched.patched_classes())
    else:
        undo([(m, r) for m in model.modules() for r in patched.record_of(m).values()])


def undo(changes: Iterable[Change]) -> None:
    """Takes back what `patch_model` has changed, where that is still so."""
    for module, replacement in list(changes):
        if patched.record_of(module).get(replacement.method) == replacement:
            patched.detach(module, replacement.method)


def undo_classes(classes: Iterable[type]) -> None:
    """Takes back what `patch_classes` has changed."""
    for cls in classes:
        if cls in patched.patched_classes():
            patched.detach_from_class(cls)


def report(model: torch.nn.Module) -> Report:
    """What in a model is computed by torch_liger now, and what is not, and why."""
    family = family_of(type_of(model)) or ANY_NORMS
    return report_on(model, family, family.switches())


def report_on(model: torch.nn.Module, family: Family, switches: dict[str, bool]) -> Report:
    """The report on a model as it is now, for operations that were switched on or off."""
    asides = list(_asides(model))
    applied = _applied(model, asides)
    left_out = {}
    for switch, on in switches.items():
        reasons = Counter(r for _, r in _plan(model, family, switch) if isinstance(r, str))
        reasons += Counter(aside for op, aside in asides if op == switch)
        # A gate is counted by the activation it has, and switched by the family's usual one.
        ops = ("swiglu", "geglu") if switch == family.gate else (switch,)
        done = sum(applied.get(op, 0) for op in ops)
        left = sum(reasons.values())
        if reasons:
            total = f"{left} of {done + left}: " if done else ""
            left_out[switch] = total + "; ".join(reasons)
        elif not done:
            left_out[switch] = _why_nothing(model, family, switch, on)
    return Report(str(type_of(model)), applied, left_out)


def _why_nothing(model: torch.nn.Module, family: Family, switch: str, on: bool) -> str:
    missing = family.why_missing().get(switch)
    if missing is not None:
        return missing
    if not on or any(True for _ in _matches(model, family, switch)):
        return "switched off"
    names = " or ".join(family.prefix + name for name in family.makers(switch))
    return f"the model has no {names}"


def _applied(model: torch.nn.Module, asides: list[tuple[str, str]]) -> dict[str, int]:
    ops = Counter(r.op for m in model.modules() for r in patched.record_of(m).values())
    ops.subtract(op for op, _ in asides)
    return {op: ops[op] for op in OPS if ops[op]}


def _asides(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """The operations of replacements that do nothing as the model is now, each with the reason."""
    for module in model.modules():
        for replacement in patched.record_of(module).values():
            reason = replacement.why_aside(module)
            if reason is not None:
                yield replacement.op, reason


def _plan(
    model: torch.nn.Module, family: Family, switch: str
) -> Iterator[tuple[torch.nn.Module, Replacement | str]]:
    """For every module that the operation is for and that is not done: what to put, or why not."""
    for module, (cls, maker) in _matches(model, family, switch):
        replacement = maker(cls, module)
        if isinstance(replacement, FusedLoss) and _inside_another(model, module):
            replacement = "the model around it computes the loss, from its logits"
        if isinstance(replacement, str):
            yield module, replacement
        elif patched.record_of(module).get(replacement.method) is None:
            yield module, patched.why_not(module, replacement) or replacement


def _inside_another(model: torch.nn.Module, module: torch.nn.Module) -> bool:
    """Whether `module` is the language model inside a multimodal one of transformers."""
    return any(
        type(outer).__name__.endswith("ForConditionalGeneration") and module in outer.modules()
        for outer in model.modules()
        if outer is not module
    )


def _matches(
    model: torch.nn.Module, family: Family, switch: str
) -> Iterator[tuple[torch.nn.Module, tuple[type, Maker]]]:
    classes = family.classes(switch)
    for module in model.modules():
        # Wrappers such as FSDP make a subclass on the fly: then it is the base that we know.
        cls = next((cls for cls in type(module).__mro__ if cls in classes), None)
        if cls is not None:
            yield module, (cls, classes[cls])


def type_of(model: torch.nn.Module) -> str | None:
    """config.model_type, of the first module inside that has a config with a row in the table."""
    found = None
    for module in model.modules():
        config = module.__dict__.get("config")
        model_type = getattr(config, "model_type", None)
        if family_of(model_type) is not None:
            return model_type
        found = found or model_type
    return found
