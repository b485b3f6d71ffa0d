"""Timing on one GPU, the same way for everything that is compared.

Every measurement works through several sets of fresh random inputs that together are much larger
than the L2 cache, so that no call finds its input there. Launches are grouped (a CUDA graph in
PyTorch, one jitted program in JAX), so that the figures are the GPU's time and not the host's. The
device copy that results are compared with is timed by the same functions.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

L2_BYTES = 50 * 2**20  # of an H200
LEAST_SETS, MOST_SETS = 6, 128
MOST_BYTES = 20 * 2**30
ROUNDS = 9  # the median of so many timings of all sets, REPEATS times over
REPEATS = 4
JAX_REPEATS = 24  # more, since a round begins with the host's dispatch and ends with its wait


def sets_for(copied_bytes: int, held_bytes: int) -> int:
    """How many sets of inputs to work through.

    Args:
        copied_bytes: what the copy, the least of what is timed, reads and writes in one set.
        held_bytes: what one set takes with its outputs.
    """
    beyond_cache = -(-4 * L2_BYTES // copied_bytes)
    wanted = min(max(beyond_cache, LEAST_SETS), MOST_SETS)
    return max(min(wanted, MOST_BYTES // held_bytes), 2)


def torch_microseconds(
    call: Callable[[int], Any],
    sets: int,
    stream: torch.cuda.Stream | None,
    in_graph: bool = True,
) -> float:
    """Median time of call(i) for i in range(sets), replayed from a graph captured on `stream`.

    With in_graph=False the calls are made one by one, for those that wait for the GPU's answer and
    so cannot be captured: then the host's time counts where it is the longer.
    """
    with torch.cuda.stream(stream):
        for i in range(sets):  # compiles, and fills the allocator
            call(i)
    torch.cuda.synchronize()

    def all_sets() -> list[Any]:
        # All outputs are kept, each in memory of its own: one that is written again and again
        # would stay in the L2 cache and never reach memory.
        return [call(i) for i in range(sets)]

    work, outputs = all_sets, None
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outputs = all_sets()
        work = graph.replay
    times = []
    with torch.cuda.stream(stream):
        work()
        for _ in range(ROUNDS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(REPEATS):
                work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / (sets * REPEATS))
    del outputs
    return statistics.median(times)


def jax_program(fn: Callable[..., Any], inputs: Sequence[tuple[Any, ...]]) -> Any:
    """fn of all inputs in one program, compiled."""
    once = jax.jit(fn)  # traced and lowered once, however many sets there are
    return jax.jit(lambda sets: [once(*given) for given in sets]).lower(inputs).compile()


def jax_microseconds(program: Any, inputs: Sequence[tuple[Any, ...]]) -> float:
    """Median time of one of the calls in what `jax_program` made for `inputs`, or of the function
    that it is to be made of.
    """
    if not isinstance(program, jax.stages.Compiled):
        program = jax_program(program, inputs)
    jax.block_until_ready(program(inputs))
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(JAX_REPEATS):
            outputs = program(inputs)
        jax.block_until_ready(outputs)
        times.append((time.perf_counter() - start) * 1e6 / (len(inputs) * JAX_REPEATS))
    return statistics.median(times)


def host_microseconds(
    functions: dict[str, Callable[[], Any]], calls: int = 1000
) -> dict[str, float]:
    """Time of one call of each where the host is the bottleneck: the least of several rounds.

    The rounds take turns, so that what else the host is doing strikes all alike.
    """
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(2 * ROUNDS):
        for name, function in functions.items():
            function()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            torch.cuda.synchronize()
            best[name] = min(best[name], (time.perf_counter() - start) * 1e6 / calls)
    return best
