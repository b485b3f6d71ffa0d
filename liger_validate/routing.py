"""Tokens that went to other experts than in the exact model, since two experts were nearly alike.

Rounding decides between experts whose scores are within rounding of each other, and what another
expert gives is not near. So such a token, and all that see it, say nothing of a fault from there
on. The scores themselves are compared for every token: a router that is wrong is out of its band.
"""

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from liger_validate.captures import Capture
from liger_validate.formulas import float64

SCORES = "mlp.gate"  # the router, whose output are the experts' scores, in transformers


class Routing:
    """Which tokens can be compared where, between captures of one checkpoint on one batch."""

    def __init__(
        self,
        exact: Capture,
        captures: Iterable[Capture],
        config: Any,
        counted: np.ndarray,
    ):
        self._counted = counted
        self.flips = 0  # tokens that went another way, over all layers and captures
        # By layer, after it: tokens that went another way in it or before it, and what sees them.
        self._lost: list[np.ndarray] = []
        lost = np.zeros_like(counted)
        for i, layer in enumerate(config.layers):
            name = f"model.layers.{i}.{SCORES}"
            if layer.experts and name in exact.outputs:
                k, wanted = config.num_experts_per_tok, exact.outputs[name]
                for capture in captures:
                    if name in capture.outputs:
                        other = _other(capture.outputs[name], wanted, k).reshape(counted.shape)
                        other &= counted & ~lost
                        self.flips += int(other.sum())
                        lost = lost | np.logical_or.accumulate(other, axis=1)
            self._lost.append(lost)

    def counted_at(self, name: str) -> np.ndarray:
        """(B, T): True where tokens count at this module's output."""
        found = re.match(r"model\.layers\.(\d+)(\..*)?$", name)
        if not found:
            after = len(self._lost) if name in ("model.norm", "logits", "lm_head") else 0
        else:
            part = found[2] or ""
            whole = part in ("", ".post_feedforward_layernorm") or (
                part.startswith(".mlp") and part != f".{SCORES}"
            )
            after = int(found[1]) + whole
        return self._counted & ~self._lost[after - 1] if after else self._counted


def _other(scores: np.ndarray, wanted: np.ndarray, k: int) -> np.ndarray:
    """Rows whose k largest are not the same, or not to be told, since the next is as large."""
    chosen, tied = [], np.zeros(1, bool)
    for given in (scores, wanted):
        rows = float64(given).reshape(-1, given.shape[-1])
        order = np.argsort(-rows, -1, kind="stable")
        chosen.append(np.sort(order[:, :k], -1))
        if k < rows.shape[-1]:
            last, following = (np.take_along_axis(rows, order[:, [i]], -1) for i in (k - 1, k))
            tied = tied | (last == following)[:, 0]
    return (chosen[0] != chosen[1]).any(-1) | tied
