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

SETS = 6
ROUNDS = 9  # the median of so many timings of SETS * REPEATS calls each
REPEATS = 4


def torch_microseconds(call: Callable[[int], Any], stream: torch.cuda.Stream) -> float:
    """Median time of call(i) for i in range(SETS), replayed from a graph captured on `stream`."""
    with torch.cuda.stream(stream):
        for i in range(SETS):  # compiles, and fills the allocator
            call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(SETS):
            call(i)
    graph.replay()
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPEATS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (SETS * REPEATS))
    return statistics.median(times)


def jax_microseconds(fn: Callable[..., Any], inputs: Sequence[tuple[jax.Array, ...]]) -> float:
    """Median time of one fn(*inputs[i]), all of them in one jitted program."""
    program = jax.jit(lambda sets: [fn(*given) for given in sets])
    jax.block_until_ready(program(inputs))
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(REPEATS):
            outputs = program(inputs)
        jax.block_until_ready(outputs)
        times.append((time.perf_counter() - start) * 1e6 / (len(inputs) * REPEATS))
    return statistics.median(times)


def host_microseconds(call: Callable[[], Any], calls: int = 2000) -> float:
    """Time of one call where the host is the bottleneck: the least of several rounds."""
    for _ in range(100):
        call()
    best = float("inf")
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) * 1e6 / calls)
    return best
