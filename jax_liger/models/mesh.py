"""The mesh with the axes data, fsdp and tensor, and how activations lie on it."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp", "tensor")
ROWS = AXES[:2]  # the axes over which a batch is split


def make_mesh(
    *, data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh with the three axes, over data * fsdp * tensor devices, the first ones by default."""
    shape = (data, fsdp, tensor)
    if devices is None:
        devices = jax.devices()[: math.prod(shape)]
    if len(devices) != math.prod(shape):
        raise ValueError(
            f"data * fsdp * tensor must be the number of devices; got {shape} and {len(devices)}"
        )
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of arrays (B, ...): rows are split over data and fsdp."""
    return NamedSharding(mesh, P(tuple(axis for axis in ROWS if axis in mesh.axis_names)))


def split_rows(x: jax.Array) -> jax.Array:
    """The residual stream x (B, T, D), its rows split over data and fsdp, and whole otherwise.

    Where a mesh with such axes is in scope (`jax.set_mesh`) and their devices divide B; else x as
    it is. Without this XLA would split D as the parameters' other axes are, and every norm would
    have to gather it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    automatic = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(a for a, kind in automatic if a in ROWS and kind == AxisType.Auto)
    if not axes or x.shape[0] % math.prod(mesh.shape[axis] for axis in axes):
        return x
    return jax.lax.with_sharding_constraint(x, P(axes, *(None,) * (x.ndim - 1)))


def lookup(embedding: nnx.Embed, ids: jax.Array) -> jax.Array:
    """embedding(ids), where the table's classes may be split over tensor.

    With a mesh with that axis in scope, each device looks up the ids of its own classes and the
    results are summed; XLA would gather the table. An id that is no class makes NaNs.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    devices = mesh.shape["tensor"] if kinds.get("tensor") == AxisType.Auto else 1
    if devices == 1 or embedding.num_embeddings % devices:
        return embedding(ids)
    (table,) = embedding.promote_dtype((embedding.embedding[...],), dtype=embedding.dtype)

    def part(table: jax.Array, ids: jax.Array) -> jax.Array:
        rows = ids - jax.lax.axis_index("tensor") * table.shape[0]
        own = (rows >= 0) & (rows < table.shape[0])
        found = jnp.where(own[..., None], table[jnp.where(own, rows, 0)], 0)
        # In float32, since XLA for CPUs fails on such a sum of 16-bit numbers. It is exact.
        wide = jnp.promote_types(found.dtype, jnp.float32)
        return jax.lax.psum(found.astype(wide), "tensor").astype(found.dtype)

    run = jax.shard_map(
        part, in_specs=(P("tensor", None), P()), out_specs=P(), axis_names={"tensor"}
    )
    known = (ids >= 0) & (ids < table.shape[0])
    return jnp.where(known[..., None], run(table, ids), jnp.nan)
