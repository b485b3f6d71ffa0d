"""Someone else's Flax nnx model by the fused kernels, in place and reversibly.

    print(patch(model))
    ...
    unpatch(model)

Each stock norm gets a class that extends its own, by way of the one of `jax_liger.nnx`. The module
stays the same object with the same attributes, so that checkpoints, optimizers and rules for
sharding keep fitting.
"""

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jax_liger.flax_options import check_stock_options


@dataclass(frozen=True)
class PatchReport:
    """What `patch` has done.

    Attributes:
        patched: the kind of each module that runs by the fused kernel now, by its path.
        left_out: the other norms, and why they are as before.
    """

    patched: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        kinds = Counter(self.patched.values())
        done = ", ".join(f"{kind} x{count}" for kind, count in kinds.items()) or "nothing"
        reasons = Counter(self.left_out.values())
        return done + "".join(f"; left out x{n}: {reason}" for reason, n in reasons.items())


def patch(model: Any, *, implementation: str | None = None) -> PatchReport:
    """Lets the stock norms of an nnx model run by the fused kernels.

    Args:
        model: an `nnx.Module`. Its `nnx.RMSNorm` and `nnx.LayerNorm` are changed, but no subclass
            of theirs. A second call changes nothing.
        implementation: that of `jax_liger.rms_norm` and `jax_liger.layer_norm`.

    Returns:
        A `PatchReport`.

    The results are rounded as the stock modules' are. Norms over other than the last axis, or
    across devices, are left out; a call with a mask raises ValueError.
    """
    report, kinds = PatchReport(), _kinds()
    for path, module in _modules(model):
        fused = kinds.get(type(module))
        if fused is None:
            continue
        try:
            check_stock_options(module)
        except ValueError as error:
            report.left_out[path] = str(error)
            continue
        _set_class(module, _standing_in(fused, implementation))
        report.patched[path] = fused.__name__
    return report


def unpatch(model: Any) -> list[str]:
    """Gives all patched modules of a model their own class back; returns their paths."""
    changed = []
    for path, module in _modules(model):
        stock = getattr(type(module), "stands_in_for", None)
        if stock is not None:
            _set_class(module, stock)
            changed.append(path)
    return changed


def _set_class(module: Any, kind: type) -> None:
    # Not by the module's own setattr, with which Flax would list the class among its attributes.
    object.__setattr__(module, "__class__", kind)


def _kinds() -> dict[type, type]:
    """Stock classes, and ours that extend them."""
    from flax import nnx

    from jax_liger.nnx import LayerNorm, RMSNorm

    return {nnx.RMSNorm: RMSNorm, nnx.LayerNorm: LayerNorm}


@functools.cache
def _standing_in(fused: type, implementation: str | None) -> type:
    """Our class with settings of the class instead of the module, as the stock one computes."""
    settings = {"offset": 0.0, "casting_mode": "none"} if fused.__name__ == "RMSNorm" else {}
    settings |= {"implementation": implementation, "stands_in_for": fused.__mro__[1]}
    return type(fused.__name__, (fused,), {"__module__": __name__, **settings})


def _modules(model: Any) -> Iterator[tuple[str, Any]]:
    from flax import nnx

    return ((".".join(map(str, path)), module) for path, module in nnx.iter_modules(model))
