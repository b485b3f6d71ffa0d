"""rms_norm_linear_rope: where the fused kernel is used, by tables of what was measured."""

import dataclasses
import json

import pytest

from liger_ops.rms_norm_linear_rope import rule
from liger_ops.rms_norm_linear_rope.cases import Config
from liger_ops.rms_norm_linear_rope.check import Heads

TABLE_HEADS = Heads(32, 8, 128)


def table(*entries, framework="triton"):
    """One of made-up figures: rows, and the passes' times over the composition's."""
    config = dataclasses.asdict(Config(128, 128, 64, 8, 3))
    return {
        "entries": [
            {"framework": framework, "dim": 4096, "num_heads": 32, "num_kv_heads": 8,
             "head_dim": 128, "rows": rows, "config": {**config, "group": rows},
             "forward": forward, **({} if both is None else {"forward + backward": both})}
            for rows, forward, both in entries
        ]
    }  # fmt: skip


@pytest.fixture
def chosen(monkeypatch):
    def choose(entries, rows, trained=False, dim=4096, heads=TABLE_HEADS, **settings):
        monkeypatch.setattr(rule, "table", lambda device: entries)
        rule._nearest.cache_clear()
        given = {"dtype": "bfloat16", "as_measured": True, **settings}
        found = rule.choose("a card", "triton", rows, dim, heads, trained=trained, **given)
        rule._nearest.cache_clear()
        assert found.fused == (found.config is not None)
        return found.config.group if found.config else None

    return choose


def test_the_rule_wants_both_neighbours_to_be_faster(chosen):
    measured = table((16, 0.6, None), (2048, 1.1, 1.2), (8192, 0.9, 1.01), (16384, 0.9, 0.96))
    for rows, expected in ((1, 16), (16, 16), (17, None), (2048, None), (8191, None),
                           (8192, 8192), (9000, 8192), (16384, 16384), (10**6, 16384)):  # fmt: skip
        assert chosen(measured, rows) == expected
    for rows, expected in ((16, None), (8192, None), (9000, None), (16384, 16384)):
        assert chosen(measured, rows, trained=True) == expected
    assert chosen(table((16, 0.98, None)), 16) is None  # as far as runs are apart
    # Not known whether it is trained: few rows are not, many may be.
    for rows, expected in ((16, 16), (9000, None), (16384, 16384)):
        assert chosen(measured, rows, trained=None) == expected


def test_the_rule_goes_by_the_nearest_shape_that_was_measured(chosen):
    measured = table((8192, 0.9, 0.9))
    assert chosen(measured, 8192) == 8192
    assert chosen(measured, 8192, dim=5120, heads=Heads(40, 8, 128)) == 8192
    assert chosen(measured, 8192, dim=1024) is None
    assert chosen(measured, 8192, heads=Heads(8, 2, 128)) is None
    assert chosen(measured, 8192, heads=Heads(64, 16, 64)) is None
    assert chosen(measured, 8192, as_measured=False) is None
    assert chosen(measured, 8192, dtype="float32") is None
    assert chosen(table((8192, 0.9, 0.9), framework="pallas"), 8192) is None
    assert chosen({"entries": []}, 8192) is None


def test_the_tables_in_the_package_are_well_formed():
    for path in rule.TABLES.glob("*.json"):
        content = json.loads(path.read_text())
        assert rule.path_of(content["device"]) == path and content["source"]
        for entry in content["entries"]:
            assert Config(**entry["config"]).block_rows >= 16
            assert all(entry.get(name, 1.0) > 0.0 for name in ("forward", "forward + backward"))
    assert rule.table("no such card") == {"entries": []}


def test_what_was_measured_on_an_h200_decides_there():
    def fused(framework, rows, trained=None, dim=4096, heads=TABLE_HEADS, **settings):
        given = {"dtype": "bfloat16", "as_measured": True, "trained": trained, **settings}
        choice = rule.choose("NVIDIA H200", framework, rows, dim, heads, **given)
        assert choice.config is None or choice.config.scales == "x"
        return choice.fused

    assert all(fused("triton", rows) for rows in (1, 2, 8, 15, 16))
    assert fused("pallas", 16) and not any(fused("pallas", rows) for rows in (1, 2, 15))
    for rows in (17, 64, 2048, 8192, 16384):
        assert not fused("triton", rows, trained=False) and not fused("pallas", rows)
    of_64 = {"dim": 2048, "heads": Heads(32, 8, 64)}
    for framework in ("pallas", "triton"):
        assert not fused(framework, 16, trained=True)
        assert not fused(framework, 16, dtype="float32")
        assert not fused(framework, 16, as_measured=False)
        assert all(fused(framework, rows, **of_64) for rows in (1, 2, 16))
        assert not any(fused(framework, rows, **of_64) for rows in (17, 2048, 8192, 16384))
