"""One forward and backward of every kernel on whichever supported jax is installed, with jax alone.

Warnings are errors here, so a deprecation of anything the kernels use shows on the newest jax.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import flax_models
import jax_liger
from jax_liger import models
from liger_ops.rope import angles as rope_oracle


def test_gated_activations_forward_and_backward():
    gate, up = (jax.random.normal(jax.random.key(seed), (5, 70)) for seed in range(2))

    def loss(implementation, gate, up):
        gated = jax_liger.swiglu(gate, up, implementation=implementation)
        fused = jax_liger.geglu(gate, implementation=implementation)
        return jnp.sum(jnp.sin(gated)) + jnp.sum(jnp.cos(fused))

    assert_kernel_equals_plain(loss, gate, up)


def test_rope_forward_and_backward():
    q, k = (jax.random.normal(jax.random.key(n), (2, 3, n, 12)) for n in (5, 2))
    cos, sin = jax.random.normal(jax.random.key(0), (2, 3, 8))

    def loss(implementation, *inputs):
        half = jax_liger.rope(*inputs, implementation=implementation)
        interleaved = jax_liger.rope(*inputs, layout="interleaved", implementation=implementation)
        return sum(jnp.sum(jnp.sin(y)) for y in (*half, *interleaved))

    assert_kernel_equals_plain(loss, q, k, cos, sin)


def test_rms_norm_forward_and_backward():
    x = jax.random.normal(jax.random.key(0), (5, 70), jnp.float32)
    residual = jax.random.normal(jax.random.key(1), (5, 70), jnp.float32)
    weight = jax.random.normal(jax.random.key(2), (70,), jnp.float32)

    def loss(implementation, x, residual, weight):
        normed, h = jax_liger.fused_add_rms_norm(x, residual, weight, implementation=implementation)
        alone = jax_liger.rms_norm(x, weight, implementation=implementation)
        return jnp.sum(jnp.sin(normed) + jnp.cos(h) + jnp.sin(alone))

    assert_kernel_equals_plain(loss, x, residual, weight)


def test_cross_entropy_forward_and_backward():
    logits = jax.random.normal(jax.random.key(0), (5, 70))
    labels = jax.numpy.asarray([0, 69, -100, 7, 3])

    def loss(implementation, logits):
        return jax_liger.cross_entropy(
            logits, labels, label_smoothing=0.1, z_loss=1e-2, softcap=5.0,
            implementation=implementation,
        )  # fmt: skip

    assert_kernel_equals_plain(loss, logits)


def test_fused_linear_cross_entropy_forward_and_backward():
    hidden = jax.random.normal(jax.random.key(0), (300, 24))
    weight, bias = jax.random.normal(jax.random.key(1), (70, 25))[:, :24], jnp.linspace(0, 1, 70)
    labels = (jnp.arange(300) % 70).at[:40].set(-100)

    def loss(implementation, *inputs):
        losses = [
            jax_liger.fused_linear_cross_entropy(
                inputs[0], inputs[1], labels, bias=inputs[2], label_smoothing=0.1, z_loss=1e-2,
                softcap=5.0, memory=memory, reduction=reduction, implementation=implementation,
            )
            for memory in ("fast", 128 * 70 * 4)
            for reduction in ("mean", "none")
        ]  # fmt: skip
        return sum(jnp.sum(jnp.sin(each)) for each in losses)

    assert_kernel_equals_plain(loss, hidden, weight, bias)


def test_rope_angles():
    parameters = dict(rope_theta=1e4, mrope_section=[4, 3, 1])
    frequencies = jax_liger.rope_frequencies({"head_dim": 16, "rope_parameters": parameters})
    positions = jnp.arange(30).reshape(3, 2, 5)
    got = jax.jit(lambda p: jax_liger.rope_angles(p, frequencies))(positions)
    for a, e in zip(got, rope_oracle.forward(positions, frequencies).values(), strict=True):
        np.testing.assert_allclose(a, e, atol=2e-6)


def test_layer_norm_forward_and_backward():
    x = jax.random.normal(jax.random.key(0), (5, 70))
    weight, bias = jax.random.normal(jax.random.key(1), (2, 70))

    def loss(implementation, x, weight, bias):
        y = jax_liger.layer_norm(x, weight, bias, implementation=implementation)
        return jnp.sum(jnp.sin(y))

    assert_kernel_equals_plain(loss, x, weight, bias)


def test_rms_norm_linear_rope_forward_and_backward():
    x = jax.random.normal(jax.random.key(0), (2, 5, 24))
    norm, weight = jnp.linspace(0.5, 1.5, 24), jax.random.normal(jax.random.key(1), (56, 24)) / 5
    own, bias = jnp.linspace(0.5, 1.5, 8), jnp.linspace(-1, 1, 56)
    cos, sin = jax.random.normal(jax.random.key(2), (2, 5, 6))

    def loss(implementation, *inputs):
        x, norm, weight, bias, own = inputs
        settings = {"num_heads": 3, "num_kv_heads": 2, "head_dim": 8}
        q, k, v = jax_liger.rms_norm_linear_rope(
            x, norm, weight, cos, sin, bias=bias, q_norm_weight=own, k_norm_weight=own,
            implementation=implementation, **settings,
        )  # fmt: skip
        lying = jax_liger.rms_norm_linear_rope(
            x, norm, weight.T, cos, sin, out_axis=1, implementation=implementation, **settings
        )
        return sum(jnp.sum(jnp.sin(y)) for y in (q, k, v, *lying))

    assert_kernel_equals_plain(loss, x, norm, weight, bias, own)


def test_a_model_trains_generates_and_is_saved(tmp_path):
    sizes = dict(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    config = models.Config.from_hf({"model_type": "qwen3", **sizes, **heads}, remat="cheap")
    model = models.CausalLM(config, rngs=nnx.Rngs(0))
    batch = {"input_ids": np.arange(12, dtype=np.int32).reshape(2, 6)}
    loss, gradients = jax.jit(jax.value_and_grad(models.loss_fn))(model, batch)
    assert abs(loss - np.log(40)) < 0.1
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))

    models.save_pretrained(model, tmp_path)
    again = models.from_pretrained(tmp_path)
    tokens = [models.generate(m, batch["input_ids"], max_new_tokens=3) for m in (model, again)]
    np.testing.assert_array_equal(*tokens)


def test_others_models_are_patched():
    tokens, positions = np.arange(10).reshape(2, 5), np.arange(5)[None] + np.zeros((2, 1), int)
    model = flax_models.BonsaiStyle()
    want = model(tokens, positions)
    assert not jax_liger.patch(model, implementation="pallas").left_out
    np.testing.assert_allclose(model(tokens, positions), want, rtol=1e-4, atol=1e-5)
    assert len(jax_liger.unpatch(model)) == 7

    module = flax_models.LinenDecoder()
    variables = module.init(jax.random.key(0), tokens, positions)
    patched = jax_liger.patch(module, implementation="pallas")
    got, want = (m.apply(variables, tokens, positions) for m in (patched, module))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert len(jax_liger.report(patched).patched) == 7


def assert_kernel_equals_plain(loss, *inputs):
    argnums = tuple(range(len(inputs)))
    kernel, plain = (
        jax.jit(jax.value_and_grad(functools.partial(loss, name), argnums))(*inputs)
        for name in ("pallas", "xla")
    )
    for a, e in zip(jax.tree.leaves(kernel), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)
