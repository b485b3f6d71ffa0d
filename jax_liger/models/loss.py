"""The training loss of a causal language model, for `nnx.value_and_grad` in any optax loop."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_liger.losses import fused_linear_cross_entropy
from jax_liger.models.decoder import CausalLM

IGNORE_INDEX = -100


def loss_fn(
    model: CausalLM,
    batch: Mapping[str, Any],
    num_items: int | jax.Array | None = None,
    router_aux_loss_coef: float | None = None,
    **options: Any,
) -> Any:
    """Mean cross-entropy of every next token, without holding the logits.

    Args:
        model: the model.
        batch: a dict of arrays (B, T):
            input_ids: the tokens.
            labels: what to predict, each at its own place, as in transformers: the shift by one is
                made here. -100 counts for nothing. Without them the labels are input_ids.
            segment_ids: which document each token belongs to, where several are packed in a row;
                0 is padding, which is not predicted. A document's last token does not predict the
                first of the next.
            attention_mask: 1 for tokens and 0 for padding, instead of segment_ids.
            positions: for the rotary embedding; by default each document's own, from 0.
        num_items: what the sum is divided by instead of the number of labels that count here: see
            `count_items`, for gradients that are accumulated over several batches.
        router_aux_loss_coef: of a mixture of experts, what the loss that spreads tokens evenly over
            the experts is multiplied by before it is added, as in transformers. Padding has no part
            in it. None for the config's where its `output_router_logits` is true, and else 0. With
            num_items it is multiplied by this batch's share of them too, so that of accumulated
            batches it is the mean.
        options: label_smoothing, z_loss, reduction, return_metrics and the others of
            `jax_liger.fused_linear_cross_entropy`.

    Returns:
        The loss, a float32 scalar; or what the options make of it.

    Raises:
        ValueError: for a router_aux_loss_coef where no layer has experts, or with a reduction that
            is no mean; and what `jax_liger.fused_linear_cross_entropy` raises.
    """
    config, segment_ids = model.config, _segments(batch)
    if router_aux_loss_coef is None:
        router_aux_loss_coef = config.router_aux_loss_coef if config.output_router_logits else 0.0
    given = (batch["input_ids"], batch.get("positions"), segment_ids)
    balance = None
    if router_aux_loss_coef:
        _check_balance(model, router_aux_loss_coef, options)
        hidden, _, balance = model.model.balanced(*given)
    else:
        hidden, _ = model.model(given[0], positions=given[1], segment_ids=given[2])
    weight, vocab_axis = model.head()
    labels = next_labels(batch.get("labels", batch["input_ids"]), segment_ids)
    result = fused_linear_cross_entropy(
        hidden,
        weight,
        labels,
        vocab_axis=vocab_axis,
        logit_scale=config.logit_scale,
        softcap=config.final_softcap,
        num_items=num_items,
        ignore_index=IGNORE_INDEX,
        **{"implementation": config.implementation, **options},
    )
    if balance is None:
        return result
    aux = router_aux_loss_coef * balance.loss()
    if num_items is not None:
        aux = aux * ((labels != IGNORE_INDEX).sum() / num_items)
    if isinstance(result, tuple):
        return result[0] + aux, *result[1:]
    return result + aux


def _check_balance(model: CausalLM, coef: float, options: Mapping[str, Any]) -> None:
    if not any(layer.experts for layer in model.config.layers):
        raise ValueError(
            f"router_aux_loss_coef must be 0 where no layer has experts; got {coef} for a "
            f"{model.config.model_type}"
        )
    reduction = options.get("reduction", "mean")
    if reduction != "mean":
        raise ValueError(
            f"reduction must be 'mean' with router_aux_loss_coef={coef}; got {reduction!r}"
        )


def count_items(batch: Mapping[str, Any]) -> jax.Array:
    """How many labels of the batch count, to be summed over batches for `num_items`."""
    labels = next_labels(batch.get("labels", batch["input_ids"]), _segments(batch))
    return (labels != IGNORE_INDEX).sum()


def next_labels(labels: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """(B, T): at each token the label of the next one, and -100 where it is of no document or of
    another.
    """
    labels = jnp.asarray(labels)
    shifted = jnp.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORE_INDEX)
    if segment_ids is None:
        return shifted
    following = jnp.pad(segment_ids[:, 1:], ((0, 0), (0, 1)))
    same = (following == segment_ids) & (segment_ids != 0)
    return jnp.where(same, shifted, IGNORE_INDEX)


def _segments(batch: Mapping[str, Any]) -> jax.Array | None:
    given = batch.get("segment_ids", batch.get("attention_mask"))
    return None if given is None else jnp.asarray(given)
