"""Each operation's cases as problems: inputs, exact results, and the public call that solves them.

One row of OPS for each public function. The call is the same in both packages but for a few
arguments, so a row holds it once, with the package as its first argument.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from liger_ops.cross_entropy import cases as cross_entropy_cases
from liger_ops.cross_entropy import oracle as cross_entropy_oracle
from liger_ops.fused_linear_cross_entropy import cases as flce_cases
from liger_ops.fused_linear_cross_entropy import oracle as flce_oracle
from liger_ops.layer_norm import cases as layer_norm_cases
from liger_ops.layer_norm import oracle as layer_norm_oracle
from liger_ops.lora_linear import cases as lora_cases
from liger_ops.lora_linear import oracle as lora_oracle
from liger_ops.rms_norm import cases as rms_norm_cases
from liger_ops.rms_norm import oracle as rms_norm_oracle
from liger_ops.rms_norm_linear_rope import cases as qkv_cases
from liger_ops.rms_norm_linear_rope import oracle as qkv_oracle
from liger_ops.rope import cases as rope_cases
from liger_ops.rope import oracle as rope_oracle
from liger_ops.swiglu import cases as swiglu_cases
from liger_ops.swiglu import oracle as swiglu_oracle

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One case of one operation.

    Attributes:
        inputs: arrays by name.
        wanted: names of the inputs whose gradients are asked for.
        upstream: of each output, in the call's order. Its numbers are exact in every dtype.
        exact: the oracle's outputs, and gradients as "d" + the input's name.
        call: of the package, the implementation and a framework's arrays; returns the outputs.
    """

    op: str
    name: str
    dtype: str
    inputs: Arrays
    wanted: tuple[str, ...]
    upstream: Arrays
    exact: Arrays
    call: Callable[[Any, str, dict[str, Any]], tuple[Any, ...]]


def _upstream(seed: int, **shapes: tuple[int, ...]) -> Arrays:
    """Normal numbers in steps of 1/16 up to 4, which bfloat16 and float16 hold too."""
    rng = np.random.default_rng([seed, 1])
    return {
        name: np.asarray(np.round(np.clip(rng.standard_normal(s), -4, 4) * 16) / 16, np.float32)
        for name, s in shapes.items()
    }


def _in_jax(package: Any) -> bool:
    return package.__name__ == "jax_liger"


def _rms_norm(case: Any, seed: int) -> Problem:
    inputs = case.draw(seed)
    fused = "residual" in inputs
    shapes = {"y": case.shape, "h": case.shape} if fused else {"y": case.shape}
    upstream = _upstream(seed, **shapes)
    settings = {"eps": case.eps, "offset": case.offset}
    x, weight, residual = (inputs.get(name) for name in ("x", "weight", "residual"))

    def call(package, implementation, given):
        op = package.fused_add_rms_norm if fused else package.rms_norm
        order = [given[name] for name in ("x", "residual", "weight") if name in given]
        out = op(*order, **settings, casting_mode=case.casting_mode, implementation=implementation)
        return out if fused else (out,)

    exact = {
        **rms_norm_oracle.forward(x, weight, residual, **settings),
        **rms_norm_oracle.backward(
            x, weight, upstream["y"], residual, upstream.get("h"), **settings
        ),
    }
    wanted = tuple(inputs)
    if case.shape[-1] == 1 and not fused:
        # All of x's gradient but eps cancels: what is left of it is rounding, in any version.
        wanted = tuple(n for n in wanted if n != "x")
        del exact["dx"]
    name = "fused_add_rms_norm" if fused else "rms_norm"
    return Problem(name, case.name, case.dtype, inputs, wanted, upstream, exact, call)


def _layer_norm(case: Any, seed: int) -> Problem:
    inputs = case.draw(seed)
    upstream = _upstream(seed, y=case.shape)
    arrays: Any = [inputs.get(name) for name in ("x", "weight", "bias")]

    def call(package, implementation, given):
        return (package.layer_norm(**given, eps=case.eps, implementation=implementation),)

    exact = {
        **layer_norm_oracle.forward(*arrays, eps=case.eps),
        **layer_norm_oracle.backward(*arrays, dy=upstream["y"], eps=case.eps),
    }
    return Problem(
        "layer_norm", case.name, case.dtype, inputs, tuple(inputs), upstream, exact, call
    )


def _gated(case: Any, seed: int) -> Problem:
    inputs = case.draw(seed)
    upstream = _upstream(seed, y=case.shape)
    exact = {
        **swiglu_oracle.forward(**inputs, activation=case.activation),
        **swiglu_oracle.backward(**inputs, dy=upstream["y"], activation=case.activation),
    }
    if case.fused:
        inputs = {"gate_up": np.concatenate(list(inputs.values()), -1)}
        exact = {"y": exact["y"], "dgate_up": np.concatenate([exact["dgate"], exact["dup"]], -1)}

    def call(package, implementation, given):
        if case.activation == "silu":
            return (package.swiglu(*given.values(), implementation=implementation),)
        approximate = "tanh" if case.activation == "gelu_tanh" else "none"
        settings = {"approximate": approximate, "implementation": implementation}
        return (package.geglu(*given.values(), **settings),)

    op = "swiglu" if case.activation == "silu" else "geglu"
    return Problem(op, case.name, case.dtype, inputs, tuple(inputs), upstream, exact, call)


def _rope(case: Any, seed: int) -> Problem:
    inputs = case.draw(seed)
    upstream = _upstream(seed, q=inputs["q"].shape, k=inputs["k"].shape)
    exact = {
        **rope_oracle.forward(**inputs, layout=case.layout),
        **rope_oracle.backward(*inputs.values(), *upstream.values(), layout=case.layout),
    }
    del exact["dcos"], exact["dsin"]

    def call(package, implementation, given):
        return package.rope(*given.values(), layout=case.layout, implementation=implementation)

    return Problem("rope", case.name, case.dtype, inputs, ("q", "k"), upstream, exact, call)


def _cross_entropy(case: Any, seed: int) -> Problem:
    inputs, arguments = case.draw(seed), case.arguments
    shape = case.shape[:-1] if arguments.reduction == "none" else ()
    upstream = _upstream(seed, loss=shape)
    arrays = (inputs["logits"], inputs["labels"], inputs.get("class_weight"), arguments)
    exact = {
        "loss": cross_entropy_oracle.forward(*arrays)["loss"],
        **cross_entropy_oracle.backward(*arrays, upstream["loss"]),
    }

    def call(package, implementation, given):
        settings = {**dataclasses.asdict(arguments), "implementation": implementation}
        settings["class_weight"] = given.get("class_weight")
        return (package.cross_entropy(given["logits"], given["labels"], **settings),)

    return Problem(
        "cross_entropy", case.name, case.dtype, inputs, ("logits",), upstream, exact, call
    )


def _fused_linear_cross_entropy(case: Any, seed: int) -> Problem:
    inputs, arguments = case.draw(seed), case.arguments
    upstream = _upstream(seed, loss=case.rows if arguments.reduction == "none" else ())
    arrays: Any = [inputs.get(k) for k in ("hidden", "weight", "labels", "class_weight", "bias")]
    settings: Any = {"arguments": arguments, "logit_scale": case.logit_scale}
    exact = {
        "loss": flce_oracle.forward(*arrays, **settings)["loss"],
        **flce_oracle.backward(*arrays, **settings, dloss=upstream["loss"]),
    }

    def call(package, implementation, given):
        loss = package.fused_linear_cross_entropy(
            *(given[name] for name in ("hidden", "weight", "labels")),
            bias=given.get("bias"),
            class_weight=given.get("class_weight"),
            logit_scale=case.logit_scale,
            memory=case.memory,
            implementation=implementation,
            **dataclasses.asdict(arguments),
        )
        return (loss,)

    wanted = tuple(name for name in ("hidden", "weight", "bias") if name in inputs)
    name = "fused_linear_cross_entropy"
    return Problem(name, case.name, case.dtype, inputs, wanted, upstream, exact, call)


def _lora_linear(case: Any, seed: int) -> Problem:
    inputs = case.draw(seed)
    upstream = _upstream(seed, y=(*case.rows, case.out))
    factors: Any = 1.0
    if case.dropout_p:
        factors = lora_oracle.dropout_factors(case.seed, inputs["x"].shape, case.dropout_p)
    arrays: Any = [inputs.get(k) for k in ("x", "weight", "lora_a", "lora_b", "bias")]
    settings = {"scaling": case.scaling, "factors": factors}
    exact = {
        **lora_oracle.forward(*arrays, **settings),
        **lora_oracle.backward(*arrays, dy=upstream["y"], **settings),
    }

    def call(package, implementation, given):
        settings = {"scaling": case.scaling, "dropout_p": case.dropout_p, "seed": case.seed}
        if not _in_jax(package):
            return (package.lora_linear(**given, **settings, implementation=implementation),)
        # Flax holds a matrix as (inputs, outputs).
        turned = {k: a.T if k in ("weight", "lora_a", "lora_b") else a for k, a in given.items()}
        return (package.lora_linear(**turned, **settings),)

    return Problem(
        "lora_linear", case.name, case.dtype, inputs, tuple(inputs), upstream, exact, call
    )


def _rms_norm_linear_rope(case: Any, seed: int) -> Problem:
    inputs = case.draw(seed)
    heads = {"q": case.heads, "k": case.kv_heads, "v": case.kv_heads}
    shapes = {name: (case.batch, case.time, n, case.head_dim) for name, n in heads.items()}
    upstream = _upstream(seed, **shapes)
    settings = {"eps": case.eps, "offset": case.offset}
    exact = {
        **qkv_oracle.forward(inputs, case.shape, **settings),
        **qkv_oracle.backward(inputs, upstream, case.shape, **settings),
    }

    def call(package, implementation, given):
        named = {"qkv_weight" if k == "weight" else k: a for k, a in given.items()}
        layout = {"out_axis": 0} if _in_jax(package) else {}
        return package.rms_norm_linear_rope(
            **{"norm_weight": None, **named},
            num_heads=case.heads,
            num_kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            casting_mode=case.casting_mode,
            implementation=implementation,
            **settings,
            **layout,
        )

    wanted = tuple(name for name in inputs if name not in ("cos", "sin"))
    name = "rms_norm_linear_rope"
    return Problem(name, case.name, case.dtype, inputs, wanted, upstream, exact, call)


def _of(
    cases: Iterable[Any], make: Callable[[Any, int], Problem], keep: Callable[[Any], bool]
) -> tuple[list[Any], Callable[[Any, int], Problem]]:
    return [case for case in cases if keep(case)], make


# By public name: the cases, and what makes a problem of one.
OPS = {
    "rms_norm": _of(rms_norm_cases.CASES, _rms_norm, lambda c: c.residual_dtype is None),
    "fused_add_rms_norm": _of(rms_norm_cases.CASES, _rms_norm, lambda c: bool(c.residual_dtype)),
    "layer_norm": _of(layer_norm_cases.CASES, _layer_norm, lambda c: True),
    "swiglu": _of(swiglu_cases.CASES, _gated, lambda c: c.activation == "silu"),
    "geglu": _of(swiglu_cases.CASES, _gated, lambda c: c.activation != "silu"),
    "rope": _of(rope_cases.CASES, _rope, lambda c: True),
    "cross_entropy": _of(cross_entropy_cases.CASES, _cross_entropy, lambda c: True),
    "fused_linear_cross_entropy": _of(
        flce_cases.CASES, _fused_linear_cross_entropy, lambda c: True
    ),
    "lora_linear": _of(lora_cases.CASES, _lora_linear, lambda c: True),
    "rms_norm_linear_rope": _of(qkv_cases.CASES, _rms_norm_linear_rope, lambda c: True),
}


def problems(op: str, dtypes: Iterable[str] = (), cases: Iterable[str] = (), seed: int = 0):
    """The problems of a public function, those of these dtypes and with these names in theirs."""
    chosen, make = OPS[op]
    dtypes, cases = tuple(dtypes), tuple(cases)
    for case in chosen:
        if (not dtypes or case.dtype in dtypes) and (
            not cases or any(part in case.name for part in cases)
        ):
            yield make(case, seed)
