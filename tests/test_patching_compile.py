"""torch.compile takes a patched model whole, and one compiled layer serves them all."""

import pytest
import torch

import torch_liger
from liger_ops import backend_triton
from patching_models import batch, made, twin

BACKENDS = [
    "eager",
    pytest.param("inductor", marks=pytest.mark.gpu),
]


@pytest.fixture(autouse=True)
def plain_versions(monkeypatch):
    monkeypatch.setattr(backend_triton, "INTERPRET", False)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "llama4_text"])
def test_a_training_step_without_graph_breaks(family, backend):
    # transformers collects router logits under a lock, which torch.compile does not trace.
    settings = {"output_router_logits": False} if family in ("mixtral", "llama4_text") else {}
    plain = made(family, attention="eager", **settings)
    if family == "mixtral":  # grouped_mm is not traced in float32 in older versions
        plain.set_experts_implementation("batched_mm")
    model = twin(plain)
    torch_liger.apply_liger_kernel(model)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    inputs = batch()
    loss = compiled(**inputs).loss
    loss.backward()
    expected = plain(**inputs).loss
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for a, e in zip(model.parameters(), plain.parameters(), strict=True):
        scale = e.grad.abs().max().item() if e.grad is not None else 0.0
        torch.testing.assert_close(a.grad, e.grad, rtol=1e-3, atol=1e-4 * scale + 1e-7)
    out = compiled(**inputs, num_items_in_batch=torch.tensor(7), return_dict=False)
    assert isinstance(out, tuple)


# torch.compile looks at inputs that are no leaves; it does so in a plain model too.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_layers_compiled_one_by_one_share_their_code():
    model = made("llama", num_hidden_layers=12, use_cache=False)
    torch_liger.apply_liger_kernel(model)
    expected = model(**batch()).loss
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.testing.assert_close(model(**batch()).loss, expected)


def test_patched_inside_a_compiled_model():
    model = torch.compile(made("llama"), fullgraph=True, backend="eager")
    expected = model(**batch()).loss
    assert torch_liger.apply_liger_kernel(model).applied["rms_norm"] == 5
    out = model(**batch())
    torch.testing.assert_close(out.loss, expected)
    assert out.logits is None
    torch_liger.unpatch(model)
    assert model(**batch()).logits is not None
