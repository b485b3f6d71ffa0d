"""Models from and to Hugging Face checkpoints, one tensor at a time."""

import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jax_liger.models import safetensors
from jax_liger.models.config import Config
from jax_liger.models.decoder import CausalLM
from jax_liger.models.names import Piece, pieces_of

Tensors = Mapping[str, np.ndarray]
Rules = Callable[[str, tuple[int, ...]], PartitionSpec]

INDEX = "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# What old checkpoints hold beside the parameters: numbers that follow from the config.
DERIVED = re.compile(r".*\.rotary_emb\.inv_freq")


def from_pretrained(
    path_or_hub_id: str | os.PathLike[str],
    *,
    dtype: Any = None,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
    ignore: Iterable[str] = (),
    **settings: Any,
) -> CausalLM:
    """A model with the weights of a Hugging Face checkpoint, in safetensors.

    Args:
        path_or_hub_id: a folder with a config.json, or a model's name on the hub, which needs
            huggingface_hub.
        dtype: of the activations, and of the parameters unless `param_dtype` is given too. None
            leaves every tensor in the dtype that it has, bit for bit, and computes in the
            embedding's.
        mesh: the devices to lay the parameters out on; None for jax's default device.
        rules: a function from a parameter's path, such as "model.layers.0.mlp.up_proj.kernel", and
            its shape to its PartitionSpec; None for a copy on every device of the mesh.
        ignore: fields of the config to pass over; see `Config.from_hf`.
        settings: param_dtype, implementation, attention, remat, fused_projections, max_length;
            see `Config`.

    Returns:
        A `CausalLM`. Every device reads its own part of a parameter from the files, and the host
        holds one such part at a time. Rows beyond the config's vocab_size, with which some
        exporters pad the vocabulary, are left out.

    Raises:
        ValueError: where the checkpoint has not exactly the tensors and shapes of the config's
            model, naming them; and what `Config.from_hf` raises.
        FileNotFoundError, ImportError: if there is no such folder, or no way to fetch it.
    """
    folder = _folder(path_or_hub_id)
    hf = json.loads((folder / "config.json").read_text())
    tensors = _open(folder)
    own = jax.numpy.dtype(tensors[EMBEDDING].dtype if EMBEDDING in tensors else "float32").name
    param_dtype = settings.pop("param_dtype", dtype)
    param_dtype = None if param_dtype is None else jax.numpy.dtype(param_dtype)
    config = Config.from_hf(
        hf, ignore=ignore, dtype=dtype or param_dtype or own, param_dtype=param_dtype or own,
        **settings,
    )  # fmt: skip
    # Abstract until the weights arrive: none is drawn only to be overwritten.
    graphdef, state = nnx.split(_abstract(config))
    params = {_joined(path): param for path, param in nnx.to_flat_state(state)}
    pieces = {path: pieces_of(path, config) for path in params}
    _check(pieces, {path: param.shape for path, param in params.items()}, tensors, config)

    loaded = []
    for path, param in nnx.to_flat_state(state):
        name = _joined(path)
        value = _Assembled(pieces[name], tensors, param_dtype)
        sharding = _sharding(name, param.shape, mesh, rules)
        array = jax.make_array_from_callback(param.shape, sharding, value.part)
        loaded.append((path, param.replace(array)))
    return nnx.merge(graphdef, nnx.from_flat_state(loaded))


def save_pretrained(
    model: CausalLM, path: str | os.PathLike[str], *, max_shard_size: int = 5_000_000_000
) -> None:
    """Writes config.json and the weights as a Hugging Face checkpoint of the model's family.

    Args:
        model: the model; parameters that its config's model has not, such as adapters, are refused.
        path: the folder, which is made if it is not there. Weights that lie in it are replaced.
        max_shard_size: bytes of tensors in one file; with more, an index says what is where.

    Every parameter is saved in the dtype that it has, and the host holds one at a time.
    """
    folder, config = Path(path), model.config
    folder.mkdir(parents=True, exist_ok=True)
    params = {_joined(p): v[...] for p, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    own = parameter_shapes(config).keys()
    if own != params.keys():
        raise ValueError(
            "the model's parameters are not those of its config: missing "
            f"{sorted(own - params.keys())}, unexpected {sorted(params.keys() - own)}"
        )
    parts: dict[str, list[tuple[str, Piece]]] = {}
    for name in params:
        for piece in pieces_of(name, config):
            parts.setdefault(piece.key, []).append((name, piece))
    for found in parts.values():  # a split projection's rows in the order of the fused one
        found.sort(key=lambda item: item[1].rows.start or 0)

    def value_of(key: str) -> np.ndarray:
        arrays = [_piece_of(np.asarray(params[name]), piece) for name, piece in parts[key]]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    described = {key: _described(params, found) for key, found in parts.items()}
    files = _shards(described, max_shard_size)
    for file, keys in files.items():
        safetensors.write(folder / file, {key: described[key] for key in keys}, value_of)
    _remove_others(folder, files)
    if len(files) > 1:
        weight_map = {key: file for file, keys in files.items() for key in keys}
        total = sum(map(_size, described.values()))
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2))
    hf = {k: v for k, v in config.hf.items() if k != "torch_dtype"}
    hf["dtype"] = params["model.embed_tokens.embedding"].dtype.name
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n")


def parameter_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The paths of the model's parameters, for partition rules to match, and their shapes."""
    state = nnx.state(_abstract(config))
    return {_joined(path): param.shape for path, param in nnx.to_flat_state(state)}


class _Assembled:
    """A parameter as it lies in the files, of which parts are read."""

    def __init__(self, pieces: list[Piece], tensors: Tensors, dtype: Any):
        self.views = []
        for piece in pieces:
            view = tensors[piece.key][piece.rows]
            view = view.T if piece.transposed else view
            self.views.append(view[None] if piece.stacked else view)
        self.axis, self.dtype = pieces[0].axis, dtype

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.views[0].shape)
        shape[self.axis] = sum(view.shape[self.axis] for view in self.views)
        return tuple(shape)

    def part(self, index: Any) -> np.ndarray:
        """A copy of self[index], whose slices have step 1."""
        spans = [part.indices(size)[:2] for part, size in zip(index, self.shape, strict=True)]
        # New memory in any case: on a CPU jax may go on to read what it is given.
        out = np.empty([end - begin for begin, end in spans], self.dtype or self.views[0].dtype)
        (first, last), start, before = spans[self.axis], 0, (slice(None),) * self.axis
        for view in self.views:
            size = view.shape[self.axis]
            begin, end = max(first, start), min(last, start + size)
            if begin < end:
                inside = slice(begin - start, end - start)
                _copy(
                    view[(*index[: self.axis], inside, *index[self.axis + 1 :])],
                    out[(*before, slice(begin - first, end - first))],
                )
            start += size
        return out


def _copy(source: np.ndarray, to: np.ndarray) -> None:
    """In blocks of columns: a transposed tensor in one go would miss the cache at every number."""
    for start in range(0, to.shape[-1], 64):
        to[..., start : start + 64] = source[..., start : start + 64]


def _check(
    pieces: dict[str, list[Piece]],
    shapes: dict[str, tuple[int, ...]],
    tensors: Tensors,
    config: Config,
) -> None:
    """Raises ValueError unless these are the tensors of the model, each of its shape."""
    expected = {piece.key for found in pieces.values() for piece in found}
    given = {key for key in tensors if not DERIVED.fullmatch(key)}
    if config.tie_word_embeddings and {HEAD, EMBEDDING} <= given:
        given.remove(HEAD)
        if not np.array_equal(_bytes(tensors[HEAD]), _bytes(tensors[EMBEDDING])):
            raise ValueError(
                f"the config has tie_word_embeddings=True, but {HEAD} and {EMBEDDING} differ"
            )
    if expected != given:
        raise ValueError(
            "the checkpoint does not fit its config: missing keys "
            f"{sorted(expected - given)}, unexpected keys {sorted(given - expected)}"
        )
    for path, found in pieces.items():
        shape = _Assembled(found, tensors, None).shape
        if shape != shapes[path]:
            raise ValueError(
                f"{path} must have shape {shapes[path]}; got {shape} from "
                + ", ".join(f"{piece.key} {tensors[piece.key].shape}" for piece in found[:3])
            )


def _bytes(tensor: np.ndarray) -> np.ndarray:
    return tensor.reshape(-1).view(np.uint8)


def _sharding(path: str, shape: tuple[int, ...], mesh: Mesh | None, rules: Rules | None):
    if mesh is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    return NamedSharding(mesh, PartitionSpec() if rules is None else rules(path, shape))


def _folder(path_or_hub_id: str | os.PathLike[str]) -> Path:
    folder = Path(path_or_hub_id)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{folder} has no config.json")
        return folder
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(
            f"{str(path_or_hub_id)!r} is no folder here, and to fetch it from the hub needs "
            "huggingface_hub: pip install huggingface_hub"
        ) from error
    wanted = ["config.json", "*.safetensors", INDEX]
    return Path(huggingface_hub.snapshot_download(str(path_or_hub_id), allow_patterns=wanted))


def _open(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, none of them read."""
    single = folder / "model.safetensors"
    if single.is_file():
        return safetensors.read(single)
    if not (folder / INDEX).is_file():
        raise FileNotFoundError(
            f"{folder} has neither model.safetensors nor {INDEX}; weights in other formats must be "
            "converted to safetensors first"
        )
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    files = {file: safetensors.read(folder / file) for file in sorted(set(weight_map.values()))}
    return {key: files[file][key] for key, file in weight_map.items()}


@functools.lru_cache(maxsize=8)
def _abstract(config: Config) -> CausalLM:
    """The config's model, with shapes for parameters. It is for looking at only."""
    return nnx.eval_shape(lambda: CausalLM(config, rngs=nnx.Rngs(0)))


def _joined(path: Iterable[Any]) -> str:
    return ".".join(map(str, path))


def _piece_of(param: np.ndarray, piece: Piece) -> np.ndarray:
    """The tensor, or its rows, that a parameter's part is."""
    part = param[(slice(None),) * piece.axis + (piece.part,)]
    part = part[0] if piece.stacked else part
    return part.T if piece.transposed else part


def _described(
    params: Mapping[str, jax.Array], found: list[tuple[str, Piece]]
) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of a checkpoint's tensor."""
    rows, dtype = 0, params[found[0][0]].dtype
    shape: tuple[int, ...] = ()
    for name, piece in found:
        # A view of one number stands for the parameter: only its shape is of interest.
        shape = _piece_of(np.broadcast_to(np.uint8(0), params[name].shape), piece).shape
        rows += shape[0]
    return (rows, *shape[1:]), np.dtype(dtype)


def _size(described: tuple[tuple[int, ...], np.dtype]) -> int:
    shape, dtype = described
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def _shards(
    described: Mapping[str, tuple[tuple[int, ...], np.dtype]], max_size: int
) -> dict[str, list[str]]:
    """Names of files, and the keys in each."""
    groups: list[list[str]] = [[]]
    filled = 0
    for key, entry in described.items():
        if filled + _size(entry) > max_size and groups[-1]:
            groups.append([])
            filled = 0
        groups[-1].append(key)
        filled += _size(entry)
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": g for i, g in enumerate(groups)}


def _remove_others(folder: Path, files: Iterable[str]) -> None:
    """An earlier checkpoint's weights, which a reader might take for this one's."""
    for old in folder.glob("model*.safetensors"):
        if old.name not in files:
            old.unlink()
    (folder / INDEX).unlink(missing_ok=True)
