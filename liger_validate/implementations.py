"""What can solve an operation's problems on this machine: both packages' ways, and peers'."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from liger_ops.drawing import DTYPES
from liger_validate.devices import Place, installed
from liger_validate.judge import PLAIN, Results
from liger_validate.peers import PEERS, NotOffered
from liger_validate.problems import Problem

IMPLEMENTATIONS = ("triton", "eager", "pallas", "xla")
FRAMEWORKS = {"torch": ("triton", "eager"), "jax": ("pallas", "xla")}
GROUPS = {**FRAMEWORKS, "liger": ("liger-kernel",)}
NOT_IN_JAX = {"lora_linear": ("pallas",)}  # whose JAX version is XLA's alone


def framework_of(name: str) -> str:
    """ "torch" or "jax"."""
    if name in PEERS:
        return PEERS[name].framework
    return "torch" if name in FRAMEWORKS["torch"] else "jax"


def plain_of(name: str) -> str:
    """The plain version by which it is judged; of a plain version, itself."""
    if name in PEERS:
        return {"torch": "eager", "jax": "xla"}[PEERS[name].framework]
    return PLAIN.get(name, name)


def chosen(against: Iterable[str] = (), peers: Iterable[str] = ()) -> list[str]:
    """Names of implementations.

    Args:
        against: names of implementations, frameworks or peers, and "liger" for liger-kernel; all
            implementations of ours if it is empty.
        peers: names of peers, to be added.

    Raises:
        ValueError: for another name.
        PeerMissing: for a peer that is not installed.
    """
    names: list[str] = []
    for name in against or IMPLEMENTATIONS:
        if name not in (*GROUPS, *IMPLEMENTATIONS, *PEERS):
            known = ", ".join((*GROUPS, *IMPLEMENTATIONS, *PEERS))
            raise ValueError(f"against must be of {known}; got {name!r}")
        names += GROUPS.get(name, (name,))
    for name in peers:
        if name not in PEERS:
            raise ValueError(f"peer must be of {', '.join(PEERS)}; got {name!r}")
        names.append(name)
    for name in names:
        if name in PEERS:
            PEERS[name].check_installed()
    return list(dict.fromkeys(names))


def why_not(name: str, place: Place) -> str | None:
    """Why an implementation cannot run there, or None if it can."""
    framework = framework_of(name)
    if not installed(framework):
        return f"{framework} is not installed"
    on_gpu = place.on_gpu(framework)
    if name in PEERS:
        needs = PEERS[name].needs
        return why_not(needs, place) if needs else None
    if name == "triton":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
            return "the tensors are not on a GPU, and TRITON_INTERPRET=1 was not set"
    if name == "pallas" and not on_gpu and os.environ.get("PALLAS_INTERPRET") != "1":
        return "the arrays are not on a GPU, and PALLAS_INTERPRET=1 was not set"
    return None


def split(names: Iterable[str], place: Place) -> tuple[list[str], dict[str, str]]:
    """Those that can run there, and of the others the reasons.

    Raises:
        RuntimeError: if none can, or if a peer cannot: those are only there when asked for.
    """
    reasons = {name: why_not(name, place) for name in names}
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    running = [name for name in reasons if name not in left_out]
    if not running or any(name in PEERS for name in left_out):
        listed = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise RuntimeError(f"cannot run here: {listed}")
    return running, left_out


def versions_of_peers(names: Iterable[str]) -> dict[str, str]:
    """Of those among the names, as their packages state them."""
    found = {}
    for name in names:
        if name in PEERS:
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:  # on the path, but not installed there
                found[name] = "unknown"
    return found


def run(problem: Problem, name: str, place: Place) -> Results:
    """The outputs, and the gradients of the inputs that the problem asks for.

    Raises:
        NotOffered: if the implementation cannot take the problem.
    """
    if name in NOT_IN_JAX.get(problem.op, ()):
        raise NotOffered(f"{problem.op} has no {name} version")
    run_there = _run_jax if framework_of(name) == "jax" else _run_torch
    interpreted = name in PEERS and PEERS[name].needs == "triton" and not place.on_gpu("torch")
    if interpreted and any(a.dtype == DTYPES["bfloat16"] for a in problem.inputs.values()):
        raise NotOffered("needs a GPU: Triton's interpreter computes bfloat16 wrongly")
    try:
        results = run_there(problem, name, place)
    except Exception as error:
        if interpreted and type(error).__name__ == "InterpreterError":
            raise NotOffered(f"needs a GPU: Triton's interpreter stops with {error}") from error
        raise
    for result, exact in problem.exact.items():
        if results[result].shape != exact.shape:
            shape = results[result].shape
            raise ValueError(f"{result} has the shape {shape}, and the exact one {exact.shape}")
    return results


def _package(problem: Problem, name: str) -> Any:
    if name in PEERS:
        return PEERS[name].package(problem.op)
    return importlib.import_module(f"{framework_of(name)}_liger")


def _named(problem: Problem, outputs: Any, gradients: Any) -> dict[str, Any]:
    results = dict(zip(problem.upstream, outputs, strict=True))
    return results | {f"d{n}": g for n, g in zip(problem.wanted, gradients, strict=True)}


def _run_jax(problem: Problem, name: str, place: Place) -> Results:
    import jax
    import jax.numpy as jnp

    package = _package(problem, name)
    with jax.default_device(place.jax):
        arrays = {key: jnp.asarray(value) for key, value in problem.inputs.items()}

        def call(*wanted):
            given = {**arrays, **dict(zip(problem.wanted, wanted, strict=True))}
            return tuple(problem.call(package, name, given))

        outputs, vjp = jax.vjp(call, *(arrays[key] for key in problem.wanted))
        upstream = problem.upstream.values()
        dys = tuple(jnp.asarray(dy, y.dtype) for dy, y in zip(upstream, outputs, strict=True))
        named = _named(problem, outputs, vjp(dys))
        return {key: np.asarray(value) for key, value in named.items()}


def _run_torch(problem: Problem, name: str, place: Place) -> Results:
    import torch

    from liger_validate.tensors import from_torch, poisoned, to_torch

    package, device = _package(problem, name), place.torch or "cpu"
    # Triton launches on the current device, whatever its tensors are on.
    current = contextlib.nullcontext() if device == "cpu" else torch.cuda.device(device)
    tensors = {key: to_torch(value, device) for key, value in problem.inputs.items()}
    wanted = [tensors[key].requires_grad_() for key in problem.wanted]
    with current, poisoned():
        outputs = problem.call(package, name, tensors)
        upstream = problem.upstream.values()
        dys = [to_torch(dy, device).to(y.dtype) for dy, y in zip(upstream, outputs, strict=True)]
        gradients = torch.autograd.grad(outputs, wanted, dys)
    named = _named(problem, outputs, gradients)
    return {key: from_torch(value) for key, value in named.items()}
