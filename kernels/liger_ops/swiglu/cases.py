"""Named shapes and dtypes for tests and benchmarks, and the kernels' tile choices."""

import itertools
from dataclasses import dataclass

import numpy as np

from liger_ops.drawing import DTYPES, draw_normal


@dataclass(frozen=True)
class Config:
    """How the kernels cut (M, F) into tiles: rows and columns of a tile, and warps a program.

    Each program makes one tile, and reads and writes every element once.
    """

    block_rows: int
    block_f: int
    num_warps: int

    @classmethod
    def for_shape(cls, dim: int) -> "Config":
        """Tiles of 1024, 8 elements a thread: on an H200 2048 and 4096 are as fast at 16384 rows
        and up to a tenth slower at 128.
        """
        block_f = min(max(1 << (dim - 1).bit_length(), 16), 1024)
        return cls(1024 // block_f, block_f, 4)


@dataclass(frozen=True)
class Case:
    """One input of swiglu or geglu; fused: gate and up are the halves of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    up_dtype: str | None = None  # as dtype unless given
    activation: str = "silu"
    fused: bool = False

    def draw(self, seed: int = 0) -> dict[str, np.ndarray]:
        """gate and up, each rounded to its dtype."""
        rng = np.random.default_rng([seed, *self.shape])
        return {
            "gate": draw_normal(rng, self.shape, self.dtype, spread=2.0),
            "up": draw_normal(rng, self.shape, self.up_dtype or self.dtype),
        }


_DTYPES = ("float32", "bfloat16", "float16")
CASES = [
    *(
        Case(f"{activation}-{dtype}{'-fused' * fused}", (5, 48), dtype, None, activation, fused)
        for activation, dtype, fused in itertools.product(
            ("silu", "gelu_tanh", "gelu"), _DTYPES, (False, True)
        )
    ),
    *(
        Case(f"shape-{'x'.join(map(str, shape))}", shape, "bfloat16")
        for shape in ((1, 1), (3, 7), (2, 3, 33), (131, 17), (0, 8), (3, 2049), (40,))
    ),
    Case("odd-halves-fused", (3, 17), "bfloat16", fused=True),
    Case("mixed-bfloat16-float32", (5, 48), "bfloat16", "float32"),
    Case("mixed-float32-float16", (5, 48), "float32", "float16", "gelu_tanh"),
]

# Where implementations overflow, cancel or underflow: gates and factors, every pair of them.
EDGE_GATES = (0.0, 1e-3, -1e-3, 20.0, -20.0, 88.8, -88.8, 100.0, -100.0, 1e4, -1e4)
EDGE_UPS = (1.0, -3.0, 1e3)


def edges(dtype: str) -> dict[str, np.ndarray]:
    gates, ups = np.meshgrid(EDGE_GATES, EDGE_UPS)
    return {"gate": gates.astype(DTYPES[dtype]), "up": ups.astype(DTYPES[dtype])}
