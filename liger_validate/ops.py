"""Every operation's cases through every implementation that this machine can run."""

import importlib.util
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from liger_validate.judge import PLAIN, ULP, Error, Results, limit_of
from liger_validate.problems import Problem, problems

IMPLEMENTATIONS = ("triton", "eager", "pallas", "xla")
GROUPS = {"torch": ("triton", "eager"), "jax": ("pallas", "xla")}
NOT_IN_JAX = {"lora_linear": ("pallas",)}  # whose JAX version is XLA's alone


@dataclass(frozen=True)
class Row:
    """One result of one case by one implementation, and what the judge says of it.

    rms, largest: the errors against the oracle; ulp: the largest in units of the last place of the
    largest exact value. plain_rms, plain_largest: those of the plain version in the same framework.
    verdict: "pass", "FAIL", "ERROR", or "plain" for the plain versions, which are the yardstick.
    """

    op: str
    case: str
    dtype: str
    result: str
    implementation: str
    rms: float
    largest: float
    ulp: float
    plain_rms: float
    plain_largest: float
    ratio: float  # rms over plain_rms
    repeatable: bool | None
    verdict: str
    message: str = ""


def why_not(implementation: str) -> str | None:
    """Why an implementation cannot run on this machine, or None if it can."""
    framework = "torch" if implementation in GROUPS["torch"] else "jax"
    if importlib.util.find_spec(framework) is None:
        return f"{framework} is not installed"
    if implementation == "triton":
        import torch

        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
            return "there is no GPU, and TRITON_INTERPRET=1 was not set"
    if implementation == "pallas":
        import jax

        from liger_ops import backend_pallas

        if jax.default_backend() != "gpu" and not backend_pallas.interpret():
            return "there is no GPU, and PALLAS_INTERPRET=1 was not set"
    return None


def chosen(against: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """The implementations of this list that run here, and why the others do not.

    Raises:
        ValueError: for a name that is neither an implementation nor a framework.
    """
    names: list[str] = []
    for name in against or IMPLEMENTATIONS:
        if name not in GROUPS and name not in IMPLEMENTATIONS:
            known = ", ".join((*GROUPS, *IMPLEMENTATIONS))
            raise ValueError(f"against must be of {known}; got {name!r}")
        names += [n for n in GROUPS.get(name, (name,)) if n not in names]
    reasons = {name: why_not(name) for name in names}
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    return [name for name in names if name not in left_out], left_out


def run(problem: Problem, implementation: str) -> Results:
    """The outputs, and the gradients of the inputs that the problem asks for."""
    return (_run_jax if implementation in GROUPS["jax"] else _run_torch)(problem, implementation)


def _named(problem: Problem, outputs: Any, gradients: Any) -> dict[str, Any]:
    results = dict(zip(problem.upstream, outputs, strict=True))
    return results | {f"d{n}": g for n, g in zip(problem.wanted, gradients, strict=True)}


def _run_jax(problem: Problem, implementation: str) -> Results:
    import jax
    import jax.numpy as jnp

    import jax_liger

    arrays = {name: jnp.asarray(value) for name, value in problem.inputs.items()}

    def call(*wanted):
        given = {**arrays, **dict(zip(problem.wanted, wanted, strict=True))}
        return tuple(problem.call(jax_liger, implementation, given))

    outputs, vjp = jax.vjp(call, *(arrays[name] for name in problem.wanted))
    upstream = problem.upstream.values()
    dys = tuple(jnp.asarray(dy, y.dtype) for dy, y in zip(upstream, outputs, strict=True))
    named = _named(problem, outputs, vjp(dys))
    return {name: np.asarray(value) for name, value in named.items()}


def _run_torch(problem: Problem, implementation: str) -> Results:
    import torch

    import torch_liger
    from liger_validate.tensors import from_torch, poisoned, to_torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = {name: to_torch(value, device) for name, value in problem.inputs.items()}
    wanted = [tensors[name].requires_grad_() for name in problem.wanted]
    with poisoned():
        outputs = problem.call(torch_liger, implementation, tensors)
        upstream = problem.upstream.values()
        dys = [to_torch(dy, device).to(y.dtype) for dy, y in zip(upstream, outputs, strict=True)]
        gradients = torch.autograd.grad(outputs, wanted, dys)
    named = _named(problem, outputs, gradients)
    return {name: from_torch(value) for name, value in named.items()}


def validate(
    ops: Iterable[str],
    dtypes: Iterable[str] = (),
    cases: Iterable[str] = (),
    implementations: Iterable[str] = IMPLEMENTATIONS,
    seed: int = 0,
) -> Iterator[Row]:
    """Rows of the table, case by case."""
    for op in ops:
        known = [n for n in implementations if n not in NOT_IN_JAX.get(op, ())]
        for problem in problems(op, dtypes, cases, seed):
            yield from rows_of(problem, known)


def rows_of(problem: Problem, implementations: Iterable[str]) -> Iterator[Row]:
    """Rows of one problem; each kernel is judged beside its framework's plain version."""
    plains: dict[str, Results] = {}
    for name in implementations:
        plain = PLAIN.get(name, name)
        label = (problem.op, problem.name, problem.dtype)
        try:
            if plain not in plains:
                plains[plain] = run(problem, plain)
            first = plains[plain] if name == plain else run(problem, name)
            second = run(problem, name)
        except Exception as error:  # what an implementation raises is a finding, not the end
            nan = float("nan")
            text = f"{type(error).__name__}: {error}"
            yield Row(*label, "", name, nan, nan, nan, nan, nan, nan, None, "ERROR", text)
            continue
        for result, exact in problem.exact.items():
            yield _judged(label, result, name, first, second, plains[plain], exact)


def _judged(label, result, name, first, second, plains, exact) -> Row:
    actual, plain = first[result], plains[result]
    error, base = Error.between(actual, exact), Error.between(plain, exact)
    dtype, message = actual.dtype.name, ""
    limit = limit_of(base, dtype)
    verdict = "pass" if name in PLAIN else "plain"
    if verdict == "pass" and dtype != plain.dtype.name:
        verdict, message = "FAIL", f"dtype {dtype}, the plain version's {plain.dtype.name}"
    elif not (error.rms <= limit.rms and error.largest <= limit.largest):
        verdict = "FAIL"
        message = f"limits {limit.rms:.3e} and {limit.largest:.3e}"
    return Row(
        op=label[0],
        case=label[1],
        dtype=label[2],
        result=result,
        implementation=name,
        rms=error.rms,
        largest=error.largest,
        ulp=error.largest / ULP[dtype],
        plain_rms=base.rms,
        plain_largest=base.largest,
        ratio=error.rms / base.rms if base.rms else (1.0 if error.rms == 0.0 else float("inf")),
        repeatable=actual.tobytes() == second[result].tobytes(),
        verdict=verdict,
        message=message,
    )
