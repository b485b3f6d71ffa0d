"""The inverse frequencies of the rotary embedding, for every way of scaling that configs name.

Pair j of a head of which R dimensions are rotated turns by the angle  position * f_j, with

    default        f_j = theta^(-2j/R)
    linear         f_j / factor: positions squeezed into the trained window
    dynamic        theta grown by g^(R/(R-2)), g = s L/W - (s - 1) with s = factor, once L =
                   seq_len exceeds the window W: the lowest f_j is divided by g, the first by 1
    yarn           f_j for pairs that turn often within the window, f_j / factor for those that
                   turn seldom, a linear ramp between; cos and sin grown by 0.1 ln(factor) + 1
    longrope       f_j / short_factor[j] within the window, f_j / long_factor[j] beyond
    llama3         as yarn, with a ramp in the frequency, and cos and sin as they are
    proportional   exponents 2j/H over the whole head H, and 0 from the rotated part on

Order of the operations and float32 are those of transformers, so that the numbers are the same: a
frequency off by one unit in the last place turns a key at position 10^5 by up to 0.006. The one
difference is the power: it is rounded right here, while torch's is one unit off now and then, so
that about one frequency in a hundred differs, by one unit or two, on llama3's ramp up to four.

Source: Su et al. (2021), arXiv:2104.09864; Peng et al., YaRN (2023), arXiv:2309.00071; Ding et al.,
LongRoPE (2024), arXiv:2402.13753; Llama Team (2024), arXiv:2407.21783; Wang et al., Qwen2-VL
(2024), arXiv:2409.12191.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from liger_ops.checking import listed
from liger_ops.rope.config_fields import need, rope_fields

Fields = dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class RopeFrequencies:
    """What turns positions into cos and sin. Equal ones have equal numbers, and equal hashes.

    So it can be a static argument of jax.jit, without compiling anew for each object.
    """

    inv_freq: np.ndarray  # (R/2,) float32
    attention_factor: float = 1.0  # cos and sin are multiplied by it
    layout: str = "half"  # how this family's checkpoints pair the dimensions, or "interleaved"
    # Multimodal models: for each frequency, the row of the positions that it reads: 0 for time,
    # 1 for height, 2 for width.
    axes: tuple[int, ...] | None = None

    @property
    def rotary_dim(self) -> int:
        """R, the number of a head's dimensions that are rotated."""
        return 2 * self.inv_freq.size

    def _key(self):
        return self.inv_freq.tobytes(), self.attention_factor, self.layout, self.axes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RopeFrequencies) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


def rope_frequencies(
    config: Any, *, seq_len: int | None = None, layer_type: str | None = None
) -> RopeFrequencies:
    """The rotary embedding's frequencies, as a model's config asks for them.

    Args:
        config: a config of transformers, or the dict that its config.json holds; of a multimodal
            model, the whole or the language model's. Old spelling (`rope_theta`, `rope_scaling`)
            or new (`rope_parameters`).
        seq_len: the largest position + 1, for the rope types 'dynamic' and 'longrope', which
            change once it exceeds the trained window; the others pay no heed to it. None means
            that it does not. Positions cannot choose themselves, as under jit and torch.compile
            they have no values yet.
        layer_type: "full_attention" or "sliding_attention", or whatever names the config uses,
            where types of layers differ in their rotary embedding, as in Gemma 3; without effect
            where they do not.

    Returns:
        RopeFrequencies: inv_freq (R/2,) float32, attention_factor, rotary_dim R, layout, axes.

    Numerics: float32, in transformers' order; about one frequency in a hundred differs from its
    modules' by a few units in the last place, where torch's power is not rounded right.

    Raises:
        ValueError: for a rope type that is not known, naming it and those that are; a field that
            the type needs and the config lacks, naming it; a layer_type that does not fit.

    Source: the formulas and papers are in the module's docstring.
    """
    if seq_len is not None and seq_len < 1:
        raise ValueError(f"seq_len must be at least 1, or None; got {seq_len}")
    fields = rope_fields(config, layer_type)
    if fields["rope_type"] not in ROPE_TYPES:
        raise ValueError(
            f"rope_type must be one of {listed(ROPE_TYPES)}; got {fields['rope_type']!r}"
        )
    inv_freq, attention_factor = ROPE_TYPES[fields["rope_type"]](fields, seq_len)
    inv_freq.flags.writeable = False  # equality and hash stand on it
    return RopeFrequencies(
        inv_freq, float(attention_factor), fields["layout"], _axes(fields, inv_freq.size)
    )


def _rotary_dim(fields: Fields) -> int:
    return int(fields["head_dim"] * fields["partial_rotary_factor"])


def _powers(base: float, dim: int, over: int) -> np.ndarray:
    """base^(2j/over) for 2j < dim, rounded to float32 once."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(over)
    return np.power(np.float64(np.float32(base)), exponents.astype(np.float64)).astype(np.float32)


def _unscaled(base: float, dim: int) -> np.ndarray:
    return np.float32(1) / _powers(base, dim, dim)


def _default(fields: Fields, seq_len: int | None):
    return _unscaled(need(fields, "rope_theta"), _rotary_dim(fields)), 1.0


def _linear(fields: Fields, seq_len: int | None):
    inv_freq, _ = _default(fields, seq_len)
    return inv_freq / np.float32(need(fields, "factor")), 1.0


def _dynamic(fields: Fields, seq_len: int | None):
    base, dim = need(fields, "rope_theta"), _rotary_dim(fields)
    if fields.get("alpha"):  # HunYuan: the growth is given, and the same for all lengths
        growth = fields["alpha"]
    else:
        factor, window = need(fields, "factor"), need(fields, "max_position_embeddings")
        length = max(seq_len or window, window)
        growth = factor * length / window - (factor - 1)
    return _unscaled(base * growth ** (dim / (dim - 2)), dim), 1.0


def _yarn(fields: Fields, seq_len: int | None):
    base, dim = need(fields, "rope_theta"), _rotary_dim(fields)
    window = need(fields, "original_max_position_embeddings")
    factor = fields.get("factor")
    if factor is None:
        factor = need(fields, "max_position_embeddings") / window

    attention_factor = fields.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all_dim = fields.get("mscale"), fields.get("mscale_all_dim")
        if mscale and mscale_all_dim:  # DeepSeek: the second is in its softmax scale already
            attention_factor = _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all_dim)
        else:
            attention_factor = _yarn_scale(factor, 1.0)

    def pair_that_turns(times: float) -> float:  # within the window; pairs have a real index here
        return dim * math.log(window / (times * 2 * math.pi)) / (2 * math.log(base))

    low = pair_that_turns(fields.get("beta_fast") or 32)
    high = pair_that_turns(fields.get("beta_slow") or 1)
    if fields.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, and no division by 0

    powers = _powers(base, dim, dim)
    pairs = np.arange(powers.size, dtype=np.float32)
    ramp = np.clip((pairs - np.float32(low)) / np.float32(high - low), 0, 1)
    kept = np.float32(1) - ramp
    squeezed = np.float32(1) / (np.float32(factor) * powers)
    inv_freq = squeezed * (np.float32(1) - kept) + (np.float32(1) / powers) * kept
    return inv_freq, attention_factor


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(fields: Fields, seq_len: int | None):
    base, dim = need(fields, "rope_theta"), _rotary_dim(fields)
    window = need(fields, "original_max_position_embeddings")
    attention_factor = fields.get("attention_factor")
    if attention_factor is None:
        factor = fields.get("factor")
        if factor is None:
            factor = need(fields, "max_position_embeddings") / window
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(window)) if factor > 1 else 1.0

    name = "long_factor" if seq_len is not None and seq_len > window else "short_factor"
    powers = _powers(base, dim, dim)
    divisors = np.asarray(need(fields, name), np.float32)
    if divisors.shape != powers.shape:
        raise ValueError(
            f"{name} must have a number for each of the {powers.size} frequencies; got "
            f"{divisors.size}"
        )
    return np.float32(1) / (divisors * powers), attention_factor


def _llama3(fields: Fields, seq_len: int | None):
    inv_freq, _ = _default(fields, seq_len)
    factor = np.float32(need(fields, "factor"))
    low, high = need(fields, "low_freq_factor"), need(fields, "high_freq_factor")
    window = need(fields, "original_max_position_embeddings")

    # torch divides a number by a tensor as 1 / tensor * number, and so do these two.
    wavelength = np.float32(1) / inv_freq * np.float32(2 * math.pi)
    turns = np.float32(1) / wavelength * np.float32(window)
    smooth = (turns - np.float32(low)) / np.float32(high - low)
    between = (np.float32(1) - smooth) * inv_freq / factor + smooth * inv_freq
    is_long = wavelength > np.float32(window / low)
    is_short = wavelength < np.float32(window / high)
    return np.where(is_long, inv_freq / factor, np.where(is_short, inv_freq, between)), 1.0


def _proportional(fields: Fields, seq_len: int | None):
    head_dim = fields["head_dim"]
    rotated = int(fields["partial_rotary_factor"] * head_dim // 2)
    inv_freq = np.zeros(head_dim // 2, np.float32)  # frequency 0 leaves a pair as it is
    inv_freq[:rotated] = np.float32(1) / _powers(need(fields, "rope_theta"), 2 * rotated, head_dim)
    return inv_freq / np.float32(fields.get("factor") or 1.0), 1.0


ROPE_TYPES = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}


def _axes(fields: Fields, pairs: int) -> tuple[int, ...] | None:
    """Which of (time, height, width) each frequency reads; None in a model of text alone."""
    sections, order = fields["mrope_section"], fields["mrope_order"]
    if sections is None:
        return None
    if order == "interleaved":  # t h w t h w ..., and time where a section has run out
        axes = np.zeros(pairs, np.int64)
        axes[1 : 3 * sections[1] : 3] = 1
        axes[2 : 3 * sections[2] : 3] = 2
        return tuple(axes.tolist())
    if sum(sections) != pairs:
        raise ValueError(
            f"mrope_section must share out the {pairs} frequencies; got {list(sections)}, in all "
            f"{sum(sections)}"
        )
    if order == "alternating":  # Ernie 4.5: h w h w ..., then time
        if sections[0] != sections[1]:
            raise ValueError(
                f"mrope_section must begin with two equal numbers, as height and width alternate; "
                f"got {list(sections)}"
            )
        return (1, 2) * sections[0] + (0,) * sections[2]
    return tuple(i % 3 for i, size in enumerate(sections) for _ in range(size))
