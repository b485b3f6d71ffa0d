"""The places of a decoder where a capture is held to the formula of its family.

At a station the model's own inputs are put into the formula that the checkpoint's config asks for.
So a fault is seen where it is, and not in all that comes after it. Beside the formula are others,
each of which is a kind of fault: if one of them gives what the model gave, that is the diagnosis.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from liger_validate import attention_stations, formulas
from liger_validate.captures import LOGITS
from liger_validate.formulas import float64, rounded
from liger_validate.subject import Faults, Station, Subject, usual
from liger_validate.tensors import changed, from_torch, product

EPSILONS = (1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)


def stations(subject: Subject) -> Iterator[Station]:
    """In the order in which a forward passes them; those whose arrays were not captured not."""
    yield from attention_stations.angles(subject)
    yield from _embedding(subject)
    for i, layer in enumerate(subject.config.layers):
        yield from _layer(subject, f"model.layers.{i}", layer)
    yield from _norm(subject, "model.norm")
    yield from _head(subject)


def _layer(s: Subject, name: str, layer: Any) -> Iterator[Station]:
    before_attention, after_attention, before_mlp, after_mlp = (
        norm and f"{name}.{norm}" for norm in s.config.family.norms
    )
    attn, mlp = f"{name}.self_attn", f"{name}.mlp"
    if before_attention:
        yield from _norm(s, before_attention)
    for part in ("q_proj", "k_proj", "v_proj", "qkv_proj"):
        yield from _linear(s, f"{attn}.{part}")
    for part in ("q_norm", "k_norm"):
        yield from _norm(s, f"{attn}.{part}")
    yield from attention_stations.attention(s, attn, layer)
    yield from _linear(s, f"{attn}.o_proj")
    if after_attention:
        yield from _norm(s, after_attention)
    if before_mlp:
        yield from _norm(s, before_mlp)
    if not layer.experts:
        for part in ("gate_proj", "up_proj", "gate_up_proj"):
            yield from _linear(s, f"{mlp}.{part}")
        yield from _gated(s, mlp)
        yield from _linear(s, f"{mlp}.down_proj")
    if after_mlp:
        yield from _norm(s, after_mlp)
    yield from _residual(s, name, after_attention or attn, after_mlp or mlp)


def _embedding(s: Subject) -> Iterator[Station]:
    actual, table = s.into("model.layers.0"), s.weights("model.embed_tokens.weight")
    if actual is None or table is None:
        return
    config, dtype = s.config, s.capture.dtype
    factor = config.embedding_multiplier
    if config.family.scaled_embedding:
        factor = float(rounded(np.asarray(factor), dtype))
    rows = from_torch(table[torch.from_numpy(s.batch.ids).long().to(table.device)])
    formula = lambda f=factor: rounded(rows * f, dtype)  # noqa: E731
    faults: Faults = []
    for other, detail in (
        (1.0, "the embedding without its multiplier"),
        (config.hidden_size**0.5, "the embedding times sqrt(D)"),
    ):
        if abs(other - factor) > 1e-3 * factor:
            faults.append(("scale", detail, lambda f=other: formula(f)))
    yield Station("model.embed_tokens", "embedding", actual, formula, faults)


def _norm(s: Subject, name: str) -> Iterator[Station]:
    x, actual, weight = s.into(name), s.out_of(name), s.vector(f"{name}.weight")
    if x is None or actual is None or weight is None:
        return
    config = s.config
    own = {
        "eps": config.rms_norm_eps,
        "offset": config.family.norm_offset,
        "casting": config.family.norm_casting_mode,
        "dtype": s.capture.dtype,
    }

    def formula(x=x, weight=weight, **changed):
        return formulas.rms_norm(x, weight, **{**own, **changed})

    offset, order = 1.0 - own["offset"], "gemma" if own["casting"] == "llama" else "llama"
    ones = np.full_like(weight, 1.0 - own["offset"])
    faults: Faults = [
        ("norm offset", f"{offset:g} is added to the weight instead of {own['offset']:g}",
         lambda: formula(offset=offset)),
        ("cast order", f"it rounds as {order!r} does", lambda: formula(casting=order)),
        ("norm weight", "the weight is left out", lambda: formula(weight=ones)),
        ("norm kind", "the mean is taken out first",
         lambda: formula(x=x - np.mean(x, -1, keepdims=True))),
    ]  # fmt: skip
    for eps in dict.fromkeys((*EPSILONS, _eps_of(x, actual, weight + own["offset"]))):
        if eps is not None and eps != own["eps"]:
            faults.append(
                ("eps", f"eps is {eps:.3g} and not {own['eps']:g}", lambda e=eps: formula(eps=e))
            )
    yield Station(name, "norm", actual, formula, faults)


def _eps_of(x: np.ndarray, actual: np.ndarray, weight: np.ndarray) -> float | None:
    """The eps with which x would be normed to what it was: the median over the rows."""
    unscaled = x * weight
    r = np.sum(actual * unscaled, -1) / np.maximum(np.sum(unscaled**2, -1), 1e-300)
    with np.errstate(divide="ignore"):
        eps = float(np.median(1.0 / r**2 - np.mean(x * x, -1)))
    return usual(eps, EPSILONS) if np.isfinite(eps) and eps > 0 else None


_SIBLINGS = {
    "q_proj": ("k_proj", "v_proj"),
    "k_proj": ("v_proj", "q_proj"),
    "v_proj": ("k_proj", "q_proj"),
    "gate_proj": ("up_proj",),
    "up_proj": ("gate_proj",),
}


def _linear(s: Subject, name: str) -> Iterator[Station]:
    x, actual, weight = s.into(name), s.out_of(name), s.weights(f"{name}.weight")
    if x is None or actual is None or weight is None:
        return
    bias, dtype = s.vector(f"{name}.bias"), s.capture.dtype
    formula = lambda x=x, w=weight, b=bias: formulas.linear(x, w, b, dtype)  # noqa: E731
    faults = _precisions(x, weight, formula, dtype)
    if bias is not None:
        faults.append(("missing bias", "the bias is left out", lambda: formula(b=None)))
    parent, _, part = name.rpartition(".")
    for sibling in _SIBLINGS.get(part, ()):
        other = s.weights(f"{parent}.{sibling}.weight")
        if other is not None and other.shape == weight.shape:
            b = s.vector(f"{parent}.{sibling}.bias")
            kind = "swapped gate/up" if part in ("gate_proj", "up_proj") else "swapped projections"
            faults.append(
                (kind, f"it has {sibling}'s weight", lambda w=other, b=b: formula(w=w, b=b))
            )
    if part == "gate_up_proj":
        faults.append(("swapped gate/up", "its halves are swapped",
                       lambda: formula(w=weight.roll(len(weight) // 2, 0))))  # fmt: skip
    if weight.shape[0] == weight.shape[1]:
        faults.append(("transposed weight", "the weight is transposed",
                       lambda: formula(w=weight.T)))  # fmt: skip
    if part in ("q_proj", "k_proj"):
        for order in _row_orders(s.config.head_dim, weight.shape[0]):
            b = None if bias is None else bias[order]
            faults.append(("rotation layout", "rows are ordered for another layout",
                           lambda o=order, b=b: formula(w=weight[o], b=b)))  # fmt: skip
    yield Station(name, "linear", actual, formula, faults)


def _row_orders(head_dim: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Of halves to neighbours, and of neighbours to halves, in every head."""
    one = np.arange(head_dim).reshape(2, -1).T.reshape(-1)
    heads = np.arange(0, rows, head_dim)[:, None]
    return (heads + one).reshape(-1), (heads + np.argsort(one)).reshape(-1)


def _precisions(x, weight, formula, dtype) -> Faults:
    if dtype != "float32":
        return []
    tf32 = formulas.rounded_to_tf32
    low = lambda a: rounded(a, "bfloat16")  # noqa: E731
    return [
        (
            "precision",
            "products are taken in TF32",
            lambda: formula(x=tf32(x), w=changed(weight, tf32)),
        ),
        (
            "precision",
            "products are taken in bfloat16",
            lambda: formula(x=low(x), w=changed(weight, low)),
        ),
    ]


def _gated(s: Subject, name: str) -> Iterator[Station]:
    actual = s.into(f"{name}.down_proj")
    gate, up = (_projected(s, name, part) for part in ("gate_proj", "up_proj"))
    if actual is None or gate is None or up is None:
        return
    dtype, own = s.capture.dtype, s.config.activation
    formula = lambda g=gate, u=up, a=own: formulas.gated(g, u, a, dtype)  # noqa: E731
    faults: Faults = [("swapped gate/up", "the activation is of up", lambda: formula(up, gate))]
    faults += [
        ("activation", f"the activation is {other} and not {own}", lambda a=other: formula(a=a))
        for other in ("silu", "gelu_tanh", "gelu")
        if other != own
    ]
    yield Station(f"{name}.act_fn", "gated", actual, formula, faults)


def _projected(s: Subject, name: str, part: str) -> np.ndarray | None:
    """A projection's result; by the formula where a fused kernel does not show it."""
    found = s.out_of(f"{name}.{part}")
    both = s.out_of(f"{name}.gate_up_proj")
    if found is None and both is not None:
        return np.split(both, 2, -1)[part == "up_proj"]
    x, weight = s.into(name), s.weights(f"{name}.{part}.weight")
    if found is None and x is not None and weight is not None:
        return formulas.linear(x, weight, s.vector(f"{name}.{part}.bias"), s.capture.dtype)
    return found


def _residual(s: Subject, name: str, attn: str, mlp: str) -> Iterator[Station]:
    x, actual = s.into(name), s.out_of(name)
    first, second = s.out_of(attn), s.out_of(mlp)
    if x is None or actual is None or first is None or second is None:
        return
    dtype, own = s.capture.dtype, s.config.residual_multiplier

    def formula(factor=own):
        middle = rounded(x + rounded(factor * first, dtype), dtype)
        return rounded(middle + rounded(factor * second, dtype), dtype)

    faults: Faults = []
    if own != 1.0:
        faults.append(("scale", "the residual multiplier is left out", lambda: formula(1.0)))
    faults.append(("residual", "what attention gave is not added",
                   lambda: rounded(x + rounded(own * second, dtype), dtype)))  # fmt: skip
    yield Station(name, "residual", actual, formula, faults)


def _head(s: Subject) -> Iterator[Station]:
    x, actual = s.out_of("model.norm"), s.out_of(LOGITS)
    table = s.weights("model.embed_tokens.weight")
    tied = s.config.tie_word_embeddings
    weight = table if tied else s.weights("lm_head.weight")
    if x is None or actual is None or weight is None or table is None:
        return
    config, dtype, size = s.config, s.capture.dtype, s.config.vocab_size
    weight, table, actual = weight[:size], table[:size], actual[..., :size]

    def formula(x=x, w=weight, scale=config.logit_scale, cap=config.final_softcap):
        logits = scale * product(x, w.T)
        return rounded(logits if cap is None else cap * np.tanh(logits / cap), dtype)

    faults = _precisions(x, weight, formula, dtype)
    if not tied:
        faults.append(("tied head", "the head is the embedding table", lambda: formula(w=table)))
    elif s.capture.head is not None:
        head = s.capture.head
        faults.append(("tied head", "the head is not the embedding table",
                       lambda: formula(w=weight.new_tensor(float64(head())[:size]))))  # fmt: skip
    if config.logit_scale != 1.0:
        faults.append(("scale", "the logits' scale is left out", lambda: formula(scale=1.0)))
    if config.final_softcap is not None:
        faults.append(("softcap", "the logits are not capped", lambda: formula(cap=None)))
    yield Station(LOGITS, "head", actual, formula, faults)
