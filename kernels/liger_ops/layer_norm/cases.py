"""Named shapes and dtypes for tests and benchmarks, and the kernels' tile choices."""

from dataclasses import dataclass

import numpy as np

from liger_ops.drawing import draw_normal
from liger_ops.row_tiles import RowTiles, of_width


class Config(RowTiles):
    """How the kernels cut (M, D) into tiles."""

    @classmethod
    def for_shape(cls, dim: int) -> "Config":
        """The tiles for rows of `dim` elements; docs/memory_bound.md has the sweep on an H200."""
        return of_width(dim, _TABLE)


# Beside rms_norm's the backward holds a second partial gradient. Compiled for sm_90, bfloat16, a
# thread takes at most 128 registers from 1024 to 8192, so all backward_programs run at once also
# where nothing limits it, as in Pallas. Of 16384 two partial gradients alone are half of all
# registers, so there they lie in memory, read and written once for every 4 rows.
_TABLE = {
    **{
        block: Config(block, 2048 // block, 4, block, 4096 // block, 4, 2, False)
        for block in (16, 32, 64, 128, 256, 512)
    },
    1024: Config(1024, 1, 2, 1024, 2, 4, 4, False),
    2048: Config(2048, 1, 4, 2048, 1, 4, 4, False),
    4096: Config(4096, 1, 8, 4096, 1, 8, 2, False),
    8192: Config(8192, 1, 8, 8192, 1, 16, 1, False),
    16384: Config(16384, 1, 16, 2048, 4, 8, 2, True),
}


@dataclass(frozen=True)
class Case:
    """One input of layer_norm, whose numbers lie around `center`."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    weight_dtype: str | None = "float32"
    bias_dtype: str | None = "float32"
    eps: float = 1e-5
    center: float = 0.0

    def draw(self, seed: int = 0) -> dict[str, np.ndarray]:
        """x, and as the case has them weight and bias, each rounded to its dtype."""
        rng = np.random.default_rng([seed, *self.shape])
        inputs = {"x": draw_normal(rng, self.shape, self.dtype, center=self.center)}
        if self.weight_dtype is not None:
            inputs["weight"] = draw_normal(
                rng, self.shape[-1:], self.weight_dtype, center=1.0, spread=0.3
            )
        if self.bias_dtype is not None:
            inputs["bias"] = draw_normal(rng, self.shape[-1:], self.bias_dtype, spread=0.3)
        return inputs


def _cases() -> list[Case]:
    cases = [
        Case(
            f"{dtype}{'-weight' * weight}{'-bias' * bias}",
            (33, 80), dtype, dtype if weight else None, dtype if bias else None,
        )
        for dtype in ("float32", "bfloat16", "float16")
        for weight in (True, False)
        for bias in (True, False)
    ]  # fmt: skip
    cases += [
        Case(f"mixed-{'-'.join(map(str, dtypes))}", (7, 48), *dtypes)
        for dtypes in (
            ("bfloat16", "float32", "float32"),
            ("bfloat16", "bfloat16", "float32"),
            ("bfloat16", "float32", None),
            ("float16", "float32", "float16"),
            ("float32", "bfloat16", "bfloat16"),
            ("float16", "bfloat16", "bfloat16"),
            ("float16", None, "bfloat16"),
        )
    ]
    cases += [
        Case(f"shape-{'x'.join(map(str, shape))}", shape, "bfloat16", "bfloat16", "bfloat16")
        for shape in (
            (1, 1), (3, 1), (1, 64), (5, 15), (31, 17), (131, 33), (133, 257), (0, 64), (40,),
            (2, 3, 4, 128),
        )
    ]  # fmt: skip
    cases += [
        # The square of the mean is a million times the variance.
        Case(f"offset-{dtype}-{'x'.join(map(str, shape))}", shape, dtype, dtype, dtype, center=1e3)
        for dtype in ("float32", "bfloat16", "float16")
        for shape in ((33, 80), (3, 12000), (2, 20000))
    ]
    cases += [
        Case("eps-1e-2", (9, 64), eps=1e-2),
        Case("not-a-power-of-two", (3, 3000), "bfloat16", "bfloat16", "bfloat16"),
        Case("two-pass", (5, 9001), "bfloat16", "bfloat16", "bfloat16"),
        Case("wide", (3, 32769), "bfloat16", "bfloat16", "bfloat16"),
        Case("wide-float32", (5, 20000)),
    ]
    return cases


CASES = _cases()

# What is timed on a GPU: (rows, D).
LARGE_SHAPES = [
    *((16384, dim) for dim in (4096, 768, 2048, 8192, 16384)),
    (65536, 768),
]
