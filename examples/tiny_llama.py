"""A LLaMA small enough to read at one sitting, in Flax nnx.

The modules carry the names that transformers gives them, so a checkpoint's key is a path into the
model. Dims: B batch, T time, D model, F feed-forward, N heads, K kv heads, H head size, V vocab.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from transformers import LlamaConfig

from jax_liger import rope, rope_angles, rope_frequencies
from jax_liger.nnx import RMSNorm, SwiGLUMLP


class Attention(nnx.Module):
    def __init__(self, config: LlamaConfig, implementation: str | None, *, rngs: nnx.Rngs):
        D, H = config.hidden_size, config.head_dim
        N, K, bias = config.num_attention_heads, config.num_key_value_heads, config.attention_bias
        self.head_dim, self.implementation = H, implementation
        self.q_proj = nnx.Linear(D, N * H, use_bias=bias, rngs=rngs)
        self.k_proj = nnx.Linear(D, K * H, use_bias=bias, rngs=rngs)
        self.v_proj = nnx.Linear(D, K * H, use_bias=bias, rngs=rngs)
        self.o_proj = nnx.Linear(N * H, D, use_bias=bias, rngs=rngs)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        B, T, _ = x.shape
        q = self.q_proj(x).reshape(B, T, -1, self.head_dim)  # (B, T, N, H)
        k = self.k_proj(x).reshape(B, T, -1, self.head_dim)  # (B, T, K, H)
        v = self.v_proj(x).reshape(B, T, -1, self.head_dim)
        q, k = rope(q, k, cos, sin, implementation=self.implementation)
        # Causal and no padding mask: the padding is on the right, after every supervised token.
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.reshape(B, T, -1))


def _norm(config: LlamaConfig, implementation: str | None, rngs: nnx.Rngs) -> RMSNorm:
    return RMSNorm(
        config.hidden_size,
        epsilon=config.rms_norm_eps,
        implementation=implementation,
        rngs=rngs,
    )


class DecoderLayer(nnx.Module):
    def __init__(self, config: LlamaConfig, implementation: str | None, *, rngs: nnx.Rngs):
        self.input_layernorm = _norm(config, implementation, rngs)
        self.self_attn = Attention(config, implementation, rngs=rngs)
        self.post_attention_layernorm = _norm(config, implementation, rngs)
        self.mlp = SwiGLUMLP(
            config.hidden_size,
            config.intermediate_size,
            use_bias=config.mlp_bias,
            implementation=implementation,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nnx.Module):
    def __init__(self, config: LlamaConfig, implementation: str | None, *, rngs: nnx.Rngs):
        self.frequencies = rope_frequencies(config)
        self.embed_tokens = nnx.Embed(config.vocab_size, config.hidden_size, rngs=rngs)
        self.layers = nnx.List(
            [
                DecoderLayer(config, implementation, rngs=rngs)
                for _ in range(config.num_hidden_layers)
            ]
        )
        self.norm = _norm(config, implementation, rngs)

    def __call__(self, input_ids: jax.Array) -> jax.Array:
        x = self.embed_tokens(input_ids)  # (B, T, D)
        cos, sin = rope_angles(jnp.arange(input_ids.shape[1]), self.frequencies)  # (T, H)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class TinyLlama(nnx.Module):
    """LlamaForCausalLM in Flax: (B, T) token ids to (B, T, V) logits.

    `implementation` goes to every norm, rotation and activation: None, "pallas" or "xla".
    """

    def __init__(self, config: LlamaConfig, *, implementation: str | None = None, rngs: nnx.Rngs):
        _refuse_unsupported(config)
        self.model = Backbone(config, implementation, rngs=rngs)
        self.lm_head = nnx.data(None)  # a tied head reads the embedding table instead
        if not config.tie_word_embeddings:
            self.lm_head = nnx.Linear(
                config.hidden_size, config.vocab_size, use_bias=False, rngs=rngs
            )

    def __call__(self, input_ids: jax.Array) -> jax.Array:
        x = self.model(input_ids)
        return self.model.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)


def _refuse_unsupported(config: LlamaConfig) -> None:
    supported = {"hidden_act": "silu", "attention_dropout": 0.0}
    found = {"hidden_act": config.hidden_act, "attention_dropout": config.attention_dropout}
    if found != supported:
        raise ValueError(f"TinyLlama supports {supported}, but the config has {found}")


def from_hf_state_dict(
    config: LlamaConfig, state_dict: dict[str, np.ndarray], *, implementation: str | None = None
) -> TinyLlama:
    """Builds a TinyLlama from the weights of a transformers LlamaForCausalLM.

    A PyTorch Linear keeps its weight as (out, in), a Flax kernel is (in, out): linear weights are
    transposed, everything else goes over as it is. Raises ValueError, naming the keys and shapes,
    unless the two models have exactly the same parameters.
    """
    arrays = {}
    for key, array in state_dict.items():
        *path, leaf = [int(part) if part.isdigit() else part for part in key.split(".")]
        if leaf == "weight" and path[-1] == "embed_tokens":
            leaf = "embedding"
        elif leaf == "weight" and array.ndim == 1:
            leaf = "scale"
        elif leaf == "weight":
            leaf, array = "kernel", array.T
        if config.tie_word_embeddings and path == ["lm_head"]:
            continue  # the same tensor as the embedding, under a second name
        arrays[(*path, leaf)] = array

    # Abstract until the weights arrive: no initializer is compiled or run only to be overwritten.
    graphdef, state = nnx.split(
        nnx.eval_shape(lambda: TinyLlama(config, implementation=implementation, rngs=nnx.Rngs(0)))
    )
    params = dict(nnx.to_flat_state(state))
    expected = {path: param.shape for path, param in params.items()}
    given = {path: array.shape for path, array in arrays.items()}
    if given != expected:
        missing, unexpected = expected.items() - given.items(), given.items() - expected.items()
        raise ValueError(f"the weights do not fit: {missing=}, {unexpected=}")
    for path, param in params.items():
        # A copy: on a CPU PyTorch goes on to train in the memory that the given arrays may share.
        params[path] = param.replace(jnp.array(arrays[path], copy=True))
    return nnx.merge(graphdef, nnx.from_flat_state(params))
