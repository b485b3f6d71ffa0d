"""How models compute: the kernels, precision, rematerialisation, and in a training loop."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from jax.ad_checkpoint import print_saved_residuals

import model_cases
from jax_liger import rope_angles
from jax_liger.models import CausalLM, Config, attention, from_pretrained, generate, loss_fn
from model_cases import CASES, assert_close, gradients, quick_jit, with_config


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_the_kernels_equal_the_stock_model(loaded, name):
    """Norms, rotations, activations and the loss, with capped logits too; in interpret mode."""
    _, model = loaded(name)
    batch = {"input_ids": model_cases.tokens(2, 12)}
    stock = gradients(with_config(model, implementation="xla"), batch)
    fused = gradients(with_config(model, implementation="pallas"), batch)
    texts = [
        str(jax.make_jaxpr(loss_fn)(with_config(model, implementation=name), batch))
        for name in ("pallas", "xla")
    ]
    # Two kinds of norm, rotation, activation and loss; layers share what is the same.
    assert texts[0].count("pallas_call") >= 5 and "pallas_call" not in texts[1]
    assert_close(jax.tree.leaves(fused), jax.tree.leaves(stock), 2e-5)


def test_rematerialisation_keeps_the_values_and_less_memory(loaded, capsys):
    _, model = loaded("llama")
    batch = {"input_ids": model_cases.tokens(2, 32)}
    want, kept = None, {}
    for remat in ("none", "activation", "cheap", "dots", "full"):
        changed = with_config(model, remat=remat)
        jax.ad_checkpoint.print_saved_residuals(loss_fn, changed, batch)
        found = re.findall(
            r"^f32\[([\d,]+)\].* (?!from the argument)", capsys.readouterr().out, re.M
        )
        kept[remat] = sum(math.prod(map(int, shape.split(","))) for shape in found)
        got = gradients(changed, batch)
        want = want or got
        assert_close(got, want, 1e-5)
    assert kept["full"] < kept["dots"] <= kept["cheap"] < kept["activation"], kept
    # Of two layers, what is between up_proj and down_proj: 2 x 32 tokens of 96 features.
    assert kept["none"] - kept["activation"] >= 2 * 2 * 32 * 96


def test_what_is_kept_of_cudnn_attention(monkeypatch, capsys):
    """Its result and row sums, and none of what went in: that is computed again from products."""
    monkeypatch.setattr(
        "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000
    )
    config = Config.from_hf(
        CASES["llama"].hf_config(), attention="cudnn", remat="cheap", dtype="bfloat16"
    )
    model = nnx.eval_shape(lambda: CausalLM(config, rngs=nnx.Rngs(0)))
    ids = jax.ShapeDtypeStruct((2, 128), "int32")
    print_saved_residuals(lambda m, i: loss_fn(m, {"input_ids": i}), model, ids)
    out = capsys.readouterr().out
    assert out.count("output of dot_product_attention_fwd") == 2 * 2  # of two layers
    assert "_rope_fwd" not in out and "_gated" not in out


def test_mixed_precision(loaded):
    """Activations in bfloat16, parameters and their gradients in float32."""
    _, model = loaded("llama")
    batch = {"input_ids": model_cases.tokens(2, 64)}
    want, exact = gradients(model, batch)
    loss, grads = gradients(with_config(model, dtype="bfloat16"), batch)
    assert loss.dtype == "float32" and abs(loss - want) < 0.01 * want
    assert {leaf.dtype.name for leaf in jax.tree.leaves(grads)} == {"float32"}
    flat, true = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(g)]) for g in (grads, exact))
    assert flat @ true / np.linalg.norm(flat) / np.linalg.norm(true) > 0.99


@pytest.mark.parametrize("name", CASES)
def test_every_activation_has_the_compute_dtype(name):
    config = Config.from_hf(CASES[name].hf_config(), dtype="bfloat16", param_dtype="float32")
    model = nnx.eval_shape(lambda: CausalLM(config, rngs=nnx.Rngs(0)))
    ids = jax.ShapeDtypeStruct((2, 8), "int32")

    def layers(model, ids):
        x = model.model.embed_tokens(ids)
        angles = rope_angles(jnp.arange(8), config.frequencies("full_attention", 8))
        outs = [block(x, angles, None, None)[0] for block in model.model.layers]
        return *outs, model.model(ids)[0], model(ids)

    assert {out.dtype.name for out in jax.eval_shape(layers, model, ids)} == {"bfloat16"}


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "olmo2"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(name, tmp_path):
    ids = model_cases.tokens()
    low = model_cases.build(CASES[name], torch.bfloat16)
    low.save_pretrained(tmp_path)
    rounded = model_cases.build(CASES[name], torch.bfloat16).float()
    exact = model_cases.hf_logits(rounded, ids)
    got = quick_jit(lambda m, i: m(i))(from_pretrained(tmp_path), ids)
    errors = [np.sqrt(np.mean((np.asarray(x, np.float64) - exact) ** 2)) for x in (
        got, model_cases.hf_logits(low, ids)
    )]  # fmt: skip
    assert got.dtype == "bfloat16"
    assert errors[0] < 1.2 * errors[1], errors


def test_training_in_an_optax_loop():
    config = Config.from_hf(CASES["qwen3"].hf_config(), remat="cheap")
    model = CausalLM(config, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    batch = {"input_ids": model_cases.tokens(2, 24)}

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, batch)) for _ in range(25)]
    assert abs(losses[0] - np.log(97)) < 0.2  # untrained: no token is likelier than another
    assert losses[-1] < 0.5 * losses[0]


def test_nothing_is_64_bit_under_x64(loaded):
    _, model = loaded("mixtral")
    batch = {"input_ids": model_cases.tokens(1, 8)}
    want = gradients(model, batch)
    with jax.enable_x64(True):
        loss, grads = gradients(model, batch)
        tokens = generate(model, batch["input_ids"], max_new_tokens=2)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((loss, grads))} == {"float32"}
    assert tokens.dtype == "int32"
    assert_close((loss, grads), want, 1e-5)


def test_cudnn_has_no_capped_scores(loaded):
    _, model = loaded("gemma2")
    with pytest.raises(ValueError, match=r"attention='cudnn' has no softcap.*got softcap=2\.0"):
        with_config(model, attention="cudnn")(model_cases.tokens(1, 4))


def test_where_cudnn_is_asked_for(monkeypatch):
    class Device:
        compute_capability = "9.0"

    def takes(dtype="bfloat16", length=128, head=64, mask=None):
        q = jax.ShapeDtypeStruct((2, length, 4, head), dtype)
        return attention._cudnn_takes(q, q, mask)

    assert not takes()  # there is no GPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device])
    mask = jax.ShapeDtypeStruct((2, 1, 128, 128), "bool")
    assert takes() and takes("float16") and takes(head=256) and takes(mask=mask)
    assert not takes("float32") and not takes(head=36) and not takes(head=264)
    assert not takes(length=1) and not takes(length=127, mask=mask) and takes(length=127)
    Device.compute_capability = "8.0"
    assert takes(head=128) and not takes(head=256)
