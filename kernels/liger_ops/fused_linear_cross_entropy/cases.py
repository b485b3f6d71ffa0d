"""How the logits are cut into parts, and named inputs for tests and benchmarks."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from liger_ops.cross_entropy.cases import EVERYTHING
from liger_ops.cross_entropy.oracle import Arguments
from liger_ops.drawing import DTYPES, draw_normal

MIB = 2**20
SCRATCH = 250 * MIB  # of logits beside a float32 sum of the weight's gradient
ALONE = 400 * MIB  # of logits where there is no such sum
LEAST = 256 * MIB
ROWS = 128  # parts are multiples of so many rows, which a matrix product's tiles fill
# Tiles of 128 x 256 that an H200 (132 multiprocessors) works on at once. A part should have as many
# rows as make hidden's gradient a whole number of such waves, or a little less. In JAX 1536 rows of
# 4096 columns, a wave and a half, took 1.12 of the products' time in all, and 2048 rows 1.05.
WAVE, TILE_COLUMNS = 132, 256
# A product of fewer multiplications takes less than a millisecond on an H200, of which launching a
# kernel of its own (PyTorch) or waiting for the rows that count (JAX) would be a part that shows.
LEAST_WORK = 2**38


@dataclass(frozen=True)
class Plan:
    """How many rows' logits exist at once.

    Attributes:
        rows: of one part; as many as there are for a single part.
        keeps_logits: a single part's logits live until the backward, which turns them into their
            gradient. Nothing is then computed twice or scaled afterwards.
        in_gradient: a part's logits lie in the memory that the weight's gradient will take.
        classes: of one block of the weight's gradient, where that is made block by block over all
            rows, from logits computed once more; None where it is summed over the parts.
        skips_kept: in JAX, ignored rows are left out of kept logits' products too, which takes
            room for a copy of three quarters of them, and is worth it where products are long.
    """

    rows: int
    keeps_logits: bool
    in_gradient: bool
    classes: int | None
    skips_kept: bool = False

    @classmethod
    def for_shape(
        cls,
        rows: int,
        dim: int,
        vocab: int,
        itemsize: int,
        *,
        sum_itemsize: int,
        needs_weight: bool,
        memory: str | int = "fast",
    ) -> "Plan":
        """The plan for hidden (rows, dim) and a head of `vocab` classes.

        Args:
            itemsize: bytes of a logit.
            sum_itemsize: bytes of an element in which the weight's gradient is summed.
            needs_weight: whether that gradient is wanted.
            memory: "fast"; "least", which computes the logits twice and keeps no sum; or the bytes
                that may be used beside the inputs and the gradients.
        """
        row_bytes = vocab * itemsize
        in_float32 = needs_weight and sum_itemsize > itemsize
        sum_bytes = vocab * dim * sum_itemsize if in_float32 else 0
        if memory == "fast":
            budget = sum_bytes + (SCRATCH if in_float32 else ALONE)
        else:
            budget = LEAST if memory == "least" else int(memory)
        if rows * row_bytes <= budget:
            skips = rows * row_bytes * 7 // 4 <= budget and rows * dim * vocab >= LEAST_WORK
            return cls(rows, True, False, None, skips)
        if budget < sum_bytes + ROWS * row_bytes and in_float32:
            # No room for the sum. Half for a part's logits, in the forward or in a block's turn.
            part = _parts(rows, dim, budget // row_bytes)
            block = max(budget // max(rows * itemsize, 1) // ROWS * ROWS, ROWS)
            return cls(part, False, False, min(block, vocab))
        fit = (budget - sum_bytes) // row_bytes
        # The gradient's own memory, dim rows' logits, is free until the sum is cast into it.
        in_gradient = in_float32 and dim > fit
        return cls(_parts(rows, dim, dim if in_gradient else fit), False, in_gradient, None)


def _parts(rows: int, dim: int, most: int) -> int:
    """Rows of equal parts of at most `most` rows, or of ROWS where that is more."""
    wave = max(WAVE // -(-dim // TILE_COLUMNS), 1) * ROWS
    unit = wave if most >= wave else ROWS
    most = max(most // unit, 1) * unit
    parts = max(-(-rows // most), 1)
    return min(-(-rows // parts // ROWS) * ROWS, most)


@dataclass(frozen=True)
class Case:
    """One input of fused_linear_cross_entropy; `ignored` are positions in the flattened labels."""

    name: str
    rows: tuple[int, ...]
    dim: int
    vocab: int
    dtype: str = "float32"
    arguments: Arguments = field(default_factory=Arguments)
    bias_dtype: str | None = None
    class_weight_dtype: str | None = None
    logit_scale: float = 1.0
    memory: str | int = "fast"
    ignored: tuple[int, ...] = (0, 3)

    def draw(self, seed: int = 0) -> dict[str, np.ndarray]:
        """hidden, weight, labels, and as the case has them bias and class_weight."""
        rng = np.random.default_rng([seed, *self.rows, self.dim, self.vocab])
        labels = rng.integers(0, self.vocab, self.rows)
        for position in self.ignored:
            if position < labels.size:
                labels.reshape(-1)[position] = self.arguments.ignore_index
        inputs = {
            "hidden": draw_normal(rng, (*self.rows, self.dim), self.dtype),
            # Logits of spread 3, as a trained head gives.
            "weight": draw_normal(
                rng, (self.vocab, self.dim), self.dtype, spread=3.0 / self.dim**0.5
            ),
            "labels": labels,
        }
        if self.bias_dtype is not None:
            inputs["bias"] = draw_normal(rng, (self.vocab,), self.bias_dtype)
        if self.class_weight_dtype is not None:
            weight = rng.uniform(0.2, 2.0, (self.vocab,))
            inputs["class_weight"] = weight.astype(DTYPES[self.class_weight_dtype])
        return inputs


_ALL: dict[str, Any] = {"bias_dtype": "float32", "class_weight_dtype": "float32"}
# So little memory that 300 rows are taken in parts: with a float32 sum of 80 x 24 and without one.
_PARTS, _BLOCKS = 80 * 24 * 4 + 128 * 80 * 2, 128 * 80 * 2


def _cases() -> list[Case]:
    cases = [
        Case(f"{dtype}-{reduction}", (9,), 24, 80, dtype, Arguments(reduction=reduction))
        for dtype in ("float32", "bfloat16", "float16")
        for reduction in ("mean", "sum", "none")
    ]
    cases += [
        Case(
            f"everything-{plan}-{reduction}", (300,), 24, 80, dtype,
            Arguments(reduction=reduction, **EVERYTHING), logit_scale=0.7, memory=memory, **_ALL,
        )
        for plan, memory, dtype in (
            ("kept", "fast", "float32"), ("kept", "fast", "bfloat16"),
            ("parts", _PARTS, "bfloat16"), ("blocks", _BLOCKS, "bfloat16"),
            ("parts", 128 * 80 * 4, "float32"), ("parts", _PARTS, "float16"),
        )
        for reduction in ("mean", "none")
    ]  # fmt: skip
    cases += [
        Case("bias-only", (5, 4), 16, 33, bias_dtype="float32"),
        Case("scale-only", (5, 4), 16, 33, "bfloat16", logit_scale=8.0),
        Case("num-items", (2, 7), 16, 33, "bfloat16", Arguments(num_items=37)),
        Case("parts-sum", (300,), 24, 80, "bfloat16", Arguments(reduction="sum"), memory=_PARTS),
        Case("all-ignored-parts", (300,), 24, 80, "bfloat16", memory=_PARTS,
             ignored=tuple(range(300))),
        Case("odd-vocabulary", (130,), 20, 257, "bfloat16", memory=128 * 257 * 2 + 257 * 20 * 4),
        Case("blocks-of-classes", (300,), 24, 290, "bfloat16", memory=128 * 290 * 2),
        Case("one-row", (1,), 8, 2, ignored=()),
        Case("no-rows", (0, 3), 8, 5),
    ]  # fmt: skip
    return cases


CASES = _cases()
