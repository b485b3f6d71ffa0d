"""Checkpoints: the same files again, what does not fit refused, and a wrong mapping noticed."""

import functools
import json
import sys

import huggingface_hub
import jax
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import save_file

import model_cases
from jax_liger.models import (
    Config,
    from_pretrained,
    loss_fn,
    names,
    parameter_shapes,
    save_pretrained,
)
from model_cases import CASES, Case

# q and k have biases and unlike numbers of heads, whose features a converter might permute.
GROUPED = Case("qwen2", dict(num_attention_heads=8, num_key_value_heads=2, head_dim=64))


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """transformers' model of a case, and the folder that it is saved in."""

    @functools.cache
    def make(case):
        folder = tmp_path_factory.mktemp("checkpoint")
        return model_cases.checkpoint(case, folder), folder

    return make


logits_of = model_cases.quick_jit(lambda model, ids: model(ids))


@pytest.mark.parametrize("name", CASES)
def test_the_round_trip_gives_the_same_files(saved, name, tmp_path):
    theirs, folder = saved(CASES[name])
    save_pretrained(from_pretrained(folder), tmp_path)
    model_cases.assert_same_files(tmp_path, folder)
    again = model_cases.loads_cleanly(tmp_path)
    ids = model_cases.tokens(1, 8)
    np.testing.assert_array_equal(
        model_cases.hf_logits(again, ids), model_cases.hf_logits(theirs, ids)
    )


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_is_kept_bit_for_bit(name, tmp_path):
    model_cases.checkpoint(CASES[name], tmp_path / "theirs", torch.bfloat16)
    model = from_pretrained(tmp_path / "theirs")
    assert model.config.dtype == model.config.param_dtype == "bfloat16"
    save_pretrained(model, tmp_path / "ours")
    model_cases.assert_same_files(tmp_path / "ours", tmp_path / "theirs")
    # Twice: what one way adds to the norms' weights the other would take off again.
    save_pretrained(from_pretrained(tmp_path / "ours"), tmp_path / "again")
    model_cases.assert_same_files(tmp_path / "again", tmp_path / "theirs")


def _interleaved(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows (heads H, ...) in the order of a rotary embedding that pairs neighbours."""
    halves = x.reshape(heads, 2, -1, *x.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(x.shape)


@pytest.mark.parametrize("permuted", ["nothing", "weights", "biases"])
def test_a_permutation_of_queries_and_keys_is_noticed(saved, tmp_path, permuted):
    """Nothing is permuted; with a permutation planted, the comparison fails as it must."""
    theirs, folder = saved(GROUPED)
    tensors = {key: value.numpy() for key, value in model_cases.tensors_of(folder).items()}
    for key, value in tensors.items():
        heads = 8 if "q_proj" in key else 2 if "k_proj" in key else None
        if heads and {1: "biases", 2: "weights"}[value.ndim] == permuted:
            tensors[key] = _interleaved(value, heads)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())

    ids = model_cases.tokens()
    got = logits_of(from_pretrained(tmp_path), ids)
    error = model_cases.relative(got, model_cases.hf_logits(theirs, ids))
    if permuted == "nothing":
        assert error.max() < 1e-5
        assert error[:, 64:].max() < 10 * error[:, :64].max()
    else:
        assert error[:, 64:].max() > 1e-2


def test_a_partial_rotation_stays_in_its_part(saved):
    """Features beyond the rotated part: their rows may change places in q and k alike."""
    _, folder = saved(CASES["phi3, longrope in half of a head"])
    model = from_pretrained(folder)
    ids = model_cases.tokens()
    want = logits_of(model, ids)
    kernel = model.model.layers[0].self_attn.qkv_proj.kernel
    q, k, v = np.split(np.array(kernel[...]), [64, 96], axis=1)
    for span, equal in ((slice(8, 16), True), (slice(0, 8), False)):
        turned = []
        for x in (q, k):  # each head's features in reverse, within the span
            x = x.reshape(64, -1, 16).copy()
            x[:, :, span] = x[:, :, span][:, :, ::-1]
            turned.append(x.reshape(64, -1))
        kernel[...] = np.concatenate([*turned, v], axis=1)
        error = model_cases.relative(logits_of(model, ids), want).max()
        assert (error < 1e-5) == equal


@pytest.mark.parametrize("weights", ["zero", "random"])
@pytest.mark.parametrize("name", ["gemma", "gemma3"])
def test_the_norms_offset_is_applied_once(name, weights, tmp_path):
    theirs = model_cases.build(CASES[name])
    norms = [p for key, p in theirs.named_parameters() if "norm" in key]
    assert len(norms) == {"gemma": 5, "gemma3": 13}[name]  # q_norm and k_norm among them
    with torch.no_grad():
        for p in norms:
            p.mul_(0.0 if weights == "zero" else 1.0)
    theirs.save_pretrained(tmp_path)
    ids = model_cases.tokens()
    want, model = model_cases.hf_logits(theirs, ids), from_pretrained(tmp_path)
    assert model_cases.relative(logits_of(model, ids), want).max() < 1e-5
    for _ in range(2):
        save_pretrained(model, tmp_path / "again")
        model_cases.assert_same_files(tmp_path / "again", tmp_path)
        model = from_pretrained(tmp_path / "again")


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads(tied, tmp_path):
    case = Case("llama", dict(tie_word_embeddings=tied))
    theirs = model_cases.checkpoint(case, tmp_path / "theirs")
    model = from_pretrained(tmp_path / "theirs")
    assert (model.lm_head is None) == tied
    save_pretrained(model, tmp_path / "ours")
    assert ("lm_head.weight" in model_cases.tensors_of(tmp_path / "ours")) == (not tied)

    # The embedding's gradient is the sum of both uses of the table, or of the one.
    ids = model_cases.tokens()
    gradients = model_cases.quick_jit(jax.grad(loss_fn))(model, {"input_ids": ids})
    longs = torch.as_tensor(ids).long()
    theirs(longs, labels=longs, use_cache=False).loss.backward()
    want = theirs.model.embed_tokens.weight.grad.numpy()
    got = np.asarray(gradients.model.embed_tokens.embedding[...])
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


def test_a_tied_head_that_is_in_the_file_too(tmp_path):
    model_cases.checkpoint(Case("llama", dict(tie_word_embeddings=True)), tmp_path)
    tensors = {k: v.numpy() for k, v in model_cases.tensors_of(tmp_path).items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert from_pretrained(tmp_path).lm_head is None
    tensors["lm_head.weight"][5, 5] += 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"tie_word_embeddings=True, but .* differ"):
        from_pretrained(tmp_path)


def test_rows_that_pad_the_vocabulary_are_left_out(saved, tmp_path):
    """No token stands for them, so they get none of the probability."""
    theirs, folder = saved(CASES["llama"])
    tensors = {key: value.numpy() for key, value in model_cases.tensors_of(folder).items()}
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[key] = np.concatenate([tensors[key], np.full((31, 64), 5.0, np.float32)])
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    model, ids = from_pretrained(tmp_path), model_cases.tokens()
    got = logits_of(model, ids)
    assert model_cases.relative(got, model_cases.hf_logits(theirs, ids)).max() < 1e-5
    save_pretrained(model, tmp_path / "trimmed")
    model_cases.assert_same_files(tmp_path / "trimmed", folder)


def test_several_files_with_an_index(saved, tmp_path):
    _, folder = saved(CASES["mistral"])
    sizes = {k: v.numel() * 4 for k, v in model_cases.tensors_of(folder).items()}
    save_pretrained(from_pretrained(folder), tmp_path, max_shard_size=60_000)
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(path.stat().st_size < 64_000 for path in tmp_path.glob("*.safetensors"))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert index["weight_map"].keys() == sizes.keys()
    model_cases.assert_same_files(tmp_path, folder)
    model_cases.loads_cleanly(tmp_path)
    # Read back, and saved as one over the many: none of them is left to be taken for this one's.
    save_pretrained(from_pretrained(tmp_path), tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    model_cases.assert_same_files(tmp_path, folder)


def test_several_files_by_transformers(tmp_path):
    model_cases.checkpoint(CASES["qwen3 moe"], tmp_path / "theirs", max_shard_size="50KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    save_pretrained(from_pretrained(tmp_path / "theirs"), tmp_path / "ours")
    model_cases.assert_same_files(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize("name", ["qwen2", "phi3", "llama 3, square, with biases"])
def test_projections_fused_or_split_whatever_the_files_have(saved, name, tmp_path):
    theirs, folder = saved(CASES[name])
    ids = model_cases.tokens()
    want = model_cases.hf_logits(theirs, ids)
    for fused in (True, False):
        model = from_pretrained(folder, fused_projections=fused)
        paths = model_cases.parameters(model)
        assert ("model.layers.1.self_attn.qkv_proj.kernel" in paths) == fused
        assert ("model.layers.1.mlp.up_proj.kernel" in paths) != fused
        assert model_cases.relative(logits_of(model, ids), want).max() < 1e-5
        save_pretrained(model, tmp_path / str(fused))
        model_cases.assert_same_files(tmp_path / str(fused), folder)


def test_dtypes_asked_for(saved):
    _, folder = saved(CASES["llama"])
    mixed = from_pretrained(folder, dtype="bfloat16", param_dtype="float32")
    assert {str(p.dtype) for p in model_cases.parameters(mixed).values()} == {"float32"}
    assert mixed(model_cases.tokens(1, 4)).dtype == "bfloat16"
    low = from_pretrained(folder, dtype=jax.numpy.bfloat16)
    assert {str(p.dtype) for p in model_cases.parameters(low).values()} == {"bfloat16"}


def test_keys_that_are_missing_or_too_many(saved, tmp_path):
    _, folder = saved(CASES["llama"])
    tensors = {key: value.numpy() for key, value in model_cases.tensors_of(folder).items()}
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())

    def load(changed):
        save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
        return from_pretrained(tmp_path)

    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    load(tensors | frequencies)  # which old checkpoints hold, and which follow from the config
    gone = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=rf"missing keys \['{gone}'\], unexpected keys \[\]"):
        load({k: v for k, v in tensors.items() if k != gone})
    with pytest.raises(ValueError, match=r"unexpected keys \['model.layers.0.mlp.up_proj.bias'\]"):
        load(tensors | {"model.layers.0.mlp.up_proj.bias": np.ones(96, np.float32)})
    with pytest.raises(ValueError, match=r"norm.scale must have shape \(64,\); got \(63,\)"):
        load(tensors | {"model.norm.weight": np.ones(63, np.float32)})
    with pytest.raises(ValueError, match=r"missing keys .*lm_head\.weight"):
        load({k: v for k, v in tensors.items() if k != "lm_head.weight"})
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="cut short"):
        from_pretrained(tmp_path)


def test_places_without_a_checkpoint(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        from_pretrained(tmp_path)
    config = CASES["llama"].hf_config()
    config.save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        from_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"'meta/no-such' is no folder here.*huggingface_hub"):
        from_pretrained("meta/no-such")


def test_from_the_hub(saved, monkeypatch):
    """Asks huggingface_hub for the config and the weights alone."""
    _, folder = saved(CASES["llama"])
    asked = {}

    def snapshot_download(repo, allow_patterns):
        asked[repo] = allow_patterns
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    from_pretrained("someone/some-model")
    (patterns,) = asked.values()
    assert "config.json" in patterns and "*.safetensors" in patterns


def test_parameters_that_are_in_no_checkpoint(saved, tmp_path):
    _, folder = saved(CASES["llama"])
    model = from_pretrained(folder)
    attention = model.model.layers[1].self_attn
    attention.q_proj.lora_a = nnx.Param(jax.numpy.zeros((64, 2)))
    with pytest.raises(ValueError, match=r"unexpected \['model.layers.1.self_attn.q_proj.lora_a'"):
        save_pretrained(model, tmp_path)


def test_the_table_names_every_parameter():
    """Each piece of a checkpoint belongs to one parameter, whatever is fused."""
    for case in CASES.values():
        for fused in (True, False):
            config = Config.from_hf(case.hf_config(), fused_projections=fused)
            seen = [
                (piece.key, piece.rows.start)
                for path in parameter_shapes(config)
                for piece in names.pieces_of(path, config)
            ]
            assert len(seen) == len(set(seen))
