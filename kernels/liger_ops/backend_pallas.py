"""The one file that touches Pallas's Triton backend, and what the kernels need to know of jax.

The backend is deprecated since jax 0.11. So versions are handled here, every call states its
compiler parameters (without them the default backend differs between versions), and an
unsupported jax means a clear error by name and the XLA version otherwise.

On a CPU the kernels run only in Pallas's interpret mode, chosen by PALLAS_INTERPRET=1 in the
environment.
"""

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from liger_ops import choosing

OLDEST_JAX, FIRST_UNSUPPORTED_JAX = (0, 10, 2), (0, 13)
JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())

KERNEL_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)

# Raised when a kernel is compiled, in the user's own call, so it cannot be caught around ours.
warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)

plgpu: Any = None
_import_error: str | None = None
try:
    from jax.experimental.pallas import triton as plgpu
except ImportError as error:  # the backend is announced to go
    _import_error = str(error)


def choose(
    implementation: str | None,
    op: str,
    *arrays: jax.Array | jax.ShapeDtypeStruct | None,
    also: tuple[str, ...] = (),
) -> str:
    """The implementation to run, "pallas" or "xla", for arrays as the caller asked.

    also: names of further ones made of kernels, which run where the kernel does.
    """
    why_not, on_gpu = _why_not(arrays), _platform() == "gpu"
    return choosing.choose(op, implementation, "pallas", "xla", why_not, on_gpu, also)


def _why_not(arrays: Sequence[jax.Array | jax.ShapeDtypeStruct | None]) -> str | None:
    if plgpu is None:
        return f"jax {jax.__version__} has no Pallas Triton backend ({_import_error})"
    if not OLDEST_JAX <= JAX_VERSION < FIRST_UNSUPPORTED_JAX:
        return f"jax {jax.__version__} is outside the supported >= 0.10.2, < 0.13"
    if _platform() != "gpu" and not interpret():
        return f"jax's default device is a {_platform()}, and PALLAS_INTERPRET=1 was not set"
    for array in arrays:
        if array is not None and array.dtype not in KERNEL_DTYPES:
            return f"the kernel takes float32, bfloat16 and float16, not {array.dtype}"
    return None


def _platform() -> str:
    """Of the mesh in scope, else of the default device: "gpu", "cpu" or "tpu"."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.config.jax_default_device  # type: ignore[attr-defined]
    if device is None:
        return jax.default_backend()
    platform = device if isinstance(device, str) else device.platform
    return "gpu" if platform in ("cuda", "rocm") else platform


def interpret() -> bool:
    """Whether kernels run in interpret mode: off a GPU, where PALLAS_INTERPRET=1 asks for it."""
    return os.environ.get("PALLAS_INTERPRET", "0") == "1" and _platform() != "gpu"


def multiprocessors() -> int:
    """Streaming multiprocessors of the GPU to compile for; in interpret mode a small stand-in."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.num_cores:
        return device.num_cores
    return getattr(jax.devices()[0], "core_count", None) or 2


def device_name() -> str:
    """Of the GPU to compile for, as the tables of measurements call it; else "cpu"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (jax.devices()[0] if device is None else device).device_kind


def shared_memory() -> int:
    """The bytes of it that one program may have on the GPU to compile for, as NVIDIA's programming
    guide has them for the compute capability; in interpret mode the least of any GPU's.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:  # its capability is not known, its name is
        return (227 if any(name in device.device_kind for name in ("H100", "H200")) else 99) * 1024
    capability = str(getattr(jax.devices()[0], "compute_capability", None))
    return {"8.0": 163, "8.7": 163, "9.0": 227, "10.0": 227, "10.3": 227}.get(capability, 99) * 1024


def pallas_call(
    kernel: Callable[..., None],
    out_shape: Any,
    *args: Any,
    programs: int,
    num_warps: int,
    interpret: bool,
    aliases: Mapping[int, int] | None = None,
    num_stages: int = 1,
) -> Any:
    """Runs `kernel` on a one-dimensional grid; its refs are the whole arrays.

    None among `args` or in `out_shape` reaches the kernel as None. `aliases` has the inputs in
    whose memory an output is written, {input: output}, both counted without the Nones; XLA copies
    such an input first where something else still needs it. `num_stages` is how many steps of a
    loop may have their loads under way.
    """
    axes = _varying_axes(args)
    if axes:
        axis_type = jax.sharding.ManualAxisType(varying=axes)
        out_shape = jax.tree.map(
            lambda out: jax.ShapeDtypeStruct(out.shape, out.dtype, manual_axis_type=axis_type),
            out_shape,
        )
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=(programs,),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        input_output_aliases=dict(aliases or {}),
    )(*args)


def load(
    ref: Any,
    *indices: jax.Array,
    mask: jax.Array | None,
    other: float = 0.0,
    eviction_policy: str | None = None,
) -> jax.Array:
    """ref[indices], and `other` where `mask` is False."""
    absent = None if mask is None else jnp.full((), other, ref.dtype)
    return plgpu.load(ref.at[indices], mask=mask, other=absent, eviction_policy=eviction_policy)


def exp(x: jax.Array) -> jax.Array:
    """e^x, float32, by the power of 2 that the card computes, as Triton's own does: jax's takes the
    CUDA library's function, of several times as many instructions.
    """
    return jnp.exp2(x * jnp.float32(1.4426950408889634))


def store(ref: Any, *indices: jax.Array, value: jax.Array, mask: jax.Array | None) -> None:
    """Writes `value`, cast to the ref's dtype, where `mask` is True."""
    plgpu.store(ref.at[indices], value.astype(ref.dtype), mask=mask)


def for_range(start: Any, stop: Any, body: Any, carry: Any) -> Any:
    """fori_loop that counts in int32 also under jax_enable_x64, and spares a loop of one step."""
    if isinstance(stop, int) and stop - start == 1:
        return body(start, carry)
    return jax.lax.fori_loop(jnp.int32(start), jnp.int32(stop), body, carry)


def as_structure(*flags: bool) -> tuple[Any, ...]:
    """Booleans as the structure of a pytree, () or None each, to be residuals of a custom_vjp:
    those are arrays, and only their structure is still known when the backward is traced.
    """
    return tuple(() if flag else None for flag in flags)


def from_structure(structure: tuple[Any, ...]) -> tuple[bool, ...]:
    return tuple(part is not None for part in structure)


def lower_to_cuda(fn: Callable[..., Any], *shapes: Any) -> str:
    """The StableHLO text of `fn` compiled for one NVIDIA H200, on a machine with or without a GPU.

    Args:
        fn: a function of arrays that calls the Pallas kernels.
        shapes: its arguments as `jax.ShapeDtypeStruct`.
    Raises whatever the GPU lowering rejects, which interpret mode does not see.
    """
    device = jax.sharding.AbstractDevice("NVIDIA H200", 132, "cuda")
    mesh = jax.sharding.AbstractMesh(
        (1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=device
    )
    with jax.sharding.use_abstract_mesh(mesh):
        # A new function object each time, so that no trace made for the CPU is reused.
        traced = jax.jit(lambda *args: fn(*args)).trace(*shapes)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def is_triton_call(text: str) -> bool:
    """Whether a lowered text holds a kernel of the Triton backend, and none of another."""
    return "xla.gpu.triton" in text and "mosaic_gpu" not in text


def match_axes(*arrays: jax.Array | None) -> tuple[jax.Array | None, ...]:
    """Marks all `arrays` as varying over the same manual mesh axes, as under shard_map a kernel
    wants them. The transpose of the mark is the sum over those axes: a replicated weight's
    gradient is added up across devices exactly once.
    """
    axes = _varying_axes(arrays)

    def mark(array: jax.Array | None) -> jax.Array | None:
        missing = () if array is None else tuple(axes - jax.typeof(array).manual_axis_type.varying)
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return tuple(mark(array) for array in arrays)


def _varying_axes(arrays: Sequence[jax.Array | None]) -> frozenset[str]:
    empty: frozenset[str] = frozenset()
    return empty.union(
        *(jax.typeof(a).manual_axis_type.varying for a in jax.tree.leaves(tuple(arrays)))
    )


Dims = tuple[str, ...]  # names of an array's dimensions


def split_rows(local: Callable[..., Any], x: jax.Array, *others: jax.Array | None) -> Any:
    """local(x, *others), on every device's own rows where the leading dimensions are sharded.

    `local` works on rows: inputs and outputs with as many dimensions as x (..., D) have x's leading
    dimensions, and a last one of any size that is not split; all others are shared by all rows, and
    as outputs are sums over rows.
    """
    rows = tuple(f"row{i}" for i in range(x.ndim - 1))

    def name(arrays: Sequence[Any]) -> list[Dims]:
        return [(*(rows if a.ndim == x.ndim else ()), f"d{a.shape[-1]}") for a in arrays]

    def names(inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[list[Dims], list[Dims]]:
        return name(_present(inputs)), name(_present(outputs))

    return _split(local, (x, *others), names, over=rows, summed=rows)


def split(
    local: Callable[..., Any],
    rule: str,
    *arrays: jax.Array | None,
    over: Sequence[str],
    summed: Sequence[str] = (),
    joined: str | None = None,
    joined_axes: Dims = (),
) -> Any:
    """local(*arrays), on every device's own part where the dimensions `over` are sharded.

    Args:
        rule: the dimensions of every argument and every output by name, as in
            "b t d, d -> b t d, d". What is given or returned as None has its names all the same.
        over: those of which `local` may see a part. All others stay whole.
        summed: those over which an output that lacks them is a sum. An output that lacks any other
            dimension does not depend on what has it.
        joined: one of those of which `local` itself puts the parts together: where it is sharded,
            `local` gets the mesh axes' names as the keyword `axes`.
        joined_axes: over which it is then sharded in any case.
    """

    def names(inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[list[Dims], list[Dims]]:
        sides = [[tuple(dims.split()) for dims in side.split(",")] for side in rule.split("->")]
        of_inputs, of_outputs = (
            [dims for dims, a in zip(side, given, strict=True) if a is not None]
            for side, given in zip(sides, (inputs, outputs), strict=True)
        )
        return of_inputs, of_outputs

    return _split(local, arrays, names, tuple(over), tuple(summed), joined, joined_axes)


def _split(
    local: Callable[..., Any],
    arrays: tuple[jax.Array | None, ...],
    names: Callable[[Sequence[Any], Sequence[Any]], tuple[list[Dims], list[Dims]]],
    over: Dims,
    summed: Dims,
    joined: str | None = None,
    joined_axes: Dims = (),
) -> Any:
    """Without this, XLA would gather arrays onto every device before a kernel it cannot look into.

    `names` gives the dimensions of the inputs and of the outputs that are not None.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not over or mesh.manual_axes or mesh.size == 1 or jax.device_count() == 1:
        return local(*arrays)
    inputs, in_tree = jax.tree.flatten(arrays)
    whole = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in inputs]  # without their sharding
    outputs = jax.eval_shape(local, *jax.tree.unflatten(in_tree, whole))
    in_dims, out_dims = names(arrays, jax.tree.leaves(outputs, is_leaf=lambda a: a is None))
    out_tree = jax.tree.structure(outputs)
    shaped = zip(in_dims, inputs, strict=True)
    sizes = {d: n for dims, a in shaped for d, n in zip(dims, a.shape, strict=True)}

    def flat_local(*arrays: jax.Array, **joined: Dims) -> tuple[jax.Array, ...]:
        return tuple(jax.tree.leaves(local(*jax.tree.unflatten(in_tree, arrays), **joined)))

    def mesh_axes(specs: Sequence[Any]) -> dict[str, Dims]:
        """The mesh axes of each dimension: those of the first input in which it is split, but for
        an axis that another dimension of some array has already.
        """
        axes: dict[str, Dims] = dict.fromkeys(over, ())
        if joined:
            axes[joined] = joined_axes
        for dims, spec in zip(in_dims, specs, strict=True):
            for dim, part in zip(dims, spec, strict=False):
                if dim in over and not axes[dim]:
                    beside = {d for all_dims in (*in_dims, *out_dims) if dim in all_dims
                              for d in all_dims} | {joined}  # fmt: skip
                    beside |= set(over) if dim == joined else set()  # or devices would not match
                    taken = {axis for d in beside if d for axis in axes.get(d, ())}
                    axes[dim] = tuple(a for a in jax.tree.leaves(part) if a not in taken)
        return axes

    def local_sums(axes: dict[str, Dims]) -> Callable[..., tuple[jax.Array, ...]]:
        def fn(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            results = []
            by_name = {"axes": axes[joined]} if joined and axes[joined] else {}
            for out, dims in zip(flat_local(*arrays, **by_name), out_dims, strict=True):
                lacking = tuple(a for dim in summed if dim not in dims for a in axes[dim])
                results.append(jax.lax.psum(out, lacking) if lacking else out)
            return tuple(results)

        return fn

    def specs(axes: dict[str, Dims], side: list[Dims]) -> tuple[PartitionSpec, ...]:
        return tuple(PartitionSpec(*(axes.get(dim) or None for dim in dims)) for dims in side)

    sharding = jax.typeof(inputs[0]).sharding
    if AxisType.Explicit in sharding.mesh.axis_types:
        axes = mesh_axes([jax.typeof(a).sharding.spec for a in inputs])
        placed = [
            jax.sharding.reshard(a, NamedSharding(sharding.mesh, spec))
            for a, spec in zip(inputs, specs(axes, in_dims), strict=True)
        ]
        outputs = jax.shard_map(
            local_sums(axes),
            mesh=sharding.mesh,
            in_specs=specs(axes, in_dims),
            out_specs=specs(axes, out_dims),
            check_vma=False,
        )(*placed)
        return jax.tree.unflatten(out_tree, outputs)

    def partition(mesh: Any, arg_shapes: Any, _: Any) -> Any:
        axes = mesh_axes([shape.sharding.spec for shape in arg_shapes])
        if joined and sizes[joined] % math.prod(mesh.shape[axis] for axis in axes[joined]):
            axes[joined] = ()  # parts of different sizes
        named = lambda side: tuple(NamedSharding(mesh, spec) for spec in specs(axes, side))  # noqa: E731
        return mesh, local_sums(axes), named(out_dims), named(in_dims)

    every = dict.fromkeys(dim for dims in (*in_dims, *out_dims) for dim in dims)
    partitioned = custom_partitioning(flat_local)
    partitioned.def_partition(
        partition=partition,
        sharding_rule=" -> ".join(", ".join(map(" ".join, side)) for side in (in_dims, out_dims)),
        # Each once, in the order in which the rule names them first.
        need_replication_factors=tuple(dim for dim in every if dim not in over),
    )
    call = jax.custom_batching.custom_vmap(partitioned)

    @call.def_vmap
    def _batched(axis_size: int, in_batched: Any, *arrays: jax.Array) -> Any:
        # What is batched is not split; the kernel takes the batch as one more grid axis.
        in_axes = tuple(0 if batched else None for batched in in_batched)
        outputs = jax.vmap(flat_local, in_axes, axis_size=axis_size)(*arrays)
        return outputs, (True,) * len(outputs)

    return jax.tree.unflatten(out_tree, call(*inputs))


def placed_as(array: jax.Array, like: jax.Array) -> jax.Array:
    """`array` with the sharding of `like`, where that is part of an array's type."""
    sharding = jax.typeof(like).sharding
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    return jax.sharding.reshard(array, sharding) if explicit else array


def _present(arrays: Sequence[Any]) -> list[Any]:
    return [a for a in arrays if a is not None]
