"""The names by which operations are switched on and off, in our spelling and in others'."""

import inspect
from typing import Any

from torch_liger.patching.families import Family

# Second spellings of the same switch.
SPELLINGS = {
    "use_fused_rmsnorm": "rms_norm",
    "use_fused_rms_norm": "rms_norm",
    "use_fused_layernorm": "layer_norm",
    "use_fused_layer_norm": "layer_norm",
    "use_fused_rope": "rope",
    "use_fused_swiglu": "swiglu",
    "use_fused_geglu": "geglu",
    "use_fused_cross_entropy": "cross_entropy",
    "use_fused_linear_cross_entropy": "fused_linear_cross_entropy",
    "use_fused_qkv": "fused_qkv",
}


FUSED_QKV_NEEDS = ("rms_norm", "rope", "fused_add_rms_norm")


def spelled(name: str, family: Family) -> str:
    """The family's own name for a switch: its gate answers to "swiglu" and "geglu" alike."""
    name = SPELLINGS.get(name, name)
    return family.gate if name in ("swiglu", "geglu") else name


def resolve(family: Family, given: dict[str, Any], caller: str) -> dict[str, bool]:
    """Every switch of the family, as given or by default.

    Raises:
        TypeError: for a name the family does not have, or two spellings that disagree.
        ValueError: for a combination or an operation that there is not.
    """
    switches = family.switches()
    spellings: dict[str, str] = {}
    for name, value in given.items():
        switch = spelled(name, family)
        if switch not in switches:
            raise TypeError(
                f"{caller}() got an unexpected keyword argument {name!r}; it takes "
                f"{', '.join(switches)}, and {', '.join(SPELLINGS)}"
            )
        if value is None:
            continue
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False; got {value!r}")
        if switch in spellings and value != switches[switch]:
            raise TypeError(
                f"{spellings[switch]} and {name} are the same switch; got "
                f"{switches[switch]} and {value}"
            )
        switches[switch], spellings[switch] = value, name
    for switch, reason in family.why_missing().items():
        if switches[switch]:
            raise ValueError(f"{switch} must be False for {family.name}: {reason}; got True")
    if switches.get("fused_qkv"):
        off = [name for name in FUSED_QKV_NEEDS if not switches[name]]
        if off:
            raise ValueError(
                f"fused_qkv=True needs {', '.join(FUSED_QKV_NEEDS)}, which it is made of or runs "
                f"beside; got False for {', '.join(off)}"
            )
    if switches.get("cross_entropy") and switches.get("fused_linear_cross_entropy"):
        raise ValueError(
            "cross_entropy and fused_linear_cross_entropy exclude each other; got True and True "
            "(pass fused_linear_cross_entropy=False for the loss over given logits)"
        )
    return switches


def signature(family: Family) -> inspect.Signature:
    """model, then the family's switches with their defaults, then the second spellings."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    switches = family.switches()
    parameters = [inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)]
    parameters += [inspect.Parameter(n, keyword, default=on) for n, on in switches.items()]
    others = ["swiglu", "geglu", *SPELLINGS]
    parameters += [
        inspect.Parameter(name, keyword, default=None)
        for name in others
        if name not in switches and spelled(name, family) in switches
    ]
    return inspect.Signature(parameters)
