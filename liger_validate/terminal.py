"""Reports as tables in a terminal."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from liger_validate.drift import is_milestone
from liger_validate.ops import OFF, Row

_BAD = "bold red"
_NAMES = 12  # of what one file has and the other has not, so many are shown


def _console() -> Console:
    # Names have brackets, which are no markup. A file or a pipe has no width; the tables need one
    # that holds their columns.
    console = Console(markup=False)
    return console if console.is_terminal else Console(width=160, markup=False)


def show_header(console: Console, header: dict[str, Any]) -> None:
    """Versions, device, precision and seed."""
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    precision = header["precision"]
    console.print(f"{header['device']}; {versions}", highlight=False)
    products = ", ".join(
        f"{precision[f'{framework}_means']} in {framework}"
        for framework in ("torch", "jax")
        if framework in precision
    )
    console.print(f"float32 products: {products}; seed {header['seed']}", highlight=False)


def show_ops(
    header: dict[str, Any], rows: Iterable[Row], left_out: dict[str, str], every: bool
) -> None:
    """A line a result; without `every`, passing ones are the worst of their operation and dtype.

    The errors against the oracle: RMS, the plain version's and their ratio; the largest, and in
    units of the last place. Then the largest difference from another implementation.
    """
    console, rows = _console(), list(rows)
    show_header(console, header)
    for name, reason in left_out.items():
        console.print(f"{name} was left out: {reason}", style="yellow", highlight=False)
    shown = rows if every else _worst(rows)
    for op, dtype in dict.fromkeys((row.op, row.dtype) for row in shown):
        group = [row for row in shown if (row.op, row.dtype) == (op, dtype)]
        console.print(_table_of_ops(f"{op}, {dtype}", group))
    for row in shown:
        if row.verdict in OFF:
            where = f"{row.implementation}, {row.op}, {row.case} {row.result}".strip()
            text = f"{where}: {row.message.splitlines()[0]}"
            # An error's brackets are not rich's.
            console.print(text, style=_BAD, highlight=False, markup=False)
    _show_summary(console, rows)


def _table_of_ops(title: str, rows: list[Row]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0)
    table.add_column("case", overflow="fold")
    for column in ("result", "by"):
        table.add_column(column, no_wrap=True)
    for column in ("RMS", "plain's", "ratio", "largest", "ulp", "apart", "ulp"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("from", "repeats", "verdict"):
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(
            *(row.case, row.result, row.implementation),
            *(_number(row.rms), _number(row.plain_rms), _count(row.ratio)),
            *(_number(row.largest), _count(row.ulp)),
            *(_number(row.apart), _count(row.apart_ulp), row.apart_from),
            {True: "yes", False: "no", None: ""}[row.repeatable],
            row.verdict,
            style={"not offered": "dim"}.get(row.verdict, _BAD if row.verdict in OFF else None),
        )
    return table


def _show_summary(console: Console, rows: list[Row]) -> None:
    results = [row for row in rows if row.verdict != "not offered"]
    failed = sum(row.verdict in OFF for row in rows)
    console.print(f"{len(results)} results, {failed} of them off", highlight=False)
    cases = Counter(
        (row.implementation, row.op, row.message) for row in rows if row.verdict == "not offered"
    )
    for (name, op, reason), count in cases.items():
        of = len({row.case for row in rows if row.op == op})
        text = f"{name}: {count} of {of} cases of {op} not offered: {reason}"
        console.print(text, style="yellow", highlight=False, markup=False)
    compared = [row for row in results if row.apart_from]
    if compared:
        most = max(compared, key=lambda row: row.apart_ulp)
        console.print(
            f"furthest apart: {most.implementation} and {most.apart_from}, {_number(most.apart)} "
            f"({_count(most.apart_ulp)} ulp) in {most.result} of {most.op}, {most.case}",
            highlight=False,
        )


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.1e}"


def _count(value: float) -> str:
    return f"{value:.2f}" if value < 1e4 else _number(value)


def _worst(rows: list[Row]) -> list[Row]:
    """Of each operation, dtype, result and implementation the largest RMS; and all that fail."""
    worst: dict[tuple[str, ...], Row] = {}
    for row in rows:
        key = (row.op, row.dtype, row.result, row.implementation)
        if row.verdict in OFF:
            key = (*key, row.case)
        if key not in worst or row.rms > worst[key].rms:
            worst[key] = row
    return list(worst.values())


_TITLES = {
    "output": "outputs: RMS difference from the model in float64, over its own RMS",
    "output gradient": "the loss's gradients at outputs, in the order of the backward",
    "gradient": "parameters' gradients that are out of their bands",
}


def show_model(header: dict[str, Any], report: dict[str, Any]) -> None:
    """Drift by layer, the first place out of its band, and the diagnoses."""
    console = _console()
    show_header(console, header)
    console.print(f"{report['path']}: {report['family']} in {report['dtype']}", highlight=False)
    labels = list(report["models"])
    for kind, title in _TITLES.items():
        rows = list(_drift_rows(report["models"], kind))
        if not rows:
            continue
        table = Table("module" if kind != "gradient" else "parameter", title=title)
        for label in labels:
            table.add_column(label, justify="right")
        table.add_column("limit", justify="right")
        for name, cells, limit in rows:
            table.add_row(name, *cells, limit)
        console.print(table)
    for label in labels:
        first, position = (
            report["models"][label][f"first_{x}"] for x in ("out_of_band", "position")
        )
        text = f"first leaves its band at {first}" if first else "stays in its band"
        text += f", from position {position}" if position is not None else ""
        console.print(f"{label} {text}", style=_BAD if first else None, highlight=False)
        flips = report["models"][label]["routed_otherwise"]
        if flips:
            text = (
                f"{label}: {flips} tokens went to other experts that were nearly alike; where they "
            )
            text += "are seen, nothing is compared with float64"
            console.print(text, style="yellow", highlight=False)
        if report["models"][label]["loss"] is not None:
            console.print(f"{label}: loss {report['models'][label]['loss']:.7g}", highlight=False)
    for finding in report["findings"]:
        console.print(
            f"{finding['model']}, {finding['station']}: {finding['diagnosis']} "
            f"({finding['detail']}; off by {finding['error']:.2e}, band {finding['band']:.1e})",
            style=_BAD,
            highlight=False,
        )
    if "training" in report:
        _show_training(console, report["training"])
    console.print("agrees" if report["agrees"] else "differs", highlight=False)


def _drift_rows(models: dict[str, Any], kind: str) -> Iterable[tuple[str, list[str], str]]:
    """Layers, the ends and whatever is out of its band in one of the models."""
    by_name: dict[str, dict[str, dict[str, Any]]] = {}
    for label, model in models.items():
        for module in model["modules"]:
            if module["kind"] == kind:
                by_name.setdefault(module["name"], {})[label] = module
    for name, found in by_name.items():
        bad = any(not module["inside"] for module in found.values())
        if bad or is_milestone(name):
            cells = [
                "" if label not in found else
                f"{found[label]['error']:.2e}{'' if found[label]['inside'] else ' !'}"
                for label in models
            ]  # fmt: skip
            yield name, cells, f"{min(m['limit'] for m in found.values()):.2e}"


def _show_training(console: Console, training: dict[str, Any]) -> None:
    table = Table("step", title=f"losses, SGD with a rate of {training['learning_rate']:g}")
    for label in training["models"]:
        table.add_column(label, justify="right")
    for step, losses in enumerate(zip(*(m["losses"] for m in training["models"].values()),
                                      strict=True)):  # fmt: skip
        table.add_row(str(step), *(f"{loss:.7g}" for loss in losses))
    console.print(table)
    for label, model in training["models"].items():
        first = model["first_out_of_band"]
        text = f"{first} leaves its band" if first else "losses and weights stay in their bands"
        console.print(f"{label}: {text}", style=_BAD if first else None, highlight=False)


def show_comparison(report: dict[str, Any]) -> None:
    """Where two captures are apart, or the largest difference; and what they do not share."""
    console = _console()
    for manifest in report["manifests"]:
        console.print(f"{manifest['model']} in {manifest['dtype']}", highlight=False)
        show_header(console, manifest)
    for what, (first, second) in report["differing"].items():
        if isinstance(first, dict) and isinstance(second, dict):
            keys = [k for k in {**first, **second} if first.get(k) != second.get(k)]
            first, second = ({k: d.get(k) for k in keys} for d in (first, second))
        console.print(f"{what}: {first} and {second}", style="yellow", highlight=False)
    for which in ("first", "second"):
        names = report[f"only_in_{which}"]
        if names:
            shown = ", ".join(names[:_NAMES]) + (", ..." if len(names) > _NAMES else "")
            console.print(
                f"only in the {which}: {len(names)} ({shown})", style="yellow", highlight=False
            )
    off = [row for row in report["tensors"] if not row["inside"]]
    largest = max(report["tensors"], key=lambda row: row["error"] / (row["tolerance"] or 1.0))
    for row in off or [largest]:
        text = f"{row['name']}: {row['error']:.2e} (tolerance {row['tolerance']:.1e}) {row['note']}"
        console.print(text.rstrip(), style=_BAD if off else None, highlight=False)
    console.print("agrees" if report["agrees"] else "differs", highlight=False)
