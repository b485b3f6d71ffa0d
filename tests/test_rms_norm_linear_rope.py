"""rms_norm_linear_rope: all implementations against the oracle, Hugging Face's layers, the rule."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

import jax_liger
import torch_liger
from compare import assert_matches_oracle, from_torch, judge, poisoned, to_torch
from liger_ops.drawing import draw_normal
from liger_ops.rms_norm_linear_rope import cases, oracle, pallas_kernel, triton_kernel
from liger_ops.rms_norm_linear_rope.cases import Case, Config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = {"weight": "qkv_weight"}  # of the oracle's arrays among the public arguments
# Compiling the interpreter's program takes seconds, so a CPU judges these in both frameworks.
BOTH = {
    "bfloat16-llama", "everything-bfloat16-gemma", "outliers-bfloat16-1-rows",
    "float16-x-of-15000", "head-size-80", "head-size-7", "no-rows",
    "mixed-float32-bfloat16-float32",
}  # fmt: skip
OPTIONS = {"xla_allow_excess_precision": False}
if DEVICE == "cpu":
    OPTIONS["xla_backend_optimization_level"] = 0


def settings_of(case, implementation):
    return {
        "num_heads": case.heads, "num_kv_heads": case.kv_heads, "head_dim": case.head_dim,
        "eps": case.eps, "offset": case.offset, "casting_mode": case.casting_mode,
        "implementation": implementation,
    }  # fmt: skip


def differentiated(inputs):
    return [name for name in inputs if name not in ("cos", "sin")]


def run(implementation, case, inputs, upstream, out_axis=0):
    """q, k, v and the gradients of all inputs but the angles, by the oracle's names."""
    in_jax = implementation in ("pallas", "xla", "composed in jax")
    settings = settings_of(case, implementation.removesuffix(" in jax"))
    results = (run_jax if in_jax else run_torch)(settings, inputs, upstream, out_axis)
    names = ("q", "k", "v", *(f"d{name}" for name in differentiated(inputs)))
    return dict(zip(names, results, strict=True))


def public(inputs):
    return {"norm_weight": None, **{NAMES.get(name, name): a for name, a in inputs.items()}}


def run_jax(settings, inputs, upstream, out_axis):
    names = differentiated(inputs)
    turned = (lambda name, a: a.T if name == "weight" else a) if out_axis else (lambda name, a: a)
    arrays = {name: turned(name, jnp.asarray(a)) for name, a in inputs.items()}

    def outputs(*values):
        given = {**arrays, **dict(zip(names, values, strict=True))}
        return jax_liger.rms_norm_linear_rope(**public(given), out_axis=out_axis, **settings)

    # XLA may not leave out the rounding of the plain version's normed x.
    @functools.partial(jax.jit, compiler_options=OPTIONS)
    def value_and_gradients(*values):
        y, vjp = jax.vjp(outputs, *values)
        return y, vjp(tuple(jnp.asarray(upstream[name]) for name in "qkv"))

    y, gradients = value_and_gradients(*(arrays[name] for name in names))
    gradients = [turned(name, g) for name, g in zip(names, gradients, strict=True)]
    return [np.asarray(a) for a in (*y, *gradients)]


def run_torch(settings, inputs, upstream, out_axis=0):
    tensors = {name: to_torch(a, DEVICE) for name, a in inputs.items()}
    wanted = [tensors[name].requires_grad_() for name in differentiated(inputs)]
    kept = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    dys = [to_torch(upstream[name], DEVICE) for name in "qkv"]
    with poisoned():
        y = torch_liger.rms_norm_linear_rope(**public(tensors), **settings)
        gradients = torch.autograd.grad(y, wanted, dys)
    assert all(torch.equal(tensors[name], kept[name]) for name in tensors)  # written to by none
    return [from_torch(t) for t in (*y, *gradients)]


def oracle_results(case, inputs, upstream):
    settings = {"eps": case.eps, "offset": case.offset}
    return {
        **oracle.forward(inputs, case.shape, **settings),
        **oracle.backward(inputs, upstream, case.shape, **settings),
    }


def plain_results(case, inputs, upstream):
    """The plain version's of float64 numbers: on a GPU at once, where the oracle takes minutes."""
    wide = ({name: a.astype(np.float64) for name, a in arrays.items()}
            for arrays in (inputs, upstream))  # fmt: skip
    return run("eager", case, *wide)


def drawn(case, exactly=oracle_results):
    """Inputs, upstream gradients in the product's dtype, and the exact results."""
    inputs, rng = case.draw(), np.random.default_rng(1)
    dtypes = {inputs["x"].dtype.name, inputs["weight"].dtype.name}
    dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    upstream = {
        name: draw_normal(rng, (case.batch, case.time, n, case.head_dim), dtype)
        for name, n in (("q", case.heads), ("k", case.kv_heads), ("v", case.kv_heads))
    }
    return inputs, upstream, exactly(case, inputs, upstream)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_against_the_oracle(case):
    inputs, upstream, exact = drawn(case)
    run_case = functools.partial(run, case=case, inputs=inputs, upstream=upstream)
    if DEVICE == "cuda" or case.name in BOTH:
        judge(run_case, exact, case.name)
    else:
        results = run_case("triton"), run_case("eager")
        assert_matches_oracle(*results, exact, f"{case.name} triton")


def test_the_cases_of_both_frameworks_are_there():
    assert {case.name for case in cases.CASES} >= BOTH


@pytest.mark.parametrize("name", ["everything-bfloat16-llama", "partial"])
def test_the_composition_against_the_oracle(name):
    case = next(case for case in cases.CASES if case.name == name)
    inputs, upstream, exact = drawn(case)
    for implementation, plain in (("composed", "eager"), ("composed in jax", "xla")):
        results = (run(one, case, inputs, upstream) for one in (implementation, plain))
        assert_matches_oracle(*results, exact, f"{name} {implementation}")


CONFIGS = {
    "in x": Config(32, 64, 16, 4, 3, "x", group=2),
    "in the weight": Config(16, 32, 32, 4, 2, "weight"),
    "part of a head": Config(16, 32, 16, 4, 2, "weight", group=1),
    "persistent": Config(16, 128, 16, 4, 2, "weight", persistent=True),
}
SIZES = {"part of a head": 64, "persistent": 64}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_every_kind_of_tiles(name, dtype, monkeypatch):
    config, size = CONFIGS[name], SIZES.get(name, 16)
    heads = (4, 2) if name == "persistent" else (3, 1)  # those of whole tiles there
    case = Case(name, 2, 18, 56, *heads, size, dtype=dtype, bias_dtype="float32", angles="per row",
                head_norm_dtype=None if name == "part of a head" else "float32")  # fmt: skip
    # On a CPU the test above has those in x in both frameworks.
    in_jax = DEVICE == "cuda" or (dtype == "bfloat16" and config.scales == "weight")
    in_jax &= not config.persistent
    for module in (pallas_kernel, triton_kernel):
        monkeypatch.setattr(
            module,
            "rms_norm_linear_rope",
            lambda *a, op=module.rms_norm_linear_rope, **k: op(*a, **{**k, "config": config}),
        )
    launched = []
    if dtype == "bfloat16":
        assert case.dim % config.block_dim  # the last step is not a whole one
    persistent = triton_kernel._Persistent.__call__
    monkeypatch.setattr(triton_kernel._Persistent, "__call__",
                        lambda *a: launched.append(a) or persistent(*a))  # fmt: skip
    inputs, upstream, exact = drawn(case)
    run_case = functools.partial(run, case=case, inputs=inputs, upstream=upstream)
    if in_jax:
        judge(run_case, exact, name)
    else:
        assert_matches_oracle(run_case("triton"), run_case("eager"), exact, name)
    assert bool(launched) == (name == "persistent")


@pytest.mark.parametrize("name", ["everything-bfloat16-llama", "partial-half"])
def test_the_weight_lies_either_way_in_jax(name):
    case = next(case for case in cases.CASES if case.name == name)
    inputs, upstream, exact = drawn(case)
    results = [run(one, case, inputs, upstream, out_axis=1) for one in ("pallas", "xla")]
    assert_matches_oracle(*results, exact, name)


def test_a_planted_fault_is_seen():
    case = dataclasses.replace(cases.CASES[3], dtype="bfloat16")
    inputs, upstream, exact = drawn(case)
    results = run("triton", case, inputs, upstream), run("eager", case, inputs, upstream)
    assert_matches_oracle(*results, exact)
    shifted = {**inputs, "cos": np.roll(inputs["cos"], 1, axis=0)}
    with pytest.raises(AssertionError, match="q: rms error"):
        assert_matches_oracle(run("triton", case, shifted, upstream), results[1], exact)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 2048, 8192])
@pytest.mark.parametrize("dim, heads, kv_heads, size", [
    (4096, 32, 8, 128), (2048, 32, 8, 64), (2560, 32, 8, 80), (1000, 7, 1, 256),
])  # fmt: skip
@pytest.mark.parametrize("extra", [{}, {"bias_dtype": "bfloat16", "head_norm_dtype": "bfloat16"}])
def test_full_size(rows, dim, heads, kv_heads, size, extra):
    # So many outliers that the norm weight's gradient, which they make up, is a sample of errors.
    case = Case("full", 1, rows, dim, heads, kv_heads, size, dtype="bfloat16", outliers=dim // 32,
                **extra)  # fmt: skip
    inputs, upstream, exact = drawn(case, plain_results)
    judge(functools.partial(run, case=case, inputs=inputs, upstream=upstream), exact, str(case))


def test_the_plain_version_is_exact_in_float64():
    case = Case("", 2, 5, 40, 3, 1, 16, dtype="bfloat16", outliers=2, **cases.ALL)
    inputs, upstream, exact = drawn(case)
    for name, plain in plain_results(case, inputs, upstream).items():
        np.testing.assert_allclose(plain, exact[name], rtol=1e-9, atol=1e-11)


def test_oracle_backward_by_finite_differences():
    case = Case("", 2, 3, 6, 3, 2, 8, 6, offset=0.5, eps=1e-2, angles="per row", **cases.ALL)
    rng = np.random.default_rng(0)
    inputs = {name: rng.standard_normal(a.shape) for name, a in case.draw().items()}
    shapes = {n: a.shape for n, a in oracle.forward(inputs, case.shape).items()}
    upstream = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    settings = {"offset": case.offset, "eps": case.eps}

    def loss(inputs):
        outputs = oracle.forward(inputs, case.shape, **settings)
        return sum(np.sum(outputs[name] * upstream[name]) for name in "qkv")

    gradients = oracle.backward(inputs, upstream, case.shape, **settings)
    assert set(gradients) == {f"d{name}" for name in differentiated(inputs)}
    for name in differentiated(inputs):
        step = 1e-5 * rng.standard_normal(inputs[name].shape)
        ahead, behind = (loss({**inputs, name: inputs[name] + sign * step}) for sign in (1, -1))
        expected = np.sum(gradients[f"d{name}"] * step)
        assert expected == pytest.approx((ahead - behind) / 2, rel=1e-6)


@pytest.mark.parametrize("implementation", ["triton", "pallas"])
def test_values_known_by_hand(implementation):
    """x of ones times a weight that picks features, turned by a quarter: the halves change places.

    The mean square is 1, so the norm leaves x as it is but for the weight w.
    """
    dim, size = 24, 8
    x, w = np.ones((1, 2, dim), np.float32), np.arange(1, dim + 1, dtype=np.float32)
    weight = np.zeros((4 * size, dim), np.float32)
    weight[np.arange(dim), np.arange(dim)] = 1.0  # q's 2 heads and k's one are w; v is 0 and bias
    bias = np.r_[np.zeros(3 * size), np.arange(size)].astype(np.float32)
    cos, sin = np.zeros((2, size), np.float32), np.ones((2, size), np.float32)
    cos[0], sin[0] = 1.0, 0.0
    settings = {"num_heads": 2, "num_kv_heads": 1, "head_dim": size, "eps": 0.0}
    if implementation == "triton":
        tensors = [to_torch(a, DEVICE) for a in (x, w, weight, cos, sin)]
        results = torch_liger.rms_norm_linear_rope(
            *tensors, bias=to_torch(bias, DEVICE), implementation="triton", **settings
        )
        q, k, v = map(from_torch, results)
    else:
        arrays = map(jnp.asarray, (x, w, weight, cos, sin))
        results = jax_liger.rms_norm_linear_rope(
            *arrays, bias=jnp.asarray(bias), implementation="pallas", **settings
        )
        q, k, v = map(np.asarray, results)
    heads = w.reshape(3, size)
    turned = np.concatenate([-heads[:, 4:], heads[:, :4]], axis=1)
    for time, expected in ((0, heads), (1, turned)):
        np.testing.assert_allclose(np.concatenate([q[0, time], k[0, time]]), expected, rtol=1e-6)
        np.testing.assert_allclose(v[0, time, 0], np.arange(size), rtol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_equal_to_hugging_face(family):
    """Its layer's own norm, projections, norms of heads and rotation."""
    config = (LlamaConfig if family == "llama" else Qwen3Config)(
        hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=8, num_hidden_layers=1, vocab_size=8, rms_norm_eps=1e-5,
    )  # fmt: skip
    modeling = modeling_llama if family == "llama" else modeling_qwen3
    name = "Llama" if family == "llama" else "Qwen3"
    layer = getattr(modeling, f"{name}DecoderLayer")(config, 0).to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    x = torch.randn(2, 5, 48, generator=generator).to(DEVICE)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 100, 0, 1]], device=DEVICE)
    rotary = getattr(modeling, f"{name}RotaryEmbedding")(config).to(DEVICE)
    cos, sin = rotary(x, positions)

    attention, norms = layer.self_attn, {}
    y = layer.input_layernorm(x)
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    q, k, v = (p(y).view(2, 5, -1, 16) for p in projections)
    if family == "qwen3":
        norms = {f"{n}_norm_weight": getattr(attention, f"{n}_norm").weight for n in "qk"}
        q, k = attention.q_norm(q), attention.k_norm(k)
    q, k = modeling.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    weight = torch.cat([p.weight for p in projections])
    actual = torch_liger.rms_norm_linear_rope(
        x, layer.input_layernorm.weight, weight, cos, sin, num_heads=4, num_kv_heads=2,
        head_dim=16, eps=1e-5, implementation="triton", **norms,
    )  # fmt: skip
    for a, e in zip(actual, (q, k, v), strict=True):
        torch.testing.assert_close(a, e, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shared_memory", [99 * 1024, 163 * 1024, 227 * 1024])
def test_tiles_fit_the_card(shared_memory):
    for rows in (1, 16, 17, 64, 65, 4096, 10**6):
        for size in (2, 7, 64, 80, 128, 256, 512):
            for norms in (False, True):
                for itemsize in (2, 4):
                    config = Config.for_shape(rows, size, norms, itemsize, shared_memory)
                    assert config.bytes_of(itemsize) <= shared_memory
                    assert config.scales == "x"  # others were not shown to be right on a GPU
                    of_tile, half, shares = config.tile(size)
                    assert of_tile * 2 * half == config.block_columns and config.block_dim >= 16
                    assert 2 * half * shares >= size and (shares == 1 or not norms)


DTYPES = "'float32', 'bfloat16', 'float16', 'float64'"
GOOD = {
    "x": (2, 3, 8), "norm_weight": (8,), "qkv_weight": (32, 8), "cos": (3, 4), "sin": (3, 4),
    "bias": (32,), "q_norm_weight": (8,), "k_norm_weight": (8,),
}  # fmt: skip
SETTINGS = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
BAD = {
    "two-dimensional-x": ({"x": (3, 8)}, {}, {},
        "x must have three dimensions, (B, T, D); got shape (3, 8)"),
    "norm-weight": ({"norm_weight": (7,)}, {}, {},
        "norm_weight must have shape (D,) with D = 8, the last dimension of x (2, 3, 8); got (7,)"),
    "weight": ({"qkv_weight": (24, 8)}, {}, {},
        "qkv_weight must have shape ((N + 2 K) H, D) with N = 2, K = 1, H = 8 and D = 8, the last "
        "dimension of x (2, 3, 8); got (24, 8)"),
    "empty-weight": ({"qkv_weight": (0, 8)}, {}, {},
        "qkv_weight must have shape ((N + 2 K) H, D) with N = 2, K = 1, H = 8 and D = 8, the last "
        "dimension of x (2, 3, 8); got (0, 8); an empty weight is what a sharded parameter looks "
        "like outside its module"),
    "bias": ({"bias": (8,)}, {}, {}, "bias must have shape ((N + 2 K) H,) = (32,); got (8,)"),
    "q-norm": ({"q_norm_weight": (16,)}, {}, {},
        "q_norm_weight must have shape (H,) with H = 8, the head_dim; got (16,)"),
    "k-norm": ({"k_norm_weight": (4,)}, {}, {},
        "k_norm_weight must have shape (H,) with H = 8, the head_dim; got (4,)"),
    "cos": ({"cos": (4, 4), "sin": (4, 4)}, {}, {},
        "cos must have shape (T, R), (1, T, R) or (B, T, R) with B = 2 and T = 3, those of q; got "
        "(4, 4)"),
    "wide-cos": ({"cos": (3, 10), "sin": (3, 10)}, {}, {},
        "cos must have an even last dimension from 2 to the head size 8; got 10 in (3, 10)"),
    "sin": ({"sin": (1, 3, 4)}, {}, {},
        "sin must have the shape of cos, (3, 4); got (1, 3, 4)"),
    "heads": ({}, {}, {"num_heads": 0}, "num_heads must be at least 1; got 0"),
    "kv-heads": ({}, {}, {"num_kv_heads": 0}, "num_kv_heads must be at least 1; got 0"),
    "head-size": ({}, {}, {"head_dim": 1}, "head_dim must be at least 2; got 1"),
    "eps": ({}, {}, {"eps": -1.0}, "eps must be at least 0; got -1.0"),
    "casting": ({}, {}, {"casting_mode": "qwen"},
        "casting_mode must be one of 'llama', 'gemma', 'none'; got 'qwen'"),
    **{
        f"integer-{name}": ({}, {name: "int32"}, {},
            f"{name} must have a dtype of {DTYPES}; got int32")
        for name in GOOD
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    shapes, dtypes, settings, message = BAD[name]
    for package, zeros, dtype_of in (
        (jax_liger, jnp.zeros, str),
        (torch_liger, torch.zeros, functools.partial(getattr, torch)),
    ):
        given = {
            key: zeros(shape, dtype=dtype_of(dtypes.get(key, "float32")))
            for key, shape in {**GOOD, **shapes}.items()
        }
        with pytest.raises(TypeError if dtypes else ValueError) as caught:
            package.rms_norm_linear_rope(**given, **{**SETTINGS, **settings})
        assert str(caught.value) == message


def test_bad_choices():
    given = {name: torch.zeros(shape) for name, shape in GOOD.items()}
    arrays = {name: jnp.zeros(shape) for name, shape in GOOD.items()}
    with pytest.raises(ValueError, match="one of None, 'triton', 'composed', 'eager'; got 'xla'"):
        torch_liger.rms_norm_linear_rope(**given, **SETTINGS, implementation="xla")
    with pytest.raises(ValueError, match="one of None, 'pallas', 'composed', 'xla'; got 'eager'"):
        jax_liger.rms_norm_linear_rope(**arrays, **SETTINGS, implementation="eager")
    with pytest.raises(ValueError, match="out_axis must be one of 0, 1; got 2"):
        jax_liger.rms_norm_linear_rope(**arrays, **SETTINGS, out_axis=2)
    with pytest.raises(ValueError, match=r"shape \(D, \(N \+ 2 K\) H\).*got \(32, 8\)"):
        jax_liger.rms_norm_linear_rope(**arrays, **SETTINGS, out_axis=1)
    with pytest.raises(ValueError, match="bias must be on x's device, cpu; got meta"):
        moved = {**given, "bias": given["bias"].to("meta")}
        torch_liger.rms_norm_linear_rope(**moved, **SETTINGS)
    doubles = {name: tensor.double() for name, tensor in given.items()}
    for implementation in ("triton", "composed"):
        with pytest.raises(RuntimeError, match=f"implementation='{implementation}' cannot run"):
            torch_liger.rms_norm_linear_rope(**doubles, **SETTINGS, implementation=implementation)
    eager = torch_liger.rms_norm_linear_rope(**doubles, **SETTINGS)
    assert all(y.dtype == torch.float64 for y in eager)
