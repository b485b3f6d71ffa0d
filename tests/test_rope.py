"""rope: every implementation against the oracle, Hugging Face's functions, and bad arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.cohere import modeling_cohere
from transformers.models.glm4 import modeling_glm4
from transformers.models.llama import modeling_llama

import jax_liger
import torch_liger
from compare import from_torch, judge, poisoned, to_torch
from liger_ops.drawing import draw_normal
from liger_ops.rope import cases, oracle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run(implementation, case, inputs, upstream, angles):
    """q, k, dq and dk, and dcos and dsin if `angles` are to be differentiated too."""
    given, wanted = list(inputs.values()), 4 if angles else 2
    settings = {"layout": case.layout, "implementation": implementation}
    if implementation in ("pallas", "xla"):
        arrays = [jnp.asarray(a) for a in given]

        def rope(*differentiated):
            return jax_liger.rope(*differentiated, *arrays[wanted:], **settings)

        outputs, vjp = jax.vjp(rope, *arrays[:wanted])
        results = [np.asarray(a) for a in (*outputs, *vjp(tuple(map(jnp.asarray, upstream))))]
    else:
        tensors = [to_torch(a, DEVICE) for a in given]
        with poisoned():
            asked = [tensor.requires_grad_() for tensor in tensors[:wanted]]
            outputs = torch_liger.rope(*tensors, **settings)
            gradients = torch.autograd.grad(
                outputs, asked, [to_torch(dy, DEVICE) for dy in upstream]
            )
        results = [from_torch(t) for t in (*outputs, *gradients)]
    return dict(zip(("q", "k", "dq", "dk", "dcos", "dsin")[: 2 + wanted], results, strict=True))


def check(case, angles=False):
    inputs = case.draw()
    rng = np.random.default_rng(1)
    upstream = [draw_normal(rng, x.shape, x.dtype.name) for x in (inputs["q"], inputs["k"])]
    exact = {
        **oracle.forward(**inputs, layout=case.layout),
        **oracle.backward(*inputs.values(), *upstream, layout=case.layout),
    }
    if not angles:
        del exact["dcos"], exact["dsin"]
    judge(functools.partial(run, case=case, inputs=inputs, upstream=upstream, angles=angles),
          exact, case.name)  # fmt: skip


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_against_the_oracle(case):
    check(case)


@pytest.mark.parametrize("angles", ["shared", "one", "per row"])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_angles_that_ask_for_a_gradient(layout, angles):
    check(cases.Case("angles", 3, layout=layout, angles=angles, rotary_dim=12), angles=True)
    check(cases.Case("angles-bfloat16", 3, layout=layout, angles=angles, dtype="bfloat16"), True)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("heads, kv_heads, size, rotary_dim", [
    (32, 8, 128, 128), (71, 1, 64, 64), (28, 4, 128, 32), (9, 3, 80, 80), (6, 1, 256, 96),
])  # fmt: skip
def test_full_size_against_the_oracle(heads, kv_heads, size, rotary_dim, dtype, layout):
    for angles in ("shared", "per row"):
        check(cases.Case("full", 2, 1031, heads, kv_heads, size, rotary_dim, dtype,
                         layout=layout, angles=angles))  # fmt: skip


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("shape", [(6,), (1, 6), (3, 6)], ids=["shared", "one", "per-row"])
def test_oracle_backward_by_finite_differences(shape, layout):
    """With cos and sin that are no angle's, and differ between the features of a pair."""
    rng = np.random.default_rng(0)
    sizes = [(3, 5, 4, 8), (3, 5, 2, 8), *[(*shape[:-1], 5, 6)] * 2]
    inputs = [rng.standard_normal(size) for size in sizes]
    dq, dk = (rng.standard_normal(size) for size in sizes[:2])
    gradients = oracle.backward(*inputs, dq, dk, layout=layout)

    def loss(*inputs):
        outputs = oracle.forward(*inputs, layout=layout)
        return np.sum(outputs["q"] * dq) + np.sum(outputs["k"] * dk)

    for i, name in enumerate(("dq", "dk", "dcos", "dsin")):
        step = [np.zeros(size) for size in sizes]
        step[i] = 1e-3 * rng.standard_normal(sizes[i])
        ahead, behind = (
            loss(*(x + sign * s for x, s in zip(inputs, step, strict=True))) for sign in (1, -1)
        )
        assert np.sum(gradients[name] * step[i]) == pytest.approx((ahead - behind) / 2, rel=1e-9)


def test_both_entries_of_a_pair_are_used_as_they_stand():
    rng = np.random.default_rng(0)
    for layout in ("half", "interleaved"):
        case = cases.Case("unequal", layout=layout)
        inputs = case.draw()
        for name in ("cos", "sin"):
            inputs[name] = draw_normal(rng, inputs[name].shape, "float32")
        upstream = [inputs["q"] + 1, inputs["k"] - 1]
        exact = {
            **oracle.forward(**inputs, layout=layout),
            **oracle.backward(*inputs.values(), *upstream, layout=layout),
        }
        judge(functools.partial(run, case=case, inputs=inputs, upstream=upstream, angles=True),
              exact, case.name)  # fmt: skip


def angles_of(positions, size):
    """cos and sin (..., T, R / 2), float32."""
    frequencies = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.as_tensor(positions, dtype=torch.float64)[..., None] * frequencies
    return angles.cos().float().to(DEVICE), angles.sin().float().to(DEVICE)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


POSITIONS = {
    "far": [list(range(1000, 1008))] * 2,
    "left-padded": [[1, 1, 1, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7]],
    "restarts": [[0, 1, 2, 3, 4, 0, 1, 2], [0, 0, 1, 2, 0, 1, 0, 1]],
    "decode": [[37], [2000]],
}


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("model", ["llama", "cohere", "glm4"])
def test_equal_to_hugging_face(model, name):
    """Their layout in memory too: (B, N, T, H), kept through the operation."""
    positions, size, width = POSITIONS[name], 16, 24 if model == "glm4" else 16
    q, k = randn(2, 6, len(positions[0]), width), randn(2, 3, len(positions[0]), width, seed=1)
    halves = angles_of(positions, size)
    twice = [torch.cat([angle, angle], dim=-1) for angle in halves]
    layout, theirs, ours = "half", twice, twice
    if model != "llama":
        layout, ours = "interleaved", [angle.repeat_interleave(2, dim=-1) for angle in halves]
    if model == "cohere":
        theirs = ours
    modules = {"llama": modeling_llama, "cohere": modeling_cohere, "glm4": modeling_glm4}
    expected = modules[model].apply_rotary_pos_emb(q, k, *theirs)
    heads_last = [x.transpose(1, 2) for x in (q, k)]
    actual = torch_liger.rope(*heads_last, *ours, layout=layout, implementation="triton")
    for a, e in zip(actual, expected, strict=True):
        assert a.transpose(1, 2).is_contiguous()
        torch.testing.assert_close(a.transpose(1, 2), e, rtol=1e-6, atol=1e-6)
    in_jax = jax_liger.rope(
        *(jnp.asarray(t.cpu().numpy()) for t in (*heads_last, *ours)),
        layout=layout, implementation="pallas",
    )  # fmt: skip
    for a, e in zip(in_jax, actual, strict=True):
        np.testing.assert_allclose(a, e.cpu(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("implementation", ["pallas", "triton"])
def test_positions_are_taken_by_value(implementation, positions):
    """The rotation of a row at a position is that of the same row among all positions."""
    every = [torch.cat([angle, angle], dim=-1) for angle in angles_of(range(2001), 8)]
    q, k = randn(2, len(positions[0]), 3, 8), randn(2, len(positions[0]), 1, 8, seed=1)
    gathered = [angle[torch.tensor(positions, device=DEVICE)] for angle in every]
    plain = torch_liger.rope(q, k, *gathered, implementation="eager")
    if implementation == "triton":
        actual = torch_liger.rope(q, k, *gathered, implementation="triton")
    else:
        arrays = [jnp.asarray(t.cpu().numpy()) for t in (q, k, *gathered)]
        actual = [to_torch(np.asarray(a), DEVICE) for a in jax_liger.rope(
            *arrays, implementation="pallas")]  # fmt: skip
    for row, times in enumerate(positions):
        for t, position in enumerate(times):
            alone = torch_liger.rope(
                q[row : row + 1, t : t + 1], k[row : row + 1, t : t + 1],
                every[0][position : position + 1], every[1][position : position + 1],
                implementation="eager",
            )  # fmt: skip
            for a, p, e in zip(actual, plain, alone, strict=True):
                torch.testing.assert_close(p[row, t], e[0, 0], rtol=1e-6, atol=1e-6)
                torch.testing.assert_close(a[row, t], e[0, 0], rtol=1e-6, atol=1e-6)


DTYPES = "'float32', 'bfloat16', 'float16', 'float64'"
GOOD = {"q": (2, 3, 4, 8), "k": (2, 3, 2, 8), "cos": (3, 6), "sin": (3, 6)}
BAD = {
    "unknown-layout": ({}, {}, "neox",
        "layout must be one of 'half', 'interleaved'; got 'neox'"),
    "odd-rotary-dim": ({"cos": (3, 5), "sin": (3, 5)}, {}, "half",
        "cos must have an even last dimension from 2 to the head size 8; got 5 in (3, 5)"),
    "no-rotary-dim": ({"cos": (3, 0), "sin": (3, 0)}, {}, "half",
        "cos must have an even last dimension from 2 to the head size 8; got 0 in (3, 0)"),
    "rotary-dim-over-head-size": ({"cos": (3, 10), "sin": (3, 10)}, {}, "half",
        "cos must have an even last dimension from 2 to the head size 8; got 10 in (3, 10)"),
    "batch-of-k": ({"k": (1, 3, 2, 8)}, {}, "half",
        "k must have shape (2, 3, K, 8), as q (2, 3, 4, 8) but for the number of heads; got "
        "(1, 3, 2, 8)"),
    "time-of-k": ({"k": (2, 4, 2, 8)}, {}, "half",
        "k must have shape (2, 3, K, 8), as q (2, 3, 4, 8) but for the number of heads; got "
        "(2, 4, 2, 8)"),
    "head-size-of-k": ({"k": (2, 3, 2, 6)}, {}, "half",
        "k must have shape (2, 3, K, 8), as q (2, 3, 4, 8) but for the number of heads; got "
        "(2, 3, 2, 6)"),
    "three-dimensional-k": ({"k": (2, 3, 8)}, {}, "half",
        "k must have shape (2, 3, K, 8), as q (2, 3, 4, 8) but for the number of heads; got "
        "(2, 3, 8)"),
    "three-dimensional-q": ({"q": (2, 3, 8)}, {}, "half",
        "q must have four dimensions, (B, T, N, H); got shape (2, 3, 8)"),
    "time-of-cos": ({"cos": (4, 6), "sin": (4, 6)}, {}, "half",
        "cos must have shape (T, R), (1, T, R) or (B, T, R) with B = 2 and T = 3, those of q; got "
        "(4, 6)"),
    "batch-of-cos": ({"cos": (3, 3, 6), "sin": (3, 3, 6)}, {}, "half",
        "cos must have shape (T, R), (1, T, R) or (B, T, R) with B = 2 and T = 3, those of q; got "
        "(3, 3, 6)"),
    "one-dimensional-cos": ({"cos": (6,), "sin": (6,)}, {}, "half",
        "cos must have shape (T, R), (1, T, R) or (B, T, R) with B = 2 and T = 3, those of q; got "
        "(6,)"),
    "sin-not-as-cos": ({"sin": (1, 3, 6)}, {}, "half",
        "sin must have the shape of cos, (3, 6); got (1, 3, 6)"),
    **{
        f"integer-{name}": ({}, {name: "int32"}, "half",
            f"{name} must have a dtype of {DTYPES}; got int32")
        for name in GOOD
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    shapes, dtypes, layout, message = BAD[name]
    for package, zeros, dtype_of in (
        (jax_liger, jnp.zeros, str),
        (torch_liger, torch.zeros, functools.partial(getattr, torch)),
    ):
        given = [
            zeros(shape, dtype=dtype_of(dtypes.get(key, "float32")))
            for key, shape in {**GOOD, **shapes}.items()
        ]
        with pytest.raises(TypeError if dtypes else ValueError) as caught:
            package.rope(*given, layout=layout)
        assert str(caught.value) == message
    with pytest.raises(ValueError, match="cos must be on q's device, cpu; got meta"):
        tensors = [torch.zeros(shape) for shape in GOOD.values()]
        torch_liger.rope(*tensors[:2], tensors[2].to("meta"), tensors[3])
