"""What was patched in a model, what was not, and why."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PatchReport:
    """What `patch` has done.

    Attributes:
        patched: the kind of each module that runs by a fused kernel now, by its path.
        left_out: the other norms, gated MLPs and users of a rotation, and why they are as before.
    """

    patched: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        kinds = Counter(self.patched.values())
        done = ", ".join(f"{kind} x{count}" for kind, count in kinds.items()) or "nothing"
        reasons = Counter(self.left_out.values())
        return done + "".join(f"; left out x{n}: {reason}" for reason, n in reasons.items())
