"""Every family against transformers: logits at each position, gradients, and the files again."""

import functools

import jax
import numpy as np
import pytest
import torch

import model_cases
from jax_liger.models import from_pretrained, loss_fn, save_pretrained
from model_cases import CASES, LENGTH

# In float32 with full precision. Measured: at most 2.3e-6 for logits and 1.2e-5 for gradients.
LOGITS_BOUND, GRADIENTS_BOUND = 1e-5, 1e-4


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """transformers' model of a case, and the folder that it is saved in."""

    @functools.cache
    def make(name):
        folder = tmp_path_factory.mktemp("checkpoint")
        return model_cases.checkpoint(CASES[name], folder), folder

    return make


logits_of = model_cases.quick_jit(lambda model, ids: model(ids))
gradients_of = model_cases.quick_jit(jax.value_and_grad(loss_fn))


@pytest.mark.parametrize("name", CASES)
def test_logits_are_equal_at_every_position(saved, name):
    theirs, folder = saved(name)
    ids = model_cases.tokens()
    want = model_cases.hf_logits(theirs, ids)
    error = model_cases.relative(logits_of(from_pretrained(folder), ids), want)
    assert error.shape == (2, LENGTH)
    assert error.max() < LOGITS_BOUND
    # Flat: a wrong pairing of the rotated features is right at position 0 and grows from there.
    assert error[:, LENGTH // 2 :].max() < 10 * error[:, : LENGTH // 2].max() + 1e-7


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_equal_through_the_mapping(saved, name, tmp_path):
    """Both models' gradients are saved as checkpoints, whose tensors must then be equal."""
    theirs, folder = saved(name)
    ids, labels = model_cases.tokens(), model_cases.tokens(seed=2)
    labels[:, :9] = -100
    theirs.zero_grad()
    longs = {"input_ids": torch.as_tensor(ids).long(), "labels": torch.as_tensor(labels).long()}
    want_loss = theirs(**longs, use_cache=False).loss
    want_loss.backward()

    model = from_pretrained(folder)
    loss, gradients = gradients_of(model, {"input_ids": ids, "labels": labels})
    np.testing.assert_allclose(float(loss), want_loss.item(), rtol=2e-6)

    save_pretrained(gradients, tmp_path / "ours")  # of the model's own structure
    values = {key: p.detach().clone() for key, p in theirs.named_parameters()}
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(p.grad)
    theirs.save_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        for key, p in theirs.named_parameters():
            p.copy_(values[key])

    ours, want = (model_cases.tensors_of(tmp_path / who) for who in ("ours", "theirs"))
    assert ours.keys() == want.keys()
    for key in want:
        error = (ours[key] - want[key]).abs().max() / want[key].abs().max()
        assert error < GRADIENTS_BOUND, f"{key}: {error}"
