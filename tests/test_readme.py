"""The README against the repository, and the rules of the layout that a reader relies on.

The README's tree is the fenced block under the heading `## Tree`: one line for each file that git
tracks (or would: untracked files that are not ignored count too). A line is indented two spaces for
each folder it lies in; its first word is the name, and the rest of the line says what it is for. A
folder's name ends in `/`, and what it holds follows. A folder of nothing but data, such as results
of benchmarks, may stand as one line for all it holds.
"""

import re
import subprocess
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]
DATA_SUFFIXES = {".csv", ".json", ".npz", ".png", ".svg", ".txt"}

FENCE = re.compile(r"^ *```[^\n]*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
# From the heading to the first fence, with no other heading between them.
TREE = re.compile(
    r"^## Tree[^\S\n]*\n(?:(?!#|```)[^\n]*\n)*```[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE
)
INLINE_CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]\n]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)

PALLAS_TRITON = re.compile(
    r"pallas\.triton\b|\bpallas\s+import\s+(?:\([^)]*?|[^\n(]*?)\btriton\b", re.DOTALL
)


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


@pytest.fixture(scope="module")
def files() -> list[str]:
    """What git tracks, or would, and what is there: relative to the root."""
    # The prefix is empty at the top of a checkout alone: a copy inside another one is skipped.
    if _git("rev-parse", "--show-prefix") != "\n":
        pytest.skip("not a git checkout, or git is not installed")
    listed = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    assert listed is not None
    return sorted(name for name in set(listed.split("\0")) if name and (ROOT / name).exists())


@pytest.fixture(scope="module")
def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def _tree_paths(readme: str) -> list[str]:
    """The paths of the tree, folders with a `/` at the end, in the README's order."""
    block = TREE.search(readme)
    assert block, "README.md has no fenced block under the heading `## Tree`"
    paths: list[str] = []
    folders = [""]
    for line in filter(str.strip, block.group(1).splitlines()):
        depth, odd = divmod(len(line) - len(line.lstrip(" ")), 2)
        assert not odd and depth < len(folders), f"indented to no folder: {line!r}"
        del folders[depth + 1 :]
        path = folders[depth] + line.split()[0]
        paths.append(path)
        if path.endswith("/"):
            folders.append(path)
    return paths


def test_the_tree_lists_every_file_once(readme, files):
    paths = _tree_paths(readme)
    twice = sorted({path for path in paths if paths.count(path) > 1})
    assert not twice, f"more than once in the README's tree: {twice}"

    # A folder with no line below it stands for what it holds.
    one_line = [
        path
        for path in paths
        if path.endswith("/") and not any(p != path and p.startswith(path) for p in paths)
    ]
    for folder in one_line:
        held = [name for name in files if name.startswith(folder)]
        assert held, f"{folder} is in the README's tree and not in the repository"
        other = [name for name in held if PurePosixPath(name).suffix not in DATA_SUFFIXES]
        assert not other, f"{folder} is one line in the README's tree, but holds {other}"

    listed = {path for path in paths if not path.endswith("/")}
    present = {name for name in files if not name.startswith(tuple(one_line))}
    assert not present - listed, f"not in the README's tree: {sorted(present - listed)}"
    assert not listed - present, f"in the README's tree only: {sorted(listed - present)}"


def test_the_make_targets_of_the_readme_exist(readme):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*) *:(?!=)", makefile, re.MULTILINE))
    # The tree is left out: there `make` may be a word of a file's description.
    text = TREE.sub("", readme)
    code = FENCE.findall(text) + INLINE_CODE.findall(FENCE.sub("", text))
    named = {
        target
        for fragment in code
        for line in fragment.splitlines()
        for target in re.findall(r"(?<![\w-])make ([a-z][\w-]*)", line.partition(" #")[0])
    }
    assert {"demo", "test"} <= named
    assert named <= targets, f"not in the Makefile: {sorted(named - targets)}"


def _anchors(markdown: str) -> set[str]:
    """The anchors that GitHub gives the headings."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in HEADING.findall(FENCE.sub("", markdown))
    }


def _resolves(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists() or not target.is_relative_to(ROOT):
        return False
    if not anchor or target.suffix != ".md":
        return True
    return anchor in _anchors(target.read_text(encoding="utf-8"))


def test_relative_links_resolve(files):
    broken = []
    for name in (name for name in files if name.endswith(".md")):
        text = (ROOT / name).read_text(encoding="utf-8")
        links = LINK.findall(INLINE_CODE.sub("", FENCE.sub("", text)))
        relative = [link for link in links if not re.match(r"[a-z][a-z0-9+.-]*:", link)]
        broken += [f"{name}: {link}" for link in relative if not _resolves(ROOT / name, link)]
    assert not broken


def test_kernels_is_a_source_root_and_no_package():
    # As a package it would hide Hugging Face's `kernels`, which transformers imports.
    assert (ROOT / "kernels").is_dir()
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_one_file_touches_the_triton_backend_of_pallas(files):
    # tests/ may name what it checks, as this file does.
    touching = [
        name
        for name in files
        if name.endswith(".py")
        and not name.startswith("tests/")
        and PALLAS_TRITON.search((ROOT / name).read_text(encoding="utf-8"))
    ]
    assert touching == ["kernels/liger_ops/backend_pallas.py"]


@pytest.mark.parametrize(
    "code",
    [
        "import jax.experimental.pallas.triton as plt",
        "from jax.experimental.pallas.triton import load",
        "from jax.experimental.pallas import triton as plt",
        "from jax.experimental.pallas import (\n    load,\n    triton,\n)",
    ],
)
def test_the_search_for_the_triton_backend_finds(code):
    assert PALLAS_TRITON.search(code)


@pytest.mark.parametrize(
    "code",
    ["from jax.experimental import pallas as pl", "from x.pallas import (\n  a,\n)\nimport triton"],
)
def test_the_search_for_the_triton_backend_passes_over(code):
    assert not PALLAS_TRITON.search(code)
