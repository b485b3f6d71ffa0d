"""Captures in a file, to be compared later, on another machine or with another version."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from liger_validate.batches import Batch
from liger_validate.captures import Capture

# How far two captures of one model may be from each other, RMS over RMS.
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}


def write(path: Path, capture: Capture, batch: Batch, header: dict[str, Any]) -> None:
    """One safetensors file: `outputs/NAME` and `gradients/NAME`, and a manifest in its metadata."""
    from safetensors.torch import save_file

    from liger_validate.tensors import to_torch

    groups = {"outputs": capture.outputs, "gradients": capture.gradients}
    tensors = {
        f"{group}/{name}": to_torch(np.ascontiguousarray(value))
        for group, found in groups.items()
        for name, value in found.items()
    }
    tensors |= {"batch/input_ids": to_torch(batch.ids), "batch/mask": to_torch(batch.mask)}
    manifest = {**header, "model": capture.label, "dtype": capture.dtype, "loss": capture.loss,
                "order": list(capture.outputs)}  # fmt: skip
    save_file(tensors, str(path), metadata={"manifest": json.dumps(manifest)})


def read(path: Path) -> tuple[Capture, Batch, dict[str, Any]]:
    """What `write` has written.

    Raises:
        ValueError: if the file has no manifest.
    """
    from safetensors import safe_open

    from liger_validate.tensors import from_torch

    with safe_open(str(path), "pt") as file:
        metadata = file.metadata() or {}
        if "manifest" not in metadata:
            raise ValueError(f"{path} has no manifest; `liger-validate capture` writes one")
        manifest = json.loads(metadata["manifest"])
        arrays = {name: from_torch(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    capture = Capture(manifest["model"], manifest["dtype"], loss=manifest["loss"])
    capture.outputs = {name: arrays[f"outputs/{name}"] for name in manifest["order"]}
    prefix = "gradients/"
    capture.gradients = {k[len(prefix) :]: a for k, a in arrays.items() if k.startswith(prefix)}
    return capture, Batch.of(arrays["batch/input_ids"], arrays["batch/mask"]), manifest


def compare(first: Path, second: Path, tolerance: float | None = None) -> dict[str, Any]:
    """The tensors that both files have, in the order of the forward: how far they are apart.

    Raises:
        ValueError: if the captures are of different tokens, or have nothing in common.
    """
    (a, batch, about_a), (b, other, about_b) = read(first), read(second)
    if not (np.array_equal(batch.ids, other.ids) and np.array_equal(batch.mask, other.mask)):
        raise ValueError(f"{first} and {second} are captures of different tokens")
    if tolerance is None:
        tolerance = max(TOLERANCE[a.dtype], TOLERANCE[b.dtype])
    pairs = [(name, a.outputs[name], b.outputs.get(name)) for name in a.outputs]
    pairs += [(f"{n}.grad", g, b.gradients.get(n)) for n, g in a.gradients.items()]
    found = []
    for name, x, y in pairs:
        if y is None or x.size != y.size:
            continue
        x, y = x.reshape(-1).astype(np.float64), y.reshape(-1).astype(np.float64)
        if x.size % batch.counted.size == 0 and not name.endswith(".grad"):
            x, y = (v.reshape(*batch.counted.shape, -1)[batch.counted] for v in (x, y))
        scale = float(np.sqrt(np.mean(x**2))) or 1.0
        error = float(np.sqrt(np.mean((x - y) ** 2))) / scale
        found.append({"name": name, "error": error, "inside": error <= tolerance})
    if not found:
        raise ValueError(f"{first} and {second} have no tensor in common")
    first_off = next((row["name"] for row in found if not row["inside"]), None)
    return {
        "manifests": [about_a, about_b],
        "tolerance": tolerance,
        "tensors": found,
        "first_out_of_band": first_off,
        "agrees": first_off is None,
    }
