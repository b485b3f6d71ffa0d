"""A linear layer with a low-rank adapter: check the arguments, run it."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_liger.arguments import as_arrays, described
from liger_ops.lora_linear import xla
from liger_ops.lora_linear.check import check_arguments, check_dropout


def lora_linear(
    x: jax.Array,
    weight: jax.Array,
    lora_a: jax.Array,
    lora_b: jax.Array,
    *,
    bias: jax.Array | None = None,
    scaling: float = 1.0,
    dropout_p: float = 0.0,
    seed: Any = None,
) -> jax.Array:
    """A linear layer with a low-rank adapter. Matrices lie as Flax keeps them.

        y = x @ weight + bias + scaling * (dropout(x) @ lora_a) @ lora_b

    Args:
        x: (..., D), float32, bfloat16, float16 or float64.
        weight: (D, O), of any of these dtypes. Where it and x differ, both are cast to the promoted
            one. Not differentiated in it, its gradient is not computed.
        lora_a: (D, r), of any of these dtypes.
        lora_b: (r, O), of any of these dtypes.
        bias: (O,), of any of these dtypes.
        scaling: alpha / r; alpha / sqrt(r) for rank-stabilised LoRA.
        dropout_p: the probability that an element of the adapter's x is dropped; the others are
            multiplied by 1 / (1 - dropout_p). In [0, 1); 0 in evaluation.
        seed: with dropout, what chooses the elements: a number below 2^63, an integer array of one,
            or a key of `jax.random`. The same number drops the same elements in PyTorch.

    Returns:
        (..., O), in the dtype of the base product. Of the dropout nothing is kept for the backward.

    Numerics: products are XLA's. The adapter's are made in the dtype of lora_a and lora_b; the sum
        with the base product is rounded to the latter's dtype.

    Raises:
        TypeError, ValueError: for an argument that does not fit, naming it and both values.

    Source: Hu et al. (2021), arXiv:2106.09685; Kalajdzievski (2023), arXiv:2312.03732.
    """
    x, weight, lora_a, lora_b, bias = as_arrays(x, weight, lora_a, lora_b, bias)
    given = map(described, (x, weight, lora_a, lora_b, bias))
    check_arguments(*given, scaling=scaling, transposed=True)  # type: ignore[arg-type]
    check_dropout(dropout_p)
    if dropout_p > 0.0 and seed is None:
        raise ValueError(f"seed must be given where dropout_p is above 0; got None and {dropout_p}")
    base = jnp.promote_types(x.dtype, weight.dtype)
    adapter = jnp.promote_types(lora_a.dtype, lora_b.dtype)
    return xla.lora_linear(
        x.astype(base),
        weight.astype(base),
        lora_a.astype(adapter),
        lora_b.astype(adapter),
        None if bias is None else bias.astype(base),
        scaling,
        dropout_p,
        _words(seed) if dropout_p > 0.0 else None,
    )


def _words(seed: Any) -> jax.Array:
    """(2,) uint32, the lower word first."""
    if isinstance(seed, int):
        return jnp.array([seed & (2**32 - 1), seed >> 32], jnp.uint32)
    seed = jnp.asarray(seed)
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(seed).reshape(-1)[-2:]
    if seed.size == 2 and seed.dtype == jnp.uint32:  # a key as `jax.random.PRNGKey` makes it
        return seed.reshape(2)
    seed = seed.reshape(())
    if seed.dtype.itemsize == 8:
        return jnp.stack([seed & (2**32 - 1), seed >> 32]).astype(jnp.uint32)
    return jnp.stack([seed.astype(jnp.uint32), jnp.zeros((), jnp.uint32)])
