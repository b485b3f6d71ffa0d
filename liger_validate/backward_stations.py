"""The places of a decoder's backward where gradients are held to their formulas.

As in `stations`, each place is given the model's own: what it captured going forward, and the
gradients that come into the place from behind. So a fault of the backward alone is seen where it
is. Between places, a gradient is the sum of those of all that uses the value.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from liger_ops.rms_norm import oracle as norm_oracle
from liger_ops.swiglu import oracle as swiglu_oracle
from liger_validate import formulas
from liger_validate.attention_stations import heads_of, settings_of
from liger_validate.formulas import rounded
from liger_validate.subject import Faults, Formula, Station, Subject
from liger_validate.tensors import product

# What a gradient is the sum of: a name to show and the array, which may be missing.
Terms = list[tuple[str, np.ndarray | None]]
RESIDUAL = "the residual"


def stations(subject: Subject) -> Iterator[Station]:
    """In the order in which a backward passes them; none without gradients at modules."""
    s = subject
    if not s.capture.output_gradients:
        return
    yield from _linear(s, "lm_head")
    yield from _sum(s, "model.norm", s.gradient_out_of("model.norm"),
                    [("lm_head", s.gradient_into("lm_head"))])  # fmt: skip
    yield from _norm(s, "model.norm")
    following = "model.norm"
    for i, layer in reversed(list(enumerate(s.config.layers))):
        name = f"model.layers.{i}"
        yield from _sum(s, name, s.gradient_out_of(name), [(following, s.gradient_into(following))])
        yield from _layer(s, name, layer)
        following = name


def _layer(s: Subject, name: str, layer: Any) -> Iterator[Station]:
    before_attention, after_attention, before_mlp, after_mlp = (
        norm and f"{name}.{norm}" for norm in s.config.family.norms
    )
    attn, mlp, factor = f"{name}.self_attn", f"{name}.mlp", s.config.residual_multiplier
    d_out, into, out_of = s.gradient_out_of(name), s.gradient_into, s.gradient_out_of
    if d_out is None:
        return

    last = after_mlp or mlp
    yield from _sum(s, last, out_of(last), [(RESIDUAL, factor * d_out)])
    if after_mlp:
        yield from _norm(s, after_mlp)
        yield from _sum(s, mlp, out_of(mlp), [(after_mlp, into(after_mlp))])
    if not layer.experts:
        yield from _mlp(s, mlp)
    if before_mlp:
        yield from _sum(s, before_mlp, out_of(before_mlp), [(mlp, into(mlp))])
        yield from _norm(s, before_mlp)
        through = _into_norm(s, before_mlp)
    else:
        through = into(mlp)

    # Between attention and the feed-forward part.
    last = after_attention or attn
    parts: Terms = [(RESIDUAL, factor * d_out)]
    parts.append((before_mlp or mlp, None if through is None else factor * through))
    yield from _sum(s, last, out_of(last), parts)
    if after_attention:
        yield from _norm(s, after_attention)
        yield from _sum(s, attn, out_of(attn), [(after_attention, into(after_attention))])
    yield from _attention(s, attn, layer)
    first = before_attention or attn
    if before_attention:
        yield from _sum(s, before_attention, out_of(before_attention), [(attn, into(attn))])
        yield from _norm(s, before_attention)
    # Past the whole layer, and past attention alone, which a residual that is detached there lacks.
    parts = [(RESIDUAL, d_out), (before_mlp or mlp, through), (first, into(first))]
    yield from _sum(s, f"{name}, input", into(name), parts, [(0, 1)])


def _mlp(s: Subject, name: str) -> Iterator[Station]:
    into, out_of = s.gradient_into, s.gradient_out_of
    yield from _sum(s, f"{name}.down_proj", out_of(f"{name}.down_proj"), [(name, out_of(name))])
    yield from _linear(s, f"{name}.down_proj")
    yield from _gated(s, name)
    parts = [f"{name}.{part}" for part in ("gate_proj", "up_proj", "gate_up_proj")]
    for part in parts:
        yield from _linear(s, part)
    uses: Terms = [(part, into(part)) for part in parts if part in s.capture.outputs]
    yield from _sum(s, f"{name}, input", into(name), uses)


def _attention(s: Subject, name: str, layer: Any) -> Iterator[Station]:
    into, out_of = s.gradient_into, s.gradient_out_of
    yield from _sum(s, f"{name}.o_proj", out_of(f"{name}.o_proj"), [(name, out_of(name))])
    yield from _linear(s, f"{name}.o_proj")
    yield from _core(s, name, layer)
    if s.config.family.qk_norm:
        for part in "qk":
            norm, projection = f"{name}.{part}_norm", f"{name}.{part}_proj"
            yield from _norm(s, norm)
            yield from _sum(s, projection, out_of(projection), [(norm, into(norm))])
    parts = [f"{name}.{part}_proj" for part in ("q", "k", "v", "qkv")]
    for part in parts:
        yield from _linear(s, part)
    uses: Terms = [(part, into(part)) for part in parts if part in s.capture.outputs]
    yield from _sum(s, f"{name}, input", into(name), uses)


def _station(name: str, kind: str, actual: np.ndarray, formula: Formula, faults: Faults) -> Station:
    """With the faults that any gradient may have."""
    formula = functools.cache(formula)

    def ratio() -> float:
        wanted = formula().reshape(-1)
        return float(actual.reshape(-1) @ wanted / max(wanted @ wanted, 1e-300))

    faults = [*faults]
    if not actual.any():
        faults.append(("detached", "no gradient comes here", lambda: np.zeros_like(actual)))
    else:
        faults.append(("gradient scale", lambda: f"the gradient is times {ratio():.3g}",
                       lambda: ratio() * formula()))  # fmt: skip
    return Station(f"{name} (backward)", f"{kind}, backward", actual, formula, faults)


def _sum(
    s: Subject,
    name: str,
    actual: np.ndarray | None,
    terms: Terms,
    residuals: Iterable[tuple[int, ...]] = (),
) -> Iterator[Station]:
    """The gradient of a value that all of `terms` use; `residuals` may be missing together."""
    arrays = [term for _, term in terms if term is not None]
    if actual is None or not arrays or len(arrays) < len(terms):
        return

    def formula(without: tuple[int, ...] = ()) -> np.ndarray:
        kept = [a.reshape(actual.shape) for i, a in enumerate(arrays) if i not in without]
        return sum(kept, np.zeros(actual.shape))

    missing = [(i,) for i in range(len(terms))] if len(terms) > 1 else []
    faults: Faults = []
    for which in (*missing, *residuals):
        names = " and ".join(terms[i][0] for i in which)
        kind = "detached residual" if terms[which[0]][0] == RESIDUAL else "detached"
        detail = f"what comes from {names} is missing"
        faults.append((kind, detail, lambda which=which: formula(which)))
    yield _station(name, "sum", actual, formula, faults)


def _linear(s: Subject, name: str) -> Iterator[Station]:
    actual, dy, weight = (
        s.gradient_into(name), s.gradient_out_of(name), s.weights(f"{name}.weight")
    )  # fmt: skip
    if weight is None and name == "lm_head" and s.config.tie_word_embeddings:
        weight = s.weights("model.embed_tokens.weight")
    if actual is None or dy is None or weight is None:
        return
    dtype = s.capture.dtype
    formula = lambda w=weight: rounded(product(dy, w), dtype)  # noqa: E731
    faults: Faults = []
    if weight.shape[0] == weight.shape[1]:
        faults.append(("transposed weight", "the weight is transposed", lambda: formula(weight.T)))
    yield _station(name, "linear", actual, formula, faults)


def _d_norm(s: Subject, name: str) -> tuple[Formula, Formula] | None:
    """The gradient of what is normed; and that of a norm whose size counts as a constant."""
    x, dy, weight = s.into(name), s.gradient_out_of(name), s.vector(f"{name}.weight")
    if x is None or dy is None or weight is None:
        return None
    eps, offset, dtype = s.config.rms_norm_eps, s.config.family.norm_offset, s.capture.dtype
    dy = dy.reshape(x.shape)

    def right() -> np.ndarray:
        return rounded(norm_oracle.backward(x, weight, dy, eps=eps, offset=offset)["dx"], dtype)

    def constant() -> np.ndarray:
        r = 1.0 / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)
        return rounded(r * dy * (weight + offset), dtype)

    return right, constant


def _into_norm(s: Subject, name: str) -> np.ndarray | None:
    """The gradient of a norm's input; by the formula where a kernel has more than the norm."""
    found, formulas_of = s.gradient_into(name), _d_norm(s, name)
    return formulas_of[0]() if found is None and formulas_of else found


def _norm(s: Subject, name: str) -> Iterator[Station]:
    actual, found = s.gradient_into(name), _d_norm(s, name)
    if actual is None or found is None:
        return
    right, constant = found
    faults: Faults = [("norm backward", "the size counts as a constant", constant)]
    yield _station(name, "norm", actual, right, faults)


def _gated(s: Subject, name: str) -> Iterator[Station]:
    dy, dtype, own = s.gradient_into(f"{name}.down_proj"), s.capture.dtype, s.config.activation
    parts = [_parts(f(f"{name}.gate_proj"), f(f"{name}.up_proj"), f(f"{name}.gate_up_proj"))
             for f in (s.out_of, s.gradient_out_of)]  # fmt: skip
    if dy is None or any(part is None for part in parts):
        return
    (gate, up), actual = parts

    @functools.cache
    def both(activation: str = own) -> dict[str, np.ndarray]:
        found = swiglu_oracle.backward(gate, up, dy, activation=activation)
        return {key: rounded(value, dtype) for key, value in found.items()}

    for part, gradient, key in zip(("up", "gate"), actual[::-1], ("dup", "dgate"), strict=True):
        faults: Faults = [
            ("activation", f"the activation is {other} and not {own}",
             lambda key=key, other=other: both(other)[key])
            for other in ("silu", "gelu_tanh", "gelu") if other != own
        ]  # fmt: skip
        formula = lambda key=key: both()[key]  # noqa: E731
        yield _station(f"{name}.act_fn, {part}", "gated", gradient, formula, faults)


def _parts(gate: Any, up: Any, both: Any) -> Any:
    if both is not None:
        return np.split(both, 2, -1)
    return None if gate is None or up is None else (gate, up)


def _core(s: Subject, name: str, layer: Any) -> Iterator[Station]:
    d_out, own = s.gradient_into(f"{name}.o_proj"), settings_of(s, layer)
    heads, actual = heads_of(s, name), heads_of(s, name, gradients=True)
    if d_out is None or own is None or heads is None or actual is None:
        return

    @functools.cache
    def gradients(back: int = 1) -> dict[str, np.ndarray]:
        return formulas.attention_backward(*heads, d_out=d_out, **own, back=back)

    for part, gradient in zip("vkq", actual[::-1], strict=True):
        faults: Faults = []
        if part != "v" and own["angles"] is not None:
            faults = [
                ("rotation missing", "it is not rotated back", lambda p=part: gradients(0)[p]),
                ("rotation direction", "it is rotated forwards", lambda p=part: gradients(-1)[p]),
            ]
        formula = lambda p=part: gradients()[p]  # noqa: E731
        yield _station(f"{name}.core, {part}", "attention", gradient, formula, faults)
