"""Fused linear cross-entropy in Pallas for JAX: the head's products are XLA's, between them the
kernels of cross-entropy.

Launchers, then the custom_vjp, then the entry point. `Plan` says how the logits are cut:

    kept      the forward keeps the logits, the backward turns them into their gradient
    parts     mean and sum: the forward makes the gradients too, part by part, up to the factor that
              only the backward knows; "none": the backward computes each part's logits once more
    blocks    as parts for hidden and bias; the weight's gradient in the backward, block by block
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from liger_ops import backend_pallas
from liger_ops.backend_pallas import as_structure, from_structure
from liger_ops.cross_entropy import pallas_rows, reduce
from liger_ops.cross_entropy.pallas_rows import Constants, class_weight_sum
from liger_ops.fused_linear_cross_entropy import pallas_parts, pallas_plain, pallas_vocab, xla_vocab
from liger_ops.fused_linear_cross_entropy.cases import Plan
from liger_ops.fused_linear_cross_entropy.pallas_parts import Gradients, Need, Settings, Upstream
from liger_ops.fused_linear_cross_entropy.pallas_plain import Outputs, hidden_dtype, upstream_of

NOTHING = Need(False, False, False)


def _plan(settings: Settings, need: Need, hidden: jax.Array, weight: jax.Array) -> Plan:
    """For the rows of all devices together: where they are split, each has fewer at once."""
    return Plan.for_shape(
        math.prod(hidden.shape[:-1]),
        hidden.shape[-1],
        weight.shape[settings.vocab_axis],
        weight.dtype.itemsize,
        sum_itemsize=jnp.dtype(settings.sum_dtype).itemsize,
        needs_weight=need.weight,
        memory=settings.memory,
    )


def _in_forward(settings: Settings, plan: Plan, need: Need) -> Need:
    """The gradients that the forward makes."""
    if plan.keeps_logits or settings.reduction == "none":
        return NOTHING
    return need._replace(weight=need.weight and plan.classes is None)


def _in_backward(settings: Settings, plan: Plan, need: Need) -> Need:
    made = _in_forward(settings, plan, need)
    return Need(*(asked and not done for asked, done in zip(need, made, strict=True)))


def _rows_of(array: jax.Array) -> str:
    return " ".join(f"row{i}" for i in range(array.ndim - 1))


def _back(leading: tuple[int, ...], tree: Any) -> Any:
    return jax.tree.map(lambda a: a.reshape(*leading, *a.shape[1:]), tree)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _forward(settings: Settings, plan: Plan, need: Need, hidden, weight, bias, classes,
             class_weight, factors) -> Outputs:  # fmt: skip
    now, later = _in_forward(settings, plan, need), _in_backward(settings, plan, need)
    keeps_logits = plan.keeps_logits and any(need)

    def local(
        hidden, weight, bias, classes, class_weight, weight_sum, factors, axes=settings.manual_axes
    ):
        leading, constants = classes.shape, Constants(class_weight, weight_sum, bias)
        h, y, shard = _local(settings, hidden, weight, classes, axes)
        logits, gradients = None, Gradients()
        if keeps_logits:
            logits = pallas_parts.kept_logits(settings, plan.skips_kept, h, weight, y)
            tokens = pallas_vocab.forward(settings.rows, logits, y, constants, shard)
        else:
            upstream = upstream_of(settings, factors).normalized()[1] if any(now) else None
            tokens, gradients = pallas_parts.over_parts(
                settings, now, plan.rows, h, weight, y, constants, upstream=upstream, shard=shard
            )
        assert tokens is not None
        if settings.manual:
            assert shard is not None
            tokens = pallas_vocab.contribution(tokens, shard)
        statistics = tokens.statistics if any(later) else None
        of_rows = (tokens.ce, tokens.z, tokens.predicted, statistics, logits, gradients.hidden)
        return *_back(leading, of_rows), gradients.weight, gradients.bias

    rows, head = _rows_of(hidden), _head(settings)
    outputs = backend_pallas.split(
        local,
        f"{rows} d, {head}, v, {rows}, v, one, two"
        f" -> {rows}, {rows}, {rows}, {rows} two, {rows} v, {rows} d, {head}, v",
        hidden, weight, bias, classes, class_weight,
        _weight_sum(settings, class_weight), factors,
        over=[*rows.split(), "v"], summed=rows.split(), joined="v",
        joined_axes=settings.vocab_axes,
    )  # fmt: skip
    ce, z, predicted, statistics, logits, *gradients = outputs
    return Outputs(ce, z, predicted, statistics, logits, Gradients(*gradients))


def _local(settings: Settings, hidden, weight, classes, axes: tuple[str, ...]):
    """A device's hidden and labels as rows, and which of the classes are its own."""
    shard = pallas_vocab.shard_of(axes, weight.shape[settings.vocab_axis], settings.manual_axes)
    h = hidden.reshape(classes.size, hidden.shape[-1])
    return h, pallas_vocab.own_labels(classes.reshape(-1), shard), shard


def _weight_sum(settings: Settings, class_weight: jax.Array | None) -> jax.Array | None:
    total = class_weight_sum(settings.rows, class_weight)
    return total if total is None else jax.lax.psum(total, settings.manual_axes)


def _head(settings: Settings) -> str:
    return "v d" if settings.vocab_axis == 0 else "d v"


@_forward.defjvp
def _forward_jvp(settings, plan, need, primals, tangents):
    now, later = _in_forward(settings, plan, need), _in_backward(settings, plan, need)
    keeps_logits = plan.keeps_logits and any(need)
    plain = functools.partial(pallas_plain.forward, settings, keeps_logits, now, any(later))
    return jax.jvp(plain, primals, tangents)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _backward(settings: Settings, plan: Plan, need: Need, hidden, weight, bias, classes,
              class_weight, statistics, logits, upstream: Upstream) -> Gradients:  # fmt: skip
    """The gradients in the dtypes of their inputs; that of the bias in float32.

    upstream: for every token, of the labels' shape, or (1,) where `reduction` is no "none".
    """

    def local(
        hidden, weight, bias, classes, class_weight, weight_sum, statistics, logits, *d,
        axes=settings.manual_axes,
    ):  # fmt: skip
        constants = Constants(class_weight, weight_sum, bias)
        h, y, shard = _local(settings, hidden, weight, classes, axes)
        statistics = statistics.reshape(y.size, statistics.shape[-1])
        upstream, unit = Upstream(*jax.tree.map(lambda a: a.reshape(-1), d)), None
        if weight.dtype == jnp.float16:  # where a mean's gradients would underflow
            unit, upstream = upstream.normalized()
        if logits is not None:
            logits = logits.reshape(y.size, logits.shape[-1])
            gradients = pallas_parts.of_kept_logits(
                settings, plan.skips_kept, need, h, weight, y, constants, logits, statistics,
                upstream, unit, shard,
            )  # fmt: skip
        else:
            by_block = plan.classes is not None and need.weight
            by_part = need._replace(weight=need.weight and not by_block)
            gradients = Gradients()
            if any(by_part):
                _, gradients = pallas_parts.over_parts(
                    settings, by_part, plan.rows, h, weight, y, constants, upstream=upstream,
                    statistics=statistics, unit=unit, shard=shard,
                )  # fmt: skip
            dweight, dbias = gradients.weight, gradients.bias
            if by_block:
                assert plan.classes is not None
                dweight = pallas_parts.over_blocks(
                    settings, plan.classes, h, weight, y, constants, statistics, upstream, unit,
                    shard,
                )  # fmt: skip
            elif need.weight:
                dweight = pallas_parts.scaled(dweight, unit, weight.dtype)
            if need.bias:
                dbias = pallas_parts.scaled(dbias, unit, jnp.float32)
            gradients = Gradients(gradients.hidden, dweight, dbias)
        return _back(classes.shape, gradients.hidden), gradients.weight, gradients.bias

    rows, head = _rows_of(hidden), _head(settings)
    of_token = rows if settings.reduction == "none" else "one"
    return Gradients(
        *backend_pallas.split(
            local,
            f"{rows} d, {head}, v, {rows}, v, one, {rows} two, {rows} v, {of_token}, {of_token}"
            f" -> {rows} d, {head}, v",
            hidden, weight, bias, classes, class_weight,
            _weight_sum(settings, class_weight), statistics, logits, *upstream,
            over=[*rows.split(), "v"], summed=rows.split(), joined="v",
            joined_axes=settings.vocab_axes,
        )
    )  # fmt: skip


@_backward.defjvp
def _backward_jvp(settings, plan, need, primals, tangents):
    return jax.jvp(functools.partial(pallas_plain.backward, settings, need), primals, tangents)


def _reduced(settings: Settings, outputs: Outputs, factors: jax.Array | None) -> Any:
    pair = None if factors is None else (factors[0], factors[1])
    return *reduce.summed(outputs.ce, outputs.z, pair), outputs.predicted


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(settings: Settings, hidden, weight, bias, classes, class_weight, factors):
    plan = _plan(settings, NOTHING, hidden, weight)
    given = (hidden.astype(weight.dtype), weight, bias, classes, class_weight, factors)
    return _reduced(settings, _forward(settings, plan, NOTHING, *given), factors)


def _loss_fwd(settings, hidden, weight, bias, classes, class_weight, factors):
    given = (hidden, weight, bias, classes, class_weight, factors)
    need = Need(*(a is not None and a.perturbed for a in given[:3]))
    given: Any = tuple(None if a is None else a.value for a in given)
    given = (given[0].astype(given[1].dtype), *given[1:])
    plan = _plan(settings, need, *given[:2])
    outputs = _forward(settings, plan, need, *given)
    kept = (outputs.statistics, outputs.logits, outputs.gradients)
    return _reduced(settings, outputs, given[-1]), (as_structure(*need), given, kept)


def _loss_bwd(settings, saved, cotangents):
    need, given, (statistics, logits, made) = saved
    hidden, weight, bias, classes, class_weight, factors = given
    need, dloss = Need(*from_structure(need)), cotangents[0]
    if isinstance(dloss, SymbolicZero):
        return (None,) * 6
    plan = _plan(settings, need, hidden, weight)
    if factors is None:
        upstream = Upstream(dloss, dloss if settings.rows.z_loss else None)
    else:
        upstream = jax.tree.map(lambda f: f * dloss, upstream_of(settings, factors))
    later = _in_backward(settings, plan, need)
    gradients = Gradients()
    if any(later):
        gradients = _backward(
            settings, plan, later, hidden, weight, bias, classes, class_weight, statistics, logits,
            upstream,
        )  # fmt: skip
    if factors is not None and any(_in_forward(settings, plan, need)):
        unit = upstream_of(settings, factors).normalized()[0] * dloss
        dtypes = (hidden_dtype(settings, hidden), weight.dtype, jnp.float32)
        gradients = Gradients(
            *(
                late if early is None else pallas_parts.scaled(early, unit, dtype)
                for early, late, dtype in zip(made, gradients, dtypes, strict=True)
            )
        )
    if gradients.bias is not None:
        gradients = gradients._replace(bias=gradients.bias.astype(bias.dtype))
    placed = (
        gradient if gradient is None else backend_pallas.placed_as(gradient, like)
        for gradient, like in zip(gradients, given[:3], strict=True)
    )
    return (*placed, None, None, None)


# Symbolic zeros tell which inputs ask for a gradient.
_loss.defvjp(_loss_fwd, _loss_bwd, symbolic_zeros=True)


def fused_linear_cross_entropy(
    hidden: jax.Array,
    weight: jax.Array,
    classes: jax.Array,
    bias: jax.Array | None,
    class_weight: jax.Array | None,
    num_items: jax.Array | None,
    logit_scale: float,
    vocab_axis: int,
    accum_dtype: str,
    memory: str | int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    reduction: str,
    predict: bool,
    vocab_axes: tuple[str, ...] = (),
    manual: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """loss, z_loss (which carries no gradient) and, if asked for, predicted classes (...).

    hidden and weight have one dtype; `classes` is what `cross_entropy.xla.as_classes` returns.
    vocab_axes and manual: as in Settings.
    """
    if logit_scale == 0.0:  # of which no gradient could be divided
        hidden, logit_scale = jnp.zeros_like(hidden), 1.0
    is_split = bool(vocab_axes) or jax.device_count() > 1
    of_kernels = pallas_rows.Settings(
        label_smoothing, softcap, z_loss, predict, backend_pallas.interpret(), logit_scale,
        keeps_weight=is_split and class_weight is not None,
    )  # fmt: skip
    # Only bfloat16 is summed in itself: float16 has not the range.
    sum_dtype = accum_dtype if weight.dtype == jnp.bfloat16 else "float32"
    settings = Settings(of_kernels, vocab_axis, reduction, sum_dtype, memory, vocab_axes, manual)
    label_weight = None
    if manual:
        hidden = hidden.astype(jnp.float32)  # in which the sum over the devices' gradients is
        if class_weight is not None:
            label_weight = xla_vocab.label_weight(class_weight, classes, vocab_axes)
    factors = reduce.factors(classes, class_weight, num_items, reduction, jnp.float32, label_weight)
    factors = None if factors is None else jnp.stack(factors)
    given = backend_pallas.match_axes(hidden, weight, bias, classes, class_weight, factors)
    outputs: Any = _loss(settings, *given)
    loss, z, predicted = outputs
    if manual:
        loss, z, predicted = jax.lax.psum((loss, z, predicted), vocab_axes)
    return loss, jax.lax.stop_gradient(z), predicted
