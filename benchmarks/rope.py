"""rope of the queries and keys of a layer, with the angles of positions 0 to T - 1."""

import torch

from description import Case, Peer, normal, with_liger

# Batch, time, heads, kv heads, head size.
SHORT = (1, 128, 32, 8, 128)
SHAPES = [(8, 2048, 32, 8, 128), (8, 2048, 28, 4, 128), (8, 2048, 32, 8, 64), SHORT]


def case(batch: int, time: int, heads: int, kv_heads: int, head_dim: int) -> Case:
    def parameters(device: str) -> tuple[torch.Tensor, ...]:
        frequencies = 500_000.0 ** -(torch.arange(0, head_dim, 2, device=device) / head_dim)
        angles = torch.outer(torch.arange(time, device=device), frequencies).repeat(1, 2)
        return angles.cos(), angles.sin()

    return Case(
        op="rope",
        rows=batch * time,
        dim=(heads + kv_heads) * head_dim,
        shape=f"B{batch} T{time} N{heads} K{kv_heads} H{head_dim}",
        data=lambda device: tuple(
            normal(device, batch, time, n, head_dim).requires_grad_() for n in (heads, kv_heads)
        ),
        parameters=parameters,
        reference=lambda q, k, cos, sin: tuple(_rotated(x, cos, sin) for x in (q, k)),
        others=others,
        elements=batch * time * (heads + kv_heads) * head_dim,
        # q and k together are one array: read and written. The angles are few and not counted.
        arrays={"forward": 2, "backward": 2},
    )


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


def others() -> dict[str, Peer]:
    def liger(apply, q, k, cos, sin):
        # It takes (B, N, T, H) and looks through the transposition at the memory below.
        rotated = apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return tuple(x.transpose(1, 2) for x in rotated)

    # It rotates in place, q and k forward and their upstream gradients backward. That is timed as
    # it is, without the copy that a caller who still needs them would have to make.
    return with_liger({}, "rope", "LigerRopeFunction", liger, overwrites=True)
