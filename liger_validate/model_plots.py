"""The plots of `liger-validate model`."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from liger_validate.drift import is_milestone

MARKS = ("o", "s", "^", "v", "D")
ERROR = "RMS difference from float64, relative"


def figure(rows: int = 1, columns: int = 1, height: float = 3.6) -> tuple[Any, Any]:
    """One of matplotlib, of the page's width, and its axes."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(9, height), layout="constrained")
    return made, made.subplots(rows, columns)


def positive(value: float | None) -> float:
    """For a logarithmic axis: what is exact or infinite has no place on it."""
    return value if value and math.isfinite(value) else math.nan


def of_model(report: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Headings and figures."""
    models = report["models"]
    yield "Outputs by module", by_module(models, "output")
    if _all(models, "output gradient"):
        title = "The loss's gradients at modules' outputs, in the order of the backward"
        yield title, by_module(models, "output gradient")
        yield "Parameters' gradients", by_module(models, "gradient")
    yield "Outputs by layer and position", by_position(models, "output")
    if _all(models, "output gradient"):
        yield "Gradients by layer and position", by_position(models, "output gradient")
    yield "Errors of all modules", histogram(models)
    if "training" in report:
        yield "Training in step", curves(report["training"])


def _of(model: dict[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    return {m["name"]: m for m in model["modules"] if m["kind"] == kind}


def _all(models: dict[str, Any], kind: str) -> list[str]:
    """The names that all models have, in the first one's order."""
    found = [_of(model, kind) for model in models.values()]
    return [name for name in found[0] if all(name in other for other in found)]


def _short(name: str) -> str:
    for prefix in ("model.", "layers."):
        name = name.removeprefix(prefix)
    name = name.removesuffix(".grad").removesuffix(".output")
    return f"layer {name}" if name.isdigit() else name


def by_module(models: dict[str, Any], kind: str) -> Any:
    """A line for each model, and the band of the last; what is out of its band is crossed."""
    names = _all(models, kind)
    made, axes = figure(height=5.5)
    for i, (label, model) in enumerate(models.items()):
        found = _of(model, kind)
        errors = [positive(found[name]["error"]) for name in names]
        axes.plot(errors, MARKS[i] + "-", label=label, **_width(i))
        off = [j for j, name in enumerate(names) if not found[name]["inside"]]
        if off:
            axes.plot(off, [errors[j] for j in off], "x", color="#b00020", ms=9, mew=2,
                      label=f"{label}, out of its band", zorder=5)  # fmt: skip
        if i == len(models) - 1:
            limits = [positive(found[name]["limit"]) for name in names]
            axes.plot(limits, "k--", lw=1, label=f"band of {label}")
    axes.set_yscale("log")
    axes.set_ylabel(ERROR)
    axes.grid(axis="y", alpha=0.3)
    step = max(1, math.ceil(len(names) / 60))
    axes.set_xticks(range(0, len(names), step), [_short(n) for n in names[::step]],
                    rotation=90, fontsize=7)  # fmt: skip
    axes.set_xlim(-0.5, len(names) - 0.5)
    _legend(axes)
    return made


def _width(i: int) -> dict[str, float]:
    """Lines that agree lie on each other: each is thinner than the one below it."""
    return {"ms": max(2, 8 - 2 * i), "lw": max(0.5, 4 - 1.5 * i), "alpha": 0.8}


def _legend(axes: Any) -> None:
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, fontsize=8, frameon=False)


def by_position(models: dict[str, Any], kind: str) -> Any:
    """Layers by positions, one map for each model, in one scale of colours."""
    names = [name for name in _all(models, kind) if is_milestone(name)]
    names = names[::-1] if kind == "output gradient" else names  # the embedding is at the bottom
    made, axes = figure(1, len(models), max(2.6, 1.8 + 0.16 * len(names)))
    maps = {}
    for label, model in models.items():
        found = _of(model, kind)
        with np.errstate(divide="ignore", invalid="ignore"):
            rows = np.log10([[positive(v) for v in found[name]["by_position"]] for name in names])
        maps[label] = rows
    every = np.concatenate([rows.reshape(-1) for rows in maps.values()])
    every = every[np.isfinite(every)]
    low, high = (every.min(), every.max()) if every.size else (-1.0, 0.0)
    image = None
    for i, (label, rows) in enumerate(maps.items()):
        image = np.atleast_1d(axes)[i].imshow(
            rows, aspect="auto", origin="lower", vmin=low, vmax=max(high, low + 0.1),
            interpolation="nearest",
        )  # fmt: skip
        np.atleast_1d(axes)[i].set_title(label, fontsize=9)
        np.atleast_1d(axes)[i].set_xlabel("position")
        np.atleast_1d(axes)[i].set_yticks([])
        np.atleast_1d(axes)[i].set_facecolor("#dddddd")
    step = max(1, math.ceil(len(names) / 24))
    np.atleast_1d(axes)[0].set_yticks(
        range(0, len(names), step), [_short(n) for n in names[::step]], fontsize=7
    )
    made.colorbar(image, ax=list(np.atleast_1d(axes)), label="log10; grey: none")
    return made


def histogram(models: dict[str, Any]) -> Any:
    """How many modules and gradients have which error."""
    made, axes = figure()
    values = [
        [math.log10(m["error"]) for m in model["modules"] if not math.isnan(positive(m["error"]))]
        for model in models.values()
    ]
    axes.hist(values, bins=24, label=list(models))
    axes.set_xlabel(f"log10 of the {ERROR}")
    axes.set_ylabel("modules and gradients")
    _legend(axes)
    return made


def curves(training: dict[str, Any]) -> Any:
    """Losses, and the norms of all gradients together; below, what they differ by."""
    made, axes = figure(2, 2, 5.5)
    first = next(iter(training["models"].values()))
    for column, (key, title) in enumerate(
        (("losses", "loss"), ("gradient_norms", "gradient norm"))
    ):
        above, below = axes[0][column], axes[1][column]
        for i, (label, model) in enumerate(training["models"].items()):
            steps, values = range(len(model[key])), np.array(model[key], float)
            above.plot(steps, values, MARKS[i] + "-", label=label, **_width(i))
            if model is not first:
                base = np.array(first[key], float)
                off = np.abs(values / base - 1.0)
                below.plot(steps, [positive(v) for v in off], MARKS[i] + "-", ms=4, lw=1,
                           color=f"C{i}", label=label)  # fmt: skip
        above.set_ylabel(title)
        below.set_ylabel("relative difference")
        below.set_xlabel(f"step, beside {next(iter(training['models']))}")
        below.set_yscale("log")
        below.set_xlim(above.get_xlim())
        for each in (above, below):
            each.xaxis.get_major_locator().set_params(integer=True)
            each.grid(alpha=0.3)
    made.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=3,
                fontsize=8, frameon=False)  # fmt: skip
    return made
