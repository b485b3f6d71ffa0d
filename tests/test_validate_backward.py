"""`liger-validate model --grads`: gradients at every module, and faults of the backward alone."""

import numpy as np
import pytest
import torch

from liger_validate.captures import Capture, gradients_of_torch, softmax_in_float64
from liger_validate.model import PATCHED, captured, compare, load
from validate_cases import BACKWARD_FAULTS, CHECKPOINTS, CLEAN, batch, folders, plain_versions


@pytest.fixture(autouse=True)
def _full_precision_and_no_interpreter(monkeypatch):
    with plain_versions(monkeypatch):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folders(CLEAN, tmp_path_factory)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_checkpoint_raises_no_alarm(folder, name, dtype):
    """Going forward and backward, in every family."""
    tokens = batch()
    report = compare(load(folder(name), dtype), tokens, grads=True)
    assert report["findings"] == [] and report["agrees"], report["models"]
    for label, model in report["models"].items():
        assert model["first_out_of_band"] is None and model["first_position"] is None
        kinds = {
            kind: [m for m in model["modules"] if m["kind"] == kind]
            for kind in ("output", "output gradient", "gradient")
        }
        names = {m["name"] for m in kinds["output"]}
        assert {"model.embed_tokens", "model.layers.1.mlp", "model.norm", "logits"} <= names, label
        assert all(m["error"] < 0.1 for m in kinds["output"])
        assert all(len(m["by_position"]) == tokens.ids.shape[1] for m in kinds["output"])
        assert np.isfinite(model["loss"])
        if model["routed_otherwise"]:
            assert "mix" in name or "moe" in name
            continue
        backward = [m["name"] for m in kinds["output gradient"]]
        assert "model.norm.output.grad" in backward[:2]  # PyTorch has `lm_head` before it
        assert backward[-1] == "model.embed_tokens.output.grad"
        assert len(backward) == len(kinds["output"]) - 1  # the loss does without logits
        assert len(kinds["gradient"]) >= 2 * 7


def test_gradients_at_modules_are_those_of_their_outputs(folder):
    """By a finite difference of the exact model's loss, along the gradient at a module's output."""
    tokens, loaded = batch(), load(folder("llama"))
    exact, _ = captured(loaded, tokens, grads=True)
    name, step = "model.layers.0.mlp", 0.05
    gradient = torch.tensor(exact.output_gradients[name])
    size = gradient.norm().item()

    def loss(change):
        def hook(module, args, output):
            return output + change / size * gradient

        handle = loaded.exact.get_submodule(name).register_forward_hook(hook)
        found = Capture("", "")
        gradients_of_torch(loaded.exact, tokens, found)
        handle.remove()
        return found.loss

    with softmax_in_float64():
        slope = (loss(step) - loss(-step)) / (2 * step)
    assert slope == pytest.approx(size, rel=2e-3)


@pytest.mark.parametrize("name", BACKWARD_FAULTS)
def test_a_fault_of_the_backward_is_found_and_named(folder, name, monkeypatch):
    fault = BACKWARD_FAULTS[name]
    assert fault.checkpoint in CHECKPOINTS
    loaded = load(folder(fault.checkpoint), fault.dtype)
    fault.plant(loaded.models[fault.label], monkeypatch)
    report = compare(loaded, batch(), grads=True)
    assert not report["agrees"]
    assert {finding["model"] for finding in report["findings"]} == {fault.label}
    first = report["findings"][0]
    assert (first["station"], first["diagnosis"]) == (fault.station, fault.diagnosis)
    assert fault.detail in first["detail"]
    for label, model in report["models"].items():
        first_off = model["first_out_of_band"]
        assert (first_off is not None) == (label == fault.label), (label, first_off)
        assert first_off is None or first_off.endswith(".grad")  # the forward is right


def test_a_parameter_without_a_gradient_is_seen(folder):
    loaded = load(folder("llama"))
    loaded.models[PATCHED].model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    report = compare(loaded, batch(), grads=True)
    first = report["models"][PATCHED]["first_out_of_band"]
    assert first == "model.layers.0.mlp.up_proj.weight.grad" and not report["agrees"]
