"""Decoders as other Flax libraries write them: their public names and shapes, with tiny sizes.

`TunixStyle` and `BonsaiStyle` have the layouts of tunix's Llama 3 and Gemma and of bonsai's Qwen3
(nnx), `LinenDecoder` those of linen models with layers made in `setup` and in compact methods.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen, nnx

D, F, N, K, H, V = 32, 48, 4, 2, 8, 11


@dataclasses.dataclass(frozen=True)
class Sharding:
    act_btf: tuple = ("fsdp", None, "tp")


@dataclasses.dataclass(frozen=True)
class Settings:
    activation: str = "silu"
    gemma: bool = False
    remat: bool = False
    shd_config: Sharding = Sharding()


sharded = []


def shard(x, spec):
    sharded.append(spec)
    return x


def apply_rope(inputs, positions, head_dim, rope_theta=1_000_000):
    exponents = jnp.arange(head_dim // 2, dtype=jnp.float32) * 2 / head_dim
    angles = positions[..., None] / (rope_theta**exponents)
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    a, b = jnp.split(inputs, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(inputs.dtype)


def apply_rotary_emb(x, cos, sin):
    cos, sin = cos[:, :, None].astype(x.dtype), sin[:, :, None].astype(x.dtype)
    a, b = x[..., 0::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)


def attend(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


class Einsum(nnx.Module):
    def __init__(self, equation, shape, rngs):
        self.equation = equation
        self.w = nnx.Param(nnx.initializers.normal(0.2)(rngs.params(), shape))

    def __call__(self, x):
        return jnp.einsum(self.equation, x, self.w[...])


class RMSNorm(nnx.Module):
    def __init__(self, dim, *, norm_eps, rngs):
        self.w = nnx.Param(1.0 + 0.3 * jax.random.normal(rngs.params(), (dim,)))
        self.norm_eps = norm_eps

    @jax.named_scope("rms_norm")
    def __call__(self, x):
        squares = jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True)
        return (self.w * x / jnp.sqrt(squares + self.norm_eps)).astype(x.dtype)


class GemmaNorm(nnx.Module):
    def __init__(self, dim, *, norm_eps, rngs):
        self.scale = nnx.Param(0.3 * jax.random.normal(rngs.params(), (dim,)))

    def __call__(self, x):
        normed = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)
        return normed * (1 + self.scale[...])


class MLP(nnx.Module):
    def __init__(self, config, rngs):
        self.config = config
        self.gate_proj = nnx.Linear(D, F, use_bias=False, rngs=rngs)
        self.up_proj = nnx.Linear(D, F, use_bias=False, rngs=rngs)
        self.down_proj = nnx.Linear(F, D, use_bias=False, rngs=rngs)

    def block(self, x):
        act = nnx.silu if self.config.activation == "silu" else nnx.gelu
        h = act(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(shard(h, self.config.shd_config.act_btf))

    @jax.named_scope("feed_forward")
    def __call__(self, x):
        if self.config.remat:
            return nnx.remat(self.block.__func__)(self, x)
        return self.block(x)


class Attention(nnx.Module):
    def __init__(self, config, rngs):
        self.config = config
        self.q_proj = Einsum("BTD,DNH->BTNH", (D, N, H), rngs)
        self.k_proj = Einsum("BSD,DKH->BSKH", (D, K, H), rngs)
        self.v_proj = Einsum("BSD,DKH->BSKH", (D, K, H), rngs)
        self.o_proj = Einsum("BTNH,NHD->BTD", (N, H, D), rngs)

    def block(self, x, positions):
        q, k = (apply_rope(y, positions, head_dim=H) for y in (self.q_proj(x), self.k_proj(x)))
        return self.o_proj(attend(q, k, self.v_proj(x)))

    @jax.named_scope("attention")
    def __call__(self, x, positions):
        if self.config.remat:
            return nnx.remat(self.block.__func__)(self, x, positions)
        return self.block(x, positions)


class Layer(nnx.Module):
    def __init__(self, config, rngs):
        norm = GemmaNorm if config.gemma else RMSNorm
        self.input_layernorm = norm(D, norm_eps=1e-5, rngs=rngs)
        self.attn = Attention(config, rngs)
        self.post_attention_layernorm = norm(D, norm_eps=1e-5, rngs=rngs)
        self.mlp = MLP(config, rngs)

    def __call__(self, x, positions):
        x = x + self.attn(self.input_layernorm(x), positions)
        return x + self.mlp(self.post_attention_layernorm(x))


class TunixStyle(nnx.Module):
    def __init__(self, config=Settings()):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.layers = nnx.List([Layer(config, rngs)])
        norm = GemmaNorm if config.gemma else RMSNorm
        self.final_norm = norm(D, norm_eps=1e-5, rngs=rngs)
        self.lm_head = Einsum("BTD,DV->BTV", (D, V), rngs)

    def __call__(self, tokens, positions):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        return self.lm_head(self.final_norm(x))


class BonsaiAttention(nnx.Module):
    def __init__(self, rngs):
        self.shd_cfg = Sharding()
        self.q_proj = Einsum("BTD,DNH->BTNH", (D, N, H), rngs)
        self.k_proj = Einsum("BSD,DKH->BSKH", (D, K, H), rngs)
        self.v_proj = Einsum("BSD,DKH->BSKH", (D, K, H), rngs)
        self.o_proj = Einsum("BTNH,NHD->BTD", (N, H, D), rngs)
        self.q_norm = RMSNorm(H, norm_eps=1e-6, rngs=rngs)
        self.k_norm = RMSNorm(H, norm_eps=1e-6, rngs=rngs)

    @jax.named_scope("attention")
    def __call__(self, x, positions):
        angles = positions[..., None] / 10000.0 ** (jnp.arange(0, H, 2) / H)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        q = apply_rotary_emb(self.q_norm(self.q_proj(x)), cos, sin)
        k = apply_rotary_emb(self.k_norm(self.k_proj(x)), cos=cos, sin=sin)
        return self.o_proj(attend(q, k, self.v_proj(x)))


class BonsaiMLP(nnx.Module):
    def __init__(self, rngs):
        self.shd_cfg = Sharding()
        self.gate_proj = nnx.Linear(D, F, use_bias=False, rngs=rngs)
        self.up_proj = nnx.Linear(D, F, use_bias=False, rngs=rngs)
        self.down_proj = nnx.Linear(F, D, use_bias=False, rngs=rngs)

    @jax.named_scope("feed_forward")
    def __call__(self, x):
        h = nnx.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(shard(h, self.shd_cfg.act_btf))


class BonsaiStyle(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.input_layernorm = RMSNorm(D, norm_eps=1e-6, rngs=rngs)
        self.attn = BonsaiAttention(rngs)
        self.post_attention_layernorm = RMSNorm(D, norm_eps=1e-6, rngs=rngs)
        self.mlp = BonsaiMLP(rngs)
        self.final_norm = RMSNorm(D, norm_eps=1e-6, rngs=rngs)

    def __call__(self, tokens, positions):
        x = self.embed(tokens)
        x = x + self.attn(self.input_layernorm(x), positions)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return self.final_norm(x)


class LinenNorm(linen.Module):
    eps: float = 1e-5

    @linen.compact
    def __call__(self, x):
        weight = self.param("weight", linen.initializers.normal(0.4), (x.shape[-1],))
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        return weight * y.astype(x.dtype)


class SetupMLP(linen.Module):
    def setup(self):
        self.gate_proj = linen.Dense(F, use_bias=False)
        self.up_proj = linen.Dense(F, use_bias=False)
        self.down_proj = linen.Dense(D, use_bias=False)
        self.dropout = linen.Dropout(0.1)

    def __call__(self, x, deterministic=True):
        h = self.up_proj(x) * linen.silu(self.gate_proj(x))
        return self.dropout(self.down_proj(h), deterministic=deterministic)


class CompactMLP(linen.Module):
    @linen.compact
    def __call__(self, x):
        gate, up = linen.Dense(F, name="wi_0")(x), linen.Dense(F, name="wi_1")(x)
        return linen.Dense(D, name="wo")(linen.gelu(gate, approximate=False) * up)


class LinenAttention(linen.Module):
    @linen.compact
    def __call__(self, x, positions):
        q, k, v = (
            linen.DenseGeneral((heads, H), use_bias=False, name=name)(x)
            for name, heads in (("query", N), ("key", K), ("value", K))
        )
        q, k = (apply_rope(y, positions, H, rope_theta=10000) for y in (q, k))
        return linen.DenseGeneral(D, axis=(-2, -1), name="out")(attend(q, k, v))


class LinenLayer(linen.Module):
    @linen.compact
    def __call__(self, x, positions):
        x = x + LinenAttention()(linen.RMSNorm(epsilon=1e-5)(x), positions)
        x = x + SetupMLP(name="mlp")(linen.LayerNorm()(x), deterministic=True)
        return x + CompactMLP()(LinenNorm()(x))


class LinenDecoder(linen.Module):
    """One layer, rematerialised with `remat`; with `scan` two, whose parameters are stacked."""

    remat: bool = False
    scan: bool = False

    @linen.compact
    def __call__(self, tokens, positions):
        x = self.encode(tokens)
        layer = linen.remat(LinenLayer) if self.remat else LinenLayer
        if self.scan:
            run = linen.scan(
                lambda block, x, _: (block(x, positions), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=2,
            )
            x, _ = run(layer(), x, None)
        else:
            x = layer()(x, positions)
        return linen.RMSNorm()(x)

    @linen.nowrap
    def label(self):
        return "decoder"

    @linen.compact
    def encode(self, tokens):
        return linen.Embed(V, D, name="embed")(tokens)
