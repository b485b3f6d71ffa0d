"""Arrays in what models take and return: nested tuples, lists, dicts and dataclasses."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from liger_ops.drawing import DTYPES

KEPT = ("f", "i", "u", "b")  # kinds of NumPy's dtypes that a file takes as they are


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """What nested tuples, lists, dicts and dataclasses hold."""
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, (tuple, list)):
        pairs = list(enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    else:
        yield name, value
        return
    for key, part in pairs:
        yield from leaves(part, f"{name}[{key}]")


def suffix(path: tuple[Any, ...]) -> str:
    """The name of a path of JAX's trees, as `leaves` has it."""
    found = []
    for entry in path:
        key = next(getattr(entry, a) for a in ("key", "idx", "name") if hasattr(entry, a))
        found.append(f"[{key}]")
    return "".join(found)


def dtype_of(arrays: Any) -> str:
    """The dtype of most parameters; float32 where there are none."""
    sizes: Counter[str] = Counter()
    for a in arrays:
        sizes[str(a.dtype).removeprefix("torch.")] += int(np.prod(a.shape))
    return sizes.most_common(1)[0][0] if sizes else "float32"


def array_of_torch(value: Any) -> tuple[np.ndarray | None, str]:
    """A copy on the host, since an operation in place may follow; or None and why there is none."""
    import torch

    from liger_validate.tensors import from_torch

    if not isinstance(value, torch.Tensor):
        return None, f"{type(value).__name__} is no tensor"
    if value.layout != torch.strided or value.is_nested or value.is_quantized or value.is_meta:
        return None, f"a tensor with the layout {value.layout} on {value.device}"
    value = value.detach().clone()
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    return from_torch(value.float() if "float8" in str(value.dtype) else value), ""


def array_of_jax(value: Any) -> tuple[np.ndarray | None, str]:
    """As `array_of_torch`."""
    import jax
    import jax.numpy as jnp
    from jax.core import Tracer

    if isinstance(value, Tracer):
        return None, "it is within a transformation"
    if not isinstance(value, (jax.Array, np.ndarray)):
        return None, f"{type(value).__name__} is no array"
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return None, "a random key"
    found = np.array(value)
    if found.dtype.kind == "c":
        return np.stack([np.real(found), np.imag(found)], -1), ""
    if found.dtype.kind in KEPT or found.dtype == DTYPES["bfloat16"]:
        return found, ""
    return found.astype(np.float32), ""
