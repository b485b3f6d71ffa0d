"""One checkpoint in transformers, plain and patched, and in Flax, on the same tokens."""

import copy
import functools
import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from liger_validate import backward_stations, captures, captures_flax, drift
from liger_validate.batches import Batch, read
from liger_validate.captures import Capture
from liger_validate.devices import default_of_torch
from liger_validate.diagnosis import findings
from liger_validate.routing import Routing
from liger_validate.stations import stations
from liger_validate.subject import Subject

PLAIN, PATCHED, FLAX = "transformers", "torch_liger", "jax_liger"
# What a model's error is held beside: the plain model's, and for that the patched one's.
BESIDE = {PLAIN: PATCHED, PATCHED: PLAIN, FLAX: PLAIN}


@dataclass
class Loaded:
    """One checkpoint as three models, and `exact`: transformers' in float64.

    config: the checkpoint's, as a `jax_liger.models.Config`. weights: of the checkpoint by name,
    in float64 after rounding to the dtype, on the GPU where there is one.
    """

    config: Any
    dtype: str
    exact: Any
    models: dict[str, Any]
    weights: Callable[[str], torch.Tensor | None]


def load(path: str, dtype: str = "float32") -> Loaded:
    """Reads a checkpoint three times: a folder, or a name on the hub.

    The models are given attention in plain operations ("eager" in transformers), so that their
    modules compute what their families' formulas say.
    """
    import transformers

    import torch_liger
    from jax_liger.models import from_pretrained

    flax = from_pretrained(path, dtype=dtype)

    def of_transformers() -> Any:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation="eager"
        )
        return model.to(default_of_torch()).eval()

    plain, patched = of_transformers(), of_transformers()
    torch_liger.apply_liger_kernel(patched)
    exact = copy.deepcopy(plain).double()
    exact.config._experts_implementation = "eager"  # the grouped product has no float64
    models = {PLAIN: plain, PATCHED: patched, FLAX: flax}
    return Loaded(flax.config, dtype, exact, models, weights_of(path, dtype))


def weights_of(path: str, dtype: str) -> Callable[[str], torch.Tensor | None]:
    """The checkpoint's tensors by name, as `Loaded` has them; None for those that it has not."""
    from safetensors import safe_open

    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(path, allow_patterns=["*.safetensors"]))
    where, device = {}, default_of_torch()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), "pt") as tensors:
            where |= dict.fromkeys(tensors.keys(), file)

    @functools.lru_cache(maxsize=8)  # neighbours are asked for together, and one is large
    def weight(name: str) -> torch.Tensor | None:
        if name not in where:
            return None
        with safe_open(str(where[name]), "pt") as tensors:
            return tensors.get_tensor(name).to(device, getattr(torch, dtype)).double()

    return weight


def captured(loaded: Loaded, batch: Batch, grads: bool = False) -> tuple[Capture, list[Capture]]:
    """The exact model's capture, and those of the three models."""
    with captures.softmax_in_float64():
        exact = _captured("exact", loaded.exact, loaded.config, batch, grads)
    return exact, [captured_of(loaded, label, batch, grads) for label in loaded.models]


def captured_of(loaded: Loaded, label: str, batch: Batch, grads: bool = False) -> Capture:
    """The capture of one of the three models."""
    return _captured(label, loaded.models[label], loaded.config, batch, grads)


def _captured(label: str, model: Any, config: Any, batch: Batch, grads: bool) -> Capture:
    if label == FLAX:
        capture = captures_flax.of_flax(model, batch, label)
        if grads:
            captures_flax.gradients_of_flax(model, batch, capture)
        return capture
    capture = captures.of_torch(model, batch, label, config)
    if grads:
        captures.gradients_of_torch(model, batch, capture)
        captures.gradients_at_modules_of_torch(model, batch, capture, config)
    return capture


def compare(loaded: Loaded, batch: Batch, *, grads: bool = False) -> dict[str, Any]:
    """The report on one batch: drift, the first place out of its band, and what is wrong where."""
    exact, each = captured(loaded, batch, grads)
    of = {capture.label: capture for capture in each}
    report: dict[str, Any] = {"dtype": loaded.dtype, "family": loaded.config.model_type}
    report |= {"models": {}, "findings": [], "batch": list(batch.ids.shape)}
    of_gradients = drift.of_gradients(of, exact, BESIDE)
    for label, capture in of.items():
        plain = of[BESIDE[label]]
        routing = Routing(exact, [capture, plain], loaded.config, batch.counted)
        drifts = drift.of_outputs(capture, plain, exact, routing.counted_at)
        if not routing.flips:  # a token's gradients go wherever it is seen
            drifts += drift.of_output_gradients(capture, plain, exact, routing.counted_at)
            drifts += of_gradients[label]
        subject = Subject(loaded.config, loaded.weights, batch, capture)
        every = itertools.chain(stations(subject), backward_stations.stations(subject))
        off = findings(every, label, capture.dtype, batch.counted)
        report["findings"] += [asdict(finding) for finding in off]
        report["models"][label] = _summary(drifts, capture.loss)
        report["models"][label]["routed_otherwise"] = routing.flips
    report["agrees"] = not report["findings"] and all(
        model["first_out_of_band"] is None for model in report["models"].values()
    )
    return report


def _summary(drifts: list[drift.Drift], loss: float | None = None) -> dict[str, Any]:
    first = next((d for d in drifts if not d.inside), None)
    # The first position that is off; a parameter's gradient has none.
    off = [] if first is None else [i for i, e in enumerate(first.by_position) if e > first.limit]
    return {
        "first_out_of_band": first and first.name,
        "first_position": off[0] if off else None,
        "loss": loss,
        "modules": [{**asdict(d), "inside": d.inside} for d in drifts],
    }


def validate(
    path: str,
    *,
    batch: str | None = None,
    dtype: str = "float32",
    grads: bool = False,
    steps: int = 0,
    learning_rate: float = 1e-2,
    seed: int = 0,
) -> dict[str, Any]:
    """Loads a checkpoint and compares; with `steps`, it trains all models in step afterwards."""
    from liger_validate.training import in_step

    loaded = load(path, dtype)
    tokens = read(batch, loaded.config.vocab_size, seed)
    report = {"path": str(path), **compare(loaded, tokens, grads=grads)}
    if steps:
        report["training"] = in_step(loaded, tokens, steps, learning_rate)
        report["agrees"] = report["agrees"] and report["training"]["agrees"]
    return report
