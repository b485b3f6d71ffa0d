"""Measures one operation on this machine's GPU, and writes JSON and a plot.

    python benchmarks/run.py rms_norm --out benchmarks/results/rms_norm_h200.json
    python benchmarks/run.py rms_norm --plot benchmarks/results/rms_norm_h200.json

The first checks every implementation against float64 and then times it; the second redraws the plot
from a result. Results hold the card, the versions and the command.
"""

import argparse
import contextlib
import importlib
import json
import os
import pathlib
import shlex
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

OPS = ("rms_norm", "layer_norm", "swiglu", "geglu", "rope", "cross_entropy")
# Whose modules measure and plot themselves.
OWN = ("fused_linear_cross_entropy", "rms_norm_linear_rope")
PACKAGES = (
    "jax",
    "jaxlib",
    "torch",
    "triton",
    "liger-kernel",
    "transformers",
    "flax",
    "optax",
    "peft",
    "tokamax",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("op", choices=OPS + OWN)
    parser.add_argument("--out", type=pathlib.Path, help="JSON to write, with a PNG beside it")
    parser.add_argument("--plot", type=pathlib.Path, help="draw the PNG of this JSON and stop")
    parser.add_argument("--quick", action="store_true", help="one shape, and the launch costs")
    parser.add_argument(
        "--shape", action="append", default=[], metavar="ROWSxDxV | DxNxKxH",
        help=f"of {' or '.join(OWN)}: this shape alone; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME",
        help="of fused_linear_cross_entropy: this implementation alone, as often",
    )  # fmt: skip
    args = parser.parse_args()
    if args.plot:
        _plot_of(args.op)(json.loads(args.plot.read_text()), args.plot.with_suffix(".png"))
        return

    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import torch

    if not torch.cuda.is_available():
        sys.exit("benchmarks/run.py needs an NVIDIA GPU, and torch sees none")
    module = importlib.import_module(args.op)
    if args.op in OWN:
        chosen: dict[str, Any] = {}
        if args.shape:
            chosen["shapes"] = [tuple(map(int, shape.split("x"))) for shape in args.shape]
        if args.only:
            chosen["only"] = args.only
        measured = module.measure(args.quick, **chosen)
    else:
        import measuring

        measured = measuring.measure(module, args.quick)
    result = {
        "device": torch.cuda.get_device_name(),
        "command": shlex.join(["python", *sys.argv]),
        "versions": versions(),
        "rows": [],
    }
    collect(measured, result, args.out)
    if args.out:
        _plot_of(args.op)(result, args.out.with_suffix(".png"))


def check_only(only: Iterable[str], known: Iterable[str]) -> None:
    """Raises ValueError where a name to measure alone is not that of an implementation."""
    if unknown := set(only) - set(known):
        raise ValueError(f"--only must be of {', '.join(known)}; got {', '.join(sorted(unknown))}")


def collect(measured: Iterable[dict], result: dict, path: pathlib.Path | None) -> None:
    """Prints each row and adds it to the result's, which is written anew with each.

    So what was measured is kept where a later row ends the run; it says "unfinished" then.
    """
    for row in measured:
        result["rows"].append(row)
        print(_line(row), flush=True)
        if path:
            _write({**result, "unfinished": True}, path)
    if path:
        _write(result, path)


def _write(result: dict, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def _plot_of(op: str) -> Callable[[dict, pathlib.Path], None]:
    return importlib.import_module(op).plot if op in OWN else plot


def versions() -> dict[str, str]:
    """Of the packages that matter to a figure, where they are installed."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _line(row: dict) -> str:
    ratio = ", ".join(f"{v:.3f} {k}" for k, v in row.items() if k.startswith("of_"))
    return (
        f"{row['op']:13} {row['pass']:18} {_shape(row):23} {row['implementation']:24}"
        f"{row['microseconds']:9.1f} us  {ratio}"
    )


def _shape(row: dict) -> str:
    return row.get("shape") or f"{row['rows']} x {row['dim']}"


def plot(result: dict, path: pathlib.Path) -> None:
    """One panel a pass: the fraction of the copy's speed, by shape and implementation."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in result["rows"] if "of_copy" in row]
    rows = [row for row in rows if not row["implementation"].startswith("copy")]
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    shapes = list(dict.fromkeys(_shape(row) for row in rows))
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    figure, axes = plt.subplots(len(passes), figsize=(12, 4 * len(passes)), squeeze=False)
    for axis, which in zip(axes[:, 0], passes, strict=True):
        for i, name in enumerate(names):
            found = {
                _shape(row): row["of_copy"]
                for row in rows
                if row["pass"] == which and row["implementation"] == name
            }
            positions = [j + i / (len(names) + 1) for j in range(len(shapes))]
            axis.bar(
                positions, [found.get(s, 0.0) for s in shapes], 1 / (len(names) + 1), label=name
            )
        axis.set_xticks([j + 0.4 for j in range(len(shapes))], shapes, fontsize="small")
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set_ylabel("speed, copy of the same bytes = 1")
        axis.set_title(f"{rows[0]['op']} {which}, bfloat16, {result['device']}")
    axes[0, 0].legend(ncols=3, fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
