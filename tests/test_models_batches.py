"""Packed documents, positions, padding and the loss: what a batch may say of its tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import model_cases
from jax_liger.models import count_items, loss_fn
from jax_liger.models.loss import next_labels
from model_cases import assert_close, gradients, quick_jit, relative


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


LENGTHS = (50, 30, 40)


def packed(seed=5):
    """Three documents in a row, with padding behind them; and their segment ids."""
    ids = model_cases.tokens(1, 128, seed=seed)
    segments = np.repeat([1, 2, 3, 0], [*LENGTHS, 128 - sum(LENGTHS)])[None].astype(np.int32)
    return ids, segments, np.split(ids[:, : sum(LENGTHS)], np.cumsum(LENGTHS)[:-1], axis=1)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "phi3, longrope in half of a head"])
def test_packed_documents_equal_separate_ones(loaded, name):
    theirs, model = loaded(name)
    ids, segments, documents = packed()
    model = model_cases.with_config(model, max_length=max(LENGTHS))
    got = quick_jit(lambda m, i, s: m(i, segment_ids=s))(model, ids, segments)
    want = [model_cases.hf_logits(theirs, document) for document in documents]
    assert relative(got[:, : sum(LENGTHS)], np.concatenate(want, 1)).max() < 1e-5
    # Without the ids the documents see each other: the comparison would notice.
    alone = quick_jit(lambda m, i: m(i))(model, ids)
    assert relative(alone[:, 50 : sum(LENGTHS)], np.concatenate(want, 1)[:, 50:]).max() > 1e-2


def test_the_loss_and_gradients_of_packed_documents(loaded):
    _, model = loaded("mistral")
    ids, segments, documents = packed()
    total = sum(n - 1 for n in LENGTHS)
    batch = {"input_ids": ids, "segment_ids": segments}
    assert int(count_items(batch)) == total
    loss, grads = gradients(model, batch)

    def separate(model):
        return sum(loss_fn(model, {"input_ids": d}, total) for d in documents)

    want_loss, want = quick_jit(jax.value_and_grad(separate))(model)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    assert_close(grads, want, 2e-5)


def test_a_label_moves_to_the_token_that_predicts_it():
    labels = np.array([[1, 2, 3, 4, 5, 6, 7]])
    segments = jnp.array([[7, 7, 7, 2, 2, 0, 0]])
    x = -100
    assert next_labels(labels, None).tolist() == [[2, 3, 4, 5, 6, 7, x]]
    # The last of a document predicts nothing, neither the next one's first token nor padding.
    assert next_labels(labels, segments).tolist() == [[2, 3, x, 5, x, x, x]]


def test_padding_on_either_side_equals_no_padding(loaded):
    _, model = loaded("qwen3")
    ids = model_cases.tokens(1, 20)
    run = quick_jit(loss_fn)
    want = run(model, {"input_ids": ids})
    for before, after in ((0, 12), (12, 0)):
        pad = ((0, 0), (before, after))
        mask = np.pad(np.ones_like(ids), pad)
        batch = {"input_ids": np.pad(ids, pad, constant_values=3), "attention_mask": mask}
        np.testing.assert_allclose(run(model, batch), want, rtol=1e-6)


def test_accumulated_gradients_equal_those_of_the_large_batch(loaded):
    _, model = loaded("llama")
    ids = model_cases.tokens(4, 32)
    labels = np.where(np.arange(32) < np.array([[30], [3], [9], [20]]), -100, ids)
    whole = {"input_ids": ids, "labels": labels}
    parts = [{key: value[i : i + 2] for key, value in whole.items()} for i in (0, 2)]
    items = sum(count_items(part) for part in parts)
    loss, want = gradients(model, whole)
    (loss_a, a), (loss_b, b) = (gradients(model, part, items) for part in parts)
    np.testing.assert_allclose(loss_a + loss_b, loss, rtol=1e-6)
    assert_close(jax.tree.map(jnp.add, a, b), want, 1e-5)


def test_positions_are_taken_by_their_values(loaded):
    theirs, model = loaded("llama")
    ids = model_cases.tokens(1, 9)
    run = quick_jit(lambda m, i, p, s: m(i, positions=p, segment_ids=s))
    restarting = np.array([[0, 1, 2, 3, 4, 0, 1, 2, 0]])
    documents = np.array([[1] * 5 + [2] * 3 + [3]])
    want = model_cases.hf_logits(theirs, ids, position_ids=restarting)
    assert relative(run(model, ids, restarting, documents), want).max() < 1e-5

    # Angles of positions this large are rounded to 6e-5, in both models alike.
    uneven = np.array([[0, 1, 5, 6, 7, 100, 101, 150, 1003]])
    one = np.ones_like(documents)
    mask = np.ones_like(ids)
    want = model_cases.hf_logits(theirs, ids, position_ids=uneven, attention_mask=mask)
    assert relative(run(model, ids, uneven, one), want).max() < 1e-5
    assert relative(run(model, ids, uneven - uneven + np.arange(9), one), want).max() > 1e-3


def test_a_partial_rotation_at_far_positions(loaded):
    theirs, model = loaded("phi3, longrope in half of a head")
    ids = model_cases.tokens(1, 16)
    positions = np.arange(16)[None] * 130  # 0 to 1950: with the frequencies for long texts
    model = model_cases.with_config(model, max_length=1951)
    run = quick_jit(lambda m, i, p: m(i, positions=p))
    want = model_cases.hf_logits(
        theirs, ids, position_ids=positions, attention_mask=np.ones_like(ids)
    )
    assert relative(run(model, ids, positions), want).max() < 1e-5


@pytest.mark.parametrize("length", [64, 65])
def test_longrope_by_the_length_of_the_text(loaded, length):
    theirs, model = loaded("phi3, longrope in half of a head")
    ids = model_cases.tokens(1, length)
    got = quick_jit(lambda m, i: m(i))(model, ids)
    assert relative(got, model_cases.hf_logits(theirs, ids)).max() < 1e-5
