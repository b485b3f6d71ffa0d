"""Where the fused kernel is used: where it was measured to be faster than the composition.

`measured/` has one table a device: for shapes and numbers of rows the fused kernel's time over that
of the composition of this project's kernels and the library's product, and the tiles it took.
Between two measured numbers of rows both must be in its favour, and a shape that was not measured
goes by one that was, of the same head size and not more than twice or half as large either way.
"""

import functools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from liger_ops.rms_norm_linear_rope.cases import Config
from liger_ops.rms_norm_linear_rope.check import Heads

TABLES = Path(__file__).parent / "measured"
DECODED = 16  # so few rows are not trained on
# Of the composition's time: what is nearer to it than this differs from run to run on an H200.
IN_FAVOUR = 0.97


class Choice(NamedTuple):
    """Whether to use the fused kernel, and its tiles: None for those of Config.for_shape."""

    fused: bool
    config: Config | None = None


def choose(
    device: str,
    framework: str,
    num_rows: int,
    dim: int,
    heads: Heads,
    *,
    dtype: str,
    as_measured: bool,
    trained: bool | None,
) -> Choice:
    """What the device's table says of `num_rows` rows.

    Args:
        device: its name as the framework gives it.
        framework: "triton" or "pallas".
        dtype: of the product; one that was not measured is not fused.
        as_measured: whether the call is otherwise of the measured kind, by `is_as_measured`; others
            are not fused.
        trained: whether there will be a backward; None where that is not known yet.
    """
    known = as_measured and dtype == "bfloat16"
    entries = _nearest(device, framework, dim, heads) if known else []
    below = [entry for entry in entries if entry["rows"] <= num_rows][-1:]
    above = [entry for entry in entries if entry["rows"] >= num_rows][:1]
    beside = below + above
    if trained is None:
        passes = ("forward",) if num_rows <= DECODED else ("forward", "forward + backward")
    else:
        passes = ("forward + backward",) if trained else ("forward",)
    # A pass without a figure was not measured, which is no reason to use the kernel.
    if not beside or not all(e.get(name, 1.0) < IN_FAVOUR for e in beside for name in passes):
        return Choice(False)
    nearest = min(beside, key=lambda entry: abs(math.log2(entry["rows"] / max(num_rows, 1))))
    return Choice(True, Config(**nearest["config"]))


def is_as_measured(given: Sequence[Any], heads: Heads, out_axis: int = 0) -> bool:
    """Whether arguments, in the kernels' order, are of the kind that benchmarks measure: x of the
    weight's dtype, a norm with a weight and heads without one, and heads that are rotated whole.
    """
    x, norm_weight, weight, _, q_norm_weight, k_norm_weight, cos, _ = given
    return (
        norm_weight is not None
        and q_norm_weight is None
        and k_norm_weight is None
        and x.dtype == weight.dtype
        and cos.shape[-1] == heads.size
        and out_axis == 0
    )


@functools.cache
def _nearest(device: str, framework: str, dim: int, heads: Heads) -> list[dict[str, Any]]:
    """The entries of the measured shape that is nearest, by their numbers of rows."""

    def distance(entry: dict[str, Any]) -> float:
        columns = Heads(entry["num_heads"], entry["num_kv_heads"], entry["head_dim"]).columns
        return max(abs(math.log2(entry["dim"] / dim)), abs(math.log2(columns / heads.columns)))

    found = [
        entry
        for entry in table(device)["entries"]
        if (entry["framework"], entry["head_dim"]) == (framework, heads.size)
        and distance(entry) <= 1.0
    ]
    least = min(map(distance, found), default=0.0)
    return sorted((e for e in found if distance(e) == least), key=lambda entry: entry["rows"])


@functools.cache
def table(device: str) -> dict[str, Any]:
    """What was measured on a device; no entries for one that was not."""
    path = path_of(device)
    return json.loads(path.read_text()) if path.exists() else {"entries": []}


def path_of(device: str) -> Path:
    """Of its table."""
    return TABLES / f"{re.sub('[^a-z0-9]+', '_', device.lower())}.json"
