"""Others' decoders, nnx and linen, by the fused kernels: equal, reversible, and nobody else's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import flax_models
import jax_liger
from flax_models import BonsaiStyle, LinenDecoder, Settings, TunixStyle
from jax_liger.patching import patch, report, unpatch
from model_cases import quick_jit

TOKENS = np.arange(14).reshape(2, 7) % flax_models.V
POSITIONS = np.arange(7) + np.array([[0], [30]])
MODELS = {
    "tunix's llama": (TunixStyle, "RMSNorm x3, RoPE x1, SwiGLU x1"),
    "with remat": (lambda: TunixStyle(Settings(remat=True)), "RMSNorm x3, RoPE x1, SwiGLU x1"),
    "tunix's gemma": (
        lambda: TunixStyle(Settings(activation="gelu", gemma=True)),
        "RMSNorm x3, RoPE x1, GeGLU x1",
    ),
    "bonsai's qwen3": (BonsaiStyle, "RMSNorm x5, RoPE x1, SwiGLU x1"),
}


def logits(model):
    return model(TOKENS, POSITIONS)


def loss(model):
    return jnp.sum(jnp.cos(logits(model).astype(jnp.float32)))


def with_dtype(model, dtype):
    for _, param in nnx.to_flat_state(nnx.state(model)):
        param.set_value(param[...].astype(dtype))
    return model


def text_of(model):
    graphdef, state = nnx.split(model)
    return str(jax.make_jaxpr(lambda state: logits(nnx.merge(graphdef, state)))(state))


def error(got, want):
    """Largest, over the largest value, of all leaves."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    worst = 0.0
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        worst = max(worst, np.abs(a - b).max() / np.abs(b).max())
    return worst


@quick_jit
def outcome(model):
    return logits(model), jax.tree.leaves(nnx.grad(loss)(model))


@pytest.mark.parametrize("name", MODELS)
def test_the_same_values_and_gradients(name):
    build, expected = MODELS[name]
    model, other = build(), build()
    exact = outcome(model)
    graphdef, own = nnx.graphdef(model), flax_models.apply_rope
    done = patch(model, implementation="pallas")
    assert sorted(str(done).split(", ")) == sorted(expected.split(", ")) and not done.left_out
    assert report(model) == done and not patch(model).patched
    assert "pallas_call" in text_of(model) and "pallas_call" not in text_of(other)
    assert flax_models.apply_rope is own
    assert error(outcome(model), exact) < 1e-5

    # Narrow: as near to the exact results as the model's own code is, with all of it in 16 bits.
    with_dtype(model, jnp.bfloat16)
    got = outcome(model)
    assert set(unpatch(model)) == set(done.patched) and unpatch(model) == []
    theirs = outcome(model)
    assert [y.dtype for y in jax.tree.leaves(got)] == [y.dtype for y in jax.tree.leaves(theirs)]
    for ours, stock, best in zip(got, theirs, exact, strict=True):
        assert error(ours, best) <= 1.5 * error(stock, best) + 2.0**-8
    assert nnx.graphdef(model) == graphdef and "pallas_call" not in text_of(model)
    assert report(model).left_out.keys() == done.patched.keys()


def test_activations_are_sharded_as_before():
    for model in (TunixStyle(), BonsaiStyle()):
        patch(model, implementation="xla")
        flax_models.sharded.clear()
        logits(model)
        assert set(flax_models.sharded) == {("fsdp", None, "tp")}


def test_under_jit_and_with_other_dtypes_of_activations():
    model = with_dtype(TunixStyle(), jnp.float16)
    want = logits(model)
    patch(model, implementation="pallas")
    got = quick_jit(logits)(model)
    assert got.dtype == want.dtype and error(got, want) < 0.03


class Norm(nnx.Module):
    """An RMSNorm with one thing about it that is not."""

    def __init__(self, wrong):
        self.weight = nnx.Param(jnp.ones(16))
        self.eps, self.wrong = 1e-6, wrong

    def __call__(self, x):
        x = jnp.clip(x, -30.0, 30.0) if self.wrong == "clipped" else x
        x = x - x.mean(-1, keepdims=True) if self.wrong == "centred" else x
        axis = -2 if self.wrong == "axis" else -1
        scale = jnp.mean(x * x, axis, keepdims=True)
        if self.wrong == "eps outside":
            return self.weight * x / (jnp.sqrt(scale) + self.eps)
        offset = {"offset": 0.5}.get(self.wrong, 0.0)
        y = (self.weight + offset) * x * jax.lax.rsqrt(scale + self.eps)
        return y * 1.001 if self.wrong == "scaled" else y


class Gated(nnx.Module):
    """A gated MLP with one thing about it that is not."""

    def __init__(self, wrong):
        rngs = nnx.Rngs(0)
        self.w1, self.w3 = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(8, 16, rngs=rngs)
        self.w2, self.wrong = nnx.Linear(16, 8, rngs=rngs), wrong

    def __call__(self, x):
        if self.wrong == "fails":
            raise RuntimeError("not today")
        x = 2.0 * x if self.wrong == "input" else x
        gate, up = self.w1(x), self.w3(x)
        if self.wrong == "swapped":
            gate, up = up, gate
        act = {
            "relu": nnx.relu,
            "quick": lambda g: g * nnx.sigmoid(1.702 * g),
            "bounded": lambda g: nnx.silu(jnp.minimum(g, 30.0)),
        }.get(self.wrong, nnx.silu)
        y = self.w2(act(gate) * up)
        return y + x if self.wrong == "residual" else y


def apply_rope(x, positions, kind="rotation"):
    """A rotation, unless it is told to be something else."""
    angles = (positions[..., None] / 100.0 ** jnp.linspace(0.0, 1.0, x.shape[-1] // 2))[:, :, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x, 2, -1)
    if kind == "reflection":
        return jnp.concatenate([a * cos - b * sin, b * cos - a * sin], -1)
    y = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    return y**3 if kind == "cube" else y


def apply_rotary_pos_emb(x, positions, kind):
    return apply_rope(x, positions, kind)


class Rotating(nnx.Module):
    def __init__(self, kind):
        self.kind = kind

    def __call__(self, x, positions):
        return apply_rope(x, positions, kind=self.kind)


class Unknown(nnx.Module):
    def __init__(self, kind):
        self.kind = kind

    def __call__(self, x, positions):
        return apply_rotary_pos_emb(x, positions, self.kind)


def test_settings_that_change_afterwards_count():
    x = jax.random.normal(jax.random.key(0), (3, 16))
    model = nnx.List([Norm(None), Gated(None)])
    assert len(patch(model, implementation="pallas").patched) == 2
    for module, change in ((model[0], ("eps", 0.5)), (model[1], ("wrong", "relu"))):
        setattr(module, *change)
        x = x[..., :8] if module is model[1] else x
        own = Norm if isinstance(module, Norm) else Gated
        np.testing.assert_array_equal(module(x), own.__call__(module, x))
        assert "pallas_call" not in str(jax.make_jaxpr(lambda x, m=module: m(x))(x))


def test_a_dropout_that_is_off_is_not_overlooked():
    class Dropping(Gated):
        def __init__(self):
            super().__init__(None)
            self.dropout = nnx.Dropout(0.5, deterministic=True)

        def __call__(self, x):
            return self.w2(self.dropout(nnx.silu(self.w1(x)) * self.w3(x)))

    assert patch(Dropping()).left_out == {"": "it has other layers too: dropout"}


@pytest.mark.parametrize(
    "kind, wrongs, reason",
    [
        (Norm, ["clipped", "centred", "axis", "eps outside", "offset", "scaled"], "no RMSNorm"),
        (Gated, ["relu", "quick", "bounded", "swapped"], "no silu or gelu"),
        (Gated, ["input", "residual"], "something else with"),
        (Gated, ["fails"], "its own code fails on trial: not today"),
    ],
)
def test_what_is_not_quite_the_same_is_left_alone(kind, wrongs, reason):
    model = nnx.List([kind(wrong) for wrong in [*wrongs, None]])
    done = patch(model)
    # The last one shows that it is for what is wrong that the others are left out.
    assert set(done.patched) == {str(len(wrongs))}
    assert done.left_out.keys() == {str(i) for i in range(len(wrongs))}
    assert all(reason in found for found in done.left_out.values())
    assert all(type(module) is kind for module in list(model)[:-1])


def test_a_rotation_is_tried_with_the_arguments_of_each_call():
    x = jax.random.normal(jax.random.key(0), (2, 7, 3, 8))
    model = Rotating("rotation")
    assert str(patch(model, implementation="pallas")) == "RoPE x1"
    for kind, ours in (("rotation", True), ("reflection", False), ("cube", False)):
        model.kind = kind
        run = jax.jit(lambda x: model(x, POSITIONS))
        assert ("pallas_call" in str(jax.make_jaxpr(run)(x))) == ours
        assert error(run(x), apply_rope(x, POSITIONS, kind)) < 1e-5
    with pytest.raises(TypeError, match="NoneType"):  # the function's own error
        model(x, positions=None)
    assert patch(Unknown("rotation")).left_out == {
        "": "apply_rotary_pos_emb has an unknown argument, kind"
    }


def init_and_apply(module):
    variables = quick_jit(module.init)(jax.random.key(0), TOKENS, POSITIONS)

    def loss(variables):
        y = module.apply(variables, TOKENS, POSITIONS)
        return jnp.sum(jnp.cos(y.astype(jnp.float32))), y

    (_, y), gradients = quick_jit(jax.value_and_grad(loss, has_aux=True))(variables)
    return variables, y, gradients


@pytest.mark.parametrize("how", [{"remat": True}, {"scan": True}], ids=str)
def test_a_linen_model(how):
    module = LinenDecoder(**how)
    variables, want, wanted = init_and_apply(module)
    patched = patch(module, implementation="pallas")
    assert patched is not module and report(module).patched == {} == report(patched).patched
    assert patch(patched) is patched and unpatch(patched) is module and unpatch(module) is module
    assert type(patched).__name__ == "LinenDecoder" and patched.label() == "decoder"
    same, got, gradients = init_and_apply(patched)
    assert jax.tree.structure(same) == jax.tree.structure(variables)
    assert jax.tree.all(jax.tree.map(np.array_equal, same, variables))
    assert error(got, want) < 1e-5 and error(gradients, wanted) < 1e-5

    counts = {"RMSNorm": 3, "LayerNorm": 1, "RoPE": 1, "SwiGLU": 1, "GeGLU": 1}
    done = report(patched)
    assert not done.left_out
    kinds = list(done.patched.values())
    assert {kind: kinds.count(kind) for kind in kinds} == counts

    run = jax.make_jaxpr(lambda m: m.apply(variables, TOKENS, POSITIONS), static_argnums=0)
    assert "pallas_call" in str(run(patched)) and "pallas_call" not in str(run(module))
    again = unpatch(patched.clone())
    assert type(again) is LinenDecoder and again == module


def test_a_patched_linen_module_within_another():
    class Outer(linen.Module):
        inner: linen.Module

        def __call__(self, tokens, positions):
            return self.inner(tokens, positions)

    module = LinenDecoder()
    outer, patched = Outer(module), Outer(patch(module, implementation="pallas"))
    variables = quick_jit(outer.init)(jax.random.key(0), TOKENS, POSITIONS)
    want = outer.apply(variables, TOKENS, POSITIONS)
    assert error(patched.apply(variables, TOKENS, POSITIONS), want) < 1e-5
    assert report(patched.inner).patched
    # And another's methods than __call__.
    method = LinenDecoder.encode
    np.testing.assert_array_equal(
        patch(module).apply({"params": variables["params"]["inner"]}, TOKENS, method=method),
        module.apply({"params": variables["params"]["inner"]}, TOKENS, method=method),
    )


class LinenGated(linen.Module):
    """A gated MLP with one thing about it that is not."""

    wrong: str = ""

    @linen.compact
    def __call__(self, x):
        gate, up = linen.Dense(16, name="w1")(x), linen.Dense(16, name="w3")(x)
        if self.wrong == "norm between":
            gate = linen.RMSNorm()(gate)
        if self.wrong == "twice":
            up = up + linen.Dense(16, name="other")(x)
        act = linen.relu if self.wrong == "relu" else linen.silu
        return linen.Dense(8, name="w2")(act(gate) * up)


class LinenShiftedNorm(linen.Module):
    @linen.compact
    def __call__(self, x):
        weight = self.param("weight", linen.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", linen.initializers.ones, (x.shape[-1],))
        return linen.RMSNorm(use_scale=False)(x) * weight + bias


class LinenScaledNorm(linen.Module):
    @linen.compact
    def __call__(self, x):
        weight = self.param("weight", linen.initializers.ones, (x.shape[-1],))
        return weight * x / (1.0 + jnp.sqrt(jnp.mean(x * x, -1, keepdims=True)))


class LinenOverTime(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.RMSNorm(reduction_axes=-2)(x)


@pytest.mark.parametrize(
    "module, path, reason",
    [
        (LinenGated("relu"), "", "no silu or gelu"),
        (LinenGated("norm between"), "", "fails on trial"),
        (LinenGated("twice"), "", "fails on trial"),
        (LinenShiftedNorm(), "", "it is no RMSNorm: it has"),
        (LinenScaledNorm(), "", "no RMSNorm over the last axis"),
        (LinenOverTime(), "RMSNorm_0", "reduction_axes must be -1"),
    ],
)
def test_what_is_not_quite_the_same_in_linen_is_left_alone(module, path, reason):
    x = jax.random.normal(jax.random.key(0), (3, 5, 8))
    patched = patch(module, implementation="pallas")
    variables = patched.init(jax.random.key(1), x)
    want = module.apply(variables, x)
    assert error(patched.apply(variables, x), want) < 1e-5
    assert reason in report(patched).left_out[path]


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="must be a Flax nnx or linen module; got dict"):
        patch({})
    variables = LinenGated().init(jax.random.key(0), jnp.ones((2, 8)))
    with pytest.raises(ValueError, match="must not be bound; got LinenGated in a scope"):
        patch(LinenGated().bind(variables))
    assert jax_liger.report is report
