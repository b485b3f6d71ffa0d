"""rms_norm_linear_rope: every implementation against the oracle, Hugging Face's layers, the rule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_liger
import torch_liger
from compare import assert_matches_oracle, from_torch, judge, poisoned, to_torch
from liger_ops.drawing import draw_normal
from liger_ops.rms_norm_linear_rope import cases, oracle
from liger_ops.rms_norm_linear_rope.cases import Case, Config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = {"weight": "qkv_weight"}  # of the oracle's arrays among the public arguments


def settings_of(case, implementation):
    return {
        "num_heads": case.heads, "num_kv_heads": case.kv_heads, "head_dim": case.head_dim,
        "eps": case.eps, "offset": case.offset, "casting_mode": case.casting_mode,
        "implementation": implementation,
    }  # fmt: skip


def run(implementation, case, inputs, upstream, out_axis=0):
    """q, k, v and the gradients of all inputs but the angles, by the oracle's names."""
    names = [name for name in inputs if name not in ("cos", "sin")]
    settings = settings_of(case, implementation)
    if "norm_weight" not in inputs:
        settings["norm_weight"] = None
    if implementation in ("pallas", "xla", "composed in jax"):
        settings["implementation"] = implementation.removesuffix(" in jax")
        arrays = {name: jnp.asarray(a) for name, a in inputs.items()}
        if out_axis:
            arrays["weight"] = arrays["weight"].T

        def outputs(*differentiated):
            given = {**arrays, **dict(zip(names, differentiated, strict=True))}
            given = {NAMES.get(name, name): a for name, a in given.items()}
            return jax_liger.rms_norm_linear_rope(**given, out_axis=out_axis, **settings)

        # XLA may not leave out the rounding of the plain version's normed x.
        @functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
        def value_and_gradients(*differentiated):
            y, vjp = jax.vjp(outputs, *differentiated)
            return y, vjp(tuple(jnp.asarray(upstream[name]) for name in "qkv"))

        y, gradients = value_and_gradients(*(arrays[name] for name in names))
        results = [np.asarray(a) for a in (*y, *gradients)]
        if out_axis:
            place = 3 + names.index("weight")
            results[place] = results[place].T
    else:
        settings["implementation"] = implementation.removesuffix(" in torch")
        tensors = {name: to_torch(a, DEVICE) for name, a in inputs.items()}
        wanted = [tensors[name].requires_grad_() for name in names]
        given = {NAMES.get(name, name): t for name, t in tensors.items()}
        with poisoned():
            y = torch_liger.rms_norm_linear_rope(**given, **settings)
            dys = [to_torch(upstream[name], DEVICE) for name in "qkv"]
            gradients = torch.autograd.grad(y, wanted, dys)
        results = [from_torch(t) for t in (*y, *gradients)]
    return dict(zip(("q", "k", "v", *(f"d{name}" for name in names)), results, strict=True))


def drawn(case):
    inputs = case.draw()
    dtype = np.promote_types(np.float32, np.float32)
    names = {inputs["x"].dtype.name, inputs["weight"].dtype.name}
    dtype = names.pop() if len(names) == 1 else "float32"
    rng = np.random.default_rng(1)
    upstream = {
        name: draw_normal(rng, (case.batch, case.time, n, case.head_dim), dtype)
        for name, n in (("q", case.heads), ("k", case.kv_heads), ("v", case.kv_heads))
    }
    settings = {"eps": case.eps, "offset": case.offset}
    exact = {
        **oracle.forward(inputs, case.shape, **settings),
        **oracle.backward(inputs, upstream, case.shape, **settings),
    }
    return inputs, upstream, exact


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_against_the_oracle(case):
    inputs, upstream, exact = drawn(case)
    judge(functools.partial(run, case=case, inputs=inputs, upstream=upstream), exact, case.name)
