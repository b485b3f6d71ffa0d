"""Named shapes and dtypes for tests and benchmarks, and the kernels' tile choices."""

from dataclasses import dataclass

import numpy as np

from liger_ops.drawing import draw_normal
from liger_ops.row_tiles import RowTiles, of_width


class Config(RowTiles):
    """How the kernels cut (M, D) into tiles."""

    @classmethod
    def for_shape(cls, dim: int) -> "Config":
        """The tiles for rows of `dim` elements; docs/rms_norm.md has the sweep on an H200."""
        return of_width(dim, _TABLE)


# Forward: 16 elements a thread, and enough rows in flight to hide their latency.
# Backward, a program holds two rows, this one and the next, in registers. So many fit on a
# multiprocessor at once: 4 programs of 2048, 2 of 4096, 1 of 8192. Of 16384 they would spill, and
# reading a row twice is faster (136 us against 157 without the second row in flight, 4096 rows);
# rows wider than that are taken in blocks of 8192.
_TABLE = {
    **{
        block: Config(block, 2048 // block, 4, block, 4096 // block, 4, 2, False)
        for block in (16, 32, 64, 128, 256, 512, 1024)
    },
    2048: Config(2048, 1, 4, 2048, 1, 4, 4, False),
    4096: Config(4096, 1, 8, 4096, 1, 8, 2, False),
    8192: Config(8192, 1, 8, 8192, 1, 16, 1, False),
    16384: Config(16384, 1, 16, 16384, 1, 8, 1, True),
    32768: Config(16384, 1, 16, 8192, 1, 16, 1, True),
}


@dataclass(frozen=True)
class Case:
    """One input of rms_norm, or of fused_add_rms_norm where `residual_dtype` is given."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    weight_dtype: str | None = "float32"
    residual_dtype: str | None = None
    eps: float = 1e-6
    offset: float = 0.0
    casting_mode: str = "llama"

    def draw(self, seed: int = 0) -> dict[str, np.ndarray]:
        """x, and as the case has them weight and residual, each rounded to its dtype."""
        rng = np.random.default_rng([seed, *self.shape])
        inputs = {"x": draw_normal(rng, self.shape, self.dtype)}
        if self.weight_dtype is not None:
            # Around 1 as trained weights are, or around 0 where the offset adds the 1.
            center = 1.0 - self.offset
            inputs["weight"] = draw_normal(
                rng, self.shape[-1:], self.weight_dtype, center=center, spread=0.3
            )
        if self.residual_dtype is not None:
            inputs["residual"] = draw_normal(rng, self.shape, self.residual_dtype, spread=2.0)
        return inputs


def _cases() -> list[Case]:
    cases = [
        Case(f"{dtype}-{casting}", (33, 80), dtype, dtype, casting_mode=casting, offset=offset)
        for dtype in ("float32", "bfloat16", "float16")
        for casting, offset in (("llama", 0.0), ("gemma", 1.0), ("none", 0.0))
    ]
    cases += [
        Case(
            f"mixed-{dtype}-weight-{weight}-{casting}", (7, 48), dtype, weight, casting_mode=casting
        )
        for dtype, weight in (
            ("bfloat16", "float32"),
            ("float32", "bfloat16"),
            ("float16", "bfloat16"),
        )
        for casting in ("llama", "gemma", "none")
    ]
    cases += [Case(f"no-weight-{dtype}", (5, 40), dtype, None) for dtype in ("float32", "bfloat16")]
    cases += [
        Case(f"shape-{'x'.join(map(str, shape))}", shape, "bfloat16", "bfloat16")
        for shape in (
            (1, 1), (3, 1), (1, 64), (2, 15), (31, 17), (131, 33), (133, 257), (0, 64),
            (2, 3, 4, 128),
        )
    ]  # fmt: skip
    cases += [
        Case("llama-with-offset", (9, 64), "bfloat16", "bfloat16", offset=0.5),
        Case("eps-1e-5", (9, 64), eps=1e-5),
        Case("not-a-power-of-two", (3, 3000), "bfloat16", "bfloat16"),
        Case("wide", (3, 32769), "bfloat16", "bfloat16"),
        Case("wide-float32", (2, 20000)),
    ]
    cases += [
        Case(f"add-{dtype}-{residual}", (33, 80), dtype, dtype, residual)
        for dtype, residual in (
            ("float32", "float32"),
            ("bfloat16", "bfloat16"),
            ("float16", "float16"),
            ("bfloat16", "float32"),
        )
    ]
    cases += [
        Case("add-gemma", (5, 100), "bfloat16", "bfloat16", "bfloat16", 1e-6, 1.0, "gemma"),
        Case("add-no-weight", (5, 100), "bfloat16", None, "bfloat16"),
        Case("add-wide", (3, 32769), "bfloat16", "bfloat16", "bfloat16"),
    ]
    return cases


CASES = _cases()

# What is timed on a GPU: (rows, D).
LARGE_SHAPES = [
    *((16384, dim) for dim in (4096, 768, 2048, 8192, 16384)),
    (65536, 768),
]
