"""Inside a decoder layer: the residual stream's addition and the norm after it in one kernel.

Everything else of the layer is called as the layer calls it. A layer is taken only if its code does
what LLaMA's does and nothing more, which is looked up in the code itself: Phi-3's has two dropouts
besides.
"""

import dis
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch_liger import norms
from torch_liger.patching.head import has_hooks
from torch_liger.patching.patched import Replacement, still_ours
from torch_liger.patching.redecorating import redecorated
from torch_liger.patching.replacements import RMSNorm

# What LLaMA's layer calls and computes, in this order; "," takes a tuple apart. A name in either
# place of None is that of a dropout.
_STEPS = (
    *("input_layernorm", "self_attn", ",", None, "+"),
    *("post_attention_layernorm", "mlp", None, "+"),
)
ATTEND = "_attend"  # the method of a layer that stands for its first norm and its attention


@dataclass(frozen=True)
class AddNorm(Replacement):
    """A decoder layer as LLaMA's.

    Args:
        dropouts: names of what the results of attention and of mlp go through, if anything.
    """

    dropouts: tuple[str | None, str | None] = (None, None)
    op: ClassVar[str] = "fused_add_rms_norm"

    def make(self) -> Callable[..., Any]:
        stock: Any = self.owner.forward  # type: ignore[attr-defined]
        defaults = _passed_on(stock)
        after_attention, after_mlp = self.dropouts

        def forward(module: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            given = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
            attend = module.__dict__.get(ATTEND)
            if attend is None:
                x, _ = module.self_attn(
                    hidden_states=module.input_layernorm(hidden_states), **given
                )
            else:
                x, _ = attend(hidden_states, given)
            if after_attention is not None:
                x = getattr(module, after_attention)(x)
            norm = module.post_attention_layernorm
            ours = settings_of(norm)
            if ours is None:
                residual = hidden_states + x
                x = norm(residual)
            else:
                x, residual = norms.fused_add_rms_norm(
                    x,
                    hidden_states,
                    norm.weight,
                    eps=getattr(norm, ours.eps),
                    offset=ours.offset,
                    casting_mode=ours.casting_mode,
                )
            x = module.mlp(x)
            return residual + (x if after_mlp is None else getattr(module, after_mlp)(x))

        decorated = redecorated(stock, forward)

        def layer(module: Any, *args: Any, **kwargs: Any) -> Any:
            # FSDP2 makes a subclass, which transformers gives a forward that checkpoints in place
            # of the one below: then the layer runs as it is.
            if type(module).forward is not stock:
                return type(module).forward(module, *args, **kwargs)
            return decorated(module, *args, **kwargs)

        return layer


def settings_of(norm: Any) -> RMSNorm | None:
    """Of a norm that does nothing but what `attach` has put there; else None."""
    ours = still_ours(norm, RMSNorm)
    return None if ours is None or has_hooks(norm) else ours


def dropouts_of(forward: Any) -> tuple[str | None, str | None] | None:
    """The names of what a layer as LLaMA's has for dropouts; None for a layer of another kind,
    which does other steps or does not pass all that it gets to attention.
    """
    code = inspect.unwrap(forward).__code__
    names = set(_passed_on(forward))
    if not any(isinstance(c, tuple) and names < set(c) for c in code.co_consts):
        return None
    steps = list(_steps_of(code))
    found: list[str | None] = []
    for wanted in _STEPS:
        if wanted is None:
            # What is called there must be a module; other operations have no name.
            found.append(steps.pop(0) if steps and steps[0].isidentifier() else None)
        elif not steps or steps.pop(0) != wanted:
            return None
    return None if steps else (found[0], found[1])


def _passed_on(forward: Any) -> dict[str, Any]:
    """The parameters after hidden_states, with their defaults."""
    parameters = list(inspect.signature(inspect.unwrap(forward)).parameters.values())[2:]
    return {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}


def _steps_of(code: Any) -> tuple[str, ...]:
    found = []
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL"):
            found.append(step.argval)
        elif step.opname == "BINARY_OP":
            found.append(step.argrepr)
        elif step.opname == "UNPACK_SEQUENCE":
            found.append(",")
    return tuple(found)
