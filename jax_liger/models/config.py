"""A decoder's configuration: read from a Hugging Face config.json, and how to compute it."""

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jax_liger.models.families import ACTIVATIONS, FAMILIES, ROPE_FIELDS, WITHOUT_EFFECT, Family
from liger_ops.checking import listed
from liger_ops.rope.frequencies import RopeFrequencies, rope_frequencies

REMAT_POLICIES = ("none", "activation", "cheap", "dots", "full")


@dataclass(frozen=True)
class Layer:
    """What one layer has of its own."""

    layer_type: str  # "full_attention" or "sliding_attention"
    window: int | None  # how many keys a query sees, its own among them; None for all before it
    rope: bool  # whether its queries and keys are rotated
    experts: bool  # whether its feed-forward part is a mixture of experts


@dataclass(frozen=True)
class Config:
    """A decoder's configuration. `Config.from_hf` makes one; all of it is static to jit.

    The second part says how to compute and may be changed with `dataclasses.replace`:

        dtype: of the activations and the products.
        param_dtype: of the parameters; float32 beside a bfloat16 dtype is mixed precision.
        implementation: of every norm, rotation, activation and the loss: "pallas", "xla" for the
            stock model, or None for the kernels on a supported GPU and XLA elsewhere.
        attention: "cudnn", "xla", or None for cuDNN's flash attention on a GPU where it takes the
            dtype and head size, and XLA elsewhere.
        remat: what a layer keeps for the backward. "none": all. "activation": all but the input of
            down_proj, act(gate) * up, which is one of its largest arrays and computed again from
            the other two. "cheap": its input and the results of the matrix products and of
            attention, so that norms, rotations and activations are computed again. "dots": as
            cheap, but attention is computed again too. "full": its input.
        fused_projections: whether q, k, v and gate, up are one matrix product each, `qkv_proj` and
            `gate_up_proj`, whatever the checkpoint has.
        fused_qkv: whether the norm before attention, the projections and the rotation are computed
            by `rms_norm_linear_rope`: as one kernel with implementation="pallas", and with None
            where that was measured to be faster. A layer whose projections have adapters, or which
            rotates nothing, and all of them with a mesh in scope that splits heads over "tensor",
            run as without it. It needs one weight, and without fused_projections that is put
            together in every call.
        max_length: of a document, for rotary embeddings that change with it (`longrope`,
            `dynamic`); None for the length of the rows, or the size of the cache.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layers: tuple[Layer, ...]
    activation: str
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    attention_scale: float
    attention_softcap: float | None
    final_softcap: float | None
    embedding_multiplier: float
    residual_multiplier: float
    logit_scale: float
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    output_router_logits: bool  # whether the experts' balance is a part of the loss
    router_aux_loss_coef: float  # what it is multiplied by
    initializer_range: float
    hf_json: str  # the config as it came, for the rotary embedding and for saving

    dtype: str = "float32"
    param_dtype: str = "float32"
    implementation: str | None = None
    attention: str | None = None
    remat: str = "none"
    fused_projections: bool = False
    fused_qkv: bool = False
    max_length: int | None = None

    def __post_init__(self):
        for name in ("dtype", "param_dtype"):  # also given as jnp.bfloat16 and the like
            object.__setattr__(self, name, jnp.dtype(getattr(self, name)).name)
        for name, known in (
            ("remat", REMAT_POLICIES),
            ("implementation", ("pallas", "xla", None)),
            ("attention", ("cudnn", "xla", None)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {known}; got {getattr(self, name)!r}")
        if self.fused_qkv and (self.family.norms[0] is None or self.family.qk_norm == "width"):
            able = (n for n, f in FAMILIES.items() if f.norms[0] and f.qk_norm != "width")
            raise ValueError(
                f"fused_qkv must be False for {self.model_type}, which has no norm before "
                f"attention, or one over all heads of queries and keys; it is for {listed(able)}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                "num_attention_heads must be a multiple of num_key_value_heads; got "
                f"{self.num_attention_heads} and {self.num_key_value_heads}"
            )

    @property
    def hf(self) -> dict[str, Any]:
        """The Hugging Face config that this one was read from."""
        return json.loads(self.hf_json)

    @property
    def family(self) -> Family:
        """What the family's code fixes."""
        return FAMILIES[self.model_type]

    def frequencies(self, layer_type: str, seq_len: int | None) -> RopeFrequencies:
        """Of the layers of this type; seq_len is the largest position + 1, as in `longrope`."""
        return _frequencies(self.hf_json, layer_type, seq_len)

    @classmethod
    def from_hf(cls, config: Any, *, ignore: Iterable[str] = (), **settings: Any) -> "Config":
        """Reads a config of Hugging Face.

        Args:
            config: what config.json holds, as a dict, or a config object of transformers.
            ignore: names of fields to pass over that would be refused.
            settings: dtype, param_dtype, implementation, attention, remat, fused_projections,
                fused_qkv, max_length.

        Raises:
            ValueError: for a model_type that there is not; a field that is needed and absent; and
                any field whose value changes what the model computes in a way that is not
                supported, or that is not known at all and not empty. It names the fields.
        """
        hf = dict(config) if isinstance(config, Mapping) else config.to_dict()
        if hf.get("model_type") not in FAMILIES:
            raise ValueError(
                f"model_type must be one of {listed(FAMILIES)}; got {hf.get('model_type')!r}"
            )
        fields = _Fields(hf)
        result = _read(fields, settings, json.dumps(hf, sort_keys=True))
        fields.refuse_the_rest(set(ignore))
        return result


class _Fields:
    """A config's fields, with its family's defaults; it remembers which have been read."""

    def __init__(self, hf: dict[str, Any]):
        self.family = FAMILIES[hf["model_type"]]
        defaults: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, **self.family.defaults}
        if hf.get("rope_parameters"):  # the newer spelling, which has all of them
            defaults = {k: v for k, v in defaults.items() if not k.startswith("rope_")}
        self.hf = {**defaults, **hf}
        self.read = set(self.family.defaults)  # known, even where others outrank them

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        value = self.hf.get(name)
        return default if value is None else value

    def own(self, name: str, default: Any) -> Any:
        """A field that only some families have; elsewhere it stays unread, and so is refused."""
        return self.get(name, default) if name in self.family.defaults else default

    def need(self, name: str) -> Any:
        if self.get(name) is None:
            raise ValueError(f"the config has no {name!r}, which a {self.hf['model_type']} needs")
        return self.hf[name]

    def refuse(self, name: str, why: str) -> None:
        raise ValueError(f"{name}={self.hf.get(name)!r} {why}, which is not supported")

    def refuse_the_rest(self, ignore: set[str]) -> None:
        rest = {
            name: value
            for name, value in self.hf.items()
            if value
            and name not in self.read | WITHOUT_EFFECT | ROPE_FIELDS | ignore
            and not name.startswith("_")
        }
        if rest:
            raise ValueError(
                f"the config has fields that a {self.hf['model_type']} is not known to have or "
                f"that are not supported: {rest}; if they change nothing, pass "
                f"ignore={sorted(rest)}"
            )


def _read(fields: _Fields, settings: dict[str, Any], hf_json: str) -> Config:
    get, own, need, family = fields.get, fields.own, fields.need, fields.family
    for name in ("attention_dropout", "resid_pdrop", "embd_pdrop", "router_jitter_noise"):
        if get(name, 0.0):
            fields.refuse(name, "drops or shakes values in training")

    heads, width = need("num_attention_heads"), need("hidden_size")
    head_dim = get("head_dim", width // heads)
    attention_bias = family.qkv_bias is None and bool(get("attention_bias", False))
    scale = own("attention_multiplier", own("query_pre_attn_scalar", head_dim) ** -0.5)
    multiplier = width**0.5 if family.scaled_embedding else own("embedding_multiplier", 1.0)
    result = Config(
        model_type=fields.hf["model_type"],
        vocab_size=need("vocab_size"),
        hidden_size=width,
        intermediate_size=need("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=get("num_key_value_heads", heads),
        head_dim=head_dim,
        layers=_layers(fields),
        activation=_activation(fields),
        rms_norm_eps=need("rms_norm_eps"),
        tie_word_embeddings=bool(get("tie_word_embeddings", False)),
        qkv_bias=bool(family.qkv_bias) or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family.mlp_bias and bool(get("mlp_bias", False)),
        attention_scale=float(scale),
        attention_softcap=own("attn_logit_softcapping", None),
        final_softcap=own("final_logit_softcapping", None),
        embedding_multiplier=float(multiplier),
        residual_multiplier=float(own("residual_multiplier", 1.0)),
        logit_scale=1.0 / own("logits_scaling", 1.0),
        num_experts=(get("num_local_experts") or need("num_experts")) if family.experts else 0,
        num_experts_per_tok=own("num_experts_per_tok", 0),
        moe_intermediate_size=own("moe_intermediate_size", need("intermediate_size")),
        norm_topk_prob=bool(own("norm_topk_prob", True)),
        output_router_logits=bool(own("output_router_logits", False)),
        router_aux_loss_coef=float(own("router_aux_loss_coef", 0.0)),
        initializer_range=get("initializer_range", 0.02),
        hf_json=hf_json,
        **{"fused_projections": family.fused_projections, **settings},
    )
    for layer_type in {layer.layer_type for layer in result.layers if layer.rope}:
        rotary_dim = result.frequencies(layer_type, None).rotary_dim
        if rotary_dim != head_dim and not family.partial_rotary:
            raise ValueError(
                f"a {fields.hf['model_type']} rotates whole heads, of {head_dim} features; its "
                f"partial_rotary_factor asks for {rotary_dim}"
            )
    return result


def _activation(fields: _Fields) -> str:
    name = fields.family.activation_field
    given = fields.get(name, "silu")
    if fields.hf["model_type"] == "gemma":
        # Its first configs say "gelu" and mean the other; transformers reads them so too.
        given = "gelu_pytorch_tanh" if given == "gelu" else given
        if fields.get("hidden_activation", given) != given:
            fields.refuse("hidden_activation", f"contradicts hidden_act={given!r}")
    if given not in ACTIVATIONS:
        raise ValueError(f"{name} must be one of {listed(ACTIVATIONS)}; got {given!r}")
    return ACTIVATIONS[given]


def _layers(fields: _Fields) -> tuple[Layer, ...]:
    get, own, family = fields.get, fields.own, fields.family
    count = fields.need("num_hidden_layers")
    window = get("sliding_window") if family.windows != "none" else None
    if not own("use_sliding_window", True):
        window = None

    rotated = own("no_rope_layers", None)
    if "no_rope_layers" not in family.defaults:
        rotated = [1] * count
    elif rotated is None:
        rotated = [(i + 1) % get("no_rope_layer_interval") for i in range(count)]

    types = get("layer_types") if family.windows == "listed" else None
    if types is None:
        types = [
            "sliding_attention" if window and _slides(i, fields, rotated) else "full_attention"
            for i in range(count)
        ]
    if len(types) != count or len(rotated) != count:
        raise ValueError(
            f"layer_types and no_rope_layers must have an entry for each of the {count} layers; "
            f"got {len(types)} and {len(rotated)}"
        )
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(f"layer_types has {listed(sorted(unknown))}, which is not supported")
    return tuple(
        Layer(
            layer_type=types[i],
            window=window if types[i] == "sliding_attention" else None,
            rope=bool(rotated[i]),
            experts=_has_experts(i, fields),
        )
        for i in range(count)
    )


def _slides(i: int, fields: _Fields, rotated: list[int]) -> bool:
    match fields.family.window_pattern:
        case "max_window_layers":
            return i >= fields.need("max_window_layers")
        case "every other":
            return i % 2 == 0
        case "sliding_window_pattern":
            return (i + 1) % fields.need("sliding_window_pattern") != 0
        case "without rope":
            return not rotated[i]
    return True


def _has_experts(i: int, fields: _Fields) -> bool:
    step, plain = fields.own("decoder_sparse_step", 1), fields.own("mlp_only_layers", [])
    return fields.family.experts and i not in plain and (i + 1) % step == 0


@functools.lru_cache(maxsize=256)
def _frequencies(hf_json: str, layer_type: str, seq_len: int | None) -> RopeFrequencies:
    hf = _Fields(json.loads(hf_json)).hf
    return rope_frequencies(hf, seq_len=seq_len, layer_type=layer_type)
