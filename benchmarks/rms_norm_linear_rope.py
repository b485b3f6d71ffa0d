"""rms_norm_linear_rope: norm, projection to q, k and v, and rotation, fused and not.

    python benchmarks/run.py rms_norm_linear_rope --out benchmarks/results/rms_norm_linear_rope.json
    python benchmarks/rms_norm_linear_rope.py benchmarks/results/rms_norm_linear_rope*.json

The first measures, trying many tiles of the fused kernels at one number of rows of each kind and
the best of them at the others: `of_composed` is the time over that of the composition of this
project's kernels, `of_best` over that of the fastest that is not fused in the same framework,
torch.compile and XLA among them. Tiles that are wrong or do not fit are printed and left out. The
second writes, from its results, the table by which the package decides where the fused kernel runs.
Every set of inputs has a weight of its own, so that none is read from the cache.
"""

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import torch
import torch._functorch.config

import jax_liger
import measuring
import timing
import torch_liger
from description import Case, normal
from liger_ops.rms_norm_linear_rope import eager, rule
from liger_ops.rms_norm_linear_rope import pallas_kernel as pallas
from liger_ops.rms_norm_linear_rope import triton_kernel as triton
from liger_ops.rms_norm_linear_rope.cases import Config
from liger_ops.rms_norm_linear_rope.check import Heads, Norm

SHAPES = [(4096, Heads(32, 8, 128)), (2048, Heads(32, 8, 64))]  # D, and N, K, H
# Where all tiles are tried, and where the best of them are.
ROWS = {16: (1,), 8192: (16384,)}
NORM = Norm(1e-6, 0.0, "llama")
BOTH = "forward + backward"

DECODING = [
    Config(16, columns, step, warps, stages)
    for columns, step, warps, stages in (
        (32, 256, 2, 4), (64, 256, 4, 3), (64, 256, 4, 4), (64, 256, 4, 5), (128, 128, 8, 5),
    )
]  # fmt: skip
MANY = [Config(128, 256, 64, 8, 4, "weight"), Config(128, 128, 64, 8, 4, "weight")]
PERSISTENT = [
    Config(128, 256, 64, 8, 3, "weight", persistent=True),
    Config(128, 256, 64, 8, 4, "weight", persistent=True),
]

Row = dict[str, Any]
Function = Callable[..., Any]


def measure(quick: bool = False, shapes: Iterable[tuple[int, ...]] = ()) -> Iterator[Row]:
    torch._functorch.config.donated_buffer = False  # lets a compiled backward run repeatedly
    chosen = [(dim, Heads(*heads)) for dim, *heads in shapes]
    for dim, heads in chosen or (SHAPES[:1] if quick else SHAPES):
        for swept, others in ROWS.items():
            found: dict[str, list[Config]] = {}
            torch._dynamo.reset()
            jax.clear_caches()
            for rows in (swept, *others):
                yield from one_size(rows, dim, heads, found, "cuda")


def one_size(
    rows: int, dim: int, heads: Heads, found: dict[str, list[Config]], device: str
) -> Iterator[Row]:
    """All implementations; `found` has the best tiles of each framework, or gets them here."""
    case = case_of(rows, dim, heads)
    passes = ("forward", BOTH) if rows > rule.DECODED else ("forward",)
    held = 2 * (rows * (dim + heads.columns) + dim * heads.columns)
    sets = timing.sets_for(held, 3 * held)
    parameters = case.parameters(device)
    inputs = [(*case.data(device), *parameters) for _ in range(sets)]
    upstreams, exact = measuring._exact(case, inputs)
    for of_framework in (_in_torch, _in_jax):
        yield from of_framework(case, heads, passes, inputs, upstreams, exact, found, device)
        if device == "cuda":
            torch.cuda.empty_cache()  # JAX has an allocator of its own


def case_of(rows: int, dim: int, heads: Heads) -> Case:
    """Few rows are of as many sequences, each at a position of its own; many are one sequence."""
    shape = (rows, 1) if rows <= rule.DECODED else (1, rows)

    def data(device: str) -> tuple[torch.Tensor, ...]:
        weight = normal(device, heads.columns, dim, spread=dim**-0.5)
        drawn = normal(device, *shape, dim), normal(device, dim, spread=0.3).add_(1.0), weight
        return tuple(tensor.requires_grad_() for tensor in drawn)

    def parameters(device: str) -> tuple[torch.Tensor, ...]:
        frequencies = 500_000.0 ** -(torch.arange(0, heads.size, 2, device=device) / heads.size)
        angles = torch.outer(torch.arange(rows, device=device), frequencies).repeat(1, 2)
        angles = angles.view(*shape, heads.size)
        return angles.cos(), angles.sin()

    def reference(x, norm_weight, weight, cos, sin):
        given = (x, norm_weight, weight, None, None, None, cos, sin)
        return eager.rms_norm_linear_rope(*given, heads, NORM)

    return Case(
        op="rms_norm_linear_rope", rows=rows, dim=dim,
        shape=f"{rows} x {dim}, N{heads.q} K{heads.kv} H{heads.size}",
        data=data, parameters=parameters, reference=reference, others=dict,
        elements=rows * (dim + heads.columns), arrays={"forward": 1, BOTH: 1},
    )  # fmt: skip


def public(package: Any, heads: Heads, implementation: str) -> Function:
    return functools.partial(
        package.rms_norm_linear_rope, num_heads=heads.q, num_kv_heads=heads.kv,
        head_dim=heads.size, implementation=implementation, **NORM._asdict(),
    )  # fmt: skip


def fused(module: Any, heads: Heads, config: Config, **settings: Any) -> Function:
    """The fused kernel with these tiles."""

    def call(x, norm_weight, weight, cos, sin):
        given = (x, norm_weight, weight, None, None, None, cos, sin)
        return module.rms_norm_linear_rope(
            *given, heads=heads, norm=NORM, config=config, **settings
        )

    return call


def candidates(framework: str, rows: int, found: dict[str, list[Config]]) -> list[Config]:
    if framework in found:
        return found[framework]
    if rows <= rule.DECODED:
        return DECODING
    return MANY + (PERSISTENT if framework == "triton" else [])


def best(times: dict[Config, float]) -> list[Config]:
    """The fastest of all, and the fastest that multiplies the norm's weight in the other way; none
    where no tiles were right.
    """
    order = sorted(times, key=lambda config: times[config])
    other = [config for config in order if config.scales != order[0].scales]
    return order[:1] + other[:1]


def of_tiles(
    configs: Iterable[Config], measured: Callable[[Config], Row]
) -> Iterator[tuple[Config, Row]]:
    """Those that can be measured. Why others cannot is printed: they do not fit this card, or are
    wrong on it, and the others still count.
    """
    for config in configs:
        try:
            row = measured(config)
        except Exception as error:
            print(f"{_tiles(config)}: {error!r}"[:300], file=sys.stderr, flush=True)
            continue
        yield config, row


def with_best(rows: list[Row]) -> list[Row]:
    """Of one pass of what is not fused: each row's time over the fastest one's as `of_best`."""
    fastest = min(row["microseconds"] for row in rows)
    return [{**row, "of_best": row["microseconds"] / fastest} for row in rows]


def _in_torch(case, heads, passes, inputs, upstreams, exact, found, device) -> Iterator[Row]:
    stream = torch.cuda.Stream() if device == "cuda" else None
    composed: dict[str, float] = {}

    def measured(name: str, function: Function, which: str, config: Config | None) -> Row:
        with torch.cuda.stream(stream):
            first, dys = inputs[0], upstreams[0]
            if which == "forward":
                with torch.no_grad():
                    results = function(*first)
            else:
                results = function(*first)
                wanted = measuring._wanted(first)
                results = (*results, *torch.autograd.grad(results, wanted, dys))
            error = check(case, name, results, exact)
            kept = _kept_mebibytes(function, inputs[0]) if which == BOTH else None
            call = measuring._torch_call(which, function, inputs, upstreams)
        us = timing.torch_microseconds(call, len(inputs), stream)
        composed.setdefault(which, us)  # which is measured first
        return _row(case, "triton", which, name, us, composed[which], error, config, kept)

    peers = {
        "torch_liger (composed)": public(torch_liger, heads, "composed"),
        "eager": public(torch_liger, heads, "eager"),
        "torch.compile": torch.compile(public(torch_liger, heads, "eager")),
    }
    fastest: dict[str, float] = {}
    for which in passes:
        rows = with_best([measured(name, fn, which, None) for name, fn in peers.items()])
        fastest[which] = min(row["microseconds"] for row in rows)
        yield from rows

    def with_tiles(which: str, config: Config) -> Row:
        row = measured("torch_liger (triton)", fused(triton, heads, config), which, config)
        return {**row, "of_best": row["microseconds"] / fastest[which]}

    times: dict[Config, float] = {}
    forward = functools.partial(with_tiles, "forward")
    for config, row in of_tiles(candidates("triton", case.rows, found), forward):
        times[config] = row["microseconds"]
        yield row
    found["triton"] = best(times)
    for which in passes[1:]:
        for _, row in of_tiles(found["triton"], functools.partial(with_tiles, which)):
            yield row


def _in_jax(case, heads, passes, inputs, upstreams, exact, found, device) -> Iterator[Row]:
    del device
    wanted = [i for i, t in enumerate(inputs[0]) if t.requires_grad]
    sets = [
        (tuple(map(measuring._to_jax, args)), tuple(map(measuring._to_jax, dys)))
        for args, dys in zip(inputs, upstreams, strict=True)
    ]
    composed: dict[str, float] = {}

    def measured(name: str, program: Any, which: str, config: Config | None) -> Row:
        results = map(measuring.to_torch, jax.tree.leaves(program(sets)[0]))
        error = check(case, name, tuple(results), exact)
        us = timing.jax_microseconds(program, sets)
        composed.setdefault(which, us)
        return _row(case, "pallas", which, name, us, composed[which], error, config, None)

    def program(function: Function, which: str) -> Any:
        return timing.jax_program(measuring._jax_passes(function, wanted)[which], sets)

    def compiled(functions: dict[Any, Function], which: str) -> dict[Any, Any]:
        """The programs that compile, several at once; the others' reasons are printed."""
        with ThreadPoolExecutor(8) as pool:
            waiting = {
                key: pool.submit(program, function, which) for key, function in functions.items()
            }
        programs = {}
        for key, one in waiting.items():
            if (error := one.exception()) is None:
                programs[key] = one.result()
            else:
                print(f"{key}: {error!r}"[:300], file=sys.stderr, flush=True)
        return programs

    peers = {
        "jax_liger (composed)": public(jax_liger, heads, "composed"),
        "XLA": public(jax_liger, heads, "xla"),
    }
    fastest: dict[str, float] = {}
    for which in passes:
        programs = compiled(peers, which)
        rows = with_best([measured(name, programs[name], which, None) for name in peers])
        fastest[which] = min(row["microseconds"] for row in rows)
        yield from rows

    def of_pass(which: str, configs: list[Config]) -> Iterator[tuple[Config, Row]]:
        functions = {config: fused(pallas, heads, config, out_axis=0) for config in configs}
        programs = compiled(functions, which)

        def one(config: Config) -> Row:
            row = measured("jax_liger (pallas)", programs[config], which, config)
            return {**row, "of_best": row["microseconds"] / fastest[which]}

        return of_tiles(programs, one)

    times: dict[Config, float] = {}
    for config, row in of_pass("forward", candidates("pallas", case.rows, found)):
        times[config] = row["microseconds"]
        yield row
    found["pallas"] = best(times)
    for which in passes[1:]:
        for _, row in of_pass(which, found["pallas"]):
            yield row


def check(case: Case, name: str, results: tuple[Any, ...], exact: tuple[Any, ...]) -> float:
    """The largest relative error of the results, the outputs and perhaps then the gradients; raises
    where it is too large to go on.
    """
    with torch.no_grad():
        errors = [
            ((actual.double() - expected).norm() / expected.norm()).item()
            for actual, expected in zip(results, exact, strict=False)
        ]
    if not all(error < measuring.LARGEST_ERROR for error in errors):  # a NaN is too large as well
        raise ArithmeticError(
            f"{case.op} by {name} at {case.shape}: relative errors against float64 must be below "
            f"{measuring.LARGEST_ERROR}; got {errors}"
        )
    return max(errors)


def _kept_mebibytes(function: Function, args: tuple[torch.Tensor, ...]) -> float:
    """What the graph of one forward keeps beside the arguments and the results."""
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = function(*args)
    for tensor in (*args, *outputs):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(kept.values()) / 2**20


def _row(case, framework, which, name, us, composed, error, config, kept) -> Row:
    heads = re.findall(r"[NKH](\d+)", case.shape)
    row = {
        "op": case.op, "pass": which, "rows": case.rows, "dim": case.dim, "shape": case.shape,
        "num_heads": int(heads[0]), "num_kv_heads": int(heads[1]), "head_dim": int(heads[2]),
        "dtype": "bfloat16", "framework": framework, "implementation": name, "microseconds": us,
        "of_composed": us / composed, "error": error,
    }  # fmt: skip
    if config is not None:
        row["implementation"] = f"{name} {_tiles(config)}"
        row["config"] = dataclasses.asdict(config)
    if kept is not None:
        row["kept_mebibytes"] = kept
    return row


def _tiles(config: Config) -> str:
    tiles = f"{config.block_rows}x{config.block_columns}x{config.block_dim}"
    kind = ", persistent" if config.persistent else ""
    return f"{tiles} {config.num_warps}w {config.num_stages}s {config.scales}{kind}"


def table_of(*results: dict[str, Any]) -> dict[str, Any]:
    """The package's table: of every size, the fastest tiles in the pass that decides."""
    sizes: dict[Any, list[Row]] = {}
    names = ("framework", "dim", "num_heads", "num_kv_heads", "head_dim", "rows")
    for row in (row for result in results for row in result["rows"]):
        if "config" in row:
            sizes.setdefault(tuple(row[name] for name in names), []).append(row)
    entries = []
    for size, rows in sizes.items():
        last = BOTH if any(row["pass"] == BOTH for row in rows) else "forward"
        fastest = min((r for r in rows if r["pass"] == last), key=lambda r: r["microseconds"])
        same = [row for row in rows if row["config"] == fastest["config"]]
        entries.append(
            {**dict(zip(names, size, strict=True)), "config": fastest["config"],
             **{row["pass"]: round(row["of_composed"], 4) for row in same}}
        )  # fmt: skip
    commands = "; ".join(f"{result['command']} with {result['versions']}" for result in results)
    source = f"{commands}; time over the composition's, bfloat16"
    return {"device": results[0]["device"], "source": source, "entries": entries}


def plot(result: dict, path: Any) -> None:
    """One panel a pass: time over the fastest that is not fused, by size and implementation."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = result["rows"]
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    figure, axes = plt.subplots(len(passes), figsize=(13, 5 * len(passes)), squeeze=False)
    for axis, which in zip(axes[:, 0], passes, strict=True):
        shapes = list(dict.fromkeys(row["shape"] for row in rows if row["pass"] == which))
        fastest = {shape: math.inf for shape in shapes}
        times: dict[str, dict[str, float]] = {}
        for row in rows:
            if row["pass"] != which:
                continue
            name = f"{row['framework']}: fused" if "config" in row else row["implementation"]
            of_name = times.setdefault(name, {})
            of_name[row["shape"]] = min(of_name.get(row["shape"], math.inf), row["microseconds"])
            if "config" not in row:
                fastest[row["shape"]] = min(fastest[row["shape"]], row["microseconds"])
        for i, (name, of_name) in enumerate(times.items()):
            positions = [j + i / (len(times) + 1) for j in range(len(shapes))]
            heights = [of_name.get(shape, 0.0) / fastest[shape] for shape in shapes]
            axis.bar(positions, heights, 1 / (len(times) + 1), label=name)
        axis.set_xticks([j + 0.4 for j in range(len(shapes))], shapes, fontsize="x-small")
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set_ylabel("time, the fastest unfused = 1")
        axis.set_title(f"rms_norm_linear_rope {which}, bfloat16, {result['device']}")
    axes[0, 0].legend(ncols=3, fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the package's table from results.")
    parser.add_argument("results", type=pathlib.Path, nargs="+", help="of different sizes")
    results = [json.loads(path.read_text()) for path in parser.parse_args().results]
    found = table_of(*results)
    path = rule.path_of(found["device"])
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"wrote {len(found['entries'])} entries to {path}")


if __name__ == "__main__":
    main()
