"""A head whose classes are split over processes, as the argument `process_group` or a DTensor says
it, and `as_forward_of` for weights that are only whole inside their module's forward.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from liger_ops.fused_linear_cross_entropy import eager_vocab
from liger_ops.fused_linear_cross_entropy.eager_vocab import Shard


class Given(NamedTuple):
    """What the loss works on: tensors of this process."""

    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    bias: torch.Tensor | None
    class_weight: torch.Tensor | None


def is_dtensor(tensor: torch.Tensor | None) -> bool:
    """Without importing what defines them."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter, type(None)):
        return False
    module = sys.modules.get("torch.distributed.tensor")  # where there is one, it was imported
    return module is not None and isinstance(tensor, module.DTensor)


def split(given: Given, process_group: Any) -> tuple[Given, Shard | None]:
    """Plain tensors, and which of the classes the weight's are; None for all of them.

    Raises ValueError for a DTensor that is split in another way than by its classes.
    """
    if not is_dtensor(given.weight):
        if process_group is None or dist.get_world_size(process_group) == 1:
            return given, None
        size, processes = len(given.weight), dist.get_world_size(process_group)
        first = dist.get_rank(process_group) * size
        return given, Shard(process_group, first, size, size * processes)
    weight: Any = given.weight
    shard = _shard_of(weight, process_group)
    hidden, labels = _whole(given.hidden), _whole(given.labels)
    local = weight.to_local()  # whose gradient comes back as a DTensor that is split as the weight
    bias, class_weight = (_own(t, weight, shard) for t in (given.bias, given.class_weight))
    return Given(hidden, local, labels, bias, class_weight), shard


def _shard_of(weight: Any, process_group: Any) -> Shard | None:
    mesh, placements = weight.device_mesh, weight.placements
    dims = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
    if len(dims) > 1 or not all(placements[i].is_shard(0) for i in dims):
        raise ValueError(
            "weight must be a DTensor that is split by its classes, Shard(0), over one dimension "
            f"of its mesh and replicated over the others; got {placements}"
        )
    if not dims or mesh.size(dims[0]) == 1:
        return None
    group = mesh.get_group(dims[0])
    if process_group is not None and process_group is not group:
        raise ValueError(
            f"process_group must be None or the one over which the DTensor weight is split, "
            f"{group}; got {process_group}"
        )
    vocab = weight.shape[0]
    # As torch.chunk deals them out: the last processes may have fewer.
    most = -(-vocab // mesh.size(dims[0]))
    first = min(mesh.get_local_rank(dims[0]) * most, vocab)
    return Shard(group, first, min(most, vocab - first), vocab)


def _whole(tensor: Any) -> torch.Tensor:
    if not is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import Replicate

    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim).to_local()


def _own(vector: Any, weight: Any, shard: Shard | None) -> torch.Tensor | None:
    """The process's part of bias or class_weight, of which it may have all or its part."""
    if vector is None or shard is None:
        return None if vector is None else _whole(vector)
    if is_dtensor(vector) and vector.placements == weight.placements:
        return vector.to_local()
    vector = _whole(vector)
    if len(vector) != shard.vocab:
        return vector  # its part, or a length that the checks refuse
    # The gradient of what all processes have is the sum of theirs.
    return eager_vocab.spread(vector, shard)[shard.first : shard.first + shard.size]


def as_forward_of(
    module: torch.nn.Module, fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """fn(*args, **kwargs), run as `module`'s forward, with all hooks before and after it.

    FSDP gathers the parameters of a module in a hook before its forward and frees them in one after
    it, and its gradients are scattered by hooks that it sets there. A loss that uses `head.weight`
    without calling `head` therefore sees a part of it, and the part of another batch than its own:

        loss = as_forward_of(head, lambda h: fused_linear_cross_entropy(h, head.weight, labels), h)

    Args:
        module: the head, as `fully_shard` has wrapped it.
        fn: reads the module's parameters when it is called.
        args, kwargs: what it is called with; hooks see tensors among them, such as hidden states
            whose gradient FSDP waits for.

    Returns:
        What fn returns.
    """
    had = module.__dict__.get("forward")
    module.forward = fn
    try:
        return module(*args, **kwargs)
    finally:
        if had is None:
            del module.forward
        else:
            module.forward = had
