"""The judge as pytest has it in other projects: fixtures and functions, without frameworks."""

import subprocess
import sys
import tomllib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import liger_validate

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
import sys
import numpy as np
import pytest
from liger_validate import assert_frameworks_agree as agree, assert_matches_oracle as matches

def test_no_framework_is_imported():
    assert not {"jax", "torch", "triton", "transformers"} & set(sys.modules)

def test_fixtures_are_the_functions(assert_matches_oracle, assert_frameworks_agree):
    assert (assert_matches_oracle, assert_frameworks_agree) == (matches, agree)

exact = np.linspace(1, 2, 50)
plain = exact.astype(np.float32)

def test_right(assert_matches_oracle, assert_frameworks_agree):
    assert_matches_oracle({"y": plain}, {"y": plain}, {"y": exact})
    assert_frameworks_agree(plain, plain, (plain, plain), exact)

def test_wrong(assert_matches_oracle):
    assert_matches_oracle(plain * np.float32(1.01), plain, exact, "mine")

def test_apart(assert_frameworks_agree):
    assert_frameworks_agree(plain, plain * np.float32(1.01), (plain, plain), exact, "mine")
"""


@pytest.fixture
def project(pytester, monkeypatch):
    """Another project, where this package is installed with the entry points of pyproject.toml."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    info = pytester.mkdir("installed") / "other_name-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-name\nVersion: 1\n")
    lines = [f"{name} = {module}" for name, module in points["pytest11"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[pytest11]", *lines]) + "\n")
    path = [pytester.path / "installed", ROOT, ROOT / "kernels"]
    monkeypatch.setenv("PYTHONPATH", ":".join(map(str, path)))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    return pytester


def test_another_projects_tests_have_the_judge(project):
    project.makepyfile(TESTS)
    result = project.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=3, failed=2)
    result.stdout.fnmatch_lines(
        ["*mine against the oracle:*", "*result: rms error 1.000e-02 is over*"]
    )
    result.stdout.fnmatch_lines(["*mine result: rms difference*is over the sum*"])
    # A failure points at the test, and not into the judge.
    result.stdout.no_fnmatch_line("*liger_validate/judge.py*")


def test_fixtures_have_a_description(project):
    result = project.runpytest_subprocess("--fixtures")
    result.stdout.fnmatch_lines(["*assert_matches_oracle*", "*assert_frameworks_agree*"])


def test_the_plugin_imports_nothing_heavy():
    code = (
        "import sys, pytest; before = set(sys.modules)\n"
        "import liger_validate.pytest_plugin\n"
        "print(sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "['liger_validate']", done.stderr


def test_the_package_offers_the_judge_and_nothing_else():
    from liger_validate import judge

    assert liger_validate.assert_matches_oracle is judge.assert_matches_oracle
    assert liger_validate.assert_frameworks_agree is judge.assert_agree
    assert liger_validate.Error is judge.Error
    with pytest.raises(AttributeError, match="no attribute 'assert_that'"):
        liger_validate.assert_that  # noqa: B018


def test_tensors_and_arrays_of_both_frameworks_are_judged():
    exact = np.linspace(1, 2, 50)
    y = torch.tensor(exact, dtype=torch.bfloat16, requires_grad=True)
    z = jnp.asarray(exact, jnp.bfloat16)
    liger_validate.assert_matches_oracle({"y": y}, {"y": z}, {"y": exact})
    liger_validate.assert_frameworks_agree(y, z, (y, z), torch.tensor(exact))
    with pytest.raises(AssertionError, match="largest error"):
        liger_validate.assert_matches_oracle(y * 1.02, y, exact)
    with pytest.raises(AssertionError, match="dtype float32"):
        liger_validate.assert_matches_oracle(y.float(), y, exact)


@pytest.mark.parametrize("place", ["first", "second", "plains"])
def test_what_is_missing_is_named(place):
    full, empty = {"y": np.ones(3)}, {"x": np.ones(3)}
    given = {"first": full, "second": full, "plains": (full, full)}
    given[place] = (full, empty) if place == "plains" else empty
    with pytest.raises(AssertionError, match=r"has the results \['x'\] and not \['y'\]"):
        liger_validate.assert_frameworks_agree(**given, exact=full)
