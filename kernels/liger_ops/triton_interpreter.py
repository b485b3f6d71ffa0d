"""What Triton's interpreter computes otherwise than a GPU, put right in this process."""

from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """Where TRITON_INTERPRET=1 is set; a GPU's kernels know nothing of it."""
    _round_to_bfloat16()
    _sum_in_a_tree()
    _multiply_bfloat16()
    _add_by_descriptor()


def _round_to_bfloat16() -> None:
    """The interpreter truncates float32 to bfloat16 where the GPU rounds to nearest even."""
    truncating = interpreter._convert_float

    def convert_float(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if (source.name, target.name) == ("fp32", "bf16"):
            return data.astype(ml_dtypes.bfloat16).view(np.uint16)
        return truncating(data, source, target, rounding_mode)

    interpreter._convert_float = convert_float


def _sum_in_a_tree() -> None:
    """NumPy adds up one number after another along any axis but the last; a GPU never does."""

    def sum_in_a_tree(self: Any, input: Any) -> Any:
        data, axis = input.handle.data, self.axis
        if axis is None:
            total = np.sum(data, keepdims=self.keep_dims)
        else:
            total = np.sum(np.ascontiguousarray(np.moveaxis(data, axis, -1)), axis=-1)
            total = np.expand_dims(total, axis) if self.keep_dims else total
        return self.to_tensor(total, input.dtype)

    interpreter.ReduceOps.sum = sum_in_a_tree


def _numbers(handle: Any) -> Any:
    """The float32 values of a handle, which holds bfloat16 as its bits."""
    if handle.dtype.scalar == tl.bfloat16:
        return handle.data.view(ml_dtypes.bfloat16).astype(np.float32)
    return handle.data


def _multiply_bfloat16() -> None:
    """The interpreter's product takes bfloat16's bits for integers."""
    builder: Any = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if a.dtype.scalar != tl.bfloat16:
            return dot(self, a, b, d, *precision)
        product = np.matmul(_numbers(a), _numbers(b), dtype=np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    builder.create_dot = create_dot


def _add_by_descriptor() -> None:
    """The interpreter has no addition to memory by a tensor descriptor."""

    def create_descriptor_reduce(self: Any, kind: Any, desc: Any, value: Any, indices: Any) -> None:
        held = self.create_descriptor_load(desc, indices, None)
        total = _numbers(held) + _numbers(value)
        if value.dtype.scalar == tl.bfloat16:
            total = total.astype(ml_dtypes.bfloat16).view(np.uint16)
        total = interpreter.TensorHandle(total.astype(value.data.dtype), value.dtype.scalar)
        self.create_descriptor_store(desc, total, indices)

    builder: Any = interpreter.InterpreterBuilder
    builder.create_descriptor_reduce = create_descriptor_reduce
