"""rope_frequencies against transformers' own modules, and how it reads configs."""

import copy
import decimal
import json

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from liger_ops.rope import frequencies as ops
from liger_ops.rope.frequencies import rope_frequencies
from rope_models import CASES, GEMMA3, LONGROPE, attention_factor_of, inv_freq_of, llama

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def torch_powers(base, dim, over):
    return (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / over)).numpy()


def as_dict(config):
    return json.loads(config.to_json_string())


# Frequencies


@each_case
def test_frequencies_equal_transformers(case, monkeypatch):
    config, rotary = case.build()
    expected = inv_freq_of(rotary, case.layer_type)
    got = rope_frequencies(config, layer_type=case.layer_type)
    assert got.attention_factor == attention_factor_of(rotary, case.layer_type)
    assert got.rotary_dim == 2 * expected.size and got.inv_freq.dtype == np.float32
    # A power that torch rounds wrong is one unit off, and its reciprocal two at most. llama3's
    # ramp is in the frequency itself, and doubles what the frequency is off by.
    ramp = case.parameters is not None and case.parameters.get("rope_type") == "llama3"
    np.testing.assert_array_max_ulp(got.inv_freq, expected, maxulp=4 if ramp else 2)
    assert np.mean(got.inv_freq != expected) <= 0.1
    # All the rest is the same to the bit.
    monkeypatch.setattr(ops, "_powers", torch_powers)
    got = rope_frequencies(config, layer_type=case.layer_type)
    np.testing.assert_array_equal(got.inv_freq, expected)


@pytest.mark.parametrize("name", ["dynamic", "phi 3 longrope", "longrope, factor"])
@pytest.mark.parametrize("seq_len", [1, 1024, 1025, 4096, 4097, 100_000, 1_000_000])
def test_what_depends_on_the_length_equals_transformers(name, seq_len, monkeypatch):
    monkeypatch.setattr(ops, "_powers", torch_powers)
    config, _ = CASES[name].build()
    inv_freq, factor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](
        config, None, seq_len=seq_len
    )
    got = rope_frequencies(config, seq_len=seq_len)
    np.testing.assert_array_equal(got.inv_freq, inv_freq.numpy())
    assert got.attention_factor == factor


@pytest.mark.parametrize("base, dim", [(1e4, 128), (5e5, 128), (1.5e5, 64), (2e6, 128), (1e6, 74)])
def test_powers_are_rounded_right(base, dim):
    powers = ops._powers(base, dim, dim)
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    with decimal.localcontext(prec=40):
        for power, exponent in zip(powers, exponents, strict=True):
            exact = decimal.Decimal(base) ** decimal.Decimal(float(exponent))
            half = decimal.Decimal(float(np.spacing(power))) / 2
            assert abs(decimal.Decimal(float(power)) - exact) <= half * decimal.Decimal("1.00001")
    np.testing.assert_array_max_ulp(powers, torch_powers(base, dim, dim), maxulp=1)


@each_case
def test_a_dict_says_the_same_as_the_object(case):
    config, _ = case.build()
    from_object = rope_frequencies(config, layer_type=case.layer_type)
    from_dict = rope_frequencies(as_dict(config), layer_type=case.layer_type)
    assert from_dict == from_object and hash(from_dict) == hash(from_object)
    whole = {"model_type": "whole", "text_config": as_dict(config), "hidden_size": 7}
    assert rope_frequencies(whole, layer_type=case.layer_type) == from_object


OLD_SPELLING = {
    "linear": dict(type="linear", factor=2.5),
    "dynamic": dict(type="dynamic", factor=3.0),
    "yarn": dict(type="yarn", factor=4.0, original_max_position_embeddings=1024),
    "yarn, both mscales": dict(
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=1024,
        mscale=1.0,
        mscale_all_dim=0.8,
    ),
    "phi 3 longrope": dict(
        type="su",
        short_factor=LONGROPE["short_factor"],
        long_factor=LONGROPE["long_factor"],
        original_max_position_embeddings=4096,
    ),
    "default": None,
    "qwen2-vl": dict(type="mrope", mrope_section=[16, 24, 24]),
}


@pytest.mark.parametrize("name", OLD_SPELLING)
@pytest.mark.parametrize("seq_len", [None, 50_000])
def test_the_old_spelling_says_the_same(name, seq_len):
    config, _ = CASES[name].build()
    old = as_dict(config)
    parameters = old.pop("rope_parameters")
    old["rope_theta"] = parameters["rope_theta"]
    old["rope_scaling"] = OLD_SPELLING[name]
    new = rope_frequencies(config, seq_len=seq_len)
    assert rope_frequencies(old, seq_len=seq_len) == new
    # and so does what transformers makes of it
    assert rope_frequencies(type(config)(**copy.deepcopy(old)), seq_len=seq_len) == new


def test_the_old_spelling_of_gemma3():
    old = dict(
        model_type="gemma3_text",
        head_dim=256,
        rope_theta=2e6,
        rope_local_base_freq=3e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    config = Gemma3TextConfig(**json.loads(json.dumps(old)))
    full, sliding = (
        rope_frequencies(old, layer_type=layer_type)
        for layer_type in ("full_attention", "sliding_attention")
    )
    assert full == rope_frequencies(config, layer_type="full_attention")
    assert sliding == rope_frequencies(config, layer_type="sliding_attention")
    assert full.inv_freq[0] == 0.125 and sliding.inv_freq[0] == 1.0
    del old["rope_local_base_freq"]
    with pytest.raises(ValueError, match=r"no 'rope_local_base_freq'.*sliding_attention"):
        rope_frequencies(old, layer_type="sliding_attention")


def test_a_window_beside_the_parameters_outranks_one_among_them():
    config = as_dict(CASES["phi 3 longrope"].build()[0])
    config["rope_parameters"]["original_max_position_embeddings"] = 16384
    assert config["original_max_position_embeddings"] == 4096
    of_transformers = type(CASES["phi 3 longrope"].build()[0])(**copy.deepcopy(config))
    for seq_len in (4096, 4097, 16385):
        got = rope_frequencies(config, seq_len=seq_len)
        assert got == rope_frequencies(of_transformers, seq_len=seq_len)
    assert rope_frequencies(config, seq_len=4097) == got  # long already

    # but not where each type of layer has its own parameters
    layers = copy.deepcopy(GEMMA3)
    layers["full_attention"] |= dict(rope_type="yarn", factor=8.0)
    config = Gemma3TextConfig(
        rope_parameters=layers,
        max_position_embeddings=8192,
        original_max_position_embeddings=2048,
    )
    inv_freq, _ = ROPE_INIT_FUNCTIONS["yarn"](config, layer_type="full_attention")
    got = rope_frequencies(config, layer_type="full_attention")
    np.testing.assert_array_max_ulp(got.inv_freq, inv_freq.numpy(), maxulp=2)


def test_gemma4_as_it_is_on_the_hub():
    config, _ = CASES["gemma 4 full"].build()
    hub = {k: v for k, v in as_dict(config).items() if k != "per_layer_config"}
    hub["global_head_dim"] = 512
    for layer_type, size in (("full_attention", 512), ("sliding_attention", 256)):
        got = rope_frequencies(hub, layer_type=layer_type)
        assert got == rope_frequencies(config, layer_type=layer_type) and got.rotary_dim == size


def test_llama_2_whose_config_has_no_base():
    config = dict(model_type="llama", hidden_size=256, num_attention_heads=2)
    assert rope_frequencies(config) == rope_frequencies(config | {"rope_theta": 1e4})


def test_dynamic_is_the_default_within_the_window():
    default = rope_frequencies(CASES["default"].build()[0])
    for factor in (1.1, 2.0, 3.7):
        config, _ = llama({"rope_type": "dynamic", "factor": factor}).build()
        for seq_len in (None, 1, 4095, 4096):
            assert rope_frequencies(config, seq_len=seq_len) == default
        beyond = rope_frequencies(config, seq_len=8192).inv_freq
        assert beyond[0] == 1.0 and np.all(beyond[1:] < default.inv_freq[1:])
        # The lowest frequency is divided by the growth of the base, factor * 2 - (factor - 1).
        growth = default.inv_freq[-1] / beyond[-1]
        np.testing.assert_allclose(growth, factor + 1, rtol=1e-5)


# Multimodal sections


def test_chunked_sections():
    config, _ = CASES["qwen2-vl"].build()
    assert rope_frequencies(config).axes == (0,) * 16 + (1,) * 24 + (2,) * 24


def test_interleaved_sections():
    config, _ = CASES["qwen3-vl"].build()
    assert rope_frequencies(config).axes == (0, 1, 2) * 20 + (0,) * 4
    # without a known family, the config's own word decides
    parameters = dict(mrope_section=[2, 1, 1], rope_theta=1e4, mrope_interleaved=True)
    assert rope_frequencies({"head_dim": 8, "rope_parameters": parameters}).axes == (0, 1, 2, 0)
    parameters["mrope_interleaved"] = False
    assert rope_frequencies({"head_dim": 8, "rope_parameters": parameters}).axes == (0, 0, 1, 2)


# Layouts


@pytest.mark.parametrize(
    "name", ["default", "phi", "stablelm", "gemma 3 full", "glm", "glm 4", "cohere", "glm-4v"]
)
def test_layout_is_how_the_family_rotates(name):
    case = CASES[name]
    frequencies = rope_frequencies(case.build()[0], layer_type=case.layer_type)
    size = frequencies.rotary_dim
    unit = torch.zeros(1, 1, 1, size)
    unit[..., 0] = 1.0
    cos, sin = torch.zeros(1, 1, size), torch.ones(1, 1, size)  # a quarter turn
    turned, _ = case.modeling().apply_rotary_pos_emb(unit, unit, cos, sin)
    partner = {1: "interleaved", size // 2: "half"}[int(turned.argmax())]
    assert frequencies.layout == partner


def test_layout_of_deepseek_can_be_overridden():
    config, _ = CASES["deepseek v3"].build()
    fields = as_dict(config)
    assert rope_frequencies(fields).layout == "interleaved"
    del fields["rope_interleave"]  # as on the hub
    assert rope_frequencies(fields).layout == "interleaved"
    assert rope_frequencies(fields | {"rope_interleave": False}).layout == "half"


# Errors


def bad(**fields):
    return dict(head_dim=64, rope_theta=1e4, max_position_embeddings=4096) | fields


def scaled(rope_type, **fields):
    return bad(rope_scaling={"rope_type": rope_type, **fields})


@pytest.mark.parametrize(
    "config, message",
    [
        (scaled("axial"), r"rope_type must be one of 'default', .*'proportional'; got 'axial'"),
        ({"head_dim": 64}, r"no 'rope_theta', which the rope type 'default' needs"),
        (scaled("linear"), r"no 'factor', which the rope type 'linear' needs"),
        (scaled("dynamic"), r"no 'factor'"),
        (
            scaled("dynamic", factor=2.0) | {"max_position_embeddings": None},
            r"no 'max_position_embeddings'",
        ),
        (
            scaled("yarn", factor=2.0) | {"max_position_embeddings": None},
            r"no 'original_max_position_embeddings'",
        ),
        (scaled("longrope", factor=2.0), r"no 'short_factor'"),
        (
            scaled("longrope", factor=2.0, short_factor=[1.0] * 31),
            r"short_factor must have a number for each of the 32 frequencies; got 31",
        ),
        (scaled("llama3", factor=8.0), r"no 'low_freq_factor'"),
        (bad(head_dim=None, hidden_size=64), r"no 'head_dim', and not both .*got 64 and None"),
        (
            scaled("default", mrope_section=[8, 8, 8]),
            r"mrope_section must share out the 32 frequencies; got \[8, 8, 8\], in all 24",
        ),
        (
            scaled("default", mrope_section=[8] * 4) | {"model_type": "hunyuan_vl_text"},
            r"'hunyuan_vl' with 'mrope_section'",
        ),
        (
            {"head_dim": 64, "rope_parameters": GEMMA3},
            r"layer_type must be one of 'full_attention', 'sliding_attention', .*got None",
        ),
    ],
)
def test_errors_of_configs(config, message):
    with pytest.raises(ValueError, match=message):
        rope_frequencies(config)


def test_errors_of_arguments():
    with pytest.raises(ValueError, match=r"seq_len must be at least 1, or None; got 0"):
        rope_frequencies(bad(), seq_len=0)
    with pytest.raises(ValueError, match=r"'nope' have no rotary embedding"):
        rope_frequencies(bad(rope_parameters=GEMMA3 | {"nope": None}), layer_type="nope")
