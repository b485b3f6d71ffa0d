"""`liger-validate model`: clean checkpoints pass, and planted faults are found and named."""

import json

import numpy as np
import pytest
import torch

import model_cases
from liger_ops import backend_triton
from liger_validate import captures_flax, cli
from liger_validate.model import FLAX, PATCHED, PLAIN, compare, load
from liger_validate.training import in_step
from validate_cases import CHECKPOINTS, FAULTS, batch, folders, plain_versions


@pytest.fixture(autouse=True)
def _full_precision_and_no_interpreter(monkeypatch):
    """The kernels themselves are in one test; elsewhere it is the plain versions, in less time."""
    with plain_versions(monkeypatch):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folders(CHECKPOINTS, tmp_path_factory)


def test_a_clean_checkpoint_with_the_kernels(folder, monkeypatch):
    monkeypatch.setattr(backend_triton, "INTERPRET", not torch.cuda.is_available())
    monkeypatch.setenv("PALLAS_INTERPRET", "1")
    report = compare(load(folder("qwen2"), "bfloat16"), batch())
    assert report["agrees"], report["findings"]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_named(folder, name, monkeypatch):
    fault = FAULTS[name]
    loaded = load(folder(fault.checkpoint), fault.dtype)
    fault.plant(loaded.models[fault.label], monkeypatch)
    report = compare(loaded, batch())
    assert not report["agrees"]
    assert {finding["model"] for finding in report["findings"]} == {fault.label}
    first = report["findings"][0]
    assert (first["station"], first["diagnosis"]) == (fault.station, fault.diagnosis)
    assert fault.detail in first["detail"]
    assert {finding["diagnosis"] for finding in report["findings"]} == {fault.diagnosis}
    for label, model in report["models"].items():
        drifted = model["first_out_of_band"] is not None
        assert drifted == (label == fault.label and not fault.hides), label


def test_there_are_twelve_kinds_of_fault():
    assert len({fault.diagnosis for fault in FAULTS.values()}) >= 12


def test_a_fault_of_no_known_kind_is_found_too(folder):
    loaded = load(folder("llama"))
    linear = loaded.models[FLAX].model.layers[1].mlp.up_proj
    linear.kernel[...] = linear.kernel[...].at[3, 5].add(0.5)
    report = compare(loaded, batch())
    assert [(f["station"], f["diagnosis"]) for f in report["findings"]] == [
        ("model.layers.1.mlp.up_proj", "unknown")
    ]
    assert report["models"][FLAX]["first_out_of_band"] == "model.layers.1.mlp.up_proj"


def test_gradients_and_training_agree(folder, tmp_path, capsys, monkeypatch):
    # Compiles in less time.
    monkeypatch.setattr(captures_flax, "_jitted", lambda: model_cases.gradients)
    file = tmp_path / "report.json"
    arguments = ["model", folder("qwen2"), "--grads", "--steps", "2", "--json", str(file)]
    assert cli.main(arguments) == 0, capsys.readouterr()
    report = json.loads(file.read_text())
    assert report["status"] == 0 and report["precision"]["torch_means"] == "highest"
    for label, model in report["models"].items():
        gradients = [m["name"] for m in model["modules"] if m["kind"] == "gradient"]
        assert len(gradients) == 2 * 12 + 3, (label, gradients)
    losses = [np.array(m["losses"]) for m in report["training"]["models"].values()]
    assert losses[0].shape == (2,) and losses[0][1] < losses[0][0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    np.testing.assert_allclose(losses[2], losses[0], rtol=1e-5)
    assert "agrees" in capsys.readouterr().out


def test_gradients_and_training_that_differ(folder, monkeypatch):
    """A gradient that is off by a factor, where the forward is right."""
    monkeypatch.setattr(captures_flax, "_jitted", lambda: model_cases.gradients)
    loaded = load(folder("qwen2"))
    weight = loaded.models[PATCHED].model.layers[1].mlp.up_proj.weight
    weight.register_hook(lambda gradient: 1.01 * gradient)
    report = compare(loaded, batch(), grads=True)
    off = {label: model["first_out_of_band"] for label, model in report["models"].items()}
    name = "model.layers.1.mlp.up_proj.weight"
    assert off == {PLAIN: None, PATCHED: f"{name}.grad", FLAX: None}
    assert not report["agrees"] and report["findings"] == []
    training = in_step(loaded, batch(), 2, 0.01)
    assert not training["agrees"]
    drifts = {d["name"]: d["inside"] for d in training["models"][PATCHED]["drift"]}
    assert not drifts[name] and drifts["model.layers.0.mlp.up_proj.weight"]
    assert training["models"][FLAX]["first_out_of_band"] is None


def test_status_1_and_2(folder, tmp_path, capsys, monkeypatch):
    from liger_validate import model

    real = model.load

    def wrong(*args):
        loaded = real(*args)
        loaded.models[FLAX].model.norm.offset = 1.0
        return loaded

    monkeypatch.setattr(model, "load", wrong)
    tokens = tmp_path / "batch.json"
    tokens.write_text(json.dumps({"input_ids": [[5, 6, 7, 8]], "attention_mask": [[1, 1, 1, 0]]}))
    assert cli.main(["model", folder("llama"), "--batch", str(tokens)]) == 1
    assert "jax_liger, model.norm: norm offset" in capsys.readouterr().out
    assert cli.main(["model", str(tmp_path / "nothing")]) == 2
    tokens.write_text(json.dumps({"input_ids": [[5, 600]]}))
    assert cli.main(["model", folder("llama"), "--batch", str(tokens)]) == 2
    assert "input_ids must be from 0 to 60" in capsys.readouterr().err
