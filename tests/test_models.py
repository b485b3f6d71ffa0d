"""Every family against transformers: logits at each position, gradients, and the files again."""

import functools

import jax
import numpy as np
import pytest
import torch

import model_cases
from jax_liger.models import from_pretrained, loss_fn, save_pretrained
from model_cases import CASES, LENGTH

# In float32 with full precision. Measured on a CPU: at most 1.8e-6 for logits, of the largest one,
# and 3.3e-6 for gradients, of each tensor's largest.
LOGITS_BOUND, GRADIENTS_BOUND = 1e-5, 3e-5


def _loss_and_logits(model, batch):
    return loss_fn(model, batch), model(batch["input_ids"])


_compared = model_cases.quick_jit(jax.value_and_grad(_loss_and_logits, has_aux=True))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Loss, logits (B, T, V), and a folder with the gradients as if they were the weights."""

    @functools.cache
    def both(name):
        folder = tmp_path_factory.mktemp("checkpoint")
        ids, labels = model_cases.tokens(), model_cases.tokens(seed=2)
        labels[:, :9] = -100

        theirs = model_cases.checkpoint(CASES[name], folder / "weights")
        longs = {"input_ids": torch.as_tensor(ids).long(), "labels": torch.as_tensor(labels).long()}
        out = theirs(**longs, use_cache=False)
        out.loss.backward()
        model_cases.save_gradients(theirs, folder / "theirs")

        model = from_pretrained(folder / "weights")
        with jax.default_matmul_precision("highest"):
            (loss, logits), gradients = _compared(model, {"input_ids": ids, "labels": labels})
        save_pretrained(gradients, folder / "ours")  # of the model's own structure
        ours = float(loss), np.asarray(logits), folder / "ours"
        return ours, (out.loss.item(), out.logits.detach().numpy(), folder / "theirs")

    return both


@pytest.mark.parametrize("name", CASES)
def test_logits_are_equal_at_every_position(results, name):
    (_, got, _), (_, want, _) = results(name)
    error = model_cases.relative(got, want)
    assert error.shape == (2, LENGTH)
    assert error.max() < LOGITS_BOUND
    # Flat: a wrong pairing of the rotated features is right at position 0 and grows from there.
    assert error[:, LENGTH // 2 :].max() < 10 * error[:, : LENGTH // 2].max() + 1e-7


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_equal_through_the_mapping(results, name):
    """Both models' gradients are saved as checkpoints, whose tensors must then be equal."""
    (loss, _, ours), (want_loss, _, theirs) = results(name)
    np.testing.assert_allclose(loss, want_loss, rtol=2e-6)
    ours, theirs = model_cases.tensors_of(ours), model_cases.tensors_of(theirs)
    assert ours.keys() == theirs.keys()
    for key, want in theirs.items():
        error = (ours[key] - want).abs().max() / want.abs().max()
        assert error < GRADIENTS_BOUND, f"{key}: {error}"
