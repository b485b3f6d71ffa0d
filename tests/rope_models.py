"""Models of transformers with every kind of rotary embedding, built from their configs."""

import dataclasses
import importlib
import json

import pytest
import transformers
from packaging.version import Version

SMALL = dict(hidden_size=256, num_attention_heads=2, max_position_embeddings=4096)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
LONGROPE = dict(
    rope_type="longrope",
    short_factor=[1.0 + 0.01 * i for i in range(48)],
    long_factor=[1.0 + 1.3 * i for i in range(48)],
)
DEEPSEEK_YARN = dict(
    rope_type="yarn",
    factor=40.0,
    beta_fast=32,
    beta_slow=1,
    original_max_position_embeddings=4096,
)
GEMMA3 = {
    "full_attention": dict(rope_type="linear", factor=8.0, rope_theta=1e6),
    "sliding_attention": dict(rope_type="default", rope_theta=1e4),
}
MROPE = dict(rope_type="default", rope_theta=1e6, mrope_section=[16, 24, 24])


@dataclasses.dataclass
class Case:
    family: str  # transformers.models.<family>
    names: str  # the classes' names begin with it; "<config>/<rotary embedding>" where they differ
    parameters: dict | None  # rope_parameters; None for the class's own
    config: dict = dataclasses.field(default_factory=dict)
    layer_type: str | None = None
    since: str = "5.0"  # the first transformers seen to compute it as its newest does

    def build(self):
        """The config and the rotary embedding of transformers."""
        if Version(transformers.__version__) < Version(self.since):
            pytest.skip(f"transformers {transformers.__version__} computes this in another way")
        config_name, _, rotary_name = self.names.partition("/")
        package = f"transformers.models.{self.family}"
        configuration = importlib.import_module(f"{package}.configuration_{self.family}")
        kwargs = dict(self.config)
        if self.parameters is not None:
            kwargs["rope_parameters"] = json.loads(json.dumps(self.parameters))
        config = getattr(configuration, f"{config_name}Config")(**kwargs)
        rotary = getattr(self.modeling(), f"{rotary_name or config_name}RotaryEmbedding")
        return config, rotary(config)

    def modeling(self):
        return importlib.import_module(f"transformers.models.{self.family}.modeling_{self.family}")


def llama(parameters, **config):
    return Case("llama", "Llama", {"rope_theta": 500000.0, **parameters}, SMALL | config)


def yarn(**parameters):
    base = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024)
    return llama(base | parameters)


CASES = {
    "default": llama({"rope_type": "default"}),
    "explicit head_dim": llama({"rope_type": "default"}, head_dim=80),
    "linear": llama({"rope_type": "linear", "factor": 2.5}),
    "dynamic": llama({"rope_type": "dynamic", "factor": 3.0}),
    "llama3": llama(LLAMA3, max_position_embeddings=131072),
    "llama3 of the 1B model": llama(LLAMA3 | {"factor": 32.0}, head_dim=64),
    "llama3, many pairs on the ramp": llama(LLAMA3, head_dim=4096),
    "yarn": yarn(),
    "yarn, attention_factor": yarn(attention_factor=1.25),
    "yarn, betas": yarn(beta_fast=16.0, beta_slow=2.0),
    "yarn, mscale alone": yarn(mscale=0.707),
    "yarn, both mscales": yarn(mscale=1.0, mscale_all_dim=0.8),
    "yarn, no truncation": yarn(truncate=False),
    "yarn, factor of the windows": yarn(factor=None),
    "yarn, a step": yarn(beta_fast=1.0, beta_slow=1.0, truncate=False),
    "yarn, a ramp that begins before the pairs": yarn(original_max_position_embeddings=100),
    "yarn, a ramp that ends behind the pairs": yarn(
        rope_theta=8.0, original_max_position_embeddings=533
    ),
    "gpt-oss": Case("gpt_oss", "GptOss", None),
    "deepseek v3": Case(
        "deepseek_v3", "DeepseekV3", DEEPSEEK_YARN | dict(mscale=1.0, mscale_all_dim=1.0)
    ),
    "deepseek v2": Case(
        "deepseek_v2", "DeepseekV2", DEEPSEEK_YARN | dict(mscale=0.707, mscale_all_dim=0.707)
    ),
    "mistral 4": Case("mistral4", "Mistral4", None),
    "phi 3 longrope": Case(
        "phi3",
        "Phi3",
        LONGROPE,
        dict(
            hidden_size=3072,
            num_attention_heads=32,
            max_position_embeddings=131072,
            original_max_position_embeddings=4096,
        ),
    ),
    "longrope, factor": llama(
        LONGROPE | dict(factor=4.0, original_max_position_embeddings=1024), head_dim=96
    ),
    "phi": Case("phi", "Phi", None),
    "stablelm": Case("stablelm", "StableLm", None),
    "glm": Case("glm", "Glm", None),
    "glm 4": Case("glm4", "Glm4", None),
    "nemotron": Case("nemotron", "Nemotron", None),
    "cohere": Case("cohere", "Cohere", None),
    "smollm 3": Case("smollm3", "SmolLM3", None),
    "hunyuan, alpha": Case(
        "hunyuan_v1_dense",
        "HunYuanDenseV1",
        dict(rope_type="dynamic", rope_theta=1e4, alpha=1000.0, factor=1.0),
        dict(head_dim=128),
        since="5.24",
    ),
    "minimax m2": Case(
        "minimax_m2", "MiniMaxM2", None, dict(head_dim=128, rotary_dim=64), since="5.24"
    ),
    "gemma 3 full": Case("gemma3", "Gemma3Text/Gemma3", GEMMA3, {}, "full_attention"),
    "gemma 3 sliding": Case("gemma3", "Gemma3Text/Gemma3", GEMMA3, {}, "sliding_attention"),
    "gemma 4 full": Case("gemma4", "Gemma4Text", None, {}, "full_attention"),
    "gemma 4 sliding": Case("gemma4", "Gemma4Text", None, {}, "sliding_attention"),
    "olmo 3": Case("olmo3", "Olmo3", None, {}, "full_attention"),
    "qwen2-vl": Case("qwen2_vl", "Qwen2VLText/Qwen2VL", MROPE),
    "qwen2.5-vl, yarn": Case(
        "qwen2_5_vl",
        "Qwen2_5_VLText/Qwen2_5_VL",
        MROPE | dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768),
    ),
    "qwen3-vl": Case("qwen3_vl", "Qwen3VLText", None, dict(head_dim=128)),
    "qwen3.5": Case("qwen3_5", "Qwen3_5Text", None),
    "glm-4v": Case(
        "glm4v",
        "Glm4vText",
        dict(MROPE, mrope_section=[8, 12, 12], partial_rotary_factor=0.5),
    ),
}


def inv_freq_of(rotary, layer_type):
    name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
    return getattr(rotary, name).numpy()


def attention_factor_of(rotary, layer_type):
    name = "attention_scaling" if layer_type is None else f"{layer_type}_attention_scaling"
    return getattr(rotary, name)
