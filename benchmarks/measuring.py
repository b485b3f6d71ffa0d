"""What every benchmark does: checks each implementation against float64, then times it.

An operation's module has `SHAPES`, `SHORT` (the shape whose launch cost is measured) and
`case(*shape)`, which describes the operation at that shape.
"""

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch._functorch.config

import jax_liger
import timing
import torch_liger
from description import Case, Peer, Tensors, normal
from jax_liger.interop import from_torch, to_torch

LARGEST_ERROR = 1e-2  # relative RMS, bfloat16 results against float64
Row = dict[str, Any]
Sets = list[tuple[Any, ...]]  # tensors, and None for a loss's upstream gradient, which is 1


def measure(module: ModuleType, quick: bool = False, device: str = "cuda") -> Iterator[Row]:
    """Rows for all shapes of an operation's module, one for each implementation and pass."""
    torch._functorch.config.donated_buffer = False  # lets a compiled backward run repeatedly
    for shape in module.SHAPES[:1] if quick else module.SHAPES:
        yield from one_shape(module.case(*shape), device)
    yield from launch_cost(module.case(*module.SHORT), device)


def torch_peers(case: Case) -> dict[str, Peer]:
    return {
        "torch_liger (triton)": Peer(_ours(case, "triton")),
        "torch.compile": Peer(torch.compile(_ours(case, "eager"))),
        **case.others(),
    }


def jax_peers(case: Case) -> dict[str, Callable[..., Any]]:
    function = getattr(jax_liger, case.op)
    return {
        "jax_liger (pallas)": functools.partial(function, implementation="pallas"),
        "XLA": functools.partial(function, implementation="xla"),
    }


def one_shape(case: Case, device: str) -> Iterator[Row]:
    torch._dynamo.reset()
    jax.clear_caches()
    array_bytes = 2 * case.elements
    sets = timing.sets_for(2 * array_bytes, max(case.arrays.values()) * array_bytes)
    parameters = case.parameters(device)
    inputs = [(*case.data(device), *parameters) for _ in range(sets)]
    upstreams, exact = _exact(case, inputs)
    yield from _in_torch(case, inputs, upstreams, exact, device)
    if device == "cuda":
        torch.cuda.empty_cache()  # JAX has an allocator of its own
    yield from _in_jax(case, inputs, upstreams, exact, device)


def launch_cost(case: Case, device: str) -> Iterator[Row]:
    """Host time of one forward call where the GPU has little to do."""
    torch._dynamo.reset()
    peers = {**torch_peers(case), "eager": Peer(_ours(case, "eager"))}
    args = (*case.data(device), *case.parameters(device))
    for with_graph in (False, True):
        given = args if with_graph else tuple(t.detach() for t in args)
        times = timing.host_microseconds(
            {
                name: functools.partial(
                    peer.function, *(_copies(given) if peer.overwrites else given)
                )
                for name, peer in peers.items()
            }
        )
        for name, us in times.items():
            yield {
                **_named(case, "launch, with graph" if with_graph else "launch", name),
                "microseconds": us, f"of_{case.baseline}": us / times[case.baseline],
            }  # fmt: skip


def _in_torch(
    case: Case, inputs: Sets, upstreams: Sets, exact: Tensors, device: str
) -> Iterator[Row]:
    sets = len(inputs)
    stream = torch.cuda.Stream() if device == "cuda" else None
    sources = [normal(device, case.elements) for _ in range(sets)]
    targets = [torch.empty_like(source) for source in sources]
    if device == "cuda":
        torch.cuda.synchronize()
    copy = timing.torch_microseconds(lambda i: targets[i].copy_(sources[i]), sets, stream)
    yield _copy_row(case, "copy (torch)", copy)
    sources.clear()
    targets.clear()

    for name, peer in torch_peers(case).items():
        with torch.cuda.stream(stream):
            errors = _torch_errors(case, name, peer.function, inputs[0], upstreams[0], exact)
            given, above = inputs, upstreams
            if peer.overwrites:
                given, above = [[_copies(one) for one in held] for held in (inputs, upstreams)]
        for which in case.arrays:
            with torch.cuda.stream(stream):
                call = _torch_call(which, peer.function, given, above)
            us = timing.torch_microseconds(call, sets, stream, peer.in_graph)
            del call  # and what it holds of the forward
            yield _row(case, which, name, us, copy, errors[which])


def _torch_call(
    which: str, function: Callable[..., Any], inputs: Sets, upstreams: Sets
) -> Callable[[int], Any]:
    """One pass over the i-th set, to be called on the stream that this is called on."""
    if which == "forward":
        detached = [tuple(t.detach() for t in args) for args in inputs]

        def forward(i: int) -> Any:
            with torch.no_grad():
                return function(*detached[i])

        return forward

    if which == "backward":
        outputs = [_tuple(function(*args)) for args in inputs]

        def backward(i: int) -> Any:
            wanted = _wanted(inputs[i])
            return torch.autograd.grad(outputs[i], wanted, upstreams[i], retain_graph=True)

        return backward

    def forward_and_backward(i: int) -> Any:
        y = _tuple(function(*inputs[i]))
        return torch.autograd.grad(y, _wanted(inputs[i]), upstreams[i])

    return forward_and_backward


def _in_jax(
    case: Case, inputs: Sets, upstreams: Sets, exact: Tensors, device: str
) -> Iterator[Row]:
    sources = [(_to_jax(normal(device, case.elements)),) for _ in inputs]
    copy = timing.jax_microseconds(jnp.copy, sources)
    yield _copy_row(case, "copy (jax)", copy)
    sources.clear()

    sets = [
        (tuple(map(_to_jax, args)), tuple(map(_to_jax, dys)))
        for args, dys in zip(inputs, upstreams, strict=True)
    ]
    wanted = [i for i, t in enumerate(inputs[0]) if t.requires_grad]
    for name, function in jax_peers(case).items():
        passes = _jax_passes(function, wanted)
        results = jax.jit(passes["forward + backward"])(*sets[0])
        errors = _errors(case, name, *(tuple(map(to_torch, part)) for part in results), exact)
        del results
        for which in case.arrays:
            us = timing.jax_microseconds(passes[which], sets)
            yield _row(case, which, name, us, copy, errors[which])


def _jax_passes(function: Callable[..., Any], wanted: list[int]) -> dict[str, Callable[..., Any]]:
    """The passes as functions of the arguments and the upstream gradients."""

    def forward(args, dys):
        return _tuple(function(*args))

    def forward_and_backward(args, dys):
        def of_wanted(*values):
            changed = list(args)
            for i, value in zip(wanted, values, strict=True):
                changed[i] = value
            return _tuple(function(*changed))

        ys, vjp = jax.vjp(of_wanted, *(args[i] for i in wanted))
        dys = (jnp.ones_like(y) if dy is None else dy for y, dy in zip(ys, dys, strict=True))
        return ys, vjp(tuple(dys))

    return {
        "forward": forward,
        "backward": lambda args, dys: forward_and_backward(args, dys)[1],
        "forward + backward": forward_and_backward,
    }


def _exact(case: Case, inputs: Sets) -> tuple[Sets, Tensors]:
    """Upstream gradients for all sets, None for a loss; and the first set's results in float64."""
    args = tuple(
        t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for t in inputs[0]
    )
    ys = _tuple(case.reference(*args))
    device = str(ys[0].device)
    upstreams = [tuple(normal(device, *y.shape) if y.ndim else None for y in ys) for _ in inputs]
    dys = tuple(dy if dy is None else dy.double() for dy in upstreams[0])
    gradients = torch.autograd.grad(ys, _wanted(args), dys)
    return upstreams, tuple(t.detach() for t in (*ys, *gradients))


def _torch_errors(case, name, function, args, dys, exact) -> dict[str, float]:
    args = _copies(args)
    ys = _tuple(function(*args))
    gradients = torch.autograd.grad(ys, _wanted(args), _copies(dys))
    return _errors(case, name, ys, gradients, exact)


def _errors(
    case: Case, name: str, outputs: Tensors, gradients: Tensors, exact: Tensors
) -> dict[str, float]:
    """The largest error of each pass; raises where one is too large to go on."""
    errors = []
    with torch.no_grad():
        for actual, expected in zip((*outputs, *gradients), exact, strict=True):
            errors.append(((actual.double() - expected).norm() / expected.norm()).item())
    if not all(error < LARGEST_ERROR for error in errors):  # a NaN is too large as well
        raise ArithmeticError(
            f"{case.op} by {name} at {case.shape}: relative errors against float64 must be below "
            f"{LARGEST_ERROR}; got {errors}"
        )
    n = len(outputs)
    parts = {"forward": errors[:n], "backward": errors[n:], "forward + backward": errors}
    return {which: max(part) for which, part in parts.items()}


def _row(case: Case, which: str, name: str, us: float, copy_us: float, error: float) -> Row:
    arrays = case.arrays[which]
    return {
        **_named(case, which, name),
        "microseconds": us,
        "terabytes_per_second": 2 * case.elements * arrays / us / 1e6,
        "of_copy": copy_us * arrays / 2 / us,
        "error": error,
    }


def _copy_row(case: Case, name: str, us: float) -> Row:
    return {
        **_named(case, "forward", name), "microseconds": us,
        "terabytes_per_second": 2 * case.elements * 2 / us / 1e6, "of_copy": 1.0, "error": 0.0,
    }  # fmt: skip


def _named(case: Case, which: str, name: str) -> Row:
    return {
        "op": case.op, "pass": which, "rows": case.rows, "dim": case.dim, "shape": case.shape,
        "dtype": "bfloat16", "implementation": name,
    }  # fmt: skip


def _ours(case: Case, implementation: str) -> Callable[..., Any]:
    function = getattr(torch_liger, case.op)
    return lambda *args: function(*args, implementation=implementation)


def _tuple(result: Any) -> tuple:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _wanted(args: Tensors) -> Tensors:
    return tuple(t for t in args if t.requires_grad)


def _copies(tensors: Any) -> tuple:
    """Copies of tensors and Nones, each a leaf that asks for a gradient where the original does."""
    return tuple(
        t if t is None else t.detach().clone().requires_grad_(t.requires_grad) for t in tensors
    )


def _to_jax(tensor: torch.Tensor | None) -> jax.Array | None:
    if tensor is None:
        return None
    return from_torch(tensor.int() if tensor.dtype == torch.int64 else tensor)
