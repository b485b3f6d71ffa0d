"""A head whose classes are split over devices: what the argument `vocab_mesh_axis` comes to."""

import functools
import math
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from liger_ops.fused_linear_cross_entropy import xla_vocab


class Split(NamedTuple):
    """The mesh axes over which the classes are split.

    Attributes:
        axes: their names; () where the argument is None.
        devices: how many there are along them.
        manual: whether each device gives its own part, as under shard_map.
    """

    axes: tuple[str, ...] = ()
    devices: int = 1
    manual: bool = False

    @classmethod
    def of(
        cls, vocab_mesh_axis: str | tuple[str, ...] | None, weight: jax.Array, vocab_axis: int
    ) -> "Split":
        """Raises ValueError where there is no such axis, or it does not split the weight."""
        if vocab_mesh_axis is None:
            return cls()
        axes = (vocab_mesh_axis,) if isinstance(vocab_mesh_axis, str) else tuple(vocab_mesh_axis)
        mesh = jax.sharding.get_abstract_mesh()
        if not axes or not set(axes) <= set(mesh.axis_names):
            hint = "" if mesh.axis_names else "; outside shard_map, jax.set_mesh puts one in scope"
            raise ValueError(
                f"vocab_mesh_axis must name axes of the mesh in scope, {mesh.axis_names}; got "
                f"{vocab_mesh_axis!r}{hint}"
            )
        manual = [axis in mesh.manual_axes for axis in axes]
        if any(manual) != all(manual):
            raise ValueError(
                f"vocab_mesh_axis must name axes that are all manual under shard_map or none; got "
                f"{axes}, of which {manual} are"
            )
        split = cls(axes, math.prod(mesh.shape[axis] for axis in axes), all(manual))
        split._check(weight, vocab_axis)
        return split

    def _check(self, weight: jax.Array, vocab_axis: int) -> None:
        if not self.manual and weight.shape[vocab_axis] % self.devices:
            raise ValueError(
                f"weight must have a number of classes that the {self.devices} devices of "
                f"vocab_mesh_axis {self.axes} divide; got {weight.shape[vocab_axis]}"
            )
        if self.manual:  # where shard_map keeps count of what differs between devices
            counted = jax.typeof(jax.lax.axis_index(self.axes)).manual_axis_type.varying
            same = set(self.axes) & counted - jax.typeof(weight).manual_axis_type.varying
            if same:
                raise ValueError(
                    f"weight must hold other classes on every device of vocab_mesh_axis "
                    f"{self.axes}; got one that is the same along {sorted(same)}"
                )

    def whole_rows(self, array: jax.Array) -> jax.Array:
        """`array` (rows, ...) of every device, where rows may be split over these axes as well."""
        sharding = jax.typeof(array).sharding
        if self.manual or not self.axes or AxisType.Explicit not in sharding.mesh.axis_types:
            return array
        parts = ((part,) if isinstance(part, str) else part or () for part in sharding.spec)
        spec = P(*(tuple(axis for axis in part if axis not in self.axes) for part in parts))
        return jax.sharding.reshard(array, spec)

    def vocab(self, weight: jax.Array, vocab_axis: int) -> int:
        """The classes of all devices."""
        return weight.shape[vocab_axis] * (self.devices if self.manual else 1)


def plain(
    split: Split,
    hidden: jax.Array,
    weight: jax.Array,
    classes: jax.Array,
    bias: jax.Array | None,
    class_weight: jax.Array | None,
    num_items: jax.Array | None,
    logit_scale: float,
    vocab_axis: int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    reduction: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """loss, z_loss and predicted classes by the plain version."""

    def run(hidden, weight, classes, bias, class_weight, num_items):
        return xla_vocab.fused_linear_cross_entropy(
            hidden, weight, classes, bias, class_weight, num_items, logit_scale, vocab_axis,
            label_smoothing, softcap, z_loss, reduction, split.axes,
        )  # fmt: skip

    arrays: Any = (hidden, weight, classes, bias, class_weight, num_items)
    if not split.manual:
        of_weight = P(split.axes, None) if vocab_axis == 0 else P(None, split.axes)
        specs = (P(), of_weight, P(), P(split.axes), P(split.axes), P())
        if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
            # hidden, classes and num_items may be split in any other way.
            arrays = tuple(
                jax.sharding.reshard(array, spec) if spec != P() and array is not None else array
                for array, spec in zip(arrays, specs, strict=True)
            )
        over = functools.partial(jax.shard_map, axis_names=set(split.axes), out_specs=P())
        run = over(run, in_specs=specs)
    return run(*arrays)
