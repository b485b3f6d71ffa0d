"""The safetensors format: an 8-byte length, a JSON header of that length, and the tensors' bytes.

Files are mapped into memory to read and written one tensor at a time, so neither holds a file's
tensors on the host, as the format's own library does to write.

Source: https://github.com/huggingface/safetensors, "Format".
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

DTYPES = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


def read(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file by name, read from disk where they are looked at.

    Raises ValueError, naming the file, for one that is cut short or of an unknown dtype.
    """
    raw = np.memmap(path, np.uint8, mode="r")
    length = int.from_bytes(raw[:8].tobytes(), "little")
    if raw.size < 8 or length > raw.size - 8:
        raise ValueError(f"{path} is no safetensors file, or is cut short: {raw.size} bytes")
    header, data = json.loads(raw[8 : 8 + length].tobytes()), raw[8 + length :]
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{path}: {name} has the dtype {entry['dtype']}, not supported")
        begin, end = entry["data_offsets"]
        if end > data.size:
            raise ValueError(f"{path} is cut short: {name} ends at {end} of {data.size} bytes")
        tensors[name] = data[begin:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def write(
    path: Path,
    tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    value_of: Callable[[str], np.ndarray],
) -> None:
    """Writes tensors of these shapes and dtypes, asking for one value at a time.

    The file appears under its name once it is whole.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in tensors.items():
        begin, end = end, end + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # so that the tensors are aligned

    unfinished = path.with_name(path.name + ".unfinished")
    with open(unfinished, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, (shape, dtype) in tensors.items():
            value = np.ascontiguousarray(value_of(name))
            if value.shape != shape or value.dtype != dtype:
                raise ValueError(
                    f"{name} was announced as {shape}, {dtype}; got {value.shape}, {value.dtype}"
                )
            file.write(value.reshape(-1).view(np.uint8).data)
    os.replace(unfinished, path)
