"""A head whose classes are split over devices: what the argument `vocab_mesh_axis` comes to."""

import functools
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from liger_ops.fused_linear_cross_entropy import xla_vocab

Axes = tuple[str, ...]


class Head(NamedTuple):
    """weight with its classes on `vocab_axis`, and bias and class_weight (V,), each perhaps None."""

    weight: jax.Array
    bias: jax.Array | None
    class_weight: jax.Array | None
    vocab_axis: int

    @property
    def specs(self) -> Any:
        """Given the mesh axes of the classes, how weight, bias and class_weight are split."""
        whole = P(None, None)
        return lambda axes: (
            P(*whole[: self.vocab_axis], axes, *whole[self.vocab_axis + 1 :]),
            *(None if a is None else P(axes) for a in (self.bias, self.class_weight)),
        )


def split(head: Head, vocab_mesh_axis: str | Axes | None) -> tuple[Axes, Head]:
    """The axes by name, none where the argument is None, and the head so split: under shard_map as
    it is, elsewhere with its arrays' shardings made so.

    Raises ValueError where there is no such axis, or the classes do not divide by its size.
    """
    if vocab_mesh_axis is None:
        return (), head
    axes = (vocab_mesh_axis,) if isinstance(vocab_mesh_axis, str) else tuple(vocab_mesh_axis)
    mesh = jax.sharding.get_abstract_mesh()
    if not axes or not set(axes) <= set(mesh.axis_names):
        hint = "" if mesh.axis_names else "; outside shard_map a mesh is put in scope by jax.set_mesh"
        raise ValueError(
            f"vocab_mesh_axis must name axes of the mesh in scope, {mesh.axis_names}; got "
            f"{vocab_mesh_axis!r}{hint}"
        )
    manual = [axis in mesh.manual_axes for axis in axes]
    if any(manual) != all(manual):
        raise ValueError(
            f"vocab_mesh_axis must name axes that are all manual under shard_map or none; "
            f"{vocab_mesh_axis!r} are {manual}"
        )
    if all(manual):
        _check_varies(head.weight, axes)
        return axes, head
    devices, classes = _devices(axes), head.weight.shape[head.vocab_axis]
    if classes % devices:
        raise ValueError(
            f"weight must have a number of classes that the {devices} devices of vocab_mesh_axis "
            f"{vocab_mesh_axis!r} divide; got {classes}"
        )
    explicit = AxisType.Explicit in mesh.axis_types
    place = jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint
    placed = jax.tree.map(place, tuple(head[:3]), head.specs(axes))
    return axes, Head(*placed, head.vocab_axis)


def _check_varies(weight: jax.Array, axes: Axes) -> None:
    """Where shard_map keeps count of what differs between devices (check_vma=True)."""
    tracked = jax.typeof(jax.lax.axis_index(axes)).manual_axis_type.varying
    same = set(axes) & tracked - jax.typeof(weight).manual_axis_type.varying
    if same:
        raise ValueError(
            f"weight must hold other classes on every device of vocab_mesh_axis {axes}; got one "
            f"that is the same along {sorted(same)}"
        )


def is_manual(axes: Axes) -> bool:
    """Whether each device gives its own part, as under shard_map."""
    return bool(axes) and axes[0] in jax.sharding.get_abstract_mesh().manual_axes


def _devices(axes: Axes) -> int:
    size = 1
    for axis in axes:
        size *= jax.sharding.get_abstract_mesh().shape[axis]
    return size


def vocab(head: Head, axes: Axes) -> int:
    """The classes of all devices."""
    return head.weight.shape[head.vocab_axis] * (_devices(axes) if is_manual(axes) else 1)


def plain(
    hidden, weight, classes, bias, class_weight, num_items, logit_scale, vocab_axis, *settings: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """loss, z_loss and predicted classes by the plain version; settings end in the axes."""
    axes = settings[-1]

    def run(hidden, weight, classes, bias, class_weight, num_items):
        return xla_vocab.fused_linear_cross_entropy(
            hidden, weight, classes, bias, class_weight, num_items, logit_scale, vocab_axis,
            *settings,
        )  # fmt: skip

    if not is_manual(axes):
        of_weight, of_bias, of_class_weight = Head(weight, bias, class_weight, vocab_axis).specs(
            axes
        )
        in_specs = (P(), of_weight, P(), of_bias, of_class_weight, P())
        split_over = functools.partial(jax.shard_map, axis_names=set(axes), out_specs=P())
        run = split_over(run, in_specs=in_specs)
    return run(hidden, weight, classes, bias, class_weight, num_items)
