"""Reports as tables in a terminal."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from liger_validate.ops import Row

_BAD = "bold red"


def _console() -> Console:
    console = Console()
    # A file or a pipe has no width; the tables need one that holds their columns.
    return console if console.is_terminal else Console(width=160)


def show_header(console: Console, header: dict[str, Any]) -> None:
    """Versions, device, precision and seed."""
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    precision = header["precision"]
    console.print(f"{header['device']}; {versions}", highlight=False)
    console.print(
        f"float32 products: {precision['torch_means']} in torch, {precision['jax_means']} in jax; "
        f"seed {header['seed']}",
        highlight=False,
    )


def show_ops(
    header: dict[str, Any], rows: Iterable[Row], left_out: dict[str, str], every: bool
) -> None:
    """One line a result; without `every`, passing ones are the worst of their operation."""
    console, rows = _console(), list(rows)
    show_header(console, header)
    for name, reason in left_out.items():
        console.print(f"{name} was left out: {reason}", style="yellow", highlight=False)
    table = Table("op", "case", "dtype", "result", "implementation")
    for column in ("RMS error", "plain's", "ratio", "largest", "ulp", "plain's largest"):
        table.add_column(column, justify="right")
    table.add_column("repeats")
    table.add_column("verdict")
    for row in rows if every else _worst(rows):
        bad = row.verdict in ("FAIL", "ERROR")
        table.add_row(
            *(row.op, row.case, row.dtype, row.result, row.implementation),
            *(f"{row.rms:.2e}", f"{row.plain_rms:.2e}", f"{row.ratio:.2f}"),
            *(f"{row.largest:.2e}", f"{row.ulp:.2f}", f"{row.plain_largest:.2e}"),
            {True: "yes", False: "no", None: ""}[row.repeatable],
            f"{row.verdict} {row.message}".strip(),
            style=_BAD if bad else None,
        )
    console.print(table)
    failed = sum(row.verdict in ("FAIL", "ERROR") for row in rows)
    console.print(f"{len(rows)} results, {failed} of them off", highlight=False)


def _worst(rows: list[Row]) -> list[Row]:
    """Of each operation, dtype, result and implementation the largest RMS; and all that fail."""
    worst: dict[tuple[str, ...], Row] = {}
    for row in rows:
        key = (row.op, row.dtype, row.result, row.implementation)
        if row.verdict in ("FAIL", "ERROR"):
            key = (*key, row.case)
        if key not in worst or row.rms > worst[key].rms:
            worst[key] = row
    return list(worst.values())
