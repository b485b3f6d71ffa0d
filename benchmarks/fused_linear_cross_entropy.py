"""fused_linear_cross_entropy, forward plus backward: time over the bare products, and memory.

Products are timed again before each implementation, since the card slows down as it warms up. The
memory is what is allocated at most beside the inputs and the gradients.
"""

import functools
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch

import jax_liger
import torch_liger
from jax_liger.interop import from_torch, to_torch
from run import check_only

SHAPES = [  # rows, D, V
    (4096, 4096, 128256),
    (16384, 4096, 128256),
    (65536, 4096, 128256),
    (16384, 2048, 128256),
    (16384, 3584, 152064),
    (16384, 2304, 256000),
    (16384, 4096, 32000),
]
CHECKED_ROWS = 512  # whose gradients are compared with float64 ones first
LARGEST_ERROR = 1e-2
ROUNDS = 5
MOST_ROWS_OF_ALL = 16384  # where those that hold all logits still take part
PART = 2048  # rows of one bare product
GIB = 2**30
TOKAMAX = "tokamax, chunked_xla"

Row = dict[str, Any]


def measure(
    quick: bool = False, shapes: Iterable[tuple[int, ...]] = (), only: Collection[str] = ()
) -> Iterator[Row]:
    check_only(only, [*torch_implementations(), *jax_implementations()])
    for shape in shapes or (SHAPES[:1] if quick else SHAPES):
        yield from _one_shape(*shape, only)


def draw(rows: int, dim: int, vocab: int, device: str) -> tuple[torch.Tensor, ...]:
    """hidden, weight and labels: half of the tokens have peaked distributions, half flat ones."""
    hidden = torch.randn(rows, dim, device=device)
    hidden[::2] *= 3.0
    weight = torch.randn(vocab, dim, device=device, dtype=torch.bfloat16).mul_(1.5 / dim**0.5)
    labels = torch.randint(vocab, (rows,), device=device)
    return hidden.bfloat16().requires_grad_(), weight.requires_grad_(), labels


def torch_implementations(kernel: str = "triton") -> dict[str, Callable[..., torch.Tensor]]:
    """Functions of (hidden, weight, labels) to the mean loss."""
    ours = functools.partial(torch_liger.fused_linear_cross_entropy, implementation=kernel)
    eager = functools.partial(torch_liger.fused_linear_cross_entropy, implementation="eager")
    found: dict[str, Callable[..., torch.Tensor]] = {
        "torch_liger": ours,
        "torch_liger, bfloat16 sums": functools.partial(ours, accum_dtype=torch.bfloat16),
        "torch_liger, least memory": functools.partial(ours, memory="least"),
        "eager": eager,
        "torch.compile": torch.compile(eager),
    }
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as liger
    except ImportError:
        return found
    found["liger-kernel"] = liger
    found["liger-kernel, float32 sums"] = functools.partial(liger, accum_dtype=torch.float32)
    return found


def jax_implementations() -> dict[str, Callable[..., jax.Array]]:
    """The same; tokamax's takes the weight as (D, V), and is given it so."""
    ours = functools.partial(jax_liger.fused_linear_cross_entropy, implementation="pallas")
    found: dict[str, Callable[..., jax.Array]] = {
        "jax_liger": ours,
        "jax_liger, bfloat16 sums": functools.partial(ours, accum_dtype="bfloat16"),
        "jax_liger, least memory": functools.partial(ours, memory="least"),
        "XLA": functools.partial(jax_liger.fused_linear_cross_entropy, implementation="xla"),
    }
    try:
        from tokamax import linear_softmax_cross_entropy_loss as tokamax
    except ImportError:
        return found
    found[TOKAMAX] = lambda hidden, weight, labels: tokamax(
        hidden, labels, weight, reduction="mean", implementation="chunked_xla"
    )
    return found


def torch_gradients(function: Callable[..., torch.Tensor], hidden, weight, labels) -> Any:
    return torch.autograd.grad(function(hidden, weight, labels), (hidden, weight))


def jax_gradients(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    return jax.jit(jax.grad(lambda h, w, y: function(h, w, y), (0, 1)))


def exact_gradients(hidden, weight, labels) -> tuple[torch.Tensor, ...]:
    """Of float64 logits of a few rows."""
    h, w = (t.detach().double().requires_grad_() for t in (hidden, weight))
    loss = torch.nn.functional.cross_entropy(h @ w.t(), labels)
    return torch.autograd.grad(loss, (h, w))


def check(name: str, actual: Any, exact: Any) -> float:
    """The largest relative error; raises where it is too large to go on."""
    errors = [
        ((a.double() - e).norm() / e.norm()).item() for a, e in zip(actual, exact, strict=True)
    ]
    if not all(error < LARGEST_ERROR for error in errors):  # a NaN is too large as well
        raise ArithmeticError(
            f"{name}: relative errors against float64 must be below {LARGEST_ERROR}; got {errors}"
        )
    return max(errors)


def _one_shape(rows: int, dim: int, vocab: int, only: Collection[str]) -> Iterator[Row]:
    torch._dynamo.reset()
    given = draw(rows, dim, vocab, "cuda")
    some = (*(t.detach()[:CHECKED_ROWS].requires_grad_() for t in given[:1]), given[1],
            given[2][:CHECKED_ROWS])  # fmt: skip
    exact = exact_gradients(*some)
    half = given[2].clone()
    half[::2] = -100

    def row(name: str, ms: float, products: float, peak: float, error: float) -> Row:
        return {
            "op": "fused_linear_cross_entropy", "pass": "forward + backward", "rows": rows,
            "dim": dim, "vocab": vocab, "shape": f"{rows} x {dim} x {vocab}", "dtype": "bfloat16",
            "implementation": name, "microseconds": ms * 1e3, "of_products": ms / products,
            "gibibytes": peak / GIB, "error": error,
        }  # fmt: skip

    gradient_bytes = 2 * (rows + vocab) * dim
    bare = functools.partial(_torch_products, given[0].detach(), given[1].detach())
    for name, function in torch_implementations().items():
        if rows > MOST_ROWS_OF_ALL and name in ("eager", "torch.compile"):
            continue
        if only and name not in only:
            continue
        error = check(name, torch_gradients(function, *some), exact)
        for suffix, labels in _labels(name, given[2], half):
            work = functools.partial(torch_gradients, function, *given[:2], labels)
            try:
                peak = _torch_peak(work) - gradient_bytes
                products, ms = _torch_milliseconds(bare), _torch_milliseconds(work)
            except torch.OutOfMemoryError:
                continue
            yield row(name + suffix, ms, products, peak, error)
    torch.cuda.empty_cache()

    arrays = [from_torch(t.detach()) for t in given[:2]]
    labels = [from_torch(t.int()) for t in (given[2], half)]
    bare = jax.jit(_jax_products)
    for name, function in jax_implementations().items():
        if rows > MOST_ROWS_OF_ALL and name == "XLA":
            continue
        if only and name not in only:
            continue
        fn, (hidden, weight) = jax_gradients(function), arrays
        across = name == TOKAMAX
        weight = weight.T if across else weight
        dhidden, dweight = map(
            to_torch, fn(hidden[:CHECKED_ROWS], weight, labels[0][:CHECKED_ROWS])
        )
        error = check(name, (dhidden, dweight.T if across else dweight), exact)
        for suffix, y in _labels(name, *labels):
            peak = fn.lower(hidden, weight, y).compile().memory_analysis().temp_size_in_bytes
            products = _jax_milliseconds(bare, *arrays)
            ms = _jax_milliseconds(fn, hidden, weight, y)
            yield row(name + suffix, ms, products, peak, error)


def _labels(name: str, all_count: Any, half: Any) -> list[tuple[str, Any]]:
    """Peers multiply ignored rows as all others."""
    ours = name.startswith(("torch_liger", "jax_liger"))
    return [("", all_count), (", half ignored", half)] if ours else [("", all_count)]


def _torch_products(hidden: torch.Tensor, weight: torch.Tensor) -> None:
    for part in hidden.split(PART):
        logits = part @ weight.t()
        logits @ weight
        logits.t() @ part


def _jax_products(hidden: jax.Array, weight: jax.Array) -> Any:
    """The three products of every part, each of its results reduced to a few numbers."""

    def step(kept, part):
        logits = part @ weight.T
        # The barrier keeps the compiler from computing the one number alone that is looked at.
        dhidden, dweight = jax.lax.optimization_barrier((logits @ weight, logits.T @ part))
        return kept + dhidden[0, 0] + dweight[0, 0], None

    parts = hidden.reshape(-1, min(PART, len(hidden)), hidden.shape[1])
    return jax.lax.scan(step, jnp.zeros((), hidden.dtype), parts)[0]


def _torch_peak(work: Callable[[], Any]) -> float:
    work()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _torch_milliseconds(work: Callable[[], Any]) -> float:
    work()
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def _jax_milliseconds(work: Callable[..., Any], *args: jax.Array) -> float:
    """With the host's dispatch and wait, which are little beside such a time."""
    jax.block_until_ready(work(*args))
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(work(*args))
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def plot(result: dict, path: Any) -> None:
    """One panel a shape: time over the products against memory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in result["rows"] if "half" not in row["implementation"]]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    figure, axes = plt.subplots(len(shapes), figsize=(8, 3.5 * len(shapes)), squeeze=False)
    for axis, shape in zip(axes[:, 0], shapes, strict=True):
        for i, name in enumerate(names):
            points = [
                (row["gibibytes"], row["of_products"])
                for row in rows
                if (row["shape"], row["implementation"]) == (shape, name)
            ]
            if points:
                style = {"color": f"C{i % 10}", "marker": "ox"[i // 10]}
                axis.scatter(*zip(*points, strict=True), label=name, **style)
        axis.set_xlabel("GiB beside inputs and gradients")
        axis.set_ylabel("time, the three products = 1")
        axis.set_title(f"{shape}, bfloat16, {result['device']}")
        axis.legend(fontsize="small", bbox_to_anchor=(1.0, 1.0), loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
