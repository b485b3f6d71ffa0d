"""A mixture of experts as the feed-forward part: every token goes through k of E gated MLPs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_liger.models.basics import down_projected, linear
from jax_liger.models.config import Config


class MatrixPerExpert(nnx.Module):
    """E linear layers without biases: `kernel` (E, inputs, outputs)."""

    def __init__(self, config: Config, inputs: int, outputs: int, *, rngs: nnx.Rngs):
        shape = (config.num_experts, inputs, outputs)
        init = nnx.initializers.normal(config.initializer_range)
        self.kernel = nnx.Param(init(rngs.params(), shape, jnp.dtype(config.param_dtype)))
        self.dtype = config.dtype

    def __call__(self, x: jax.Array, rows_of: jax.Array) -> jax.Array:
        """x (M, inputs), sorted by expert; rows_of (E,), how many rows each expert has."""
        return jax.lax.ragged_dot(x, self.kernel[...].astype(self.dtype), rows_of)


class Experts(nnx.Module):
    """down_e(act(gate_e(x)) * up_e(x)) for rows x that are sorted by their expert e."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        D, F = config.hidden_size, config.moe_intermediate_size
        self.gate_proj = MatrixPerExpert(config, D, F, rngs=rngs)
        self.up_proj = MatrixPerExpert(config, D, F, rngs=rngs)
        self.down_proj = MatrixPerExpert(config, F, D, rngs=rngs)

    def __call__(self, x: jax.Array, rows_of: jax.Array) -> jax.Array:
        """Maps (M, D) to (M, D)."""
        gate, up = self.gate_proj(x, rows_of), self.up_proj(x, rows_of)
        return down_projected(self, gate, up, rows_of=(rows_of,))


class Balance(NamedTuple):
    """How the tokens of a layer, or of several, are spread over the experts; float32."""

    tokens: jax.Array  # (E,), how many have the expert among their k
    probabilities: jax.Array  # (E,), the sum of theirs for the expert
    count: jax.Array  # (), of the tokens

    def loss(self) -> jax.Array:
        """E sum_e (share of tokens at e) (mean probability of e): k where they are spread evenly.

        Differentiable in the probabilities. Of several layers it is that of their sums.

        Source: Fedus et al. (2021), arXiv:2101.03961, equations 4 to 6.
        """
        count = jnp.maximum(self.count, 1.0)
        experts = self.tokens.shape[0]
        return experts * jnp.sum(self.tokens / count * (self.probabilities / count))


class MixtureOfExperts(nnx.Module):
    """y = sum of w_e expert_e(x) over the k experts with the largest w_e.

    w = softmax(router(x)), divided by the sum of the k where `norm_topk_prob` says so. Rows are
    sorted by expert, so that each matrix meets its own rows in one product; none is dropped.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        self.router = linear(config, config.hidden_size, config.num_experts, rngs=rngs)
        self.experts = Experts(config, rngs=rngs)

    def __call__(self, x: jax.Array, counted: jax.Array | None = None) -> tuple[jax.Array, Balance]:
        """Maps (B, T, D) to (B, T, D), with the balance of the tokens that are counted.

        counted: (B, T), False for padding; None counts all.
        """
        k, D = self.config.num_experts_per_tok, x.shape[-1]
        rows = x.reshape(-1, D)  # (M, D)
        weights, chosen, probabilities = self._route(rows)  # (M, k), (M, k), (M, E)
        balance = _balance(chosen, probabilities, counted)

        chosen = chosen.reshape(-1)  # (M k,)
        order = jnp.argsort(chosen)
        rows_of = jnp.bincount(chosen, length=self.config.num_experts).astype(jnp.int32)
        out = self.experts(rows[order // k], rows_of)

        out = out[jnp.argsort(order)].reshape(-1, k, D)
        out = jnp.einsum("mkd,mk->md", out, weights, preferred_element_type=jnp.float32)
        return out.astype(x.dtype).reshape(x.shape), balance

    def _route(self, rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The weights (M, k), the experts that they belong to, and all probabilities (M, E)."""
        probabilities = jax.nn.softmax(self.router(rows).astype(jnp.float32), -1)
        weights, chosen = jax.lax.top_k(probabilities, self.config.num_experts_per_tok)
        if self.config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdims=True)
        return weights.astype(rows.dtype), chosen, probabilities


def _balance(chosen: jax.Array, probabilities: jax.Array, counted: jax.Array | None) -> Balance:
    ones = jnp.ones(chosen.shape[0], jnp.float32)
    weights = ones if counted is None else counted.reshape(-1).astype(jnp.float32)
    experts = jnp.arange(probabilities.shape[-1], dtype=chosen.dtype)
    at = (chosen[:, :, None] == experts).astype(jnp.float32).sum(1)  # (M, E)
    return Balance(weights @ at, weights @ probabilities, weights.sum())
