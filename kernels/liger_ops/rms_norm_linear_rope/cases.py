"""Named inputs for tests and benchmarks, and the kernels' tile choices."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from liger_ops.drawing import DTYPES, draw_normal
from liger_ops.rms_norm_linear_rope.check import Heads
from liger_ops.rope.cases import Case as RopeCase
from liger_ops.rope.cases import power_of_two


@dataclass(frozen=True)
class Config:
    """How the kernels cut the product into tiles; docs/rms_norm_linear_rope.md has what an H200
    showed of them, which is little yet.

    Attributes:
        block_rows, block_columns, block_dim: of a tile, and of one step of it along D, powers of
            two. Columns are features of whole heads, or of a part of one with both features of
            every pair; see `tile`.
        num_warps, num_stages: the latter are steps whose loads are under way.
        scales: what the norm's weight is multiplied into. "x": a tile of x before it is
            multiplied, in registers, where its squares are gathered as well. "weight": the
            projection's weight, beforehand, by one pass over it; tiles of x are then multiplied as
            they lie in memory, and the rows' scales found beforehand too. As long as such tiles
            gathered the squares, most of them were wrong on an H200, by 3 to 38 %, and right in
            interpret mode. What they are now has not run on a GPU, so for_shape does not choose it.
        group: row blocks that share a column block's weights in the cache before the next.
        persistent: Triton alone: one program a multiprocessor, which walks over tiles and loads
            them by the tensor memory accelerator; needs an x that is multiplied as it lies in
            memory, and heads that are rotated whole.
    """

    block_rows: int
    block_columns: int
    block_dim: int
    num_warps: int
    num_stages: int
    scales: str = "x"
    group: int = 8
    persistent: bool = False

    @classmethod
    def for_shape(
        cls, num_rows: int, head_dim: int, head_norms: bool, itemsize: int, shared_memory: int
    ) -> "Config":
        """The tiles for `num_rows` rows: of kinds that an H200 showed to be right, but not tuned.

        The largest tile whose sums fit in registers, where there are rows for it. Up to 16 rows the
        time is that of reading the weight: narrow tiles, so that every multiprocessor reads some.

        Args:
            head_norms: whether heads have norms of their own, for which a tile holds heads whole.
            itemsize: bytes of an element of x and of the weight.
            shared_memory: bytes that a program may have.
        """
        whole = 2 * power_of_two(-(-head_dim // 2)) if head_norms else 1
        step = 128 // itemsize
        if num_rows <= 16:
            columns = max(whole, 64)
            wanted = cls(16, columns, step * max(256 // columns, 1), 8 if columns > 64 else 4, 4)
        elif num_rows <= 64 or whole > 256:
            rows = 64 if whole <= 256 else max(128 * 128 // whole, 16)
            wanted = cls(rows, max(whole, 128), step, 8 if whole > 128 else 4, 4)
        else:
            wanted = cls(128, 256, step, 8, 3)
        return wanted.fitted(itemsize, shared_memory)

    def fitted(self, itemsize: int, shared_memory: int) -> "Config":
        """With as many stages as `shared_memory` holds, or with shorter steps."""
        config = self
        while config.bytes_of(itemsize) > shared_memory:
            if config.num_stages > 2:
                config = replace(config, num_stages=config.num_stages - 1)
            elif config.block_dim > 16:
                config = replace(config, block_dim=config.block_dim // 2)
            else:
                break
        return config

    def bytes_of(self, itemsize: int) -> int:
        """Of shared memory: the tiles under way and one more of x, that is changed. Where it is
        multiplied as it lies in memory and the program goes on to another tile, a quarter of the
        results on their way out, and the float32 numbers of half of those, which change layout.
        """
        tile = (self.block_rows + self.block_columns) * self.block_dim * itemsize
        last = self.block_rows * self.block_dim * itemsize
        if self.persistent:
            last = self.block_rows * self.block_columns * (itemsize + 2) // 4 + 1024
        return tile * self.num_stages + last

    def tile(self, head_dim: int) -> tuple[int, int, int]:
        """Heads of a tile, columns of half a head in it, and tiles that make up a head."""
        half = power_of_two(-(-head_dim // 2))
        heads = max(self.block_columns // (2 * half), 1)
        columns = min(half, self.block_columns // 2)
        return heads, columns, half // columns

    def column_blocks(self, heads: int, kv_heads: int, head_dim: int) -> int:
        of_tile, _, shares = self.tile(head_dim)
        return (-(-heads // of_tile) + 2 * -(-kv_heads // of_tile)) * shares


@dataclass(frozen=True)
class Case:
    """One input of rms_norm_linear_rope.

    outliers: how many features of x are a thousand times as large as the others, in every row.
    angles: as in rope's cases.
    """

    name: str
    batch: int = 2
    time: int = 5
    dim: int = 48
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    rotary_dim: int | None = None  # as head_dim unless given
    dtype: str = "float32"
    weight_dtype: str | None = None  # as dtype unless given
    norm_dtype: str | None = "same"
    bias_dtype: str | None = None
    head_norm_dtype: str | None = None
    eps: float = 1e-6
    offset: float = 0.0
    casting_mode: str = "llama"
    angles: str = "shared"
    outliers: int = 0
    scale: float = 1.0  # of x

    @property
    def shape(self) -> Heads:
        return Heads(self.heads, self.kv_heads, self.head_dim)

    def draw(self, seed: int = 0) -> dict[str, np.ndarray]:
        """The operation's arrays by the oracle's names, each rounded to its dtype."""
        rng = np.random.default_rng([seed, self.batch, self.time, self.dim, self.heads])
        x = draw_normal(rng, (self.batch, self.time, self.dim), "float32", spread=self.scale)
        x[..., rng.permutation(self.dim)[: self.outliers]] *= 1000.0
        weight = self.weight_dtype or self.dtype
        center = 1.0 - self.offset

        def vector(size: int, dtype: str, center: float, spread: float) -> np.ndarray:
            return draw_normal(rng, (size,), dtype, center=center, spread=spread)

        inputs = {
            "x": x.astype(DTYPES[self.dtype]),
            "weight": draw_normal(
                rng, (self.shape.columns, self.dim), weight, spread=self.dim**-0.5
            ),
        }
        if self.norm_dtype is not None:
            dtype = self.dtype if self.norm_dtype == "same" else self.norm_dtype
            inputs["norm_weight"] = vector(self.dim, dtype, center, 0.3)
        if self.bias_dtype is not None:
            inputs["bias"] = vector(self.shape.columns, self.bias_dtype, 0.0, 1.0)
        if self.head_norm_dtype is not None:
            for name in ("q_norm_weight", "k_norm_weight"):
                inputs[name] = vector(self.head_dim, self.head_norm_dtype, center, 0.3)
        angle = RopeCase(
            "", self.batch, self.time, head_dim=self.head_dim, rotary_dim=self.rotary_dim,
            angles=self.angles,
        ).angle_of_each_position()  # fmt: skip
        return {
            **inputs,
            "cos": np.cos(angle).astype(np.float32),
            "sin": np.sin(angle).astype(np.float32),
        }


ALL: dict[str, Any] = {"bias_dtype": "float32", "head_norm_dtype": "float32"}
_HALF = ("bfloat16", "float16")


def _cases() -> list[Case]:
    cases = [
        Case(f"{dtype}-{casting}", dtype=dtype, casting_mode=casting, offset=offset)
        for dtype in ("float32", *_HALF)
        for casting, offset in (("llama", 0.0), ("gemma", 1.0), ("none", 0.5))
    ]
    cases += [
        Case(f"everything-{dtype}-{casting}", 2, 9, 40, dtype=dtype, casting_mode=casting,
             offset=offset, angles="per row", eps=1e-5, **ALL)
        for dtype in ("float32", *_HALF)
        for casting, offset in (("llama", 0.0), ("gemma", 1.0))
    ]  # fmt: skip
    cases += [
        Case(f"outliers-{dtype}-{rows}-rows", 1, rows, 96, dtype=dtype, outliers=2,
             bias_dtype=dtype)
        for dtype in ("float32", *_HALF)
        for rows in (1, 33)
    ]  # fmt: skip
    # Too large for float16 when it is multiplied by a weight before it is normed, and small.
    cases += [Case(f"float16-x-of-{scale}", dtype="float16", scale=scale, eps=1e-13)
              for scale in (15000, 0.001)]  # fmt: skip
    cases += [Case(f"{rows}-rows", rows, 1, 72, dtype="bfloat16") for rows in (1, 2, 7, 16, 17)]
    cases += [
        Case("many-rows", 2, 67, 40, 2, 1, 8, dtype="bfloat16", angles="per row"),
        Case("multi-head", 1, 6, 32, 3, 3, 16, dtype="bfloat16", bias_dtype="bfloat16"),
        Case("multi-query", 1, 6, 32, 5, 1, 16, dtype="bfloat16", head_norm_dtype="bfloat16"),
        Case("one-head", 1, 3, 32, 1, 1, 2),
        Case("large-heads", 1, 3, 32, 2, 1, 128, dtype="bfloat16"),
        Case("large-heads-normed", 1, 18, 32, 2, 1, 256, 64, head_norm_dtype="float32"),
        Case("larger-heads-normed", 1, 3, 32, 1, 1, 512, head_norm_dtype="float32"),
        Case("head-size-80", 1, 5, 32, 3, 2, 80, dtype="bfloat16", head_norm_dtype="bfloat16"),
        Case("head-size-7", 1, 5, 32, 3, 2, 7, 6, head_norm_dtype="float32"),
        Case("partial", 1, 5, 32, 3, 1, 64, 16, dtype="bfloat16", angles="one"),
        Case("partial-normed", 1, 20, 32, 3, 1, 64, 40, head_norm_dtype="float32"),
        Case("partial-half", 2, 20, 32, 3, 1, 64, 32, dtype="bfloat16", bias_dtype="float32"),
        Case("no-norm-weight", dtype="bfloat16", norm_dtype=None),
        Case("no-norm-weight-float16", dtype="float16", norm_dtype=None),
        Case("wide", 1, 3, 1000, 2, 1, 16, dtype="bfloat16"),
        Case("one-feature", 1, 3, 1, 2, 1, 16, eps=0.1),
        Case("no-rows", 0, 3), Case("no-time", 2, 0, dtype="bfloat16", **ALL),
    ]  # fmt: skip
    cases += [
        Case(f"mixed-{dtype}-{weight}-{norm}", dtype=dtype, weight_dtype=weight, norm_dtype=norm,
             bias_dtype="float32")
        for dtype, weight, norm in (
            ("bfloat16", "bfloat16", "float32"), ("float32", "bfloat16", "float32"),
            ("bfloat16", "float32", "bfloat16"), ("float16", "bfloat16", "float16"),
        )
    ]  # fmt: skip
    return cases


CASES = _cases()
