"""The matrix products of the head and the kernels between them, over one device's rows.

Logits are made a part of the rows at a time (`over_parts`), or a block of the classes at a time
(`over_blocks`), and their gradient takes their place in memory. A product is computed in the dtype
of its operands with sums in float32.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from liger_ops import backend_pallas
from liger_ops.cross_entropy import pallas_rows
from liger_ops.cross_entropy.pallas_rows import Constants, Tokens
from liger_ops.cross_entropy.xla import IGNORED
from liger_ops.fused_linear_cross_entropy import pallas_vocab
from liger_ops.fused_linear_cross_entropy.pallas_vocab import Shard


@dataclass(frozen=True)
class Settings:
    """What is known before tracing; `rows` is for the kernels, the rest as in the public function.
    sum_dtype is what the weight's gradient is summed in over parts. vocab_axes are the mesh axes
    over which the classes are split: under shard_map (`manual`), or, of global arrays, besides
    those over which they are by their sharding.
    """

    rows: pallas_rows.Settings
    vocab_axis: int
    reduction: str
    sum_dtype: str
    memory: str | int
    vocab_axes: tuple[str, ...] = ()
    manual: bool = False

    @property
    def manual_axes(self) -> tuple[str, ...]:
        return self.vocab_axes if self.manual else ()


class Need(NamedTuple):
    """The inputs that ask for a gradient."""

    hidden: bool
    weight: bool
    bias: bool


class Gradients(NamedTuple):
    """hidden (M, D), weight as it lies, bias (V,) float32; None for what is not asked for."""

    hidden: Any = None
    weight: Any = None
    bias: Any = None


class Upstream(NamedTuple):
    """The upstream gradients of every token's ce and z, (M,) or (1,), and z's perhaps None."""

    dce: jax.Array
    dz: jax.Array | None

    def normalized(self) -> tuple[jax.Array, "Upstream"]:
        """A power of two and what is left over, of which the largest is near 1, so that float16
        does not underflow. To multiply by the power later is exact.
        """
        largest = jnp.max(jnp.abs(self.dce), initial=jnp.float32(0.0))
        if self.dz is not None:
            largest = jnp.maximum(largest, jnp.max(jnp.abs(self.dz), initial=jnp.float32(0.0)))
        unit = jnp.ldexp(jnp.float32(1.0), jnp.frexp(largest)[1])
        return unit, jax.tree.map(lambda d: d / unit, self)


def scaled(x: Any, unit: jax.Array | None, dtype: Any) -> jax.Array:
    """unit x in `dtype`, rounded once."""
    return x.astype(dtype) if unit is None else (x.astype(jnp.float32) * unit).astype(dtype)


def logits_of(settings: Settings, hidden: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.lax.dot_general(hidden, weight, (((1,), (1 - settings.vocab_axis,)), ((), ())))


def hidden_product(
    settings: Settings, dlogits, weight, unit: jax.Array | None, shard: Shard | None
) -> jax.Array:
    dtype = weight.dtype if unit is None and shard is None else jnp.float32
    contracted = (((1,), (settings.vocab_axis,)), ((), ()))
    return jax.lax.dot_general(dlogits, weight, contracted, preferred_element_type=dtype)


def hidden_gradient(
    product: jax.Array, dtype: Any, unit: jax.Array | None, shard: Shard | None
) -> jax.Array:
    """The product times `unit`, and of all shards together, rounded once."""
    if shard is not None:
        product = shard.sum_gradient(product)
    return scaled(product, unit, pallas_vocab.gradient_dtype(shard, dtype))


def weight_gradient(settings: Settings, dlogits, hidden, dtype: Any) -> jax.Array:
    pair = (dlogits, hidden) if settings.vocab_axis == 0 else (hidden, dlogits)
    contracted = (((0,), (0,)), ((), ()))
    return jax.lax.dot_general(*pair, contracted, preferred_element_type=dtype)


@jax.custom_batching.custom_vmap
def _count(classes: jax.Array) -> jax.Array:
    return jnp.sum(classes != IGNORED, dtype=jnp.int32)


@_count.def_vmap
def _count_of_batch(axis_size, in_batched, classes):
    """All rows: where each of a batch took a branch of its own, all branches would be computed."""
    del axis_size, in_batched
    return jnp.int32(classes.shape[-1]), False


def over_rows_that_count(
    classes: jax.Array, skips: bool, products: Callable[[jax.Array | None], Any]
) -> Any:
    """products(at), of the fewest quarters of the rows that hold all that count, or products(None)
    of all rows; always those unless it `skips`.
    """
    num_rows = classes.shape[0]
    if not skips:
        return products(None)
    order = jnp.argsort(classes == IGNORED, stable=True).astype(jnp.int32)
    quarters = [num_rows * i // 4 for i in (1, 2, 3)]
    count = _count(classes)
    branch = sum(jnp.int32(count > rows) for rows in quarters)
    some = [functools.partial(products, order[:rows]) for rows in quarters]
    return jax.lax.switch(branch, [*some, functools.partial(products, None)])


def _spread(rows: jax.Array, at: jax.Array, like: jax.Array) -> jax.Array:
    """`rows` at their places among as many as `like` has, the others zero."""
    zeros: Any = jnp.zeros((like.shape[0], rows.shape[1]), rows.dtype)
    zeros = backend_pallas.match_axes(zeros, rows)[0]
    return zeros.at[at].set(rows, mode="promise_in_bounds", unique_indices=True)


def kept_logits(settings: Settings, skips: bool, hidden, weight, classes) -> jax.Array:
    """Of all rows at once; where it `skips`, those of ignored rows may be zeros."""

    def logits(at: jax.Array | None) -> jax.Array:
        if at is None:
            return logits_of(settings, hidden, weight)
        return _spread(logits_of(settings, hidden[at], weight), at, hidden)

    return over_rows_that_count(classes, skips, logits)


def of_kept_logits(
    settings: Settings,
    skips: bool,
    need: Need,
    hidden: jax.Array,
    weight: jax.Array,
    classes: jax.Array,
    constants: Constants,
    logits: jax.Array,
    statistics: jax.Array,
    upstream: Upstream,
    unit: jax.Array | None,
    shard: Shard | None = None,
) -> Gradients:
    """The gradients, times `unit`, from logits and statistics that the forward has kept.

    skips: as in over_rows_that_count.
    """
    dlogits, dbias = pallas_rows.backward(
        settings.rows, logits, classes, constants, statistics, *upstream,
        vocab=pallas_vocab.size(shard), in_place=True, sum_bias=need.bias,
    )  # fmt: skip

    def products(at: jax.Array | None) -> tuple[Any, Any]:
        h, d = (hidden, dlogits) if at is None else (hidden[at], dlogits[at])
        dhidden = dweight = None
        if need.hidden:
            dhidden = hidden_product(settings, d, weight, unit, shard)
            dhidden = dhidden if at is None else _spread(dhidden, at, hidden)
        if need.weight:
            dtype = hidden.dtype if unit is None else jnp.float32
            dweight = scaled(weight_gradient(settings, d, h, dtype), unit, weight.dtype)
        return dhidden, dweight

    dhidden, dweight = over_rows_that_count(classes, skips, products)
    if need.hidden:
        dhidden = hidden_gradient(dhidden, weight.dtype, unit, shard)
    if need.bias:
        dbias = scaled(dbias, unit, jnp.float32)
    return Gradients(dhidden, dweight, dbias)


def over_parts(
    settings: Settings,
    need: Need,
    rows: int,
    hidden: jax.Array,
    weight: jax.Array,
    classes: jax.Array,
    constants: Constants,
    *,
    upstream: Upstream | None = None,
    statistics: jax.Array | None = None,
    unit: jax.Array | None = None,
    shard: Shard | None = None,
) -> tuple[Tokens | None, Gradients]:
    """The tokens' losses, unless their statistics are given, and the gradients that are needed,
    with the logits of at most `rows` rows at once. The rows that count are taken first and the
    loop ends after the last of them.

    The gradient of hidden is multiplied by `unit`; the others are sums in settings.sum_dtype and
    float32, left for the caller to multiply.
    """
    num_rows = hidden.shape[0]
    wants_tokens = statistics is None

    def part(hidden, classes, upstream, statistics):
        logits, tokens = logits_of(settings, hidden, weight), None
        if wants_tokens:
            tokens = pallas_vocab.forward(settings.rows, logits, classes, constants, shard)
            statistics = tokens.statistics
        if not any(need):
            return tokens, Gradients()
        dlogits, dbias = pallas_rows.backward(
            settings.rows, logits, classes, constants, statistics, *upstream,
            vocab=pallas_vocab.size(shard), in_place=True, sum_bias=need.bias,
        )  # fmt: skip
        dhidden = dweight = None
        if need.hidden:
            dhidden = hidden_product(settings, dlogits, weight, unit, shard)
            dhidden = hidden_gradient(dhidden, weight.dtype, unit, shard)
        if need.weight:
            dweight = weight_gradient(settings, dlogits, hidden, settings.sum_dtype)
        return tokens, Gradients(dhidden, dweight, dbias)

    if num_rows <= rows:
        return part(hidden, classes, upstream, statistics)

    ignored = classes == IGNORED
    order = jnp.argsort(ignored, stable=True).astype(jnp.int32)
    # The last part is filled up with rows that do not exist: nothing is read or written there.
    order = jnp.concatenate([order, num_rows + jnp.arange(-num_rows % rows, dtype=jnp.int32)])
    count = jnp.sum(~ignored, dtype=jnp.int32)

    def body(i, carry):
        tokens, sums = carry
        at = jax.lax.dynamic_slice_in_dim(order, i * rows, rows)

        def take(a: Any, fill: int = 0) -> Any:
            return a.at[at].get(mode="fill", fill_value=fill, unique_indices=True)

        def put(a: jax.Array, value: jax.Array) -> jax.Array:
            return a.at[at].set(value, mode="drop", unique_indices=True)

        h, y = take(hidden), take(classes, IGNORED)
        # One upstream gradient for all tokens is not taken apart.
        own = jax.tree.map(lambda d: d if d.shape[0] == 1 else take(d), upstream)
        its_tokens, its_gradients = part(h, y, own, None if wants_tokens else take(statistics))
        add = lambda a, b: jax.tree.map(jnp.add, a, b)  # noqa: E731
        return jax.tree.map(put, tokens, its_tokens), Gradients(
            jax.tree.map(put, sums.hidden, its_gradients.hidden),
            add(sums.weight, its_gradients.weight),
            add(sums.bias, its_gradients.bias),
        )

    def zeros(like: Any, dtype: Any = None) -> jax.Array:
        of_mesh = jnp.zeros(like.shape, dtype or like.dtype)
        return backend_pallas.match_axes(of_mesh, hidden)[0]  # type: ignore[return-value]

    tokens = None
    if wants_tokens:
        tokens = jax.tree.map(zeros, pallas_rows.shapes(settings.rows, num_rows))
    start = Gradients(
        zeros(hidden, pallas_vocab.gradient_dtype(shard, hidden.dtype)) if need.hidden else None,
        zeros(weight, settings.sum_dtype) if need.weight else None,
        zeros(constants.bias, jnp.float32) if need.bias else None,
    )
    parts = jax.lax.div(count + jnp.int32(rows - 1), jnp.int32(rows))
    return backend_pallas.for_range(0, parts, body, (tokens, start))


def over_blocks(
    settings: Settings,
    block: int,
    hidden: jax.Array,
    weight: jax.Array,
    classes: jax.Array,
    constants: Constants,
    statistics: jax.Array,
    upstream: Upstream,
    unit: jax.Array | None,
    shard: Shard | None = None,
) -> jax.Array:
    """The weight's gradient, times `unit`: a block of classes at a time over all rows, from logits
    computed once more, each in one product and cast once.
    """
    axis, vocab = settings.vocab_axis, weight.shape[settings.vocab_axis]
    block = min(block, vocab)  # of a shard there may be fewer than the plan was made for

    def step(first: jax.Array, width: int, dweight: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(weight, first, width, axis)
        dlogits, _ = pallas_rows.backward(
            settings.rows, logits_of(settings, hidden, part), classes, constants, statistics,
            *upstream, first_class=first[None], vocab=pallas_vocab.size(shard) or vocab,
            in_place=True,
        )  # fmt: skip
        dtype = weight.dtype if unit is None else jnp.float32
        its_gradient = weight_gradient(settings, dlogits, hidden, dtype)
        its_gradient = scaled(its_gradient, unit, weight.dtype)
        return jax.lax.dynamic_update_slice_in_dim(dweight, its_gradient, first, axis)

    whole = vocab // block
    # A copy of weight, of which every block is written over.
    dweight = backend_pallas.for_range(
        0, whole, lambda i, dweight: step(jnp.int32(i) * block, block, dweight), weight
    )
    if vocab % block:
        dweight = step(jnp.int32(whole * block), vocab % block, dweight)
    return dweight
