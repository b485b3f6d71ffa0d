"""Bad input: an error that names the argument and both values, the same in both frameworks."""

import jax.numpy as jnp
import pytest
import torch

import jax_liger
import torch_liger

FRAMEWORKS = {
    "jax": (jax_liger, lambda shape, dtype: jnp.zeros(shape, dtype)),
    "torch": (torch_liger, lambda shape, dtype: torch.zeros(shape, dtype=getattr(torch, dtype))),
}
DTYPES = "'float32', 'bfloat16', 'float16', 'float64'"

# shapes and dtypes of x, weight and residual; settings; the error
BAD = {
    "mismatched-weight": (
        [((2, 8), "float32"), ((7,), "float32")], {}, ValueError,
        "weight must have shape (D,) with D = 8, the last dimension of x (2, 8); got (7,)",
    ),
    "two-dimensional-weight": (
        [((2, 8), "float32"), ((1, 8), "float32")], {}, ValueError,
        "weight must have shape (D,) with D = 8, the last dimension of x (2, 8); got (1, 8)",
    ),
    "mismatched-residual": (
        [((2, 8), "float32"), ((8,), "float32"), ((3, 8), "float32")], {}, ValueError,
        "residual must have the shape of x, (2, 8); got (3, 8)",
    ),
    "integer-x": (
        [((2, 8), "int32"), ((8,), "float32")], {}, TypeError,
        f"x must have a dtype of {DTYPES}; got int32",
    ),
    "integer-weight": (
        [((2, 8), "float32"), ((8,), "int32")], {}, TypeError,
        f"weight must have a dtype of {DTYPES}; got int32",
    ),
    "integer-residual": (
        [((2, 8), "float32"), ((8,), "float32"), ((2, 8), "int32")], {}, TypeError,
        f"residual must have a dtype of {DTYPES}; got int32",
    ),
    "no-dimension": (
        [((), "float32")], {}, ValueError,
        "x must have at least one dimension, (..., D); got shape ()",
    ),
    "negative-eps": (
        [((2, 8), "float32")], {"eps": -1e-6}, ValueError, "eps must be at least 0; got -1e-06",
    ),
    "nan-eps": (
        [((2, 8), "float32")], {"eps": float("nan")}, ValueError, "eps must be at least 0; got nan",
    ),
    "unknown-casting-mode": (
        [((2, 8), "float32")], {"casting_mode": "qwen"}, ValueError,
        "casting_mode must be one of 'llama', 'gemma', 'none'; got 'qwen'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", BAD)
def test_the_error_names_the_argument_and_both_values(framework, name):
    package, make = FRAMEWORKS[framework]
    described, settings, kind, message = BAD[name]
    x, weight, residual = [*(make(*d) for d in described), None, None][:3]
    with pytest.raises(kind) as caught:
        if residual is None:
            package.rms_norm(x, weight, **settings)
        else:
            package.fused_add_rms_norm(x, residual, weight, **settings)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "framework, names", [("jax", "'pallas', 'xla'"), ("torch", "'triton', 'eager'")]
)
def test_unknown_implementation(framework, names):
    package, make = FRAMEWORKS[framework]
    with pytest.raises(ValueError) as caught:
        package.rms_norm(make((2, 8), "float32"), implementation="cuda")
    assert str(caught.value) == f"implementation must be one of None, {names}; got 'cuda'"


def test_tensors_on_two_devices():
    x, weight = torch.zeros(2, 8), torch.zeros(8, device="meta")
    with pytest.raises(ValueError, match="weight must be on x's device, cpu; got meta"):
        torch_liger.rms_norm(x, weight)
