"""Where parameters and batches lie on a mesh with the axes data, fsdp and tensor.

    mesh = make_mesh(fsdp=4, tensor=2)
    model = from_pretrained(path, mesh=mesh, rules=rules_for(mesh))
    batch = jax.device_put(batch, batch_sharding(mesh))
    with jax.set_mesh(mesh):
        loss, gradients = step(model, batch)  # jitted; loss_fn(..., vocab_mesh_axis="tensor")

Rows of the batch are split over data and fsdp. Every matrix is split over tensor along heads,
features of the feed-forward part, or classes, so that activations of size D are whole on every
device and the norms' kernels need nothing from others; and over fsdp along its other axis, from
which it is gathered for its product. Over data nothing but the batch is split.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_liger.models.checkpoint import Rules
from jax_liger.models.mesh import batch_sharding as batch_sharding
from jax_liger.models.mesh import make_mesh as make_mesh

# Of the layers whose path matches, how the kernel (inputs, outputs) is split. The first one counts.
KERNELS = (
    (r".*\.(o_proj|down_proj)", ("tensor", "fsdp")),
    (r".*_proj|lm_head", ("fsdp", "tensor")),
    (r".*", (None, None)),
)


def rules(path: str, shape: tuple[int, ...]) -> P:
    """How a parameter is split, whatever the sizes of the axes are.

    Args:
        path: such as "model.layers.0.mlp.up_proj.kernel", or of an adapter's part.
        shape: its shape. Experts' matrices have an axis more in front, which is not split.
    """
    layer, _, name = path.rpartition(".")
    if name == "embedding":
        return P("tensor", "fsdp")
    inputs, outputs = next(spec for known, spec in KERNELS if re.fullmatch(known, layer))
    return {
        "kernel": P(*(None,) * (len(shape) - 2), inputs, outputs),
        "lora_a": P(inputs, None),
        "lora_b": P(None, outputs),
        "magnitude": P(outputs),
        "bias": P(outputs),
    }.get(name, P())


def rules_for(mesh: Mesh, rules: Rules = rules) -> Rules:
    """The rules less the axes that the mesh has not, or whose devices do not divide a size."""
    return functools.partial(_fitting, mesh, rules)


def shard(model: nnx.Module, mesh: Mesh, rules: Rules = rules) -> None:
    """Lays a model's variables, or an optimizer's, out on a mesh, in place.

    Args:
        model: a module. What is no parameter, such as counts of random numbers, is copied to every
            device. An `nnx.Optimizer` made of a model that is laid out already needs no call.
        mesh: the devices.
        rules: as of `from_pretrained`; axes that do not fit are left out.
    """
    fitting, placed = rules_for(mesh, rules), []
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        value = variable.get_value()
        is_param = isinstance(variable, nnx.Param)
        spec = fitting(".".join(map(str, path)), value.shape) if is_param else P()
        placed.append((path, variable.replace(jax.device_put(value, NamedSharding(mesh, spec)))))
    nnx.update(model, nnx.from_flat_state(placed))


def _fitting(mesh: Mesh, rules: Callable[..., P], path: str, shape: tuple[int, ...]) -> P:
    def part(given: Any, size: int) -> Any:
        axes = (given,) if isinstance(given, str) else given or ()
        axes = tuple(axis for axis in axes if axis in mesh.axis_names)
        if size % math.prod(mesh.shape[axis] for axis in axes):
            return None
        return axes[0] if len(axes) == 1 else axes or None

    return P(*map(part, rules(path, shape), shape))
