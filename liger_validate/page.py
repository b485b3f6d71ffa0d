"""A report as one HTML page that needs nothing beside it: tables, and plots as embedded images."""

import base64
import html
import io
import json
import math
from collections.abc import Iterable
from typing import Any

from liger_validate import model_plots

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem }
table { border-collapse: collapse; font-size: 13px }
td, th { padding: 2px 10px; text-align: left; border-bottom: 1px solid #ddd }
.off { color: #b00020; font-weight: 600 } img { max-width: 100% }
"""


def of_model(header: dict[str, Any], report: dict[str, Any]) -> str:
    """The page of `liger-validate model`."""
    models = report["models"]
    parts = [_verdict(report["agrees"]), _header(header)]
    parts.append(f"<p>{html.escape(report['path'])}: {report['family']} in {report['dtype']}</p>")
    parts.append("<h2>Faults</h2>" + (_findings(report["findings"]) or "<p>None was found.</p>"))
    rows = [(label, m["first_out_of_band"] or "stays in its band", _position(m), _loss(m))
            for label, m in models.items()]  # fmt: skip
    columns = ("model", "first at", "from position", "loss")
    parts.append("<h2>Where drift leaves its band</h2>" + _table(columns, rows))
    parts += [f"<h2>{title}</h2>{_image(plot)}" for title, plot in model_plots.of_model(report)]
    if "training" in report:
        of = report["training"]["models"]
        rows = [(label, m["first_out_of_band"] or "stays in its band") for label, m in of.items()]
        parts.append(_table(("trained model", "first at"), rows))
    return _page("liger-validate model", parts)


def of_ops(header: dict[str, Any], rows: Iterable[dict[str, Any]], agrees: bool) -> str:
    """The page of `liger-validate ops`."""
    rows = list(rows)
    columns = ("op", "case", "dtype", "result", "implementation", "rms", "plain_rms", "ratio",
               "largest", "ulp", "plain_largest", "apart", "apart_ulp", "apart_from",
               "repeatable", "verdict", "message")  # fmt: skip
    cells = [[_or_empty(row[column]) for column in columns] for row in rows]
    parts = [_verdict(agrees), _header(header), _image(_ratios(rows)), _table(columns, cells)]
    return _page("liger-validate ops", parts)


def _page(title: str, parts: Iterable[str]) -> str:
    body = "\n".join(parts)
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>\n{body}\n</body></html>\n"
    )


def _verdict(agrees: bool) -> str:
    return "<p>Agrees.</p>" if agrees else "<p class='off'>Differs.</p>"


def _header(header: dict[str, Any]) -> str:
    rows = [*header["versions"].items(), ("device", header["device"]), ("seed", header["seed"])]
    rows.append(("precision", json.dumps(header["precision"])))
    return _table(("", ""), rows)


def _or_empty(value: Any) -> str:
    """Nothing for what a row of an operation has not: a case not offered has no error."""
    absent = value is None or (isinstance(value, float) and math.isnan(value))
    return "" if absent else _short(value)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _table(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    lines = []
    for row in rows:
        cells = [str(cell) for cell in row]
        off = " class='off'" if {"FAIL", "ERROR"} & set(cells) else ""
        lines.append(f"<tr{off}>{''.join(f'<td>{html.escape(c)}</td>' for c in cells)}</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _findings(findings: list[dict[str, Any]]) -> str:
    columns = ("model", "station", "diagnosis", "detail", "error", "band")
    return _table(columns, [[_short(f[c]) for c in columns] for f in findings]) if findings else ""


def _loss(model: dict[str, Any]) -> str:
    return "" if model["loss"] is None else f"{model['loss']:.7g}"


def _position(model: dict[str, Any]) -> str:
    found = model["first_position"]
    return "" if found is None else str(found)


def _image(figure: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f"<img alt='plot' src='data:image/png;base64,{data}'>"


def _ratios(rows: list[dict[str, Any]]) -> Any:
    figure, axes = model_plots.figure()
    names = sorted({row["implementation"] for row in rows})
    ops = list(dict.fromkeys(row["op"] for row in rows))
    for name in names:
        points = [(ops.index(r["op"]), model_plots.positive(r["rms"])) for r in rows
                  if r["implementation"] == name]  # fmt: skip
        shift = (names.index(name) - (len(names) - 1) / 2) * 0.15
        axes.plot([x + shift for x, _ in points], [y for _, y in points], "o", ms=3, label=name)
    axes.set_yscale("log")
    axes.set_ylabel("RMS error against the oracle")
    axes.set_xticks(range(len(ops)), ops, rotation=20, fontsize=8)
    axes.legend()
    return figure
