"""rms_norm against a device copy of the same bytes, and against peers."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch._functorch.config

import jax_liger
import torch_liger
from jax_liger.interop import from_torch, to_torch
from liger_ops.rms_norm.cases import LARGE_SHAPES
from timing import SETS, host_microseconds, jax_microseconds, torch_microseconds

LARGEST_ERROR = 1e-2  # relative RMS, bfloat16 results against float64
Row = dict[str, Any]


def measure(quick: bool) -> Iterator[Row]:
    for rows, dim in LARGE_SHAPES[:1] if quick else LARGE_SHAPES:
        yield from _one_shape(rows, dim)
    yield from _launch_cost()


def torch_peers() -> dict[str, Callable[..., torch.Tensor]]:
    """Forward functions of (x, weight); their backward is autograd's."""
    eager = torch_liger.rms_norm
    peers = {
        "torch_liger (triton)": lambda x, w: torch_liger.rms_norm(x, w, implementation="triton"),
        "torch.compile": torch.compile(lambda x, w: eager(x, w, implementation="eager")),
        "F.rms_norm": lambda x, w: torch.nn.functional.rms_norm(x, (x.shape[-1],), w, 1e-6),
    }
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    except ImportError:
        pass
    else:
        # in_place=False: its default overwrites the upstream gradient, which is timed repeatedly.
        peers["liger-kernel"] = lambda x, w: LigerRMSNormFunction.apply(
            x, w, 1e-6, 0.0, "llama", False
        )
    return peers


def jax_peers() -> dict[str, Callable[..., jax.Array]]:
    return {
        "jax_liger (pallas)": lambda x, w: jax_liger.rms_norm(x, w, implementation="pallas"),
        "XLA": lambda x, w: jax_liger.rms_norm(x, w, implementation="xla"),
    }


def _one_shape(rows: int, dim: int) -> Iterator[Row]:
    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # lets a compiled backward run repeatedly
    jax.clear_caches()
    stream = torch.cuda.Stream()
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    xs = [make(rows, dim).requires_grad_() for _ in range(SETS)]
    dys = [make(rows, dim) for _ in range(SETS)]
    weight = make(dim).requires_grad_()
    exact = _exact(xs[0], weight, dys[0])
    outs = [torch.empty_like(x) for x in xs]
    array_bytes = rows * dim * 2
    torch.cuda.synchronize()

    def row(name: str, which: str, us: float, copy_us: float, error: float) -> Row:
        moved = array_bytes * (2 if which == "forward" else 3)
        floor = copy_us * moved / (2 * array_bytes)
        return {
            "op": "rms_norm", "pass": which, "rows": rows, "dim": dim, "dtype": "bfloat16",
            "implementation": name, "microseconds": us, "terabytes_per_second": moved / us / 1e6,
            "of_copy": floor / us, "error": error,
        }  # fmt: skip

    copy = torch_microseconds(lambda i: outs[i].copy_(xs[i].detach()), stream)
    yield row("copy (torch)", "forward", copy, copy, 0.0)
    for name, fn in torch_peers().items():
        with torch.cuda.stream(stream):
            y = fn(xs[0], weight)
            gradients = torch.autograd.grad(y, (xs[0], weight), dys[0].clone())
            errors = [_error(a, e) for a, e in zip((y, *gradients), exact, strict=True)]
            with torch.no_grad():
                fn(xs[0], weight)
        assert max(errors) < LARGEST_ERROR, (name, rows, dim, errors)
        with torch.no_grad():
            us = torch_microseconds(lambda i: fn(xs[i], weight), stream)  # noqa: B023
        yield row(name, "forward", us, copy, errors[0])
        with torch.cuda.stream(stream):
            ys = [fn(x, weight) for x in xs]

        def backward(i: int) -> Any:
            inputs = (xs[i], weight)
            return torch.autograd.grad(ys[i], inputs, dys[i], retain_graph=True)  # noqa: B023

        yield row(name, "backward", torch_microseconds(backward, stream), copy, max(errors[1:]))

    w = from_torch(weight)
    sets = [(from_torch(x), from_torch(dy)) for x, dy in zip(xs, dys, strict=True)]
    copy = jax_microseconds(lambda x, dy: jnp.copy(x), sets)
    yield row("copy (jax)", "forward", copy, copy, 0.0)
    for name, fn in jax_peers().items():
        y, vjp = jax.vjp(fn, sets[0][0], w)
        errors = [_error(to_torch(a), e) for a, e in zip((y, *vjp(sets[0][1])), exact, strict=True)]
        assert max(errors) < LARGEST_ERROR, (name, rows, dim, errors)
        us = jax_microseconds(lambda x, dy: fn(x, w), sets)  # noqa: B023
        yield row(name, "forward", us, copy, errors[0])
        us = jax_microseconds(lambda x, dy: jax.vjp(fn, x, w)[1](dy), sets)  # noqa: B023
        yield row(name, "backward", us, copy, max(errors[1:]))


def _launch_cost() -> Iterator[Row]:
    """Host time of one forward call where the GPU has next to nothing to do."""
    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    for needs_grad in (False, True):
        weight = torch.nn.Parameter(torch.ones_like(x[0]), requires_grad=needs_grad)
        times = host_microseconds(
            {name: functools.partial(fn, x, weight) for name, fn in torch_peers().items()}
        )
        for name, us in times.items():
            yield {
                "op": "rms_norm", "pass": "launch, with graph" if needs_grad else "launch",
                "rows": 64, "dim": 4096, "dtype": "bfloat16", "implementation": name,
                "microseconds": us, "of_F.rms_norm": us / times["F.rms_norm"],
            }  # fmt: skip


def _exact(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """y, dx and dweight in float64, by the formulas of the oracle."""
    x, weight, dy = (t.detach().double() for t in (x, weight, dy))
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    g = dy * weight
    dx = r * (g - x * r * r * (g * x).mean(-1, keepdim=True))
    return [x * r * weight, dx, (dy * x * r).sum(0)]


def _error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return ((actual.double() - exact).norm() / exact.norm()).item()
