"""`liger-validate capture`, `compare` and the HTML page."""

import base64
import re

import pytest

import model_cases
from liger_ops import backend_triton
from liger_validate import cli, files
from validate_cases import CHECKPOINTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    model_cases.checkpoint(CHECKPOINTS["llama"], path)
    return path


@pytest.fixture(autouse=True)
def _no_interpreter(monkeypatch):
    monkeypatch.setattr(backend_triton, "INTERPRET", False)
    monkeypatch.setenv("PALLAS_INTERPRET", "0")


def images_of(page):
    found = re.findall(r"data:image/png;base64,([^']+)'", page)
    return [base64.b64decode(data) for data in found]


def test_two_captures_agree_and_a_changed_weight_is_found(folder, tmp_path, capsys):
    ours, theirs, wrong = (tmp_path / f"{name}.safetensors" for name in ("a", "b", "c"))
    for out, label in ((theirs, "jax_liger"), (ours, "transformers")):
        arguments = ["capture", str(folder), "--model", label, "--out", str(out)]
        assert cli.main(arguments) == 0, capsys.readouterr()
    capture, inputs, manifest = files.read(ours)
    assert manifest["model"] == "transformers" and manifest["versions"]["torch"]
    assert manifest["precision"]["torch_means"] == "highest"
    assert inputs["input_ids"].shape == (2, 32)
    assert cli.main(["compare", str(ours), str(theirs), "--common"]) == 0
    assert "agrees" in capsys.readouterr().out

    capture.outputs["model.layers.1.mlp"] = capture.outputs["model.layers.1.mlp"] * 1.01
    files.write(wrong, capture, inputs, manifest)
    assert cli.main(["compare", str(ours), str(wrong)]) == 1
    assert "model.layers.1.mlp: 1.00e-02" in capsys.readouterr().out
    assert cli.main(["compare", str(ours), str(wrong), "--tolerance", "0.02"]) == 0
    assert cli.main(["compare", str(ours), str(folder / "model.safetensors")]) == 2
    assert "no manifest" in capsys.readouterr().err


@pytest.mark.parametrize("label", ["transformers", "jax_liger"])
def test_gradients_are_captured_in_bfloat16(folder, tmp_path, label):
    out = tmp_path / "captured.safetensors"
    arguments = ["capture", str(folder), "--model", label, "--dtype", "bfloat16", "--grads"]
    assert cli.main([*arguments, "--out", str(out)]) == 0
    capture, _, _ = files.read(out)
    gradient = capture.gradients["model.layers.0.mlp.down_proj.weight"]
    assert gradient.dtype == "bfloat16" and gradient.any()
    assert cli.main(["compare", str(out), str(out)]) == 0


def test_the_page_of_a_model_stands_alone(folder, tmp_path):
    file = tmp_path / "page.html"
    arguments = ["model", str(folder), "--grads", "--steps", "2", "--html", str(file)]
    assert cli.main(arguments) == 0
    page = file.read_text()
    assert len(images_of(page)) == 7
    assert all(image.startswith(b"\x89PNG") and len(image) > 5000 for image in images_of(page))
    assert not re.search(r"(src|href)='?\"?http", page)
    assert "Agrees." in page and "None was found." in page


def test_the_page_of_operations(tmp_path):
    file = tmp_path / "page.html"
    arguments = ["ops", "--op", "swiglu", "--case", "shape-3x7", "--against", "eager,xla"]
    assert cli.main([*arguments, "--html", str(file)]) == 0
    page = file.read_text()
    assert len(images_of(page)) == 1 and page.count("<td>swiglu</td>") == 6
