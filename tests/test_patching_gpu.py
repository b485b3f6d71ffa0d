"""Patched models on a GPU: bfloat16 by the kernels, and the memory that the logits took."""

import pytest
import torch

import torch_liger
from patching_models import MODELS, batch, made, results, twin

pytestmark = pytest.mark.gpu


def difference(a, e):
    return ((a.float() - e.float()).norm() / e.float().norm().clamp(min=1e-12)).item()


@pytest.mark.parametrize("family", MODELS)
def test_bfloat16_is_as_near_as_plain(family):
    """To float32, in every gradient taken together."""
    exact, inputs = made(family), batch()
    expected = results(exact, **inputs)
    errors = []
    for patch in (False, True):
        model = twin(exact).to(torch.bfloat16)
        if patch:
            torch_liger.apply_liger_kernel(model)
        found = results(model, **inputs)
        assert found["loss"].dtype == torch.float32
        gradients = [difference(found[n], e) for n, e in expected.items() if e.abs().max() > 1e-6]
        errors.append(sum(gradients) / len(gradients))
    assert errors[1] < 1.5 * errors[0] + 1e-3


def peak(model, inputs):
    model(**inputs).loss.backward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(**inputs).loss.backward()
    return torch.cuda.max_memory_allocated() - before


def test_the_logits_are_never_there():
    settings = {"vocab_size": 64000, "max_position_embeddings": 2048, "hidden_size": 256}
    plain = made("llama", attention="sdpa", **settings).to(torch.bfloat16)
    model = twin(plain)
    torch_liger.apply_liger_kernel(model)
    inputs = batch(rows=4, length=2048, vocab=64000)
    del inputs["attention_mask"]
    logits = 4 * 2048 * 64000 * 2
    assert peak(plain, inputs) > 2 * logits
    assert peak(model, inputs) < logits
