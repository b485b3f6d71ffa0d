"""The stations of attention: the angles, and what lies between the projections."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from liger_validate import formulas
from liger_validate.formulas import float64
from liger_validate.subject import Faults, Station, Subject, usual

THETAS = (1e4, 1e5, 1.5e5, 5e5, 1e6, 2e6, 5e6, 1e7)


def angles(s: Subject) -> Iterator[Station]:
    """One for each type of layer that rotates."""
    config = s.config
    for kind in sorted({layer.layer_type for layer in config.layers if layer.rope}):
        if s.capture.angles_of(kind) is not None:
            yield _angles_of(s, kind)


def _angles_of(s: Subject, kind: str) -> Station:
    config, positions, found = s.config, s.batch.positions, s.capture.angles_of(kind)
    assert found is not None
    length = config.max_length or positions.shape[1]
    own = config.frequencies(kind, length)
    actual = np.stack([np.broadcast_to(float64(a), (*positions.shape, own.rotary_dim))
                       for a in found], 2)  # fmt: skip

    def formula(shift=0, inv_freq=own.inv_freq, factor=own.attention_factor, at=positions):
        return np.stack(formulas.angles(at + shift, inv_freq, factor), 2)

    steps = np.broadcast_to(np.arange(positions.shape[1]), positions.shape)
    exponents = -np.arange(0, own.rotary_dim, 2) / own.rotary_dim
    faults: Faults = [
        ("position offset", f"positions are off by {shift}", lambda n=shift: formula(n))
        for shift in (-2, -1, 1, 2)
    ]
    faults.append(("position offset", "padding is counted", lambda: formula(at=steps)))
    for theta in dict.fromkeys((*THETAS, _theta_of(actual, positions))):
        if theta is not None:
            faults.append(
                ("wrong theta", f"theta is {theta:.6g}, without scaling",
                 lambda base=theta: formula(inv_freq=base**exponents))
            )  # fmt: skip
    faults.append(("scale", "cos and sin without their factor", lambda: formula(factor=1.0)))
    return Station(f"model.rotary_emb ({kind})", "angles", actual, formula, faults)


def _theta_of(actual: np.ndarray, positions: np.ndarray) -> float | None:
    """The base of these angles, from the second slowest of them at position 1."""
    half = actual.shape[-1] // 2
    rows = np.argwhere(positions == 1)
    if half < 3 or not len(rows):
        return None
    b, t = rows[0]
    angle = np.arctan2(actual[b, t, 1, half - 2], actual[b, t, 0, half - 2])
    return usual(float(angle ** (-half / (half - 2))), THETAS) if angle > 0 else None


def attention(s: Subject, name: str, layer: Any) -> Iterator[Station]:
    """Rotation, scores, softmax and values of one layer."""
    actual, heads, own = s.into(f"{name}.o_proj"), heads_of(s, name), settings_of(s, layer)
    if actual is None or heads is None or own is None:
        return
    config, mask, angles = s.config, s.batch.mask, own["angles"]

    def formula(**changed: Any) -> np.ndarray:
        return formulas.attention(*heads, **{**own, **changed})

    faults: Faults = []
    if angles is not None:
        cos, sin = angles
        half = cos.shape[-1] // 2
        pairs = tuple(np.repeat(a[..., :half], 2, -1) for a in angles)
        faults += [
            ("rotation layout", "neighbours are rotated and not halves",
             lambda: formula(angles=pairs, layout="interleaved")),
            ("rotation direction", "it rotates backwards", lambda: formula(angles=(cos, -sin))),
            ("rotation missing", "nothing is rotated", lambda: formula(angles=None)),
        ]  # fmt: skip
    H, D = config.head_dim, config.hidden_size
    for scale in dict.fromkeys((1.0, H**-0.5, 1.0 / H, D**-0.5, own["scale"] * H**-0.5)):
        if abs(scale - own["scale"]) > 1e-3 * own["scale"]:
            faults.append(("scale", f"scores are times {scale:.4g} and not {own['scale']:.4g}",
                           lambda f=scale: formula(scale=f)))  # fmt: skip
    if own["softcap"] is not None:
        faults.append(("softcap", "scores are not capped", lambda: formula(softcap=None)))
    for detail, seen in _masks(mask, layer.window):
        faults.append(("mask", detail, lambda a=seen: formula(seen=a)))
    yield Station(f"{name}.core", "attention", actual, formula, faults)


def settings_of(s: Subject, layer: Any) -> dict[str, Any] | None:
    """What the formula of this layer's attention is given beside its heads."""
    found = s.capture.angles_of(layer.layer_type) if layer.rope else None
    if layer.rope and found is None:
        return None
    mask, angles = s.batch.mask, None
    if found is not None:
        cos, sin = (np.broadcast_to(float64(a), (*mask.shape, a.shape[-1])) for a in found)
        angles = (cos, sin)
    return {
        "scale": s.config.attention_scale,
        "softcap": s.config.attention_softcap,
        "layout": "half",
        "seen": formulas.visible(mask, window=layer.window),
        "angles": angles,
        "dtype": s.capture.dtype,
    }


def _masks(mask: np.ndarray, window: int | None) -> Iterator[tuple[str, np.ndarray]]:
    yield "queries see what comes after them", formulas.visible(mask, causal=False, window=window)
    if not mask.all():
        yield "padding is seen", formulas.visible(np.ones_like(mask), window=window)
    if window is not None:
        yield "the window is left out", formulas.visible(mask)
        for other in (window - 1, window + 1):
            yield f"the window is {other} and not {window}", formulas.visible(mask, window=other)


def heads_of(s: Subject, name: str, gradients: bool = False) -> tuple[Any, Any, Any] | None:
    """q, k and v (B, T, heads, H) as they go into the rotation, or their gradients."""
    config, out_of = s.config, s.gradient_out_of if gradients else s.out_of
    both = out_of(f"{name}.qkv_proj")
    if both is not None:
        q = config.num_attention_heads * config.head_dim
        k = config.num_key_value_heads * config.head_dim
        found: list[Any] = np.split(both, (q, q + k), -1)
    else:
        found = [
            out_of(f"{name}.{part}_norm") if config.family.qk_norm and part != "v" else None
            for part in "qkv"
        ]
        found = [
            out_of(f"{name}.{part}_proj") if a is None else a
            for part, a in zip("qkv", found, strict=True)
        ]
    if any(a is None for a in found):
        return None
    q, k, v = (a.reshape(*s.batch.ids.shape, -1, config.head_dim) for a in found)
    return q, k, v
