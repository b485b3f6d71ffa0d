"""How rows are cut into parts, the dropout kernel's tiles, and named inputs for tests."""

from dataclasses import dataclass

import numpy as np

from liger_ops.drawing import draw_normal

SCRATCH = 256 * 2**20  # bytes of one part's cast or dropped-out rows


def rows_of_a_part(width: int, itemsize: int) -> int:
    """Rows of `width` elements that SCRATCH holds: a multiple of 128, to fill a product's tiles.

    A float32 product of rank 64 over the 400 to 2300 rows that 32 MiB hold has four to eighteen
    tiles for 132 multiprocessors of an H200. 256 MiB have not been measured yet.
    """
    return max(SCRATCH // max(width * itemsize, 1) // 128 * 128, 128)


@dataclass(frozen=True)
class Config:
    """The dropout kernel's tile: rows, and columns of each of the four quarters of a row.

    Each program reads and writes its elements once, four columns to one set of random words.
    """

    block_rows: int
    block_columns: int
    num_warps: int

    @classmethod
    def for_shape(cls, dim: int) -> "Config":
        """Tiles of 2048 elements. Not yet measured on a GPU."""
        quarter = max(-(-dim // 4), 1)
        columns = min(1 << (quarter - 1).bit_length(), 512)
        return cls(max(512 // columns, 1), columns, 4)


@dataclass(frozen=True)
class Case:
    """One input of lora_linear."""

    name: str
    rows: tuple[int, ...]
    dim: int
    out: int
    rank: int
    dtype: str = "float32"
    adapter_dtype: str | None = None  # as dtype unless given
    bias: bool = False
    scaling: float = 2.0
    dropout_p: float = 0.0
    seed: int = 0

    def draw(self, seed: int = 0) -> dict[str, np.ndarray]:
        """x, weight, lora_a, lora_b and bias as the case has it; y's two terms are of one size."""
        rng = np.random.default_rng([seed, *self.rows, self.dim, self.out])
        adapter = self.adapter_dtype or self.dtype
        spread = self.dim**-0.5
        inputs = {
            "x": draw_normal(rng, (*self.rows, self.dim), self.dtype),
            "weight": draw_normal(rng, (self.out, self.dim), self.dtype, spread=spread),
            "lora_a": draw_normal(rng, (self.rank, self.dim), adapter, spread=spread),
            "lora_b": draw_normal(
                rng, (self.out, self.rank), adapter, spread=self.rank**-0.5 / abs(self.scaling)
            ),
        }
        if self.bias:
            inputs["bias"] = draw_normal(rng, (self.out,), self.dtype)
        return inputs


_DTYPES = ("float32", "bfloat16", "float16")
CASES = [
    *(
        Case(f"{dtype}{'-bias' * bias}", (5, 7), 48, 40, 8, dtype, bias=bias)
        for dtype in _DTYPES
        for bias in (False, True)
    ),
    *(
        Case(f"{dtype}-dropout", (5, 7), 48, 40, 8, dtype, dropout_p=0.3, seed=7)
        for dtype in _DTYPES
    ),
    Case("bfloat16-float32-adapter", (5, 7), 48, 40, 8, "bfloat16", "float32", bias=True),
    Case("float16-float32-adapter", (33,), 48, 40, 8, "float16", "float32", scaling=0.5),
    Case("float32-bfloat16-adapter", (33,), 48, 40, 8, "float32", "bfloat16"),
    Case("mixed-dropout", (3, 11), 50, 24, 4, "bfloat16", "float32", dropout_p=0.5,
         seed=2**40 + 5),
    Case("parts", (300,), 64, 72, 8, "bfloat16", "float32"),
    Case("parts-dropout", (300,), 64, 72, 8, "bfloat16", dropout_p=0.1, seed=3),
    Case("odd-sizes", (3, 5), 37, 29, 3, "bfloat16", bias=True, scaling=-0.7, dropout_p=0.25),
    Case("one-column", (4,), 1, 1, 1, "float32", dropout_p=0.5, seed=11),
    Case("one-row", (1,), 16, 8, 2, "bfloat16"),
    Case("no-leading-dimension", (), 16, 8, 2),
    Case("no-rows", (0, 3), 8, 5, 2, dropout_p=0.1),
    Case("tall-rank", (9,), 16, 8, 24, "bfloat16"),
]  # fmt: skip
