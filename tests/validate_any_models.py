"""Models of no known family, for `liger_validate.capture`: one in PyTorch, and the same in Flax."""

import functools

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

SIZE = 6
MATRIX = np.random.default_rng(0).standard_normal((SIZE, SIZE)).astype(np.float32) / 2
X = np.random.default_rng(1).standard_normal((3, SIZE)).astype(np.float32)


class Linear(torch.nn.Linear):
    """Its `forward` is that of the class above."""


class Part(torch.nn.Module):
    """Returns arrays in a dict and a tuple, and things that are none."""

    def __init__(self):
        super().__init__()
        self.shared = Linear(SIZE, SIZE, bias=False)
        self.relu = torch.nn.ReLU(inplace=True)
        self.unused = torch.nn.Linear(2, 2)
        self.shared.weight.data = torch.tensor(MATRIX)

    def forward(self, x):
        h = self.relu(self.shared(x))
        h = self.shared(h)
        return {"hidden": (h, h.argmax(-1)), "none": None, "count": 3}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleList([Part()])
        self.head = torch.nn.Linear(SIZE, 1, bias=False)
        self.head.weight.data = torch.tensor(MATRIX[:1])

    def forward(self, x, *, scale):
        return self.head(self.parts[0](x)["hidden"][0]) * scale


class FlaxLinear(nnx.Linear):
    """Its `__call__` is that of the class above."""


class FlaxPart(nnx.Module):
    def __init__(self):
        self.shared = FlaxLinear(SIZE, SIZE, use_bias=False, rngs=nnx.Rngs(0))
        self.unused = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.shared.kernel[...] = jnp.asarray(MATRIX.T)

    def __call__(self, x):
        h = nnx.relu(self.shared(x))
        h = self.shared(h)
        return {"hidden": (h, h.argmax(-1)), "none": None, "count": 3}


class FlaxModel(nnx.Module):
    def __init__(self):
        self.parts = nnx.List([FlaxPart()])
        self.head = nnx.Linear(SIZE, 1, use_bias=False, rngs=nnx.Rngs(0))
        self.head.kernel[...] = jnp.asarray(MATRIX[:1].T)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x, *, scale):
        self.calls[...] += 1
        return self.head(self.parts[0](x)["hidden"][0]) * scale


def make_torch(dtype=torch.float32, factor=1.0):
    """What `liger-validate capture --model validate_any_models:make_torch` calls."""
    model = Model().to(dtype)
    model.head.weight.data *= factor
    return model, {"x": torch.tensor(X, dtype=dtype), "scale": 2.0}


def make_flax():
    return FlaxModel(), {"x": jnp.asarray(X), "scale": 2.0}


make_other = functools.partial(make_torch, factor=1.001)
make_bfloat16 = functools.partial(make_torch, dtype=torch.bfloat16)


def gradients() -> dict[str, np.ndarray]:
    """Of the mean square of the output, by hand: at the head, behind it, and before it."""
    x, w, v = (a.astype(np.float64) for a in (X, MATRIX, MATRIX[:1]))
    first = x @ w.T
    hidden = np.maximum(first, 0.0)
    second = hidden @ w.T
    d_head = 2.0 * (2.0 * second @ v.T) * 2.0 / len(x)  # loss = mean((2 head)^2)
    d_second = d_head @ v
    d_first = (d_second @ w) * (first > 0)
    return {
        "head": d_head,
        "parts.0.shared@2": d_second,
        "parts.0[hidden][0]": d_second,
        "parts.0.shared": d_first,
        "weight": d_second.T @ hidden + d_first.T @ x,
    }
