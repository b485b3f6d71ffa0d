"""Generation with a cache: the tokens of transformers, the end token, and drawing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import model_cases
from jax_liger.models import Cache, generate
from model_cases import quick_jit, relative


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize("name", ["gemma3", "mixtral"])
def test_decoding_one_token_at_position_37(loaded, name):
    _, model = loaded(name)
    ids = model_cases.tokens(2, 38)
    want = quick_jit(lambda m, i: m(i))(model, ids)[:, 37:]
    step = quick_jit(lambda m, i, c: m(i, cache=c))
    _, cache = step(model, ids[:, :37], Cache.empty(model.config, 2, 48))
    got, cache = step(model, ids[:, 37:], cache)
    assert relative(got, want).max() < 1e-5
    assert int(cache.filled) == 38


def theirs_generated(theirs, ids, **kwargs):
    ids = torch.as_tensor(ids, dtype=torch.long)
    kwargs = {k: torch.as_tensor(v) if isinstance(v, np.ndarray) else v for k, v in kwargs.items()}
    return theirs.generate(ids, do_sample=False, **kwargs).numpy()


@pytest.mark.parametrize("name", ["llama 3, square, with biases", "gemma3", "mistral"])
def test_greedy_generation_equals_transformers(loaded, name):
    """Of prompts of unlike lengths, past the sliding windows."""
    theirs, model = loaded(name)
    theirs.generation_config.eos_token_id = None
    ids = model_cases.tokens(3, 20)
    mask = (np.arange(20) >= np.array([[0], [7], [15]])).astype(np.int32)
    ids = np.where(mask, ids, 0)
    want = theirs_generated(theirs, ids, attention_mask=mask, max_new_tokens=30)
    got = generate(model, ids, attention_mask=jnp.asarray(mask), max_new_tokens=30)
    np.testing.assert_array_equal(got, want)


def test_generation_ends_at_the_end_token(loaded):
    _, model = loaded("mistral")
    ids = model_cases.tokens(3, 20)
    free = np.asarray(generate(model, ids, max_new_tokens=12))[:, 20:]
    end = int(free[0, 4])
    got = np.asarray(
        generate(model, ids, max_new_tokens=12, eos_token_id=(end, 96), pad_token_id=1)
    )[:, 20:]
    for row, want in zip(got, free, strict=True):
        stops = np.flatnonzero(np.isin(want, (end, 96)))
        stop = stops[0] + 1 if stops.size else 12
        assert row.tolist() == want[:stop].tolist() + [1] * (12 - stop)


def test_drawn_tokens_follow_the_distribution(loaded):
    _, model = loaded("llama")
    prompt = model_cases.tokens(1, 5)
    logits = np.asarray(quick_jit(lambda m, i: m(i))(model, prompt))[0, -1].astype(np.float64) / 0.7
    likely = np.argsort(logits)[-4:]
    want = np.zeros(97)
    want[likely] = np.exp(logits[likely]) / np.exp(logits[likely]).sum()
    ids = np.repeat(prompt, 4000, 0)
    settings = dict(max_new_tokens=1, temperature=0.7, top_k=4, key=jax.random.key(3))
    drawn = np.asarray(generate(model, ids, **settings))[:, -1]
    frequency = np.bincount(drawn, minlength=97) / 4000
    assert np.abs(frequency - want).max() < 4 * 0.5 / 4000**0.5  # four standard deviations
    assert frequency[want == 0].sum() == 0
    np.testing.assert_array_equal(np.asarray(generate(model, ids, **settings))[:, -1], drawn)


def test_arguments_of_generation_that_do_not_fit(loaded):
    _, model = loaded("llama")
    ids = model_cases.tokens(1, 4)
    with pytest.raises(ValueError, match=r"key must be given to draw with temperature=0\.5"):
        generate(model, ids, max_new_tokens=1, temperature=0.5)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1; got 0"):
        generate(model, ids, max_new_tokens=0)
    with pytest.raises(ValueError, match="temperature must be at least 0; got -1"):
        generate(model, ids, max_new_tokens=1, temperature=-1.0)
