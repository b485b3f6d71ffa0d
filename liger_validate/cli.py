"""The command `liger-validate`: exit status 0 (agrees), 1 (differs) or 2 (could not run)."""

import argparse
import json
import math
import os
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
        type=_names,
        action="extend",
        default=[],
        metavar="NAMES",
        help="a list of torch, jax, triton, eager, pallas, xla and liger (liger-kernel); torch and "
        "jax stand for both of a framework's; ours all if left out",
    )
    ops.add_argument(
        "--peer",
        type=_names,
        action="extend",
        default=[],
        metavar="NAMES",
        help="another library beside them, held to the same yardstick: liger-kernel, tokamax",
    )
    ops.add_argument(
        "--device", metavar="NAME", help="cpu, gpu, cuda or cuda:N; a GPU if there is one"
    )
    ops.add_argument("--all-rows", action="store_true", help="print rows that pass, too, singly")

    model = commands.add_parser("model", help="a checkpoint in Flax and in transformers")
    model.add_argument("path", help="a folder with a checkpoint, or a name on the hub")
    model.add_argument("--batch", help=".json, .npz or .safetensors with input_ids (B, T)")
    model.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    model.add_argument(
        "--grads",
        action="store_true",
        help="compare the gradients of parameters and of modules' outputs too",
    )
    model.add_argument("--steps", type=int, default=0, help="of training, in step")
    model.add_argument("--learning-rate", type=float, default=1e-2, help="of --steps' SGD")

    capture = commands.add_parser("capture", help="a model's activations, to a file")
    capture.add_argument("path", nargs="?", help="a folder with a checkpoint, or a name on the hub")
    capture.add_argument(
        "--model",
        default="transformers",
        help="transformers, torch_liger or jax_liger, for a checkpoint; without one module:factory,"
        " which is called and returns any model and its inputs: (model, inputs), where inputs are a"
        " dict of keywords, a tuple or the only one, or (model, inputs, loss)",
    )
    capture.add_argument("--out", type=Path, required=True, metavar="FILE", help=".safetensors")
    capture.add_argument("--batch", help="as for model")
    capture.add_argument("--dtype", choices=("float32", "bfloat16"), help="of a checkpoint")
    capture.add_argument("--grads", action="store_true", help="write gradients too")

    files = commands.add_parser("compare", help="two files that capture wrote")
    files.add_argument("first", type=Path)
    files.add_argument("second", type=Path)
    files.add_argument("--tolerance", type=float, help="RMS over RMS; by the dtype if left out")
    files.add_argument("--common", action="store_true", help="only one file may have a tensor, too")
    files.add_argument("--json", type=Path, metavar="FILE", help="write the report there")

    capture.add_argument("--seed", type=int, default=0)
    capture.add_argument("--precision", choices=("highest", "tf32"))
    for command in (ops, model):
        command.add_argument("--html", type=Path, metavar="FILE", help="a page with plots")
        command.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument(
            "--precision", choices=("highest", "tf32"), help="of float32 products, in both"
        )
    return top


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    arguments = parser().parse_args(argv)
    # Both frameworks share the card: JAX takes what it needs, and not most of it at once.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if "autotune" not in (flags := os.environ.get("XLA_FLAGS", "")):
        # Every operation is a program of its own here, and each product would be tuned for seconds.
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_autotune_level=0".strip()
    try:
        return _COMMANDS[arguments.command](arguments)
    except Exception as error:
        print(f"liger-validate: {type(error).__name__}: {error}", file=sys.stderr)
        return COULD_NOT_RUN


def _begin(arguments: argparse.Namespace, place: Any = None) -> dict[str, Any]:
    from liger_validate import environment

    if arguments.precision:
        environment.set_precision(arguments.precision)
    environment.same_precision(place)
    return environment.described(arguments.seed, place)


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
    from liger_validate import devices, implementations, ops, page, terminal
    from liger_validate.problems import OPS

    names = arguments.op or list(OPS)
    unknown = [name for name in names if name not in OPS]
    if unknown:
        raise ValueError(f"op must be of {', '.join(OPS)}; got {', '.join(unknown)}")
    wanted = implementations.chosen(arguments.against, arguments.peer)
    place = devices.find(arguments.device, map(implementations.framework_of, wanted))
    header = _begin(arguments, place)
    header["versions"] |= implementations.versions_of_peers(wanted)
    running, left_out = implementations.split(wanted, place)
    rows = list(
        ops.validate(names, arguments.dtype, arguments.case, running, arguments.seed, place)
    )
    if not rows:
        raise ValueError("no case has these names and dtypes")
    table = [asdict(row) for row in rows]
    terminal.show_ops(header, rows, left_out, arguments.all_rows)
    passed = not any(row.verdict in ops.OFF for row in rows)
    status = AGREES if passed else DIFFERS
    if all(row.verdict == "not offered" for row in rows):
        status = COULD_NOT_RUN
    _write(
        arguments,
        {**header, "left_out": left_out, "status": status, "rows": table},
    )
    if arguments.html:
        arguments.html.write_text(page.of_ops(header, table, status == AGREES))
    return status


def _model(arguments: argparse.Namespace) -> int:
    from liger_validate import page, terminal
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
    if arguments.html:
        arguments.html.write_text(page.of_model(header, report))
    return status


def _capture(arguments: argparse.Namespace) -> int:
    from liger_validate import any_model, files, model
    from liger_validate.batches import read

    header = _begin(arguments)
    if ":" in arguments.model:
        if arguments.path or arguments.batch or arguments.dtype:
            raise ValueError(
                f"{arguments.model} makes the model and its inputs; it takes no path, --batch or "
                "--dtype"
            )
        made, inputs, *loss = any_model.made_by(arguments.model)
        any_model.capture(
            made, inputs, arguments.out, grads=arguments.grads, seed=arguments.seed,
            loss=loss[0] if loss else None,
        )  # fmt: skip
        return AGREES
    if arguments.model not in model.BESIDE or not arguments.path:
        raise ValueError(
            f"capture needs a path and --model of {', '.join(model.BESIDE)}, or --model "
            f"module:factory; got {arguments.path!r} and {arguments.model!r}"
        )
    loaded = model.load(arguments.path, arguments.dtype or "float32")
    batch = read(arguments.batch, loaded.config.vocab_size, arguments.seed)
    found = model.captured_of(loaded, arguments.model, batch, arguments.grads)
    header |= {"framework": "jax" if arguments.model == model.FLAX else "torch", "training": False}
    files.write(arguments.out, found, batch.inputs, header)
    return AGREES


def _compare(arguments: argparse.Namespace) -> int:
    from liger_validate import files, terminal

    report = files.compare(arguments.first, arguments.second, arguments.tolerance, arguments.common)
    terminal.show_comparison(report)
    status = AGREES if report["agrees"] else DIFFERS
    _write(arguments, {**report, "status": status})
    return status


_COMMANDS = {"ops": _ops, "model": _model, "capture": _capture, "compare": _compare}


if __name__ == "__main__":
    sys.exit(main())
