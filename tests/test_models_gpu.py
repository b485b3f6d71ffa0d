"""On a GPU: the kernels and cuDNN's attention against XLA alone, in bfloat16."""

import jax
import numpy as np
import pytest

import model_cases
from jax_liger.models import Cache, from_pretrained, loss_fn
from jax_liger.models.sharding import batch_sharding, make_mesh, rules_for
from model_cases import CASES, gradients, with_config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("remat", ["none", "cheap"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma2", "gemma3", "mixtral"])
def test_kernels_and_cudnn_equal_xla(name, remat, packed, tmp_path):
    """Windows and documents are masks that cuDNN must apply as XLA does."""
    model_cases.checkpoint(CASES[name], tmp_path)
    model = from_pretrained(tmp_path)
    batch = {"input_ids": model_cases.tokens()}
    if packed:
        segments = np.repeat([1, 2, 3, 0], [50, 30, 40, 8])
        batch["segment_ids"] = np.broadcast_to(segments, (2, 128)).astype(np.int32)
    with jax.default_matmul_precision("highest"):
        want, exact = gradients(with_config(model, implementation="xla", attention="xla"), batch)
    low = dict(dtype="bfloat16", remat=remat)
    errors = []
    for settings in (low, low | dict(implementation="xla", attention="xla")):
        loss, grads = gradients(with_config(model, **settings), batch)
        assert abs(loss - want) < 0.01 * want
        flat, true = (
            np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(g)])
            for g in (grads, exact)
        )
        errors.append(np.linalg.norm(flat - true) / np.linalg.norm(true))
    assert errors[0] < 1.5 * errors[1], errors


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_a_prompt_into_the_cache(name, tmp_path):
    model_cases.checkpoint(CASES[name], tmp_path)
    model = with_config(from_pretrained(tmp_path), dtype="bfloat16")
    ids = model_cases.tokens()
    want = jax.jit(lambda m, i: m(i))(model, ids)
    got, _ = jax.jit(lambda m, i, c: m(i, cache=c))(model, ids, Cache.empty(model.config, 2, 256))
    assert model_cases.relative(got, want).max() < 0.03


@pytest.mark.skipif(jax.device_count() < 2, reason=f"needs two GPUs, JAX has {jax.devices()}")
@pytest.mark.parametrize("axis", ["data", "fsdp", "tensor"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_two_gpus_equal_one(name, axis, tmp_path):
    """With the kernels, and with the head's classes split where the axis is tensor."""
    case = CASES[name]
    case = model_cases.Case(case.model_type, case.config | {"vocab_size": 96})
    model_cases.checkpoint(case, tmp_path)
    batch = {"input_ids": model_cases.tokens(vocab=96)}
    want = gradients(from_pretrained(tmp_path, implementation="pallas"), batch)
    mesh = make_mesh(**{axis: 2}, devices=jax.devices()[:2])
    model = from_pretrained(tmp_path, mesh=mesh, rules=rules_for(mesh), implementation="pallas")
    with jax.set_mesh(mesh):
        split = "tensor" if axis == "tensor" else None
        function = lambda model, batch: loss_fn(model, batch, vocab_mesh_axis=split)  # noqa: E731
        got = jax.jit(jax.value_and_grad(function))(
            model, jax.device_put(batch, batch_sharding(mesh))
        )
    model_cases.assert_close(got, want, 1e-4)
