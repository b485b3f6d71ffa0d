"""The loss that spreads tokens over the experts: that of transformers, with padding and without."""

import dataclasses

import jax
import numpy as np
import pytest
import torch

import model_cases
from jax_liger.models import count_items, from_pretrained, loss_fn, save_pretrained
from model_cases import CASES, quick_jit, with_config

COEF = 0.7
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": COEF}


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def batch(padded=True):
    ids = model_cases.tokens(2, 24)
    mask = np.ones_like(ids)
    if padded:
        mask[0, 15:] = 0
    return {"input_ids": ids, "labels": np.where(mask, ids, -100), "attention_mask": mask}


step = quick_jit(jax.value_and_grad(loss_fn))
STATIC = ("router_aux_loss_coef", "return_z_loss", "z_loss")
loss_of = quick_jit(loss_fn, static_argnames=STATIC)


@pytest.mark.parametrize("name", ["mixtral", "qwen3 moe"])
@pytest.mark.parametrize("padded", [False, True])
def test_the_loss_and_its_gradients_are_those_of_transformers(tmp_path, name, padded):
    case = dataclasses.replace(CASES[name], config=CASES[name].config | BALANCED)
    theirs = model_cases.checkpoint(case, tmp_path / "weights")
    given = batch(padded)
    if not padded:
        given.pop("attention_mask")
    out = theirs(**{k: torch.as_tensor(v).long() for k, v in given.items()}, use_cache=False)
    out.loss.backward()
    model_cases.save_gradients(theirs, tmp_path / "theirs")

    model = from_pretrained(tmp_path / "weights")
    assert model.config.router_aux_loss_coef == COEF and out.aux_loss > 1.0
    loss, gradients = step(model, given)
    np.testing.assert_allclose(float(loss), out.loss.item(), rtol=3e-6)
    save_pretrained(gradients, tmp_path / "ours")
    ours = model_cases.tensors_of(tmp_path / "ours")
    for key, want in model_cases.tensors_of(tmp_path / "theirs").items():
        assert (ours[key] - want).abs().max() <= 3e-5 * want.abs().max(), key


def test_the_coefficient_by_argument_and_by_config(loaded):
    _, model = loaded("mixtral")  # whose config does not ask for it
    given = batch()
    plain = loss_of(model, given)
    added = loss_of(model, given, router_aux_loss_coef=0.5) - plain
    assert 0.5 < added / 0.5 < 4.0  # k = 2 where all is even, and E at most
    asked = with_config(model, **BALANCED)
    np.testing.assert_allclose(loss_of(asked, given) - plain, COEF / 0.5 * added, rtol=1e-4)
    np.testing.assert_allclose(loss_of(asked, given, router_aux_loss_coef=0.0), plain, rtol=1e-6)
    loss, z = loss_of(asked, given, return_z_loss=True, z_loss=1e-3)
    np.testing.assert_allclose(loss - z - plain, COEF / 0.5 * added, rtol=1e-4)


def test_accumulated_batches_have_the_mean_of_their_balances(loaded):
    _, model = loaded("mixtral")
    whole = batch()
    parts = [{k: v[i : i + 1] for k, v in whole.items()} for i in range(2)]
    counts = [int(count_items(part)) for part in parts]
    assert counts[0] != counts[1]

    def aux(part, num_items=None):
        losses = [loss_of(model, part, num_items, router_aux_loss_coef=c) for c in (1.0, 0.0)]
        return float(losses[0] - losses[1])

    got = sum(aux(part, sum(counts)) for part in parts)
    want = sum(aux(part) * n for part, n in zip(parts, counts, strict=True)) / sum(counts)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_rematerialised_layers_have_the_same_balance(loaded):
    _, model = loaded("mixtral")
    asked = with_config(model, **BALANCED)
    loss, gradients = step(asked, batch())
    again, same = step(with_config(asked, remat="cheap"), batch())
    np.testing.assert_allclose(loss, again, rtol=1e-6)
    model_cases.assert_close(jax.tree.leaves(same), jax.tree.leaves(gradients), 1e-5)


def test_a_balance_that_cannot_be_is_refused(loaded):
    _, llama = loaded("llama")
    with pytest.raises(ValueError, match=r"router_aux_loss_coef must be 0 .* 0.1 for a llama"):
        loss_fn(llama, batch(), router_aux_loss_coef=0.1)
    _, mixtral = loaded("mixtral")
    with pytest.raises(ValueError, match=r"reduction must be 'mean' .*; got 'none'"):
        loss_fn(mixtral, batch(), router_aux_loss_coef=0.1, reduction="none")
