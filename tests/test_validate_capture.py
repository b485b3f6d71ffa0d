"""Captures of any model, in PyTorch and in Flax, and comparing two of their files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from liger_ops.drawing import DTYPES
from liger_validate import capture, capture_nnx, capture_torch, cli, files
from validate_any_models import FlaxModel, X, gradients, make_bfloat16, make_flax, make_torch

OUTPUTS = ["parts.0.shared", "parts.0.relu", "parts.0.shared@2",
           "parts.0[hidden][0]", "parts.0[hidden][1]", "head", "(model)"]  # fmt: skip


@pytest.mark.parametrize("make", [make_torch, make_flax])
def test_every_call_of_every_module_is_kept(make):
    model, inputs = make()
    found = capture(model, inputs, grads=True)
    assert list(found.outputs) == [n for n in OUTPUTS if make is make_torch or "relu" not in n]
    assert found.outputs["parts.0[hidden][1]"].dtype.kind == "i"
    why = found.skipped
    assert "is no" in why["parts.0[none]"] and "int is no" in why["parts.0[count]"]
    assert "not called" in why["parts.0.unused"] and "head" not in why
    # The rectifier works in place on what `shared` gave, whose numbers and gradient are of before.
    assert (found.outputs["parts.0.shared"] < 0).any()
    wanted = gradients()
    weight = wanted.pop("weight")
    for name, value in wanted.items():
        np.testing.assert_allclose(found.output_gradients[name], value, rtol=2e-5, atol=1e-6)
    own = {n.replace("kernel", "weight"): g for n, g in found.gradients.items()}
    actual = own["parts.0.shared.weight"]
    actual = actual if make is make_torch else actual.T
    np.testing.assert_allclose(actual, weight, rtol=2e-5, atol=1e-6)
    assert not own["parts.0.unused.weight"].any()
    assert found.loss == pytest.approx(np.mean(found.outputs["(model)"].astype(np.float64) ** 2))


def test_the_model_is_left_as_it_was():
    model, inputs = make_torch()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    state = torch.get_rng_state()
    capture_torch(model, inputs, grads=True)
    assert model.head.weight.grad.sum() == 6 and model.parts[0].shared.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    flax, inputs = make_flax()
    before = {kind: kind.__call__ for kind in (FlaxModel, nnx.Linear)}
    capture_nnx(flax, inputs, grads=True)
    assert flax.calls[...] == 0
    assert all(kind.__call__ is call for kind, call in before.items())


def test_a_file_has_all_of_it_and_a_manifest(tmp_path):
    model, inputs = make_bfloat16()
    path = tmp_path / "a.safetensors"
    found = capture(model, inputs, path, grads=True, seed=5, label="mine")
    again, given, manifest = files.read(path)
    for group in ("outputs", "output_gradients", "gradients"):
        ours, theirs = getattr(found, group), getattr(again, group)
        assert {*ours} == {*theirs} and ours
        assert all(ours[n].tobytes() == theirs[n].tobytes() for n in ours)
    assert found.outputs["head"].dtype == DTYPES["bfloat16"]
    assert given.keys() == {"x"} and manifest["skipped"]["inputs/scale"] == "float is no tensor"
    assert (manifest["model"], manifest["dtype"], manifest["seed"]) == ("mine", "bfloat16", 5)
    assert manifest["framework"] == "torch" and manifest["training"] is True
    assert manifest["tensors"]["outputs/head"] == {"dtype": "bfloat16", "shape": [3, 1]}
    assert {"device", "versions", "precision"} <= manifest.keys()


def test_other_outputs_and_losses():
    class Several(torch.nn.Module):
        def forward(self, x):
            return x * 1j, x.to_sparse(), torch.zeros(0, 3)

    found = capture(Several(), (torch.tensor(X),))
    assert found.outputs["(model)[0]"].shape == (3, 6, 2) and found.outputs["(model)[2]"].size == 0
    assert "sparse" in found.skipped["(model)[1]"]
    with pytest.raises(ValueError, match="asks for a gradient"):
        capture(Several(), (torch.tensor(X),), grads=True)
    model, inputs = make_torch()
    scaled = capture(model, inputs, grads=True, loss=lambda y: y.sum())
    np.testing.assert_array_equal(scaled.output_gradients["(model)"], np.ones((3, 1)))
    with pytest.raises(ValueError, match="must be a scalar"):
        capture(model, inputs, grads=True, loss=lambda y: y)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module or a flax\.nnx\.Module"):
        capture(lambda x: x, (X,))


def test_within_a_transformation_there_are_no_values():
    class Within(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(6, 6, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return jax.jit(lambda x: self.linear(x))(x), jax.random.key(0)

    found = capture(Within(), jnp.asarray(X))
    assert list(found.outputs) == ["(model)[0]"]
    assert "transformation" in found.skipped["linear"]
    assert found.skipped["(model)[1]"] == "a random key"


def test_dropout_draws_the_same_twice(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Dropout(0.5))
    first, second = (capture_torch(model, torch.tensor(X), seed=3) for _ in range(2))
    np.testing.assert_array_equal(first.outputs["1"], second.outputs["1"])
    flax = nnx.Sequential(nnx.Linear(6, 6, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    found = capture_nnx(flax, jnp.asarray(X), grads=True)
    dropped = found.outputs["layers.1"] == 0
    assert dropped.any() and not found.output_gradients["layers.0"][dropped].any()


def run(*arguments):
    return cli.main([str(a) for a in arguments])


def test_the_command_names_a_model_and_compares(tmp_path, capsys):
    ours, same, other, flax = (tmp_path / f"{n}.safetensors" for n in "abcd")
    made = [(ours, "make_torch"), (same, "make_torch"), (other, "make_other"), (flax, "make_flax")]
    for out, factory in made:
        arguments = ["--model", f"validate_any_models:{factory}", "--out", out, "--grads"]
        assert run("capture", *arguments) == 0, capsys.readouterr()
    assert run("compare", ours, same) == 0
    report = tmp_path / "report.json"
    assert run("compare", ours, other, "--json", report) == 1
    found = json.loads(report.read_text())
    assert found["first_out_of_band"] == "head" and not found["differing"]
    off = {row["name"]: row["error"] for row in found["tensors"] if not row["inside"]}
    assert off["head"] == pytest.approx(1e-3, rel=1e-2) and "parts.0.shared" not in off
    assert off["parts.0.shared@2.output.grad"] > 1e-3 and "parts.0.shared.weight.grad" in off

    capsys.readouterr()
    assert run("compare", ours, flax) == 1  # their names differ
    text = capsys.readouterr().out
    assert "only in the first: 5 (parts.0.relu" in text
    assert "framework: torch and jax" in text
    assert run("compare", ours, flax, "--common") == 0


def test_what_cannot_be_captured_or_compared(tmp_path, capsys):
    ours, theirs = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    model, inputs = make_torch()
    capture(model, inputs, ours)
    found, given, manifest = files.read(ours)
    files.write(theirs, found, {"x": given["x"] + 1}, manifest)
    assert run("compare", ours, theirs) == 2
    assert "different inputs" in capsys.readouterr().err
    tf32 = {**manifest, "precision": {**manifest["precision"], "torch_means": "tf32"}}
    files.write(theirs, found, given, tf32)
    assert run("compare", ours, theirs) == 2
    assert "float32 products at 'highest'" in capsys.readouterr().err
    assert run("compare", ours, theirs, "--tolerance", "1e-3") == 0
    found.outputs["head"] = found.outputs["head"][:2]
    found.outputs["parts.0[hidden][1]"] = found.outputs["parts.0[hidden][1]"] + 1
    files.write(theirs, found, given, manifest)
    assert run("compare", ours, theirs) == 1
    text = capsys.readouterr().out
    assert "the shapes are (3, 1) and (2, 1)" in text and "parts.0[hidden][1]: " in text
    out = ("--out", theirs)
    assert run("capture", "--model", "validate_any_models:Model", *out) == 2
    assert "must return (model, inputs)" in capsys.readouterr().err
    assert run("capture", tmp_path, "--model", "validate_any_models:make_torch", *out) == 2
    assert run("capture", "--model", "torch", *out) == 2
    assert "--model of transformers, torch_liger, jax_liger" in capsys.readouterr().err


def test_a_model_of_the_folder_is_found(tmp_path):
    """As the installed command, whose folder is not on the path by itself."""
    (tmp_path / "mine.py").write_text(
        "import torch\n\n\nclass Box:\n    @staticmethod\n    def make():\n"
        "        return torch.nn.Linear(2, 2), torch.ones(1, 2)\n"
    )
    code = "import sys; from liger_validate.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["capture", "--model", "mine:Box.make", "--out", "a.safetensors"]
    root = Path(__file__).parents[1]
    environment = {"PYTHONPATH": f"{root}:{root / 'kernels'}", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=tmp_path, env={**os.environ, **environment}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert list(files.read(tmp_path / "a.safetensors")[0].outputs) == ["(model)"]
