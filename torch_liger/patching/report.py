"""What was replaced in a model, what was not, and why."""

import functools
import logging
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Report:
    """Returned by every `apply_liger_kernel_to_*` and by `report`.

    Attributes:
        model_type: of the model's config.
        applied: how many modules compute each operation by ours.
        left_out: for every other operation of the family, the reason; a part of one too.
    """

    model_type: str
    applied: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        applied = ", ".join(f"{op} x{count}" for op, count in self.applied.items()) or "nothing"
        left_out = "; ".join(f"{op} ({reason})" for op, reason in self.left_out.items())
        line = f"Applied Liger kernel to {self.model_type}: {applied}"
        return f"{line}. Left out: {left_out}" if left_out else line


@functools.cache
def log_once(level: int, message: str) -> None:
    """Logs what holds for many modules, or for every step, one time."""
    logging.getLogger("torch_liger").log(level, message)
