"""The rotary embedding's angles: frequencies from a config, cos and sin from positions."""

from typing import Any

import torch

from liger_ops import backend_triton
from liger_ops.rope import angles as rope_check
from liger_ops.rope.frequencies import RopeFrequencies as RopeFrequencies
from liger_ops.rope.frequencies import rope_frequencies as rope_frequencies

# The frequencies and axes on each device, so that a step copies nothing there.
_kept: dict[Any, Any] = {}


def rope_angles(
    positions: torch.Tensor, frequencies: RopeFrequencies, *, layout: str = "half"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cos and sin by which `rope` rotates queries and keys at these positions.

        angle = positions * inv_freq
        cos, sin = attention_factor * cos(angle), attention_factor * sin(angle)

    Args:
        positions: (T,) or (B, T), integers, or float32; any, so left padding, packed rows and
            decoding need nothing else. For a multimodal model also (3, B, T) with time, height and
            width; with fewer dimensions the three are the same, as in text.
        frequencies: what `rope_frequencies` returns.
        layout: "half" for R columns (c_0, ..., c_(R/2-1)) twice, or "interleaved" for c_0, c_0,
            c_1, c_1, and so on; give `rope` the same. `frequencies.layout` is that of the family's
            checkpoints.

    Returns:
        cos and sin, float32, (T, R) or (B, T, R), on the device of positions.

    Numerics: positions, angles, cos and sin in float32, as in transformers: the angle is off by up
    to 6e-8 of itself, which is 4e-3 at position 10^5; positions are exact up to 2^24. On the same
    frequencies the numbers are those of transformers' modules, before these cast them to the
    model's dtype.

    Raises:
        TypeError, ValueError: for an argument that does not fit, naming it and its value.

    Source: Su et al. (2021), arXiv:2104.09864.
    """
    dtype = str(positions.dtype).removeprefix("torch.")
    rope_check.check_arguments(positions.shape, dtype, frequencies, layout)
    inv_freq, axes = _on_device_of(positions, frequencies)
    p = positions.float()
    if p.dim() == 3:  # each frequency takes the axis that it reads
        time, height, width = p[..., None]
        p = torch.where(axes == 0, time, torch.where(axes == 1, height, width))
    else:
        p = p[..., None]
    angle = p * inv_freq
    cos, sin = (of(angle) * frequencies.attention_factor for of in (torch.cos, torch.sin))
    if layout == "half":
        return torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)


def _on_device_of(positions: torch.Tensor, frequencies: RopeFrequencies):
    """inv_freq and axes as tensors; kept, unless positions are fake or of another special kind."""
    device = positions.device
    if type(positions) is not torch.Tensor:
        return _tensors(frequencies, device)
    return backend_triton.kept(
        _kept, lambda: (frequencies, device), lambda: _tensors(frequencies, device)
    )


@torch.inference_mode(False)  # what is kept is used in training as well
def _tensors(frequencies: RopeFrequencies, device: torch.device):
    inv_freq = torch.asarray(frequencies.inv_freq, device=device, copy=True)
    axes = None if frequencies.axes is None else torch.tensor(frequencies.axes, device=device)
    return inv_freq, axes
