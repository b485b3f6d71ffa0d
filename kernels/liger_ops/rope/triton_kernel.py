"""Rotary embedding in Triton for PyTorch.

Kernel, then launcher, then the autograd.Function, then the entry point. One kernel rotates q and k
in one launch, forwards or, for the gradients, backwards. Tensors are read and written where they
lie, by the strides of their first three dimensions; what is written is always a new tensor.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from liger_ops import backend_triton
from liger_ops.rope import eager
from liger_ops.rope.cases import Config, power_of_two


@triton.jit
def _load(base, fits, FULL: tl.constexpr, start, width, BLOCK: tl.constexpr):
    """`width` columns from `start` in a tile of BLOCK, a power of two.

    FULL: `fits` is true everywhere, so that it need not be looked at.
    """
    col = tl.arange(0, BLOCK)[None, None, :]
    if FULL and width == BLOCK:
        value = tl.load(base + start + col)
    else:
        value = tl.load(base + start + col, mask=fits & (col < width), other=0.0)
    return value


@triton.jit
def _store(base, value, fits, FULL: tl.constexpr, start, width, BLOCK: tl.constexpr):
    col = tl.arange(0, BLOCK)[None, None, :]
    value = value.to(base.dtype.element_ty)
    if FULL and width == BLOCK:
        tl.store(base + start + col, value)
    else:
        tl.store(base + start + col, value, mask=fits & (col < width))


@triton.jit
def _load_pairs(
    base, fits, FULL: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Of the first R columns the first features of all pairs, and the second ones, float32."""
    if INTERLEAVED:  # read side by side, as they lie, and taken apart in registers
        x = _load(base, fits, FULL, 0, R, 2 * HALF)
        first, second = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], HALF, 2)))
    else:
        first = _load(base, fits, FULL, 0, R // 2, HALF)
        second = _load(base, fits, FULL, R // 2, R // 2, HALF)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _store_pairs(
    base,
    first,
    second,
    fits,
    FULL: tl.constexpr,
    R: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    if INTERLEAVED:
        x = tl.join(first.to(base.dtype.element_ty), second.to(base.dtype.element_ty))
        x = tl.reshape(x, (x.shape[0], x.shape[1], 2 * HALF))
        _store(base, x, fits, FULL, 0, R, 2 * HALF)
    else:
        _store(base, first, fits, FULL, 0, R // 2, HALF)
        _store(base, second, fits, FULL, R // 2, R // 2, HALF)


@triton.jit
def _heads(share, HEADS: tl.constexpr, SHARES: tl.constexpr, BLOCK: tl.constexpr):
    """The heads (1, BLOCK, 1) of one share, and the mask of those that there are."""
    each: tl.constexpr = (HEADS + SHARES - 1) // SHARES
    number = tl.arange(0, BLOCK)[None, :, None]
    head = share * each + number
    return head.to(tl.int64), (number < each) & (head < HEADS)


@triton.jit
def _rotate_kernel(
    cos_ptr,  # (B, T, R)
    sin_ptr,  # (B, T, R)
    q_ptr,  # (B, T, N, H), or None with all that is called q
    k_ptr,  # (B, T, K, H), or None with all that is called k
    q_out_ptr,  # (B, T, N, H)
    k_out_ptr,  # (B, T, K, H)
    num_rows,  # B T
    T,
    cos_stride_b,  # 0 where rows of the batch share their angles
    cos_stride_t,
    sin_stride_b,
    sin_stride_t,
    q_stride_b,
    q_stride_t,
    q_stride_n,
    k_stride_b,
    k_stride_t,
    k_stride_n,
    q_out_stride_b,
    q_out_stride_t,
    q_out_stride_n,
    k_out_stride_b,
    k_out_stride_t,
    k_out_stride_n,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    HALF: tl.constexpr,  # powers of two that hold R / 2 and H - R
    REST: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACKWARDS: tl.constexpr,
):
    share = tl.program_id(0) % SHARES
    first_row = (tl.program_id(0) // SHARES).to(tl.int64) * BLOCK_ROWS
    row = first_row + tl.arange(0, BLOCK_ROWS)[:, None, None]
    b, t = row // T, row % T
    row_fits = row < num_rows
    ROWS_FULL: tl.constexpr = BLOCK_ROWS == 1
    Q_FULL: tl.constexpr = ROWS_FULL and BLOCK_N * SHARES == N
    K_FULL: tl.constexpr = ROWS_FULL and BLOCK_K * SHARES == K

    # Everything is asked for before anything is computed.
    cos_at = cos_ptr + b * cos_stride_b + t * cos_stride_t
    sin_at = sin_ptr + b * sin_stride_b + t * sin_stride_t
    cos_1, cos_2 = _load_pairs(cos_at, row_fits, ROWS_FULL, R, HALF, INTERLEAVED)
    sin_1, sin_2 = _load_pairs(sin_at, row_fits, ROWS_FULL, R, HALF, INTERLEAVED)
    if BLOCK_N > 0:
        q_head, q_fits = _heads(share, N, SHARES, BLOCK_N)
        q_fits = row_fits & q_fits
        q_at = q_ptr + b * q_stride_b + t * q_stride_t + q_head * q_stride_n
        q_1, q_2 = _load_pairs(q_at, q_fits, Q_FULL, R, HALF, INTERLEAVED)
        if R < H:
            q_rest = _load(q_at, q_fits, Q_FULL, R, H - R, REST)
    if BLOCK_K > 0:
        k_head, k_fits = _heads(share, K, SHARES, BLOCK_K)
        k_fits = row_fits & k_fits
        k_at = k_ptr + b * k_stride_b + t * k_stride_t + k_head * k_stride_n
        k_1, k_2 = _load_pairs(k_at, k_fits, K_FULL, R, HALF, INTERLEAVED)
        if R < H:
            k_rest = _load(k_at, k_fits, K_FULL, R, H - R, REST)

    if BACKWARDS:
        sin_1, sin_2 = -sin_2, -sin_1
    if BLOCK_N > 0:
        q_to = q_out_ptr + b * q_out_stride_b + t * q_out_stride_t + q_head * q_out_stride_n
        y_1, y_2 = q_1 * cos_1 - q_2 * sin_1, q_2 * cos_2 + q_1 * sin_2
        _store_pairs(q_to, y_1, y_2, q_fits, Q_FULL, R, HALF, INTERLEAVED)
        if R < H:
            _store(q_to, q_rest, q_fits, Q_FULL, R, H - R, REST)
    if BLOCK_K > 0:
        k_to = k_out_ptr + b * k_out_stride_b + t * k_out_stride_t + k_head * k_out_stride_n
        y_1, y_2 = k_1 * cos_1 - k_2 * sin_1, k_2 * cos_2 + k_1 * sin_2
        _store_pairs(k_to, y_1, y_2, k_fits, K_FULL, R, HALF, INTERLEAVED)
        if R < H:
            _store(k_to, k_rest, k_fits, K_FULL, R, H - R, REST)


# By the arguments' metadata: the launches depend on nothing else.
_LAUNCHES: dict[Any, backend_triton.Launch] = {}


def _launch(q, k, cos, sin, q_out, k_out, layout: str, backwards: bool) -> backend_triton.Launch:
    (batch, time, _, head_dim), size = (k if q is None else q).shape, cos.shape[-1]
    heads, kv_heads = (0 if x is None else x.shape[2] for x in (q, k))
    config = Config.for_shape(batch * time, heads, kv_heads, head_dim)
    shares, block_n, block_k = config.deal(heads, kv_heads)
    strides = [
        *(s for angle in (cos, sin) for s in angle_strides(angle)),
        *(s for x in (q, k, q_out, k_out) for s in ((0, 0, 0) if x is None else x.stride()[:3])),
    ]
    return backend_triton.Launch(
        _rotate_kernel,
        -(-batch * time // config.block_rows) * shares,
        (batch * time, time, *strides),
        (heads, kv_heads, head_dim, size, power_of_two(size // 2), power_of_two(head_dim - size),
         shares, config.block_rows, block_n, block_k, layout == "interleaved", backwards),
        config.num_warps,
    )  # fmt: skip


def angle_strides(angle: torch.Tensor) -> tuple[int, int]:
    """Of the batch and of time."""
    if angle.dim() == 2 or angle.shape[0] == 1:
        return 0, angle.stride(-2)
    return angle.stride(0), angle.stride(1)


def adjacent(x: torch.Tensor | None) -> torch.Tensor | None:
    """Of any strides but that features are adjacent."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def _empty(like: torch.Tensor | None) -> torch.Tensor | None:
    """Without gaps, its dimensions in the order in which they lie in memory in `like`."""
    if like is None:
        return None
    y = torch.empty_like(like)
    return y if y.stride(-1) == 1 else torch.empty(like.shape, dtype=y.dtype, device=y.device)


def _rotate(q, k, cos, sin, layout: str, backwards: bool, into: Any = None) -> tuple[Any, Any]:
    """q and k, not both None, in their own dtypes; None stays None.

    into: the tensors to write, of adjacent features; new ones unless given.
    """
    q, k, cos, sin = adjacent(q), adjacent(k), adjacent(cos), adjacent(sin)
    q_out, k_out = (_empty(q), _empty(k)) if into is None else into
    of = backend_triton.metadata
    where = None if into is None else (of(q_out), of(k_out))
    launch = backend_triton.kept(
        _LAUNCHES,
        lambda: (of(q), of(k), of(cos), of(sin), layout, backwards, where),
        lambda: _launch(q, k, cos, sin, q_out, k_out, layout, backwards),
    )
    if launch.programs:
        launch(cos, sin, q, k, q_out, k_out)
    return q_out, k_out


class _Rope(torch.autograd.Function):
    """Linear in q and k: their gradients are those of the results, rotated the other way.

    q or k is None where it is one of those gradients and not asked for.
    """

    @staticmethod
    def forward(ctx: Any, q, k, cos, sin, layout, backwards):
        need_q, need_k, need_cos, need_sin = ctx.needs_input_grad[:4]
        ctx.layout, ctx.backwards, ctx.angles = layout, backwards, need_cos or need_sin
        ctx.set_materialize_grads(False)
        q_out, k_out = _rotate(q, k, cos, sin, layout, backwards)
        if ctx.angles:  # only they need q and k
            ctx.save_for_backward(cos, sin, q, k)
        else:
            ctx.save_for_backward(cos, sin)
            if not need_q and q_out is not None:
                ctx.mark_non_differentiable(q_out)
            if not need_k and k_out is not None:
                ctx.mark_non_differentiable(k_out)
        return q_out, k_out

    @staticmethod
    def backward(ctx: Any, dq, dk):  # type: ignore[override]
        cos, sin = ctx.saved_tensors[:2]
        need_q, need_k, need_cos, need_sin = ctx.needs_input_grad[:4]
        dcos = dsin = None
        if ctx.angles:
            q, k = ctx.saved_tensors[2:]
            dcos, dsin = eager.gradients_of_angles(
                ((q, dq), (k, dk)), cos, sin, ctx.layout, ctx.backwards
            )
        dq, dk = dq if need_q else None, dk if need_k else None
        if dq is not None or dk is not None:
            rotate = _apply if backend_triton.creates_graph() else _rotate
            dq, dk = rotate(dq, dk, cos, sin, ctx.layout, not ctx.backwards)
        return dq, dk, dcos if need_cos else None, dsin if need_sin else None, None, None


def _apply(q, k, cos, sin, layout: str, backwards: bool) -> Any:
    if torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (q, k, cos, sin)
    ):
        return _Rope.apply(q, k, cos, sin, layout, backwards)
    # autograd.Function costs as much host time as the launch: spared where nothing is to be saved.
    return _rotate(q, k, cos, sin, layout, backwards)


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return _apply(q, k, cos, sin, layout, False)
