"""`liger-validate ops`: the table's numbers, its verdicts and the exit status."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import torch

from liger_ops.drawing import DTYPES
from liger_validate import cli, environment, implementations, ops
from liger_validate.judge import PLAIN
from liger_validate.problems import OPS, problems

# A small case of every operation, of those that both interpreters run in little time.
SMALL = {
    "rms_norm": "bfloat16-llama",
    "fused_add_rms_norm": "bfloat16",
    "layer_norm": "bfloat16-weight-bias",
    "swiglu": "silu-bfloat16",
    "geglu": "gelu_tanh-bfloat16",
    "rope": "bfloat16",
    "cross_entropy": "bfloat16-mean",
    "fused_linear_cross_entropy": "bfloat16-mean",
    "lora_linear": "bfloat16-bias",
    "rms_norm_linear_rope": "1-rows",
}
# Its interpreter compiles for seconds; how each operation is called in JAX, "xla" shows too.
WITH_PALLAS = ("swiglu", "rope", "cross_entropy")


def first(op, case=None):
    return next(iter(problems(op, ["bfloat16"], [case or SMALL[op]])))


@pytest.mark.parametrize("op", OPS)
def test_every_implementation_of_every_operation_passes(op):
    problem = first(op)
    names = [n for n in implementations.IMPLEMENTATIONS if n != "pallas" or op in WITH_PALLAS]
    rows = list(ops.rows_of(problem, names))
    assert problem.op == op
    assert {(row.implementation, row.result) for row in rows} == {
        (name, result) for name in names for result in problem.exact
    }
    for row in rows:
        assert row.verdict == ("pass" if row.implementation in PLAIN else "plain"), row
        assert row.repeatable and 0 <= row.rms < 0.02, row
    assert max(row.rms for row in rows) > 0  # bfloat16 is never exact


def test_the_upstream_gradients_are_exact_in_every_dtype():
    dy = first("swiglu").upstream["y"]
    assert np.array_equal(dy.astype(np.float16).astype(np.float32), dy)
    assert np.array_equal(dy.astype(DTYPES["bfloat16"]).astype(np.float32), dy)


def test_a_gradient_that_is_rounding_alone_is_not_judged():
    names = ("shape-1x1", "shape-3x1", "shape-1x64")
    (one, three, wide) = (first("rms_norm", name) for name in names)
    assert one.wanted == three.wanted == ("weight",) and wide.wanted == ("x", "weight")
    assert set(one.exact) == {"y", "dweight"}
    rows = list(ops.rows_of(one, ["triton", "pallas"]))
    assert {row.verdict for row in rows} == {"pass"}


def planted(problem, fault):
    """The problem, solved wrongly by the kernel alone."""

    def call(package, implementation, given):
        outputs = problem.call(package, implementation, given)
        return tuple(fault(y) for y in outputs) if implementation == "triton" else outputs

    return dataclasses.replace(problem, call=call)


def test_a_planted_fault_fails():
    problem = planted(first("swiglu"), lambda y: y * 1.02)
    rows = list(ops.rows_of(problem, ["triton", "eager"]))
    assert {r.verdict for r in rows if r.implementation == "triton"} == {"FAIL"}
    assert {r.verdict for r in rows if r.implementation == "eager"} == {"plain"}


def test_what_is_not_finite_fails_whatever_the_plain_version_gives():
    problem = first("swiglu")

    def call(package, implementation, given):
        (y,) = problem.call(package, "eager", given)
        return (y * float("nan"),)

    rows = list(ops.rows_of(dataclasses.replace(problem, call=call), ["triton", "eager"]))
    assert {(row.verdict, row.message) for row in rows} == {("FAIL", "not all finite")}


def test_a_kernel_of_another_dtype_fails():
    problem = planted(first("swiglu"), lambda y: y.float())
    verdicts = {r.result: r for r in ops.rows_of(problem, ["triton"])}
    assert verdicts["y"].verdict == "FAIL" and "dtype float32" in verdicts["y"].message


def test_what_an_implementation_raises_is_a_row():
    def fault(y):
        raise RuntimeError("out of memory")

    (row,) = ops.rows_of(planted(first("swiglu"), fault), ["triton"])
    assert row.verdict == "ERROR" and "out of memory" in row.message
    assert np.isnan(row.rms) and cli._finite({"rows": [row.rms, 1.0]}) == {"rows": [None, 1.0]}


def test_the_command_writes_its_report(tmp_path, capsys):
    file = tmp_path / "report.json"
    arguments = ["ops", "--op", "swiglu", "--dtype", "bfloat16", "--case", "shape-1x1"]
    assert cli.main([*arguments, "--against", "eager,xla", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report["status"] == 0
    assert {row["implementation"] for row in report["rows"]} == {"eager", "xla"}
    assert {row["apart_from"] for row in report["rows"]} == {"eager", "xla"}
    assert all(row["apart_ulp"] <= 1 and row["repeatable"] for row in report["rows"])
    assert "0 of them off" in capsys.readouterr().out


@pytest.fixture
def settings():
    """Puts the frameworks' precisions back."""
    before = torch.get_float32_matmul_precision(), jax.config.jax_default_matmul_precision
    yield
    torch.set_float32_matmul_precision(before[0])
    jax.config.update("jax_default_matmul_precision", before[1])


@pytest.mark.parametrize("precision", ["highest", "tf32"])
def test_every_report_says_by_what_it_was_made(tmp_path, capsys, settings, precision):
    html, file = tmp_path / "report.html", tmp_path / "report.json"
    arguments = ["ops", "--op", "swiglu", "--case", "shape-1x1", "--against", "eager,xla"]
    arguments += ["--device", "cpu", "--seed", "3", "--precision", precision]
    assert cli.main([*arguments, "--json", str(file), "--html", str(html)]) == 0
    report = json.loads(file.read_text())
    assert report["seed"] == 3 and report["device"] == "torch: cpu; jax: cpu"
    names = ("python", "numpy", "torch", "jax", "jaxlib")
    assert set(names) <= set(report["versions"])
    assert report["versions"]["torch"] == torch.__version__
    for framework in ("torch", "jax"):
        assert report["precision"][f"{framework}_means"] == precision
    out, page = capsys.readouterr().out, html.read_text()
    assert f"float32 products: {precision} in torch, {precision} in jax; seed 3" in out
    assert f"&quot;torch_means&quot;: &quot;{precision}&quot;" in page
    assert "<td>seed</td><td>3</td>" in page and "<td>torch: cpu; jax: cpu</td>" in page
    for name in names:
        assert f"{name} {report['versions'][name]}" in out.replace("\n", " ").replace("  ", " ")
        assert f"<td>{name}</td><td>{report['versions'][name]}</td>" in page


def test_one_framework_states_its_own_precision_alone(tmp_path, monkeypatch, settings):
    file = tmp_path / "report.json"
    # JAX would multiply otherwise, and is not in use.
    jax.config.update("jax_default_matmul_precision", "bfloat16")
    arguments = ["ops", "--op", "swiglu", "--case", "shape-1x1"]
    assert cli.main([*arguments, "--against", "eager", "--json", str(file)]) == 0
    assert set(json.loads(file.read_text())["precision"]) == {"torch", "torch_means"}
    assert cli.main([*arguments, "--against", "eager,xla"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "relu"], "op must be of"),
        (["--against", "cuda"], "against must be of"),
        (["--op", "swiglu", "--case", "no such"], "no case"),
    ],
)
def test_what_cannot_run_is_status_2(arguments, message, capsys):
    assert cli.main(["ops", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_status_1_where_a_result_is_off(monkeypatch, capsys):
    real = ops.problems
    wrong = lambda *args: (planted(p, lambda y: y * 1.02) for p in real(*args))  # noqa: E731
    monkeypatch.setattr(ops, "problems", wrong)
    arguments = ["ops", "--op", "swiglu", "--case", "shape-3x7", "--against", "triton"]
    assert cli.main(arguments) == 1
    assert "FAIL" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("torch_setting", "jax_setting", "on_gpu", "same"),
    [
        ("highest", None, False, True),
        ("highest", None, True, False),  # JAX multiplies in TF32 there
        ("highest", "highest", True, True),
        ("high", None, True, True),
        ("high", "float32", True, False),
        ("medium", "bfloat16", False, True),
    ],
)
def test_precision_settings_mean_the_same(torch_setting, jax_setting, on_gpu, same):
    ours, theirs = environment.meaning(torch_setting, jax_setting, on_gpu)
    assert (ours == theirs) is same


def test_refuses_two_precisions(monkeypatch, capsys):
    found = {"torch": "high", "jax": "highest", "torch_means": "tf32", "jax_means": "highest"}
    monkeypatch.setattr(environment, "precision", lambda place: found)
    assert cli.main(["ops", "--op", "swiglu"]) == 2
    assert "--precision" in capsys.readouterr().err
