"""The wheel, installed beside Hugging Face's `kernels`, in an environment of its own.

The environment sees the heavy packages of the one that runs the tests (jax, torch, transformers)
through a .pth file. Python reads .pth files only in an environment's own folders, so the editable
install that lies among those packages stays out of reach: what is imported is the wheel.
"""

import importlib.metadata
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Import name -> where the tree keeps it.
PACKAGES = {
    "jax_liger": ROOT / "jax_liger",
    "torch_liger": ROOT / "torch_liger",
    "liger_ops": ROOT / "kernels" / "liger_ops",
    "liger_validate": ROOT / "liger_validate",
}

# `import name` fails as it does where `name` is not installed, and its parts with it.
BLOCK = """
import sys

class Block:
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{fullname!r}}", name=fullname)

sys.meta_path.insert(0, Block())
"""


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    for tool in ("build", "hatchling"):
        if not _installed(tool):
            pytest.skip(f"{tool} is not installed: the extra [dev] brings it")
    out = tmp_path_factory.mktemp("wheel")
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT)
    _run(*build, cwd=out)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """The interpreter of an environment that holds the wheel and sees the heavy packages."""
    home = tmp_path_factory.mktemp("clean")
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    _run(*pip, "install", "--quiet", "--no-index", "--no-deps", wheel, cwd=home)
    site_packages = home / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    heavy = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    # The lines are appended to the path, so what the environment holds itself wins.
    (site_packages / "heavy.pth").write_text("\n".join(heavy) + "\n")
    return python


def _python(python: Path, code: str) -> str:
    # -I: neither the working directory nor PYTHONPATH may lend us the checkout.
    return _run(python, "-I", "-c", code, cwd=python.parent)


def test_the_wheel_holds_the_packages_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    top = {name.partition("/")[0] for name in names}
    dist_info = {name for name in top if name.endswith(".dist-info")}
    assert top - dist_info == set(PACKAGES)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)

    # Code, type marker and tuned tables travel; nothing that is only in the checkout does.
    expected = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.suffix in {".py", ".json"} or path.name == "py.typed"
    }
    assert {f"{package}/py.typed" for package in PACKAGES} <= expected
    assert {name for name in names if name.partition("/")[0] in PACKAGES} == expected


def test_metadata(python):
    code = "import importlib.metadata as m; print(*m.metadata('jax-torch-liger').get_all({!r}))"
    extras = _python(python, code.format("Provides-Extra")).split()
    assert {"jax", "torch", "all", "dev", "cuda"} <= set(extras)
    assert _python(python, code.format("License-Expression")).strip() == "Apache-2.0"


def test_lives_beside_hugging_faces_kernels(python):
    for distribution in ("kernels", "transformers", "jax", "torch"):
        if not _installed(distribution):
            pytest.skip(f"{distribution} is not installed: the extra [dev] brings it")
    code = """
import kernels
import jax_liger, torch_liger, liger_ops
from transformers import LlamaForCausalLM
print(kernels.__file__, kernels.get_kernel.__name__)
print(jax_liger.__file__, torch_liger.__file__, liger_ops.__file__, sep="\\n")
"""
    hugging_face, *ours = _python(python, code).splitlines()[-4:]
    path, function = hugging_face.rsplit(maxsplit=1)
    assert function == "get_kernel"
    assert Path(path).parent.parent in {Path(p) for p in sys.path}
    # The wheel is what was imported, not the checkout.
    home = python.parent.parent
    assert all(Path(file).is_relative_to(home) for file in ours), (home, ours)


@pytest.mark.parametrize(
    ("package", "own", "other"),
    [("jax_liger", "jax", "torch"), ("torch_liger", "torch", "jax")],
)
def test_each_package_leaves_the_other_framework_alone(python, package, own, other):
    if not _installed(own):
        pytest.skip(f"{own} is not installed")
    absent = {"torch": ("torch", "triton"), "jax": ("jax", "jaxlib", "flax")}[other]
    _python(python, BLOCK.format(names=absent) + f"import {package}")
    # Where it is installed, it is not imported all the same.
    found = _python(
        python, f"import sys, {package}; print(sorted({set(absent)} & set(sys.modules)))"
    )
    assert found.splitlines()[-1] == "[]"


def test_liger_ops_imports_no_framework(python):
    frameworks = {"jax", "jaxlib", "flax", "torch", "triton", "transformers"}
    found = _python(
        python, f"import sys, liger_ops; print(sorted({frameworks} & set(sys.modules)))"
    )
    assert found.splitlines()[-1] == "[]"


def test_pytest_finds_the_judge_and_imports_no_framework_for_it(python):
    code = """
import importlib.metadata, sys
(point,) = importlib.metadata.entry_points(group="pytest11", name="liger_validate")
print(point.load().__file__)
print(sorted({"jax", "torch", "triton", "numpy"} & set(sys.modules)))
"""
    file, imported = _python(python, code).splitlines()[-2:]
    assert Path(file).is_relative_to(python.parent.parent) and imported == "[]"
