"""What a station is, and what it is made of: a capture and its checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from liger_validate.batches import Batch
from liger_validate.captures import Capture
from liger_validate.formulas import float64
from liger_validate.tensors import from_torch

Formula = Callable[[], np.ndarray]
Detail = str | Callable[[], str]
Faults = list[tuple[str, Detail, Formula]]


@dataclass
class Station:
    """One place: what the model gave, the formula, and the faults that are tried.

    kind: "norm", "linear" and so on, for the band. faults: name, detail and formula of each.
    """

    name: str
    kind: str
    actual: np.ndarray
    formula: Formula
    faults: Faults = field(default_factory=list)


@dataclass(frozen=True)
class Subject:
    """A capture with what its checkpoint says.

    config: a `jax_liger.models.Config`. weights: of the checkpoint, (outputs, inputs), float64,
    rounded to the capture's dtype; tensors of PyTorch where the products are to be taken.
    """

    config: Any
    weights: Callable[[str], torch.Tensor | None]
    batch: Batch
    capture: Capture

    def vector(self, name: str) -> np.ndarray | None:
        """A norm's weight, or a bias."""
        found = self.weights(name)
        return None if found is None else from_torch(found)

    def into(self, name: str) -> np.ndarray | None:
        """What went into a module, in float64."""
        found = self.capture.inputs.get(name)
        return None if found is None else float64(found)

    def out_of(self, name: str) -> np.ndarray | None:
        """What came out of a module, in float64."""
        found = self.capture.outputs.get(name)
        return None if found is None else float64(found)

    def gradient_into(self, name: str) -> np.ndarray | None:
        """The loss's gradient at what went into a module, through that module, in float64."""
        found = self.capture.input_gradients.get(name)
        return None if found is None else float64(found)

    def gradient_out_of(self, name: str) -> np.ndarray | None:
        """The loss's gradient at what came out of a module, in float64."""
        found = self.capture.output_gradients.get(name)
        return None if found is None else float64(found)


def usual(value: float, known: tuple[float, ...]) -> float:
    """The known value that is meant, where one is as near as an estimate is good."""
    return next((k for k in known if abs(value - k) < 0.02 * k), value)
