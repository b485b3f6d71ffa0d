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
        options: label_smoothing, z_loss, reduction, return_metrics and the others of
            `jax_liger.fused_linear_cross_entropy`.

    Returns:
        The loss, a float32 scalar; or what the options make of it.
    """
    segment_ids = _segments(batch)
    hidden, _ = model.model(
        batch["input_ids"], positions=batch.get("positions"), segment_ids=segment_ids
    )
    weight, vocab_axis = model.head()
    config = model.config
    return fused_linear_cross_entropy(
        hidden,
        weight,
        next_labels(batch.get("labels", batch["input_ids"]), segment_ids),
        vocab_axis=vocab_axis,
        logit_scale=config.logit_scale,
        softcap=config.final_softcap,
        num_items=num_items,
        ignore_index=IGNORE_INDEX,
        **{"implementation": config.implementation, **options},
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
