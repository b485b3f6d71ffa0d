"""rope_angles of both frameworks against transformers' own modules, and against float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_liger
import torch_liger
from liger_ops.rope import angles as oracle
from liger_ops.rope.frequencies import RopeFrequencies, rope_frequencies
from rope_models import CASES, Case, inv_freq_of

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def positions_for(frequencies, window):
    """Within the window and well beyond, for two rows that differ."""
    rng = np.random.default_rng(0)
    shape = (2, 150) if frequencies.axes is None else (3, 2, 150)
    positions = rng.integers(0, 200_000, shape)
    positions[..., :50] = rng.integers(0, window, positions[..., :50].shape)
    positions[..., -1] = 200_000
    return positions


@each_case
def test_angles_equal_transformers(case):
    config, rotary = case.build()
    seq_len = 200_001
    own = rope_frequencies(config, seq_len=seq_len, layer_type=case.layer_type)
    positions = positions_for(own, 1024)
    kwargs = {} if case.layer_type is None else {"layer_type": case.layer_type}
    expected = rotary(torch.zeros(1), torch.from_numpy(positions), **kwargs)
    tolerance = 0.0
    if case.family == "deepseek_v2":  # one complex number for both, from a function of its own
        expected, tolerance = (expected.real, expected.imag), 1.2e-7
    # Some give cat(c, c), or c alone, to functions that pair neighbours.
    layout = "interleaved" if case.family in ("cohere", "glm4v") else "half"
    columns = expected[0].shape[-1]

    # transformers' frequencies, after forward has chosen them by the length, give its numbers
    theirs = dataclasses.replace(own, inv_freq=inv_freq_of(rotary, case.layer_type))
    got = torch_liger.rope_angles(torch.from_numpy(positions), theirs, layout=layout)
    for got_, expected_ in zip(got, expected, strict=True):
        assert got_.dtype == torch.float32
        torch.testing.assert_close(got_[..., :columns], expected_, rtol=0, atol=tolerance)

    # and our own are off by the angle that a unit in the last place of a frequency makes
    # (two for most, as tests of the frequencies say; dynamic takes the base's power in float32)
    rope_type = None if case.parameters is None else case.parameters.get("rope_type")
    units = (4 if rope_type in ("dynamic", "llama3") else 2) * np.spacing(theirs.inv_freq)
    off = np.abs(own.inv_freq - theirs.inv_freq)
    assert np.all(off <= units)
    p = torch.from_numpy(positions).double().numpy()
    p = p.max(0) if p.ndim == 3 else p
    bound = p[..., None] * off + np.spacing((p[..., None] * own.inv_freq).astype(np.float32))
    bound = np.where(off == 0, 0, bound) * own.attention_factor
    bound = np.repeat(bound, 2, -1) if layout == "interleaved" else np.concatenate([bound] * 2, -1)
    got = torch_liger.rope_angles(torch.from_numpy(positions), own, layout=layout)
    for got_, expected_ in zip(got, expected, strict=True):
        error = np.abs(got_[..., :columns].numpy() - expected_.numpy())
        assert np.all(error <= bound[..., :columns] + 2e-7 * own.attention_factor)


def test_angles_of_ernie_equal_transformers():
    """Its module holds the frequencies in another order, so the angles are compared alone."""
    case = Case("ernie4_5_vl_moe", "Ernie4_5_VLMoeText", None, dict(head_dim=128))
    config, rotary = case.build()
    own = rope_frequencies(config)
    assert own.layout == "interleaved"
    assert sorted(own.inv_freq) == sorted(rotary.inv_freq.numpy())
    positions = torch.from_numpy(positions_for(own, 1024))
    got = torch_liger.rope_angles(positions, own, layout="interleaved")
    for got_, expected in zip(got, rotary(torch.zeros(1), positions), strict=True):
        torch.testing.assert_close(got_, expected, rtol=0, atol=0)


POSITIONS = {
    "one row": np.arange(40),
    "left padding": np.array([[0, 0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]]),
    "packed rows that restart": np.array([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 1]]),
    "a step of decoding": np.array([[37], [5]]),
    "beyond the window": np.array([[0, 4095, 4096, 131_071, 999_999]]),
    "none": np.zeros((2, 0), np.int64),
}


@pytest.mark.parametrize("name", ["default", "yarn", "gemma 4 full", "qwen2-vl", "qwen3-vl"])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS.keys())
def test_both_frameworks_agree_with_the_oracle(name, layout, positions):
    case = CASES[name]
    frequencies = rope_frequencies(case.build()[0], layer_type=case.layer_type)
    forms = [positions]
    if frequencies.axes is not None and positions.ndim == 2:
        forms.append(np.stack([positions, positions // 2, positions // 3]))
    for form in forms:
        expected = oracle.forward(form, frequencies, layout=layout)
        by_torch = torch_liger.rope_angles(torch.from_numpy(form), frequencies, layout=layout)
        by_jax = jax_liger.rope_angles(form, frequencies, layout=layout)
        # Half a unit in the last place of the angle, and of cos and sin a unit.
        largest = form.max(initial=0) * frequencies.inv_freq.max()
        bound = frequencies.attention_factor * (largest * 2.0**-24 + 1.2e-7)
        for part, of_torch, of_jax in zip(("cos", "sin"), by_torch, by_jax, strict=True):
            assert of_jax.shape == of_torch.shape == (*positions.shape, frequencies.rotary_dim)
            assert of_jax.dtype == jnp.float32 and of_torch.dtype == torch.float32
            error = np.abs(of_torch.numpy() - expected[part])
            assert error.max(initial=0) <= bound
            # The angles are the same number in both, so there the bound has no part of them.
            apart = np.abs(of_torch.numpy() - np.asarray(of_jax))
            assert apart.max(initial=0) <= frequencies.attention_factor * 2.4e-7


def test_a_row_is_the_table_looked_up():
    frequencies = rope_frequencies(CASES["llama3"].build()[0])
    table = [part.numpy() for part in torch_liger.rope_angles(torch.arange(64), frequencies)]
    for positions in (POSITIONS["left padding"], POSITIONS["packed rows that restart"]):
        got = torch_liger.rope_angles(torch.from_numpy(positions), frequencies)
        for part, whole in zip(got, table, strict=True):
            np.testing.assert_array_equal(part.numpy(), whole[positions])


def test_error_of_the_float32_angle_at_a_far_position():
    """What the docstrings state: half a unit in the last place of the angle, 4e-3 at 10^5."""
    frequencies = rope_frequencies(CASES["default"].build()[0])
    positions = np.arange(99_000, 100_001)
    cos, _ = torch_liger.rope_angles(torch.from_numpy(positions), frequencies)
    error = np.abs(cos.numpy() - oracle.forward(positions, frequencies)["cos"])
    assert 2e-3 < error.max() < 4e-3
    error = np.abs(cos.numpy() - oracle.forward(positions + 1, frequencies)["cos"])
    assert error.max() > 0.1  # a position off by one is no rounding


def test_the_layouts_hold_the_same_numbers():
    frequencies = rope_frequencies(CASES["default"].build()[0])
    half, _ = jax_liger.rope_angles(jnp.arange(9), frequencies)
    pairs, _ = jax_liger.rope_angles(jnp.arange(9), frequencies, layout="interleaved")
    size = frequencies.rotary_dim // 2
    np.testing.assert_array_equal(half[:, :size], half[:, size:])
    np.testing.assert_array_equal(pairs[:, ::2], half[:, :size])
    np.testing.assert_array_equal(pairs[:, 1::2], half[:, :size])


# Compilers


@pytest.mark.parametrize("name", ["yarn", "qwen3-vl"])
def test_traced_positions_in_jax(name):
    frequencies = rope_frequencies(CASES[name].build()[0])
    positions = jnp.asarray(POSITIONS["left padding"])
    if frequencies.axes is not None:
        positions = jnp.stack([positions, positions + 5, positions * 2])
    expected = jax_liger.rope_angles(positions, frequencies)
    static = jax.jit(lambda p, f: jax_liger.rope_angles(p, f), static_argnums=1)
    again = rope_frequencies(CASES[name].build()[0])  # equal, and another object
    for got in (static(positions, frequencies), static(positions, again)):
        for part, expected_part in zip(got, expected, strict=True):
            np.testing.assert_allclose(part, expected_part, rtol=0, atol=2.4e-7)
    assert static._cache_size() == 1


def test_nothing_has_64_bits_under_x64():
    frequencies = rope_frequencies(CASES["qwen3-vl"].build()[0])
    with jax.enable_x64(True):
        positions = jnp.zeros((3, 2, 4), jnp.int64)
        jaxpr = jax.make_jaxpr(lambda p: jax_liger.rope_angles(p, frequencies))(positions)
        assert [out.dtype for out in jaxpr.out_avals] == [jnp.float32, jnp.float32]
    assert "f64" not in str(jaxpr)


@pytest.mark.parametrize("name", ["yarn", "qwen3-vl"])
def test_compiles_without_a_graph_break(name):
    compiled = torch.compile(torch_liger.rope_angles, fullgraph=True, backend="aot_eager")
    first = rope_frequencies(CASES[name].build()[0])
    second = dataclasses.replace(first, inv_freq=first.inv_freq / 2)
    for frequencies in (first, second):
        for size in (4, 7):
            positions = torch.arange(2 * size).reshape(2, size)
            if frequencies.axes is not None:
                positions = torch.stack([positions, positions + 5, positions * 2])
            got = compiled(positions, frequencies)
            expected = torch_liger.rope_angles(positions, frequencies)
            torch.testing.assert_close(got, expected, rtol=0, atol=2.4e-7)


def test_what_is_kept_serves_training_after_inference():
    frequencies = rope_frequencies({"head_dim": 24, "rope_theta": 1234.0})
    with torch.inference_mode():
        torch_liger.rope_angles(torch.arange(3), frequencies)
    positions = torch.arange(3.0, requires_grad=True)
    cos, _ = torch_liger.rope_angles(positions, frequencies)
    cos.sum().backward()
    angle = np.arange(3.0)[:, None] * frequencies.inv_freq
    expected = -2 * (np.sin(angle) * frequencies.inv_freq).sum(-1)
    np.testing.assert_allclose(positions.grad, expected, atol=1e-5)


def test_fake_positions_leave_nothing_behind():
    from torch._subclasses.fake_tensor import FakeTensorMode

    frequencies = rope_frequencies({"head_dim": 24, "rope_theta": 4321.0})
    with FakeTensorMode():
        cos, _ = torch_liger.rope_angles(torch.arange(3), frequencies)
        assert cos.shape == (3, 24)
    cos, _ = torch_liger.rope_angles(torch.arange(3), frequencies)
    assert float(cos[0, 0]) == 1.0


# Errors


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_errors_of_angles(framework):
    rope_angles = {"jax": jax_liger, "torch": torch_liger}[framework].rope_angles
    array = {"jax": jnp.asarray, "torch": torch.asarray}[framework]
    frequencies = RopeFrequencies(np.ones(4, np.float32))
    positions = array(np.zeros((2, 3), np.int32))
    with pytest.raises(ValueError, match=r"layout must be one of 'half', 'interleaved'; got 'x'"):
        rope_angles(positions, frequencies, layout="x")
    with pytest.raises(TypeError, match=r"what rope_frequencies returns; got ndarray"):
        rope_angles(positions, frequencies.inv_freq)
    with pytest.raises(TypeError, match=r"integer dtype or 'float32'; got bool"):
        rope_angles(positions == 0, frequencies)
    with pytest.raises(ValueError, match=r"\(T,\) or \(B, T\).*not of a multimodal.*\(3, 2, 3\)"):
        rope_angles(array(np.zeros((3, 2, 3), np.int32)), frequencies)
    multimodal = dataclasses.replace(frequencies, axes=(0, 0, 1, 2))
    with pytest.raises(ValueError, match=r"positions must be .*got \(4, 2, 3\)"):
        rope_angles(array(np.zeros((4, 2, 3), np.int32)), multimodal)
    with pytest.raises(ValueError, match=r"positions must be .*got \(\)"):
        rope_angles(array(np.zeros((), np.int32)), frequencies)
