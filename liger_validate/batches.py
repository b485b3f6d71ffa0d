"""The tokens that both frameworks get."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Batch:
    """ids, mask and positions (B, T): tokens, 1 where a token counts, and its place from 0.

    Padding may lie at either side of a row. Its own position is 0.
    """

    ids: np.ndarray
    mask: np.ndarray
    positions: np.ndarray

    @classmethod
    def of(cls, ids: np.ndarray, mask: np.ndarray | None = None) -> "Batch":
        """Positions count a row's tokens, and pass over its padding.

        Raises:
            ValueError: if the shapes are not one (B, T), or a row's tokens do not lie in one piece.
        """
        ids = np.asarray(ids, np.int32)
        mask = np.ones_like(ids) if mask is None else np.asarray(mask, np.int32)
        if ids.ndim != 2 or mask.shape != ids.shape:
            raise ValueError(
                f"input_ids must be (B, T) and attention_mask alike; got {ids.shape}, {mask.shape}"
            )
        begins = np.diff(mask, prepend=0, axis=1) == 1
        if np.any(begins.sum(1) != 1) or not np.isin(mask, (0, 1)).all():
            raise ValueError("attention_mask must be 1 for one piece of every row and 0 elsewhere")
        return cls(ids, mask, np.maximum(np.cumsum(mask, 1) - 1, 0).astype(np.int32) * mask)

    @property
    def counted(self) -> np.ndarray:
        """(B, T): True where a token counts."""
        return self.mask.astype(bool)

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        """The arrays by the names that transformers has for them."""
        return {"input_ids": self.ids, "attention_mask": self.mask, "position_ids": self.positions}

    @property
    def padded(self) -> bool:
        """Whether there is any padding."""
        return not self.mask.all()


def read(path: str | None, vocab: int, seed: int) -> Batch:
    """The batch in a .json, .npz or .safetensors file; random tokens (2, 32) without one.

    The file has `input_ids` and perhaps `attention_mask`, both (B, T).
    """
    if path is None:
        rng = np.random.default_rng(seed)
        return Batch.of(rng.integers(min(3, vocab - 1), vocab, (2, 32)))
    if Path(path).suffix == ".json":
        found = json.loads(Path(path).read_text())
    elif Path(path).suffix == ".npz":
        with np.load(path) as file:
            found = dict(file)
    elif Path(path).suffix == ".safetensors":
        from safetensors.numpy import load_file

        found = load_file(path)
    else:
        raise ValueError(f"batch must be a .json, .npz or .safetensors file; got {path!r}")
    if "input_ids" not in found:
        raise ValueError(f"{path} has no input_ids; it has {sorted(found)}")
    batch = Batch.of(np.asarray(found["input_ids"]), found.get("attention_mask"))
    if batch.ids.min() < 0 or batch.ids.max() >= vocab:
        raise ValueError(f"input_ids must be from 0 to {vocab - 1}; got {batch.ids.max()}")
    return batch
