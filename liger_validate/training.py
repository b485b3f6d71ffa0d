"""All models trained in step: the same batch, the same plain gradient descent."""

import math
from dataclasses import asdict
from typing import Any

import numpy as np

from liger_validate import captures, captures_flax, drift
from liger_validate.batches import Batch
from liger_validate.tensors import squares


def in_step(loaded: Any, batch: Batch, steps: int, learning_rate: float) -> dict[str, Any]:
    """Losses, norms of the gradients and the weights' drift, after every step and at the end.

    SGD without momentum: nothing but the gradients decides, and both frameworks spell it alike.
    The models of `loaded` are changed.
    """
    from liger_validate.model import BESIDE, FLAX

    runs: dict[str, dict[str, Any]] = {}
    with captures.softmax_in_float64():
        exact = _train_torch(loaded.exact, batch, steps, learning_rate)
    for label, model in loaded.models.items():
        train = _train_flax if label == FLAX else _train_torch
        runs[label] = train(model, batch, steps, learning_rate)
    report: dict[str, Any] = {"steps": steps, "learning_rate": learning_rate, "models": {}}
    weights = {
        label: captures.Capture(label, loaded.dtype, gradients=run["weights"])
        for label, run in {**runs, "exact": exact}.items()
    }
    of_weights = drift.of_gradients(
        {label: weights[label] for label in runs}, weights["exact"], BESIDE
    )
    for label, run in runs.items():
        found = []
        for name in ("losses", "gradient_norms"):
            curves = (run[name], runs[BESIDE[label]][name], exact[name])
            found.append(drift.of_numbers(label, name, *curves, loaded.dtype))
        found += of_weights[label]
        report["models"][label] = {
            "losses": run["losses"],
            "gradient_norms": run["gradient_norms"],
            "first_out_of_band": next((_weight(d.name) for d in found if not d.inside), None),
            "drift": [
                {**asdict(d), "name": _weight(d.name), "by_position": [], "inside": d.inside}
                for d in found
            ],
        }
    report["agrees"] = all(m["first_out_of_band"] is None for m in report["models"].values())
    return report


def _weight(name: str) -> str:
    return name.removesuffix(".grad")


def _train_torch(model: Any, batch: Batch, steps: int, learning_rate: float) -> dict[str, Any]:
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    losses, norms = [], []
    capture = captures.Capture("", "")
    for _ in range(steps):
        captures.gradients_of_torch(model, batch, capture)
        losses.append(capture.loss)
        norms.append(_norm(capture.gradients.values()))
        optimizer.step()
    weights = dict(model.named_parameters())
    return {"losses": losses, "gradient_norms": norms, "weights": weights}


def _train_flax(model: Any, batch: Batch, steps: int, learning_rate: float) -> dict[str, Any]:
    import jax

    losses, norms = [], []
    for _ in range(steps):
        loss, grads = captures_flax.loss_and_gradients(model, batch)
        losses.append(loss)
        norms.append(_norm(np.asarray(leaf) for leaf in jax.tree.leaves(grads)))
        model = jax.tree.map(lambda w, g: w - w.dtype.type(learning_rate) * g, model, grads)
    weights = captures_flax.as_torch(model, model.config)
    return {"losses": losses, "gradient_norms": norms, "weights": weights}


def _norm(gradients: Any) -> float:
    return math.sqrt(sum(squares(g) for g in gradients))
