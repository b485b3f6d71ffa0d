"""RMSNorm, projection and rotation in Pallas for JAX.

Launchers, then the custom_vjp, then the entry points; the kernel is in pallas_product.py. The
backward keeps the arguments and nothing else: the norm is computed again, and the products are
XLA's.
"""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.experimental import pallas as pl

from liger_ops import backend_pallas
from liger_ops.backend_pallas import as_structure, from_structure
from liger_ops.rms_norm import pallas_kernel as rms_norm
from liger_ops.rms_norm.pallas_helpers import Settings as NormSettings
from liger_ops.rms_norm_linear_rope import xla
from liger_ops.rms_norm_linear_rope.cases import Config
from liger_ops.rms_norm_linear_rope.check import Heads, Norm
from liger_ops.rms_norm_linear_rope.pallas_product import Settings, tile_kernel
from liger_ops.rope import pallas_kernel as rope


class Inputs(NamedTuple):
    """x (B, T, D), the weight of the product's dtype, and the others of `xla`."""

    x: Any
    norm_weight: Any
    weight: Any
    bias: Any
    q_norm_weight: Any
    k_norm_weight: Any
    cos: Any
    sin: Any


def _split(local: Any, settings: Settings, given: Inputs, *others: Any, results: str) -> Any:
    """local(*given, *others), on every device's own part of the batch or of time."""
    # A batch axis of 1 is the same for all rows, however those are split.
    cos = given.cos
    angle = "t r" if cos.ndim == 2 else "b t r" if cos.shape[0] == given.x.shape[0] else "one t r"
    weight = "o d" if settings.out_axis == 0 else "d o"
    upstream = ", b t n h, b t k h, b t k h" if others else ""
    rule = f"b t d, d, {weight}, o, h, h, {angle}, {angle}{upstream} -> {results}"
    return backend_pallas.split(local, rule, *given, *others, over=("b", "t"), summed=("b", "t"))


@functools.partial(jax.jit, static_argnums=0)
def _forward(settings: Settings, given: Inputs) -> tuple[jax.Array, jax.Array, jax.Array]:
    local = functools.partial(_run, settings)
    return _split(local, settings, given, results="b t n h, b t k h, b t k h")


def _run(settings: Settings, *arrays: Any) -> tuple[jax.Array, ...]:
    """On one device."""
    given, heads = Inputs(*arrays), settings.heads
    x, weight, norm_weight = given.x, given.weight, given.norm_weight
    (batch, time, dim), rotary = x.shape, given.cos.shape[-1]
    num_rows, dtype = batch * time, weight.dtype
    outputs = tuple(
        jax.ShapeDtypeStruct((num_rows, n, heads.size), dtype)
        for n in (heads.q, heads.kv, heads.kv)
    )
    if num_rows == 0:
        return tuple(jnp.zeros((batch, time, *out.shape[1:]), dtype) for out in outputs)

    head_norms = given.q_norm_weight is not None or given.k_norm_weight is not None
    config = settings.config or Config.for_shape(
        num_rows, heads.size, head_norms, dtype.itemsize, backend_pallas.shared_memory()
    )
    _, half, shares = config.tile(heads.size)
    if head_norms and shares > 1:
        raise ValueError(f"tiles of {config.block_columns} columns do not hold a head to be normed")
    if settings.out_axis == 1 and (rotary != heads.size or 2 * half * shares != heads.size):
        # A tile's columns do not lie beside each other: the weight is turned, so that D does.
        settings, weight = replace(settings, out_axis=0), weight.T
    r = None
    if norm_weight is not None and config.scales == "weight" and x.dtype == dtype:
        scale = norm_weight.astype(jnp.float32) + settings.norm.offset
        weight = (weight * jnp.expand_dims(scale, settings.out_axis)).astype(dtype)
        norm_weight = None
    # Where x is multiplied as it lies in memory, or may have to be scaled before.
    if (norm_weight is None and x.dtype == dtype) or dtype == jnp.float16:
        mean = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1)
        r = jax.lax.rsqrt(mean + settings.norm.eps).reshape(num_rows)
    q, k, v = backend_pallas.pallas_call(
        functools.partial(tile_kernel, settings=settings, config=config),
        outputs,
        x.reshape(num_rows, dim), norm_weight, weight, given.bias, given.q_norm_weight,
        given.k_norm_weight, *(a.reshape(-1, rotary) for a in (given.cos, given.sin)), r,
        programs=pl.cdiv(num_rows, config.block_rows) * config.column_blocks(*heads),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=settings.interpret,
    )  # fmt: skip
    return tuple(y.reshape(batch, time, *y.shape[1:]) for y in (q, k, v))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
@functools.partial(jax.jit, static_argnums=(0, 1))
def _backward(settings: Settings, need: tuple[bool, ...], given: Inputs, upstream: Any) -> Any:
    """The gradients of the first six inputs, in their dtypes; None for what `need` does not ask.

    upstream: those of q, k and v.
    """
    weight = "o d" if settings.out_axis == 0 else "d o"
    local = functools.partial(_gradients, settings, need)
    gradients = _split(local, settings, given, *upstream, results=f"b t d, d, {weight}, o, h, h")
    return tuple(
        None if g is None else g.astype(a.dtype) for g, a in zip(gradients, given[:6], strict=True)
    )


def _gradients(settings: Settings, need: tuple[bool, ...], *arrays: Any) -> tuple[Any, ...]:
    """On one device, those that are summed over rows in float32 where others have rows too."""
    given, (dq, dk, dv) = Inputs(*arrays[:8]), arrays[8:]
    need_x, need_norm, need_weight, need_bias, *need_own = need
    heads, x, weight, axis = settings.heads, given.x, given.weight, settings.out_axis
    norm = NormSettings(*settings.norm, settings.interpret)
    summed = weight.dtype if jax.device_count() == 1 else jnp.float32
    own = (given.q_norm_weight, given.k_norm_weight)
    y: Any = None
    if need_weight or any(w is not None for w in own):
        y = rms_norm.normed_rows(norm, x, None, given.norm_weight)[0].astype(weight.dtype)

    du = [*rope.turned_back("half", settings.interpret, dq, dk, given.cos, given.sin), dv]
    of_own: list[Any] = [None, None]
    for i, (own_weight, first, count) in enumerate(
        zip(own, (0, heads.q), (heads.q, heads.kv), strict=True)
    ):
        if own_weight is None:
            continue
        # What the norm saw, in float32 as there, is multiplied once more: the heads' columns.
        columns = slice(first * heads.size, (first + count) * heads.size)
        part = weight[columns] if axis == 0 else weight[:, columns]
        u = xla.product(y, part, axis, jnp.float32)
        if given.bias is not None:
            u = u + given.bias[columns]
        u = u.reshape(du[i].shape)
        of_heads, of_own[i] = rms_norm.gradients_of_rows(
            norm, (True, need_own[i]), u, own_weight, du[i], None
        )
        du[i] = of_heads.astype(du[i].dtype)  # type: ignore[union-attr]
    rows = jnp.concatenate(du, axis=2).reshape(*x.shape[:2], heads.columns)

    dx = dnorm = dweight = dbias = None
    if need_x or need_norm:
        dy = jax.lax.dot_general(rows, weight, (((2,), (axis,)), ((), ())))
        dx, dnorm = rms_norm.gradients_of_rows(
            norm, (need_x, need_norm), x, given.norm_weight, dy, None
        )
    if need_weight:
        pair = (rows, y) if axis == 0 else (y, rows)
        contracted = (((0, 1), (0, 1)), ((), ()))
        dweight = jax.lax.dot_general(*pair, contracted, preferred_element_type=summed)
    if need_bias:
        dbias = jnp.sum(rows, axis=(0, 1), dtype=jnp.float32)
    return dx, dnorm, dweight, dbias, *of_own


@_backward.defjvp
def _backward_jvp(settings, need, primals, tangents):
    """Second derivatives come from the XLA version."""

    def plain(given, upstream):
        gradients = _plain_vjp(settings, Inputs(*given))(tuple(upstream))[:6]
        return tuple(g if asked else None for g, asked in zip(gradients, need, strict=True))

    return jax.jvp(plain, primals, tangents)


def _plain_vjp(settings: Settings, given: Inputs) -> Any:
    def plain(*given):
        arguments: Any = (*given, settings.heads, settings.norm, settings.out_axis)
        return xla.rms_norm_linear_rope(*arguments)

    return jax.vjp(plain, *given)[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(settings, *given):
    return _forward(settings, Inputs(*given))


def _fused_fwd(settings, *primals):
    need = as_structure(*(p is not None and p.perturbed for p in primals))
    given = tuple(None if p is None else p.value for p in primals)
    # Not _forward: this may be differentiated once more.
    return _fused(settings, *given), (need, given)


def _fused_bwd(settings: Settings, saved: Any, cotangents: Any) -> Any:
    need, given = from_structure(saved[0]), Inputs(*saved[1])
    if all(isinstance(ct, SymbolicZero) for ct in cotangents):
        return (None,) * 8
    upstream = tuple(
        jnp.zeros(ct.shape, ct.dtype) if isinstance(ct, SymbolicZero) else ct  # type: ignore[arg-type]
        for ct in cotangents
    )
    gradients = (None,) * 6
    if any(need[:6]):
        gradients = _backward(settings, need[:6], given, upstream)
    of_angles = (None, None)
    if any(need[6:]):
        found = _plain_vjp(settings, given)(upstream)[6:]
        of_angles = tuple(g if asked else None for g, asked in zip(found, need[6:], strict=True))
    return *gradients, *of_angles


# Symbolic zeros tell which inputs ask for a gradient.
_fused.defvjp(_fused_fwd, _fused_bwd, symbolic_zeros=True)


def rms_norm_linear_rope(
    *given: Any, heads: Heads, norm: Norm, out_axis: int, config: Config | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k and v of the arguments of `Inputs`; with the tiles of `config`, if given."""
    full_precision = jax.config.jax_default_matmul_precision in ("highest", "float32")  # type: ignore[attr-defined]
    settings = Settings(heads, norm, out_axis, full_precision, config, backend_pallas.interpret())
    return _fused(settings, *backend_pallas.match_axes(*given))  # type: ignore[return-value]


def composed(
    *given: Any, heads: Heads, norm: Norm, out_axis: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The kernel of the norm, XLA's product, and the kernel of the rotation."""
    arguments: Any = (*given, heads, norm, out_axis)
    return xla.rms_norm_linear_rope(*arguments, normed=rms_norm.rms_norm, rotated=rope.rope)
