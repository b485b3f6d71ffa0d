"""RMSNorm, projection and rotation in Triton for PyTorch.

Launchers, then the autograd.Function, then the entry points; the kernels are in triton_product.py.
The backward keeps the arguments and nothing else: the norm is computed again, and the products are
the library's.
"""

from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from liger_ops import backend_triton
from liger_ops.backend_triton import dense, row_stride, rows
from liger_ops.rms_norm import triton_kernel as rms_norm
from liger_ops.rms_norm_linear_rope import eager
from liger_ops.rms_norm_linear_rope.cases import Config, power_of_two
from liger_ops.rms_norm_linear_rope.check import Heads, Norm
from liger_ops.rms_norm_linear_rope.triton_product import (
    persistent_kernel,
    scale_kernel,
    tile_kernel,
    weight_kernel,
)
from liger_ops.rope import triton_kernel as rope


class Inputs(NamedTuple):
    """x (B, T, D), weight ((N + 2 K) H, D) of the product's dtype, and the others of `eager`."""

    x: Any
    norm_weight: Any
    weight: Any
    bias: Any
    q_norm_weight: Any
    k_norm_weight: Any
    cos: Any
    sin: Any


class _Persistent(NamedTuple):
    """A launch of persistent_kernel, by Triton's own dispatch, which encodes the descriptors."""

    programs: int
    x_block: list[int]
    weight_block: list[int]
    result_block: list[int]
    arguments: tuple[Any, ...]
    config: Config

    def __call__(self, x, _, weight, bias, q_norm, k_norm, cos, sin, r, q, k, v) -> None:
        x, columns, size = x.reshape(-1, x.shape[-1]), weight.shape[0], q.shape[-1]
        y = q.as_strided((len(x), columns // size, size), (columns, size, 1))  # k and v follow q
        blocks = self.x_block, self.weight_block, self.result_block
        descriptors = [
            TensorDescriptor(t, list(t.shape), list(t.stride()), block)
            for t, block in zip((x, weight, y), blocks, strict=True)
        ]
        launch: Any = persistent_kernel[(self.programs,)]
        with torch.cuda.device(x.device if x.is_cuda else -1):
            launch(
                *descriptors, bias, q_norm, k_norm, cos, sin, r, *self.arguments,
                num_warps=self.config.num_warps, num_stages=self.config.num_stages,
            )  # fmt: skip


class _Plan(NamedTuple):
    launch: Any
    launch_weight: backend_triton.Launch | None  # where the norm's weight goes into the weight
    launch_scales: backend_triton.Launch | None  # of rows, where r comes first


# By the arguments' metadata: the plans depend on nothing else.
_PLANS: dict[Any, _Plan] = {}


def _plan(given: Inputs, heads: Heads, norm: Norm, config: Config | None, precision: str) -> _Plan:
    x, weight = given.x, given.weight
    (batch, time, dim), size = x.shape, given.cos.shape[-1]
    num_rows, itemsize = batch * time, weight.element_size()
    head_norms = given.q_norm_weight is not None or given.k_norm_weight is not None
    if config is None:
        config = Config.for_shape(
            num_rows, heads.size, head_norms, itemsize, backend_triton.shared_memory(x.device)
        )  # fmt: skip
    of_tile, half, shares = config.tile(heads.size)
    if head_norms and shares > 1:
        raise ValueError(f"tiles of {config.block_columns} columns do not hold a head to be normed")
    same = x.dtype == weight.dtype
    scales_weight = given.norm_weight is not None and config.scales == "weight" and same
    # Then x is multiplied as it lies in memory.
    as_it_is = same and (scales_weight or given.norm_weight is None)
    launch_weight = launch_scales = None
    block = min(power_of_two(dim), 4096)
    if scales_weight:
        arguments = row_stride(rows(weight)), norm.offset
        launch_weight = backend_triton.Launch(
            weight_kernel, len(weight), arguments, (dim, block), 4
        )  # fmt: skip
    if as_it_is or weight.dtype == torch.float16:
        launch_scales = backend_triton.Launch(
            scale_kernel, num_rows, (row_stride(rows(x)), norm.eps), (dim, block), 4
        )
    column_blocks = config.column_blocks(heads.q, heads.kv, heads.size)
    tiles = -(-num_rows // config.block_rows) * column_blocks
    strides = (*rope.angle_strides(given.cos), *rope.angle_strides(given.sin))
    if config.persistent and as_it_is and _fits_descriptors(given, heads, of_tile):
        launch = _Persistent(
            min(tiles, backend_triton.multiprocessors(x.device)),
            [config.block_rows, config.block_dim],
            [of_tile * heads.size, config.block_dim],
            [config.block_rows, of_tile, heads.size // 4],
            (num_rows, -(-dim // config.block_dim), time, *strides, norm.eps, norm.offset, dim,
             *heads, config.block_rows, of_tile, config.block_dim, config.group, column_blocks,
             precision),
            config,
        )  # fmt: skip
        return _Plan(launch if tiles else None, launch_weight, launch_scales)
    launch = backend_triton.Launch(
        tile_kernel,
        tiles,
        (num_rows, time, row_stride(rows(x)), row_stride(rows(weight)), *strides, norm.eps,
         norm.offset),
        (dim, *heads, size, config.block_rows, of_tile, half, shares, config.block_dim,
         config.group, column_blocks, precision),
        config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
    return _Plan(launch if tiles else None, launch_weight, launch_scales)


def _fits_descriptors(given: Inputs, heads: Heads, of_tile: int) -> bool:
    """Whether heads are rotated whole and fill whole tiles, and rows lie as the tensor memory
    accelerator wants them.
    """
    if torch.compiler.is_compiling() or given.cos.shape[-1] != heads.size:
        return False
    if heads.q % of_tile or heads.kv % of_tile:
        return False
    aligned = all(
        row_stride(rows(t)) * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0
        for t in (given.x, given.weight)
    )
    # The least that a descriptor's block has of a row is 16 bytes, and results go by quarter heads.
    least = 4 * 16 // given.weight.element_size()
    return aligned and heads.size == power_of_two(heads.size) and heads.size >= least


def _forward(
    given: Inputs, heads: Heads, norm: Norm, config: Config | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    given = given._replace(cos=rope.adjacent(given.cos), sin=rope.adjacent(given.sin))
    x, weight = given.x, given.weight
    exact = weight.dtype == torch.float32 and not backend_triton.allows_tf32()
    precision = "ieee" if exact else "tf32"
    of = backend_triton.metadata
    aligned = given.x.data_ptr() % 16 if config is not None and config.persistent else 0
    plan = backend_triton.kept(
        _PLANS,
        lambda: (*map(of, given), heads, norm, config, precision, aligned),
        lambda: _plan(given, heads, norm, config, precision),
    )
    q, k, v = _results(x, weight.dtype, heads, isinstance(plan.launch, _Persistent))
    if plan.launch is None:
        return q, k, v
    weight, norm_weight, r = rows(weight), dense(given.norm_weight), None
    assert weight is not None
    if plan.launch_weight is not None:
        scaled = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        plan.launch_weight(weight, norm_weight, scaled)
        weight, norm_weight = scaled, None
    if plan.launch_scales is not None:
        r = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        plan.launch_scales(rows(x), r)
    plan.launch(
        rows(x), norm_weight, weight, dense(given.bias), dense(given.q_norm_weight),
        dense(given.k_norm_weight), given.cos, given.sin, r, q, k, v,
    )  # fmt: skip
    return q, k, v


def _results(
    x: torch.Tensor, dtype: torch.dtype, heads: Heads, together: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for q, k and v; `together` in one, where a row has q's heads, then k's, then v's."""
    if not together:
        shapes = ((*x.shape[:-1], n, heads.size) for n in (heads.q, heads.kv, heads.kv))
        return tuple(torch.empty(s, dtype=dtype, device=x.device) for s in shapes)  # type: ignore[return-value]
    y = torch.empty(*x.shape[:-1], heads.q + 2 * heads.kv, heads.size, dtype=dtype, device=x.device)
    # Tensors of their own and no views: autograd forbids to change several views of one tensor.
    parts = y.split((heads.q, heads.kv, heads.kv), dim=-2)
    return tuple(y.new_empty(0).set_(part) for part in parts)  # type: ignore[return-value]


def _backward(
    given: Inputs, heads: Heads, norm: Norm, needs: Inputs, upstream: tuple[Any, Any, Any]
) -> Inputs:
    """The gradients of what `needs` says, but for those of the angles."""
    x, weight = given.x, given.weight
    num_rows, dim = x.shape[0] * x.shape[1], x.shape[2]
    y: Any = None
    if needs.weight or given.q_norm_weight is not None or given.k_norm_weight is not None:
        y = rms_norm.rms_norm(x, given.norm_weight, *norm).to(weight.dtype).view(num_rows, dim)

    du = torch.empty(*x.shape[:2], heads.q + 2 * heads.kv, heads.size, dtype=weight.dtype,
                     device=x.device)  # fmt: skip
    parts = du.split((heads.q, heads.kv, heads.kv), dim=2)
    for part, dy in zip(parts, upstream, strict=True):
        if dy is None:
            part.zero_()
    if upstream[2] is not None:
        parts[2].copy_(upstream[2])
    own = (given.q_norm_weight, given.k_norm_weight)
    # Turned back into their parts of du or, where a norm comes before that, into new memory.
    turned = [
        dy if dy is None else part if weight is None else torch.empty_like(part).contiguous()
        for part, dy, weight in zip(parts[:2], upstream[:2], own, strict=True)
    ]
    if any(t is not None for t in turned):
        rope._rotate(*upstream[:2], given.cos, given.sin, "half", True, turned)
    of_own = [
        _through_norm(given, norm, y, columns, weight, dy, part, need)
        for columns, weight, dy, part, need in zip(
            (slice(0, heads.q * heads.size), slice(heads.q * heads.size, -heads.kv * heads.size)),
            own, turned, parts[:2], (needs.q_norm_weight, needs.k_norm_weight), strict=True,
        )
    ]  # fmt: skip

    du = du.view(num_rows, heads.columns)
    dx = dnorm_weight = dweight = dbias = None
    if needs.x or needs.norm_weight:
        dy = (du @ weight).view(x.shape)
        dx, dnorm_weight = rms_norm._backward(
            x, given.norm_weight, dy, None, *norm, needs.x, needs.norm_weight
        )
    if needs.weight:
        dweight = du.t() @ y
    if needs.bias:
        dbias = du.sum(0, dtype=torch.float32).to(given.bias.dtype)
    return Inputs(dx, dnorm_weight, dweight, dbias, *of_own, None, None)  # type: ignore[arg-type]


def _through_norm(given: Inputs, norm: Norm, y, columns: slice, own, dy, part, need: bool) -> Any:
    """Fills `part` of du from dy through the heads' own norm, if any, and returns the gradient of
    that norm's weight.

    What the norm saw is multiplied once more, from y: the heads' columns of the product.
    """
    if own is None:
        return None
    if dy is None:
        return torch.zeros_like(own) if need else None
    weight, bias = given.weight[columns], given.bias
    bias = None if bias is None else bias[columns].to(weight.dtype)
    u = torch.nn.functional.linear(y, weight, bias).view(part.shape)
    of_heads, of_own = rms_norm._backward(u, own, dy, None, *norm, True, need)
    part.copy_(of_heads)
    return of_own


class _Fused(torch.autograd.Function):
    """Outputs q, k and v."""

    @staticmethod
    def forward(ctx: Any, heads, norm, config, *given):
        ctx.settings = heads, norm
        ctx.save_for_backward(*given)
        ctx.set_materialize_grads(False)
        return _forward(Inputs(*given), heads, norm, config)

    @staticmethod
    def backward(ctx: Any, *upstream):  # type: ignore[override]
        given, needs = Inputs(*ctx.saved_tensors), Inputs(*ctx.needs_input_grad[3:])
        heads, norm = ctx.settings
        if all(dy is None for dy in upstream):
            return (None,) * 11
        if backend_triton.creates_graph():
            return None, None, None, *_plain_gradients(given, ctx.settings, upstream, True)
        gradients = Inputs(*(None,) * 8)  # type: ignore[arg-type]
        if any(needs[:6]):
            gradients = _backward(given, heads, norm, needs, upstream)
        if needs.cos or needs.sin:
            angles = [t if i > 5 else None if t is None else t.detach()
                      for i, t in enumerate(given)]  # fmt: skip
            with torch.enable_grad():
                of_angles = _plain_gradients(Inputs(*angles), ctx.settings, upstream, False)[6:]  # type: ignore[arg-type]
            gradients = gradients._replace(cos=of_angles[0], sin=of_angles[1])
        return None, None, None, *gradients


def _plain_gradients(given: Inputs, settings: Any, upstream: Any, again: bool) -> list[Any]:
    """By the plain version, of what asks for one; differentiable if `again`."""
    outputs = eager.rms_norm_linear_rope(*given, *settings)
    used = [
        (y, torch.zeros_like(y) if dy is None else dy)
        for y, dy in zip(outputs, upstream, strict=True)
        if y.requires_grad
    ]
    outputs, upstream = zip(*used, strict=True)
    gradients = backend_triton.differentiable_gradients(outputs, given, upstream)
    return gradients if again else [g if g is None else g.detach() for g in gradients]


def rms_norm_linear_rope(
    *given: torch.Tensor | None, heads: Heads, norm: Norm, config: Config | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of the arguments of `Inputs`; with the tiles of `config`, if given."""
    inputs = Inputs(*given)  # type: ignore[arg-type]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        return _Fused.apply(heads, norm, config, *inputs)  # type: ignore[return-value]
    # autograd.Function costs as much host time as the launch: spared where nothing is to be saved.
    return _forward(inputs, heads, norm, config)


def composed(
    *given: torch.Tensor | None, heads: Heads, norm: Norm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The kernel of the norm, the library's product, and the kernel of the rotation."""
    inputs = Inputs(*given)  # type: ignore[arg-type]
    return eager.rms_norm_linear_rope(
        *inputs, heads, norm, normed=rms_norm.rms_norm, rotated=rope.rope
    )
