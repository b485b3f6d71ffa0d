"""Named shapes and dtypes for tests and benchmarks, and the kernels' tile choices."""

import itertools
from dataclasses import dataclass

import numpy as np

from liger_ops.drawing import DTYPES, draw_normal


@dataclass(frozen=True)
class Config:
    """How the kernels cut q and k into tiles.

    A program takes `block_rows` positions and, of each, at most `block_heads` heads of q and of k:
    the heads of both are dealt out evenly to as many programs as that needs. It reads and writes
    every element once, and the angles of its positions once.
    """

    block_rows: int
    block_heads: int
    num_warps: int

    @classmethod
    def for_shape(cls, num_rows: int, heads: int, kv_heads: int, head_dim: int) -> "Config":
        """The tiles for `num_rows` positions in all, by a sweep on an H200: docs/memory_bound.md.

        All heads of a position at once, up to 4096 elements of q, 32 a thread; where positions are
        too few to fill the card so, 8 heads of two.
        """
        most, width = max(heads, kv_heads, 1), power_of_two(head_dim)
        if num_rows <= 512:
            return cls(2, min(power_of_two(most), 8, max(2048 // width, 1)), 4)
        # A tile has 2^i heads. Where that leaves many of them empty, smaller tiles leave fewer: 71
        # heads are nine tiles of 8, or one of 128.
        block_heads = power_of_two(most)
        if 4 * most < 3 * block_heads:
            block_heads = min(block_heads, 8)
        block_heads = min(block_heads, max(4096 // width, 1))
        return cls(min(max(2048 // (block_heads * width), 1), 16), block_heads, 4)

    def deal(self, heads: int, kv_heads: int) -> tuple[int, int, int]:
        """Programs for each block of positions, and the tile's heads of q and of k, 0 for none."""
        shares = -(-max(heads, kv_heads) // self.block_heads)
        block_n, block_k = (power_of_two(-(-n // shares)) if n else 0 for n in (heads, kv_heads))
        return shares, block_n, block_k


def power_of_two(n: int) -> int:
    """The first that is at least n; 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class Case:
    """One input of rope.

    angles: "shared" for cos and sin of shape (T, R), "one" for (1, T, R), "per row" for (B, T, R)
    with rows of their own positions, padded at the left.
    """

    name: str
    batch: int = 2
    time: int = 5
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    rotary_dim: int | None = None  # as head_dim unless given
    dtype: str = "float32"
    kv_dtype: str | None = None  # as dtype unless given
    angle_dtype: str = "float32"
    layout: str = "half"
    angles: str = "shared"
    positions: tuple[int, ...] | None = None  # arange(time) unless given

    def draw(self, seed: int = 0) -> dict[str, np.ndarray]:
        """q, k, cos and sin, each rounded to its dtype."""
        rng = np.random.default_rng([seed, self.batch, self.time, self.heads, self.head_dim])
        shape = (self.batch, self.time, self.heads, self.head_dim)
        kv_shape = (self.batch, self.time, self.kv_heads, self.head_dim)
        angles = self.angle_of_each_position()
        angle_dtype = DTYPES[self.angle_dtype]
        return {
            "q": draw_normal(rng, shape, self.dtype),
            "k": draw_normal(rng, kv_shape, self.kv_dtype or self.dtype),
            "cos": np.cos(angles).astype(angle_dtype),
            "sin": np.sin(angles).astype(angle_dtype),
        }

    def angle_of_each_position(self) -> np.ndarray:
        """In float64: both features of a pair have position * 10000^(-2 pair / R)."""
        size = self.rotary_dim or self.head_dim
        frequencies = 10000.0 ** (-np.arange(0, size, 2) / size)
        positions = np.asarray(self.positions or range(self.time), np.float64)
        if self.angles != "shared":
            positions = positions[None]
        if self.angles == "per row":
            padding = np.arange(self.batch)[:, None]
            positions = np.maximum(positions - padding, 1.0)
        angles = positions[..., None] * frequencies
        if self.layout == "half":
            return np.concatenate([angles, angles], axis=-1)
        return np.repeat(angles, 2, axis=-1)


# Heads of q and of k, and head sizes: few of them powers of two.
HEADS = ((28, 4, 64), (14, 2, 80), (9, 3, 96), (6, 1, 128), (71, 1, 16), (32, 8, 256))
_LAYOUTS, _DTYPES = ("half", "interleaved"), ("float32", "bfloat16", "float16")
_PER_ROW = "per row"
CASES = [
    *(
        Case(f"{layout}-{dtype}", dtype=dtype, layout=layout)
        for layout, dtype in itertools.product(_LAYOUTS, _DTYPES)
    ),
    *(
        Case(f"{layout}-{angles.replace(' ', '-')}", 3, layout=layout, angles=angles)
        for layout, angles in itertools.product(_LAYOUTS, ("shared", "one", "per row"))
    ),
    *(
        Case(
            f"{layout}-heads-{heads}-{kv_heads}-size-{size}", 1, 2, heads, kv_heads, size,
            dtype="bfloat16", layout=layout,
        )
        for layout, (heads, kv_heads, size) in itertools.product(_LAYOUTS, HEADS)
    ),
    *(
        Case(
            f"{layout}-partial-{size}-of-128", 1, 4, 2, 1, 128, size,
            layout=layout, dtype=dtype, positions=(0, 1, 777, 2000),
        )
        for layout, (size, dtype) in itertools.product(
            _LAYOUTS, ((32, "float32"), (40, "bfloat16"))
        )
    ),
    Case("mixed-dtypes", dtype="bfloat16", kv_dtype="float32", angles=_PER_ROW),
    Case("mixed-dtypes-interleaved", dtype="float16", kv_dtype="bfloat16", layout="interleaved"),
    Case("angles-bfloat16", dtype="bfloat16", angle_dtype="bfloat16"),
    Case("angles-float16-of-float32", angle_dtype="float16"),
    Case("more-kv-heads-than-heads", heads=2, kv_heads=5),
    Case("smallest", 1, 1, 1, 1, 2, positions=(3,)),
    Case("many-positions", 2, 67, 3, 1, 6, 4, angles=_PER_ROW),
    # More than 512 take other tiles.
    Case("more-positions", 2, 300, 3, 1, 16, angles=_PER_ROW),
    Case("more-positions-9-heads", 2, 300, 9, 1, 6, 4, "bfloat16", layout="interleaved"),
    Case("odd-head-size", head_dim=7, rotary_dim=6, layout="interleaved"),
    Case("no-kv-heads", kv_heads=0),
    Case("no-rows", batch=0),
    Case("no-positions", time=0, angles="one"),
]  # fmt: skip
