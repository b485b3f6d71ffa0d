"""Adapters from and to the files of PEFT: adapter_config.json and adapter_model.safetensors.

An adapter of the layer a.b has the tensors base_model.model.a.b.lora_A.weight (r, D),
base_model.model.a.b.lora_B.weight (O, r), and with DoRA base_model.model.a.b.lora_magnitude_vector
(O,). The names of layers are those of the checkpoint, not of a model whose projections are fused.
"""

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_liger.models import safetensors
from jax_liger.models.checkpoint import parameter_shapes
from jax_liger.models.config import Config
from jax_liger.models.decoder import CausalLM
from jax_liger.models.lora import LoRALinear, adapters, attach, check_settings, linear_layers
from jax_liger.models.names import Piece, pieces_of
from liger_ops.checking import listed

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
LORA_A, LORA_B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"

# Fields that do not change what an adapter computes, or whose effect the tensors' shapes show.
WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config",
    "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "megatron_core",
    "peft_version", "qalora_group_size", "rank_pattern", "revision", "target_modules", "task_type",
}  # fmt: skip
READ = {"peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "alpha_pattern"}
# Ways to begin that leave the model's own weights as they are; others need the changed ones.
BEGINNINGS = (True, False, "gaussian", "eva", "orthogonal")


def save_adapters(model: CausalLM, path: str | os.PathLike[str]) -> None:
    """Writes the adapters as PEFT does, so that `peft.PeftModel.from_pretrained` loads them.

    Args:
        model: a model with adapters, of `add_lora` or `load_adapters`.
        path: the folder, which is made if it is not there.

    Every tensor is saved in the dtype that it has. A fused projection's adapter, where the
    checkpoint has the parts, becomes one for each part, all with the same lora_A.

    Raises:
        ValueError: for a model without adapters, layers that differ in rsLoRA, DoRA or dropout, and
            parts of a projection that the checkpoint has fused.
    """
    found = adapters(model)
    if not found:
        raise ValueError("the model has no adapters; add_lora gives it some")
    shared = {
        (layer.rslora, layer.magnitude is not None, layer.dropout) for layer in found.values()
    }
    if len(shared) > 1:
        raise ValueError(f"adapters must agree in rslora, dora and dropout; got {shared}")
    (rslora, dora, dropout), config = shared.pop(), model.config

    tensors: dict[str, np.ndarray] = {}
    sizes: dict[str, tuple[int, float]] = {}
    for layer_path, layer in found.items():
        pieces = _pieces(layer_path, config)
        if not pieces:
            raise ValueError(
                f"{layer_path} is a part of a fused projection in the checkpoint, and so PEFT has "
                "no adapter for it; make the model with fused_projections=True"
            )
        for piece in pieces:
            name = _layer_of(piece)
            sizes[name] = (layer.rank, layer.alpha)
            tensors |= {
                PREFIX + name + end: array for end, array in _tensors_of(layer, piece.part).items()
            }

    (rank, alpha), _ = Counter(sizes.values()).most_common(1)[0]
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.hf.get("_name_or_path"),
        "inference_mode": True,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": dropout,
        "target_modules": _targets(list(sizes), config),
        "rank_pattern": {name: r for name, (r, _) in sizes.items() if r != rank},
        "alpha_pattern": {name: a for name, (_, a) in sizes.items() if a != alpha},
        "use_rslora": rslora,
        "use_dora": dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {key: (array.shape, array.dtype) for key, array in tensors.items()}
    safetensors.write(folder / WEIGHTS, shapes, tensors.__getitem__)
    (folder / CONFIG).write_text(json.dumps(described, indent=2) + "\n")


def load_adapters(
    model: CausalLM,
    path: str | os.PathLike[str],
    *,
    dropout: float | None = None,
    param_dtype: Any = None,
    rngs: nnx.Rngs | None = None,
) -> list[str]:
    """Gives a model the adapters that PEFT, or `save_adapters`, has written in a folder.

    Args:
        model: a model without adapters, of the checkpoint that they were trained on.
        path: the folder.
        dropout: for training on; None for what the file says where rngs are given, else 0.
        param_dtype: of the adapters; None for the dtype that each has in the file.
        rngs: the keys for the dropout.

    Returns:
        The paths of the layers that have adapters now.

    Raises:
        ValueError: for settings that are not supported, naming them; tensors that belong to no
            layer, lack their partner or have another shape than the layer asks for; a model that
            has adapters; and parts of a projection that the model has fused, unless they share
            their lora_A, or the other way round.
        FileNotFoundError: where one of the two files is not there.
    """
    folder = Path(path)
    if adapters(model):
        raise ValueError("the model has adapters already; merge_lora adds them to its kernels")
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{folder} has no {file}")
    settings = json.loads((folder / CONFIG).read_text())
    _refuse_the_rest(settings)
    rslora, dora = bool(settings.get("use_rslora")), bool(settings.get("use_dora"))
    if dropout is None:
        dropout = float(settings.get("lora_dropout", 0.0)) if rngs is not None else 0.0
    if dropout and rngs is None:
        raise ValueError(f"rngs must be given where dropout is above 0; got None and {dropout}")
    check_settings(dropout, dora)

    tensors = safetensors.read(folder / WEIGHTS)
    ends = (LORA_A, LORA_B, *((MAGNITUDE,) if dora else ()))
    attached, used = {}, set()
    for layer_path, layer in linear_layers(model).items():
        pieces = _pieces(layer_path, model.config)
        keys = [[PREFIX + _layer_of(piece) + end for end in ends] for piece in pieces]
        if not any(key in tensors for part in keys for key in part):
            continue
        used |= {key for part in keys for key in part}
        missing = [key for part in keys for key in part if key not in tensors]
        if missing:
            raise ValueError(f"the adapter of {layer_path} needs {listed(missing)} as well")
        parts = [[tensors[key] for key in part] for part in keys]
        alphas = {_alpha(_layer_of(piece), settings) for piece in pieces}
        attached[layer_path] = (*_joined(layer_path, layer.kernel.shape, parts, alphas), *alphas)
    if tensors.keys() - used or not attached:
        raise ValueError(
            f"tensors of {WEIGHTS} must belong to linear layers of the model, with projections "
            f"fused where the checkpoint has them fused; got {sorted(tensors.keys() - used)}"
        )
    for layer_path, (lora_a, lora_b, magnitude, alpha) in attached.items():
        attach(
            *(model, layer_path, _copy(lora_a, param_dtype), _copy(lora_b, param_dtype)),
            None if magnitude is None else _copy(magnitude, param_dtype),
            alpha=alpha, rslora=rslora, dropout=dropout, rngs=rngs,
        )  # fmt: skip
    return list(attached)


def _tensors_of(layer: LoRALinear, outputs: slice) -> dict[str, np.ndarray]:
    """PEFT's tensors for some of a layer's outputs, by the ends of their names."""
    found = {
        LORA_A: np.asarray(layer.lora_a[...]).T,
        LORA_B: np.asarray(layer.lora_b[...])[:, outputs].T,
    }
    if layer.magnitude is not None:
        found[MAGNITUDE] = np.asarray(layer.magnitude[...])[outputs]
    return found


def _copy(array: np.ndarray, dtype: Any) -> jax.Array:
    """New memory: on a CPU jax may go on to read what it is given, which is a file here."""
    return jnp.asarray(np.array(array, dtype or array.dtype))


def _joined(
    path: str, shape: tuple[int, ...], parts: list[list[np.ndarray]], alphas: set[float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """lora_a, lora_b and magnitude of a layer from PEFT's tensors for its parts, in order."""
    lora_a = parts[0][0]
    if len(alphas) > 1 or not all(np.array_equal(part[0], lora_a) for part in parts):
        raise ValueError(
            f"{path} has one lora_a for all its parts, and theirs differ; load the model with "
            "fused_projections=False"
        )
    for part in parts:
        ranks = (part[0].shape[0], part[1].shape[1])
        if ranks[0] != ranks[1]:
            raise ValueError(f"lora_A and lora_B of {path} must have one rank; got {ranks}")
    lora_b = np.concatenate([part[1] for part in parts])
    magnitude = np.concatenate([part[2] for part in parts]) if len(parts[0]) > 2 else None
    got = (lora_a.shape[1], lora_b.shape[0], *(() if magnitude is None else magnitude.shape))
    if got != (*shape, *shape[1:])[: len(got)]:
        raise ValueError(
            f"the adapter of {path} must be for a kernel of shape {tuple(shape)}; got lora_A "
            f"{[part[0].shape for part in parts]} and lora_B {[part[1].shape for part in parts]}"
        )
    return lora_a.T, lora_b.T, magnitude


def _pieces(path: str, config: Config) -> list[Piece]:
    """The layers of the checkpoint that a layer of the model is; none if it is a part of one."""
    pieces = pieces_of(path + ".kernel", config)
    return pieces if all(piece.rows == slice(None) for piece in pieces) else []


def _layer_of(piece: Piece) -> str:
    return piece.key.removesuffix(".weight")


def _targets(names: list[str], config: Config) -> list[str]:
    """The last parts of the names, unless other layers of the checkpoint have them too."""
    ends = {name.rpartition(".")[2] for name in names}
    matched = {
        _layer_of(piece)
        for path in parameter_shapes(config)
        for piece in pieces_of(path, config)
        if _layer_of(piece).rpartition(".")[2] in ends
    }
    return sorted(ends) if matched == set(names) else names


def _alpha(name: str, settings: dict[str, Any]) -> float:
    for pattern, alpha in (settings.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", name):
            return alpha
    return settings["lora_alpha"]


def _refuse_the_rest(settings: dict[str, Any]) -> None:
    """Raises ValueError for settings with an effect that the model does not have."""
    refused = {
        key: value
        for key, value in settings.items()
        if key not in WITHOUT_EFFECT | READ | {"init_lora_weights"}
        and value not in (None, False, "none", [], {})
    }
    if settings.get("peft_type") != "LORA":
        refused["peft_type"] = settings.get("peft_type")
    if settings.get("init_lora_weights", True) not in BEGINNINGS:
        refused["init_lora_weights"] = settings["init_lora_weights"]
    if refused:
        raise ValueError(f"these settings of {CONFIG} are not supported: {refused}")
