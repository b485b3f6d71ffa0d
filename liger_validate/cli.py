"""The command `liger-validate`: exit status 0 (agrees), 1 (differs) or 2 (could not run)."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

AGREES, DIFFERS, COULD_NOT_RUN = 0, 1, 2


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="liger-validate", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)

    ops = commands.add_parser("ops", help="operations against their float64 oracle")
    ops.add_argument("--op", nargs="+", metavar="NAME", help="public names; all if left out")
    ops.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16", "float16"), default=[])
    ops.add_argument("--case", nargs="+", default=[], help="only cases with this in their names")
    ops.add_argument(
        "--against",
        type=lambda text: text.split(","),
        default=[],
        help="a list such as triton,xla; torch and jax stand for both of a framework's",
    )
    ops.add_argument("--all-rows", action="store_true", help="print rows that pass, too, singly")

    model = commands.add_parser("model", help="a checkpoint in Flax and in transformers")
    model.add_argument("path", help="a folder with a checkpoint, or a name on the hub")
    model.add_argument("--batch", help=".json, .npz or .safetensors with input_ids (B, T)")
    model.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    model.add_argument("--grads", action="store_true", help="compare parameters' gradients too")
    model.add_argument("--steps", type=int, default=0, help="of training, in step")
    model.add_argument("--learning-rate", type=float, default=1e-2, help="of --steps' SGD")

    for command in (ops, model):
        command.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument(
            "--precision", choices=("highest", "tf32"), help="of float32 products, in both"
        )
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    arguments = parser().parse_args(argv)
    try:
        return {"ops": _ops, "model": _model}[arguments.command](arguments)
    except Exception as error:
        print(f"liger-validate: {type(error).__name__}: {error}", file=sys.stderr)
        return COULD_NOT_RUN


def _begin(arguments: argparse.Namespace) -> dict[str, Any]:
    from liger_validate import environment

    if arguments.precision:
        environment.set_precision(arguments.precision)
    environment.same_precision()
    return environment.described(arguments.seed)


def _write(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    if arguments.json:
        text = json.dumps(_finite(report), indent=1, allow_nan=False)
        arguments.json.write_text(text + "\n")


def _finite(value: Any) -> Any:
    """None for what is not finite, which JSON has not."""
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _ops(arguments: argparse.Namespace) -> int:
    from liger_validate import ops, terminal
    from liger_validate.problems import OPS

    names = arguments.op or list(OPS)
    unknown = [name for name in names if name not in OPS]
    if unknown:
        raise ValueError(f"op must be of {', '.join(OPS)}; got {', '.join(unknown)}")
    header = _begin(arguments)
    implementations, left_out = ops.chosen(arguments.against)
    if not implementations:
        raise RuntimeError(f"no implementation runs here: {left_out}")
    rows = list(
        ops.validate(names, arguments.dtype, arguments.case, implementations, arguments.seed)
    )
    if not rows:
        raise ValueError("no case has these names and dtypes")
    terminal.show_ops(header, rows, left_out, arguments.all_rows)
    passed = all(row.verdict in ("pass", "plain") for row in rows)
    status = AGREES if passed else DIFFERS
    _write(
        arguments,
        {**header, "left_out": left_out, "status": status, "rows": [asdict(row) for row in rows]},
    )
    return status


def _model(arguments: argparse.Namespace) -> int:
    from liger_validate import terminal
    from liger_validate.model import validate

    header = _begin(arguments)
    report = validate(
        arguments.path,
        batch=arguments.batch,
        dtype=arguments.dtype,
        grads=arguments.grads,
        steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        seed=arguments.seed,
    )
    terminal.show_model(header, report)
    status = AGREES if report["agrees"] else DIFFERS
    _write(arguments, {**header, **report, "status": status})
    return status


if __name__ == "__main__":
    sys.exit(main())
