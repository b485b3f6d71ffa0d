"""Named inputs for tests and benchmarks, and the kernels' tile choices."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from liger_ops.cross_entropy.oracle import Arguments
from liger_ops.drawing import DTYPES, draw_normal


@dataclass(frozen=True)
class Config:
    """How the kernels take the V logits of a row.

    Attributes:
        forward_steps, forward_columns: the forward reads a tile of (steps, columns) consecutive
            logits at once, and keeps a running maximum and sum a column; both powers of two.
        backward_block: logits a program of the backward turns into gradients.
        forward_warps, backward_warps: warps a program.
    """

    forward_steps: int
    forward_columns: int
    forward_warps: int
    backward_block: int
    backward_warps: int

    @classmethod
    def for_shape(cls, classes: int) -> "Config":
        """The tiles for V = `classes`, by a sweep on an H200: docs/memory_bound.md."""
        whole = max(1 << (classes - 1).bit_length(), 16)
        columns = min(whole, 1024)
        return cls(min(whole // columns, 8), columns, 4, min(whole, 4096), 4)


@dataclass(frozen=True)
class Case:
    """One input of cross_entropy.

    Attributes:
        ignored, invalid: positions (in the flattened labels) of such labels.
        offset: added to all logits before they are rounded.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    arguments: Arguments = field(default_factory=Arguments)
    class_weight_dtype: str | None = None
    ignored: tuple[int, ...] = (0, 3)
    spread: float = 3.0
    offset: float = 0.0

    def draw(self, seed: int = 0) -> dict[str, np.ndarray]:
        """logits, labels, and class_weight where the case has it."""
        rng = np.random.default_rng([seed, *self.shape])
        inputs = {
            "logits": draw_normal(
                rng, self.shape, self.dtype, center=self.offset, spread=self.spread
            ),
            "labels": rng.integers(0, self.shape[-1], self.shape[:-1]),
        }
        for position in self.ignored:
            if position < inputs["labels"].size:
                inputs["labels"].reshape(-1)[position] = self.arguments.ignore_index
        if self.class_weight_dtype is not None:
            weight = rng.uniform(0.2, 2.0, self.shape[-1:])
            inputs["class_weight"] = weight.astype(DTYPES[self.class_weight_dtype])
        return inputs


EVERYTHING: dict[str, Any] = {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-2}


def _cases() -> list[Case]:
    cases = [
        Case(f"{dtype}-{reduction}", (6, 50), dtype, Arguments(reduction=reduction))
        for dtype in ("float32", "bfloat16", "float16")
        for reduction in ("mean", "sum", "none")
    ]
    cases += [
        Case(f"{name}-{reduction}", (7, 41), "float32", Arguments(reduction=reduction, **{name: v}))
        for name, v in EVERYTHING.items()
        for reduction in ("mean", "none")
    ]
    cases += [
        Case(
            f"everything-{dtype}-{reduction}", (2, 5, 300), dtype,
            Arguments(reduction=reduction, **EVERYTHING), weight_dtype,
        )
        for dtype, weight_dtype in (
            ("float32", "float32"), ("bfloat16", "float32"), ("float16", "bfloat16"),
        )
        for reduction in ("mean", "sum", "none")
    ]  # fmt: skip
    cases += [
        Case("weight-mean", (9, 33), class_weight_dtype="float32"),
        Case("num-items", (9, 33), arguments=Arguments(num_items=37), class_weight_dtype="float32"),
        Case("num-items-z", (9, 33), arguments=Arguments(num_items=5.0, z_loss=1e-3)),
        Case("ignore-index-is-a-class", (9, 33), arguments=Arguments(ignore_index=5)),
        Case("large-offset", (6, 100), offset=1e4, arguments=Arguments(label_smoothing=0.1)),
        Case("large-offset-bfloat16", (6, 100), "bfloat16", offset=-3e4),
        Case("peaked", (6, 100), "bfloat16", spread=40.0),
        Case("all-ignored", (3, 20), ignored=(0, 1, 2)),
        Case("one-dimension", (20,), ignored=()),
    ]
    cases += [
        Case(f"shape-{'x'.join(map(str, shape))}", shape, "bfloat16")
        for shape in ((1, 1), (5, 2), (0, 7), (3, 257), (2, 2049), (2, 20000), (2, 3, 16384))
    ]
    return cases


CASES = _cases()
