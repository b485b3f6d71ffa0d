"""Experts: near ties are no fault, and a router that is wrong is one."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import model_cases
from liger_ops import backend_triton
from liger_validate.captures import Capture
from liger_validate.model import FLAX, compare, load
from liger_validate.routing import Routing
from validate_cases import CLEAN, batch


def routing(scores, wanted, counted):
    captures = [
        Capture("", "", outputs={f"model.layers.{i}.mlp.gate": s.reshape(-1, 3) for i, s in each})
        for each in (wanted, scores)
    ]
    layers = [SimpleNamespace(experts=experts) for experts in (False, True, True)]
    config = SimpleNamespace(layers=layers, num_experts_per_tok=1)
    return Routing(captures[0], captures[1:], config, counted)


def test_what_sees_a_token_of_another_expert_counts_no_more():
    counted = np.ones((2, 4), bool)
    counted[1, 0] = False
    wanted = np.tile([3.0, 2.0, 1.0], (2, 4, 1))
    scores, tied = wanted.copy(), wanted.copy()
    scores[0, 2] = [2.9, 2.9001, 1.0]  # another expert
    scores[1, 0] = [0.0, 2.0, 1.0]  # of padding, which is not asked
    tied[1, 3, :2] = 2.5  # as good as the next
    found = routing([(1, scores), (2, tied)], [(1, wanted), (2, wanted)], counted)
    assert found.flips == 2

    def lost(name):
        return [tuple(place) for place in np.argwhere(counted & ~found.counted_at(name))]

    first, both = [(0, 2), (0, 3)], [(0, 2), (0, 3), (1, 3)]
    for name in ("model.embed_tokens", "model.layers.0", "model.layers.1.self_attn.o_proj",
                 "model.layers.1.mlp.gate", "model.layers.1.post_attention_layernorm"):  # fmt: skip
        assert lost(name) == [], name
    for name in ("model.layers.1.mlp", "model.layers.1", "model.layers.1.mlp.experts",
                 "model.layers.2.input_layernorm", "model.layers.2.mlp.gate"):  # fmt: skip
        assert lost(name) == first, name
    for name in ("model.layers.2.mlp", "model.layers.2", "model.norm", "logits"):
        assert lost(name) == both, name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    model_cases.checkpoint(CLEAN["qwen3 moe"], path)
    return str(path)


def _scaled_router(mlp):
    mlp.router.kernel[...] = 1.01 * mlp.router.kernel[...]


def _weights_of_no_sum(mlp):
    mlp.config = dataclasses.replace(mlp.config, norm_topk_prob=False)


@pytest.mark.parametrize(("plant", "where"), [(_scaled_router, ".gate"), (_weights_of_no_sum, "")])
def test_a_router_that_is_wrong_is_found(folder, plant, where, monkeypatch):
    monkeypatch.setattr(backend_triton, "INTERPRET", False)
    monkeypatch.setenv("PALLAS_INTERPRET", "0")
    loaded = load(folder)
    plant(loaded.models[FLAX].model.layers[1].mlp)
    with jax.default_matmul_precision("highest"):
        report = compare(loaded, batch())
    assert report["models"][FLAX]["first_out_of_band"] == f"model.layers.1.mlp{where}"
    assert not report["agrees"]
