"""Captures in a file, to be compared later, on another machine or with another version."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from liger_validate.captures import Capture
from liger_validate.drift import LEAST
from liger_validate.formulas import float64

FORMAT = 1
# How far two captures of one model may be from each other, RMS over RMS. Whole numbers not at all.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
# What may differ between two captures, and is then said.
ABOUT = ("model", "framework", "device", "versions", "seed", "dtype", "training", "precision")


def write(
    path: Path, capture: Capture, inputs: Mapping[str, np.ndarray], header: dict[str, Any]
) -> None:
    """One safetensors file, and in its metadata a manifest.

    Its tensors are inputs/NAME, what the model was given; outputs/NAME and output_gradients/NAME of
    modules; and gradients/NAME of parameters.
    """
    from safetensors.torch import save_file

    from liger_validate.tensors import to_torch

    groups: dict[str, Mapping[str, Any]] = {
        "inputs": inputs,
        "outputs": capture.outputs,
        "output_gradients": capture.output_gradients,
        "gradients": capture.gradients,
    }
    tensors = {
        f"{group}/{name}": to_torch(value).contiguous()
        for group, found in groups.items()
        for name, value in found.items()
    }
    manifest = {
        **header,
        "format": FORMAT,
        "model": capture.label,
        "dtype": capture.dtype,
        "loss": capture.loss,
        "order": list(capture.outputs),
        "skipped": capture.skipped,
        "tensors": {
            name: {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)}
            for name, t in tensors.items()
        },
    }
    save_file(tensors, str(path), metadata={"manifest": json.dumps(manifest)})


def read(path: Path) -> tuple[Capture, dict[str, np.ndarray], dict[str, Any]]:
    """What `write` has written: the capture, its inputs and the manifest.

    Raises:
        ValueError: if the file has no manifest, or one of another format.
    """
    from safetensors import safe_open

    from liger_validate.tensors import from_torch

    with safe_open(str(path), "pt") as file:
        metadata = file.metadata() or {}
        if "manifest" not in metadata:
            raise ValueError(f"{path} has no manifest; `liger-validate capture` writes one")
        manifest = json.loads(metadata["manifest"])
        if manifest.get("format") != FORMAT:
            raise ValueError(
                f"{path} has the format {manifest.get('format')}; this version reads {FORMAT}"
            )
        arrays = {name: from_torch(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118

    def group(prefix: str) -> dict[str, np.ndarray]:
        return {k[len(prefix) :]: a for k, a in arrays.items() if k.startswith(prefix)}

    capture = Capture(manifest["model"], manifest["dtype"], loss=manifest["loss"])
    capture.outputs = {name: arrays[f"outputs/{name}"] for name in manifest["order"]}
    capture.output_gradients = group("output_gradients/")
    capture.gradients = group("gradients/")
    capture.skipped = manifest["skipped"]
    return capture, group("inputs/"), manifest


def compare(
    first: Path, second: Path, tolerance: float | None = None, common: bool = False
) -> dict[str, Any]:
    """How far the tensors of two files are apart, in the order of the forward and of the backward.

    Args:
        tolerance: RMS over RMS, for all tensors; by their dtypes if left out.
        common: whether names that only one of them has are no difference.

    Raises:
        ValueError: if the captures are of different inputs, have nothing in common, or were taken
            at different precisions of float32 products with no tolerance given for that.
    """
    (a, given, about_a), (b, other, about_b) = read(first), read(second)
    if given.keys() != other.keys() or any(not np.array_equal(given[k], other[k]) for k in given):
        raise ValueError(f"{first} and {second} are captures of different inputs")
    means = [_means(about) for about in (about_a, about_b)]
    if means[0] != means[1] and tolerance is None:
        raise ValueError(
            f"{first} has float32 products at {means[0]!r} and {second} at {means[1]!r}; "
            "give both one --precision, or a --tolerance for this"
        )
    groups = [
        ("", a.outputs, b.outputs, list(a.outputs)),
        (".output.grad", a.output_gradients, b.output_gradients,
         [name for name in reversed(a.outputs) if name in a.output_gradients]),
        (".grad", a.gradients, b.gradients, list(a.gradients)),
    ]  # fmt: skip
    rows: list[dict[str, Any]] = []
    missing: tuple[list[str], list[str]] = ([], [])
    for suffix, ours, theirs, names in groups:
        missing[0].extend(name + suffix for name in names if name not in theirs)
        missing[1].extend(name + suffix for name in theirs if name not in ours)
        pairs = [(name + suffix, ours[name], theirs[name]) for name in names if name in theirs]
        counted = given.get("attention_mask") if suffix != ".grad" else None
        rows += _rows(pairs, counted, tolerance, LEAST if suffix else 0.0)
    if not rows:
        raise ValueError(f"{first} and {second} have no tensor in common")
    off = [row["name"] for row in rows if not row["inside"]]
    return {
        "manifests": [about_a, about_b],
        "differing": {key: [about_a.get(key), about_b.get(key)] for key in ABOUT
                      if about_a.get(key) != about_b.get(key)},
        "tensors": rows,
        "only_in_first": missing[0],
        "only_in_second": missing[1],
        "first_out_of_band": off[0] if off else None,
        "agrees": not off and (common or not any(missing)),
    }  # fmt: skip


def _means(manifest: dict[str, Any]) -> str:
    """The precision at which the framework of a capture multiplied float32."""
    return manifest["precision"]["jax_means" if manifest["framework"] == "jax" else "torch_means"]


def _rows(
    pairs: list[tuple[str, np.ndarray, np.ndarray]],
    counted: np.ndarray | None,
    tolerance: float | None,
    least: float,
) -> Iterator[dict[str, Any]]:
    """least: what part of the largest RMS of all is the least that a difference is measured by."""
    scales = [_rms(float64(x)) for _, x, _ in pairs]
    floor = least * max(scales, default=0.0)
    for (name, x, y), scale in zip(pairs, scales, strict=True):
        limit = _limit(x, y) if tolerance is None else tolerance
        row = {"name": name, "error": math.inf, "tolerance": limit, "inside": False, "note": ""}
        if x.size != y.size:
            row["note"] = f"the shapes are {x.shape} and {y.shape}"
            yield row
            continue
        if x.dtype != y.dtype:
            row["note"] = f"the dtypes are {x.dtype} and {y.dtype}"
        x, y = (float64(v).reshape(-1) for v in (_where(counted, v, x.shape) for v in (x, y)))
        if counted is not None:
            scale = _rms(x)
        off = _rms(x - y)
        error = off / (max(scale, floor) or 1.0) if math.isfinite(off) else math.inf
        if not math.isfinite(off) and np.array_equal(x, y, equal_nan=True):
            error = 0.0
        yield {**row, "error": error, "inside": error <= limit}


def _limit(x: np.ndarray, y: np.ndarray) -> float:
    return max(TOLERANCE.get(a.dtype.name, 0.0) for a in (x, y))


def _rms(a: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(a)))) if a.size else 0.0


def _where(counted: np.ndarray | None, a: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The array's numbers at tokens that count, where it has an axis or two of tokens."""
    if counted is None or counted.ndim != 2:
        return a
    a = a.reshape(shape)
    if shape[:2] == counted.shape:
        return a[counted.astype(bool)]
    if shape[:1] == (counted.size,):
        return a[counted.astype(bool).reshape(-1)]
    return a
