"""The benchmarks without their clock: each operation's description, and the check it must pass."""

import dataclasses
import importlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
import torch

# benchmarks/ is a folder of scripts, not a package.
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import description
import measuring
import run
import timing
from liger_ops import backend_triton

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {
    "rms_norm": [(6, 48)],
    "swiglu": [(6, 48, False), (6, 48, True)],
    "geglu": [(6, 48, False), (6, 48, True)],
    "layer_norm": [(6, 48)],
    "rope": [(2, 5, 3, 1, 16)],
    "cross_entropy": [(6, 33)],
}
OURS_AND_PLAIN = {"torch_liger", "eager"}
KEYS = {"op", "pass", "rows", "dim", "shape", "dtype", "implementation", "microseconds"}


@pytest.fixture(autouse=True)
def no_clock(monkeypatch):
    """Calls everything that would be timed, on two sets, and reports a made-up time for it."""

    def torch_microseconds(call, sets, stream, in_graph=True):
        for i in range(sets):
            call(i)
        return 2.0

    def jax_microseconds(fn, inputs):
        compiled = isinstance(fn, jax.stages.Compiled)
        jax.block_until_ready(fn(inputs) if compiled else [fn(*given) for given in inputs])
        return 2.0

    def host_microseconds(functions):
        for function in functions.values():
            function()
        return {name: 1.0 + i for i, name in enumerate(functions)}

    for stand_in in (torch_microseconds, jax_microseconds, host_microseconds):
        monkeypatch.setattr(timing, stand_in.__name__, stand_in)
    monkeypatch.setattr(timing, "sets_for", lambda copied_bytes, held_bytes: 2)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    if DEVICE == "cpu":  # liger-kernel, where it is installed, does not run in Triton's interpreter
        monkeypatch.setitem(sys.modules, "liger_kernel", None)


@pytest.mark.parametrize("op", SMALL)
def test_every_implementation_and_pass_has_its_row(op):
    module = importlib.import_module(op)
    for shape in SMALL[op]:
        case = module.case(*shape)
        rows = list(measuring.one_shape(case, DEVICE))
        measured = {(row["implementation"], row["pass"]) for row in rows}
        assert measured >= {
            (name, which)
            for name in ("torch_liger (triton)", "torch.compile", "jax_liger (pallas)", "XLA")
            for which in case.arrays
        }
        assert {("copy (torch)", "forward"), ("copy (jax)", "forward")} <= measured
        assert len(measured) == len(rows)
        for row in rows:
            assert row.keys() == KEYS | {"terabytes_per_second", "of_copy", "error"}
            # The time of a copy, which moves two arrays, stands for that of all others.
            arrays = 2 if "copy" in row["implementation"] else case.arrays[row["pass"]]
            assert row["of_copy"] == arrays / 2
            assert row["terabytes_per_second"] == pytest.approx(case.elements * arrays / 1e6)
            assert ("copy" in row["implementation"]) == (row["error"] == 0.0)
            assert op in run._line(row) and case.shape in run._line(row)


@pytest.mark.parametrize("op", SMALL)
def test_launch_costs_have_their_rows(op):
    case = importlib.import_module(op).case(*SMALL[op][0])
    rows = list(measuring.launch_cost(case, DEVICE))
    assert {row["pass"] for row in rows} == {"launch", "launch, with graph"}
    assert {"torch_liger (triton)", "torch.compile", "eager", case.baseline} <= {
        row["implementation"] for row in rows
    }
    for row in rows:
        assert row.keys() == KEYS | {f"of_{case.baseline}"}
        assert (row["implementation"] == case.baseline) == (row[f"of_{case.baseline}"] == 1.0)


@pytest.mark.parametrize("op", run.OPS)
def test_shapes_are_described(op):
    module = importlib.import_module(op)
    cases = [module.case(*shape) for shape in [*module.SHAPES, module.SHORT]]
    assert len({case.shape for case in cases}) == len(set([*module.SHAPES, module.SHORT]))
    for case in cases:
        assert case.op == op and case.elements % case.rows == 0
        assert case.baseline == "eager" or case.baseline in case.others()


@pytest.mark.parametrize("part", ["forward", "gradient"])
def test_a_wrong_implementation_is_not_timed(part):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y * 1.02 if part == "forward" else y.clone()

        @staticmethod
        def backward(ctx, dy):
            return dy * 1.02 if part == "gradient" else dy

    module = importlib.import_module("swiglu")
    silu = torch.nn.functional.silu
    wrong = description.Peer(lambda gate, up: Scaled.apply(silu(gate) * up))
    case = dataclasses.replace(module.case(6, 48, False), others=lambda: {"wrong": wrong})
    with pytest.raises(ArithmeticError, match="swiglu by wrong at 6 x 48"):
        list(measuring.one_shape(case, DEVICE))


def test_one_that_overwrites_gets_copies():
    # As liger-kernel's does: gate and up become the gradients, behind autograd's back.

    class Overwriting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gate, up):
            ctx.save_for_backward(gate, up)
            return torch.nn.functional.silu(gate) * up

        @staticmethod
        def backward(ctx, dy):
            gate, up = (t.data for t in ctx.saved_tensors)
            s = torch.sigmoid(gate)
            dgate, dup = dy * up * (s + gate * s * (1 - s)), dy * gate * s
            return gate.copy_(dgate), up.copy_(dup)

    module = importlib.import_module("swiglu")
    peer = description.Peer(Overwriting.apply, overwrites=True)
    inputs = [module.case(6, 48, False).data(DEVICE) for _ in range(2)]
    before = [t.detach().clone() for args in inputs for t in args]
    drawn = iter(inputs)
    case = dataclasses.replace(
        module.case(6, 48, False),
        data=lambda device: next(drawn),
        others=lambda: {"overwriting": peer},
    )
    rows = list(measuring.one_shape(case, DEVICE))
    assert {r["pass"] for r in rows if r["implementation"] == "overwriting"} == set(case.arrays)
    after = [t for args in inputs for t in args]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_fused_linear_cross_entropy_checks_what_it_times(tmp_path):
    head = importlib.import_module("fused_linear_cross_entropy")
    given = head.draw(64, 32, 96, DEVICE)
    exact = head.exact_gradients(*given)
    functions = head.torch_implementations()
    if DEVICE == "cpu":  # Inductor and liger-kernel want a GPU
        functions = {n: f for n, f in functions.items() if n.split(",")[0] in OURS_AND_PLAIN}
    errors = {
        name: head.check(name, head.torch_gradients(function, *given), exact)
        for name, function in functions.items()
    }
    arrays = [measuring.from_torch(t.detach()) for t in given[:2]]
    labels = measuring.from_torch(given[2].int())
    for name, function in head.jax_implementations().items():
        gradients = head.jax_gradients(function)(*arrays, labels)
        errors[name] = head.check(name, [measuring.to_torch(g) for g in gradients], exact)
    assert {name.split(",")[0] for name in errors} >= OURS_AND_PLAIN | {"jax_liger", "XLA"}
    with pytest.raises(ArithmeticError, match="must be below"):
        head.check("halved", [g / 2 for g in exact], exact)
    head._torch_products(given[0].detach(), given[1].detach())
    jax.block_until_ready(head._jax_products(*arrays))

    pytest.importorskip("matplotlib")
    rows = [
        {"shape": "64 x 32 x 96", "implementation": name, "of_products": 1.0, "gibibytes": i}
        for i, name in enumerate(errors)
    ]
    head.plot({"rows": rows, "device": "none"}, tmp_path / "result.png")
    assert (tmp_path / "result.png").stat().st_size > 5_000


def _halve_results_of(config, module, monkeypatch):
    """Tiles that are wrong on this machine, in both frameworks."""
    for kernels in (module.triton, module.pallas):
        op = kernels.rms_norm_linear_rope

        def call(*given, op=op, **settings):
            outputs = op(*given, **settings)
            return tuple(y / 2 for y in outputs) if settings["config"] == config else outputs

        monkeypatch.setattr(kernels, "rms_norm_linear_rope", call)


def test_rms_norm_linear_rope_tries_its_tiles_and_makes_its_table(tmp_path, monkeypatch, capsys):
    fused = importlib.import_module("rms_norm_linear_rope")
    heads, tiles = fused.Heads(2, 1, 16), fused.Config(16, 32, 16, 4, 2)
    weighted = dataclasses.replace(tiles, scales="weight")
    monkeypatch.setattr(fused, "DECODING", [tiles])
    monkeypatch.setattr(fused, "MANY", [weighted])
    monkeypatch.setattr(fused, "PERSISTENT", [dataclasses.replace(weighted, persistent=True)])
    monkeypatch.setattr(fused.rule, "DECODED", 4)
    rows = []
    wrong = dataclasses.replace(tiles, num_warps=1)
    fused.MANY.insert(0, wrong)
    _halve_results_of(wrong, fused, monkeypatch)
    for number in (2, 9):
        found = {}
        made = list(fused.one_size(number, 48, heads, found, DEVICE))
        printed = capsys.readouterr().err
        assert printed.count("must be below 0.01") == (0 if number < 4 else 2)  # one a framework
        assert all(row["of_best"] > 0.0 for row in made)
        unfused = [row for row in made if "config" not in row]
        for key in {(row["framework"], row["pass"]) for row in made}:
            of_key = [row for row in unfused if (row["framework"], row["pass"]) == key]
            assert min(row["of_best"] for row in of_key) == 1.0
        assert {(r["framework"], r["pass"]) for r in made if "config" in r} == {
            (framework, which)
            for framework in ("triton", "pallas")
            for which in (("forward",) if number < 4 else ("forward", fused.BOTH))
        }
        assert fused.candidates("pallas", 33, found) == [tiles if number < 4 else weighted]
        names = {row["implementation"] for row in made if "config" not in row}
        assert names == {"torch_liger (composed)", "eager", "torch.compile",
                         "jax_liger (composed)", "XLA"}  # fmt: skip
        rows += made
    kept = {r["implementation"]: r["kept_mebibytes"] for r in rows
            if "kept_mebibytes" in r}  # fmt: skip
    fewest = [value for name, value in kept.items() if "triton" in name]
    assert fewest and all(value == 0.0 for value in fewest) and kept["torch_liger (composed)"] > 0

    result = {"rows": rows, "device": "none", "command": "", "versions": {}}
    table = fused.table_of(result)
    assert len(table["entries"]) == 4
    slower = dataclasses.replace(weighted, num_warps=8)
    assert fused.best({slower: 3.0, tiles: 2.0, weighted: 1.0}) == [weighted, tiles]
    assert fused.best({slower: 3.0, weighted: 1.0}) == [weighted]
    assert fused.best({}) == []
    for entry in table["entries"]:
        assert fused.Config(**entry["config"]) and entry["forward"] == 1.0
        assert (fused.BOTH in entry) == (entry["rows"] > 4)
    case = fused.case_of(9, 48, heads)
    with pytest.raises(ArithmeticError, match="must be below"):
        fused.check(case, "halved", (torch.ones(3),), (torch.full((3,), 2.0),))
    pytest.importorskip("matplotlib")
    fused.plot(result, tmp_path / "result.png")
    assert (tmp_path / "result.png").stat().st_size > 5_000


def test_what_was_measured_is_kept_where_the_run_ends_early(tmp_path):
    row = {"op": "rope", "pass": "forward", "rows": 1, "dim": 2, "implementation": "XLA",
           "microseconds": 3.0, "of_copy": 0.5}  # fmt: skip

    def measured(fails):
        yield row
        if fails:
            raise RuntimeError("the card is gone")

    path = tmp_path / "results" / "rope.json"
    with pytest.raises(RuntimeError, match="the card is gone"):
        run.collect(measured(True), {"device": "none", "rows": []}, path)
    assert json.loads(path.read_text()) == {"device": "none", "rows": [row], "unfinished": True}
    run.collect(measured(False), {"device": "none", "rows": []}, path)
    assert json.loads(path.read_text()) == {"device": "none", "rows": [row]}
    run.collect(measured(False), {"device": "none", "rows": []}, None)


def test_enough_sets_to_miss_the_cache(monkeypatch):
    monkeypatch.undo()
    for copied in (2**21, 2**26, 2**30):
        sets = timing.sets_for(copied, 3 * copied)
        assert sets * copied >= 4 * timing.L2_BYTES and sets >= 6
    assert timing.sets_for(2**33, 3 * 2**32) == 2
    assert timing.sets_for(2**30, 5 * 2**30) == 4
    assert timing.sets_for(2, 3) == timing.MOST_SETS


@pytest.mark.parametrize("name", ["torch_liger in a loop", "torch_liger in Trainer"])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*pin_memory.*:UserWarning")
def test_utilisation_is_sampled_in_the_window(name, monkeypatch):
    pytest.importorskip("accelerate")
    utilisation = importlib.import_module("utilisation")
    monkeypatch.setattr(utilisation, "SECONDS", 0.5)
    monkeypatch.setattr(utilisation, "WARMUP", 2)
    monkeypatch.setattr(utilisation, "LOGGING", 1)
    monkeypatch.setattr(backend_triton, "INTERPRET", False)
    settings = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
                "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64}  # fmt: skip
    read = itertools.cycle([90.0, 100.0]).__next__
    row = utilisation.window(utilisation.LOOPS[name], settings, 2, 8, DEVICE, read)
    assert row["window_seconds"] >= 0.5 and row["steps"] >= 1
    assert row["tokens_per_second"] == 2 * 8 * row["steps"] / row["window_seconds"]
    assert row["samples"] >= 1 and 90.0 <= row["gpu_utilization"] <= 100.0
    assert abs(row["loss"] - 4.16) < 1.0  # ln 64
    samples = row["samples"]  # which begin with a 100, since the first reading was the check
    assert row["share_of_samples_at_95"] == -(-samples // 2) / samples


TINY: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    "work, names",
    [
        ("full_jax", ["XLA", "XLA + remat activation"]),
        ("lora_jax", ["XLA", "XLA + bfloat16 adapters"]),
    ],
)
def test_training_steps_in_jax_on_a_tiny_model(monkeypatch, work, names):
    training = importlib.import_module("training")
    for name in ("LLAMA", "QWEN2"):
        sizes = {k: v for k, v in getattr(training, name).items() if k != "head_dim"}
        monkeypatch.setattr(training, name, sizes | TINY)
    for name, value in (("LENGTH", 16), ("WARMUP", 1), ("STEPS", 2)):
        monkeypatch.setattr(training, name, value)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    rows = list(training.WORKS[work](names))
    assert [row["implementation"] for row in rows] == names
    for row in rows:
        assert row["tokens_per_second"] > 0.0 and row["mfu"] > 0.0 and len(row["seconds"]) == 2
        assert 0.0 < row["gibibytes"] < 1.0 and abs(row["loss"] - 4.2) < 1.0
    losses = [row["loss"] for row in rows]
    assert losses[0] == pytest.approx(losses[1], abs=0.02)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_operations_of_training_are_counted_as_in_torch():
    from flax import nnx
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    from jax_liger.models import CausalLM, LoRAParam, add_lora
    from torch_liger.flops import model_flops

    training = importlib.import_module("training")
    tied = TINY | {"tie_word_embeddings": True}
    model = CausalLM(training._jax_config("llama", tied), rngs=nnx.Rngs(0))
    theirs = LlamaForCausalLM(LlamaConfig(**tied))
    assert training._jax_flops(model, nnx.Param) == model_flops(theirs).at(training.LENGTH)
    model = CausalLM(training._jax_config("qwen2", TINY), rngs=nnx.Rngs(0))
    add_lora(model, rank=4, alpha=8, rngs=nnx.Rngs(0))
    lora = LoraConfig(r=4, target_modules=training.LINEARS)
    theirs = get_peft_model(Qwen2ForCausalLM(Qwen2Config(**TINY)), lora)
    assert training._jax_flops(model, LoRAParam) == model_flops(theirs).at(training.LENGTH)


def test_a_name_that_no_implementation_has_is_refused():
    run.check_only((), ["XLA"])
    run.check_only(["XLA"], ["XLA", "eager"])
    with pytest.raises(ValueError, match="must be of XLA, eager; got xla"):
        run.check_only(["XLA", "xla"], ["XLA", "eager"])


RESULTS = sorted(BENCHMARKS.glob("results/*.json"))
TRAINING = [path for path in RESULTS if path.stem.startswith("training_")]


@pytest.mark.parametrize("path", TRAINING, ids=lambda p: p.stem)
def test_training_steps_kept_here_are_as_the_script_writes_them(path):
    result = json.loads(path.read_text())
    assert result["command"].startswith("python benchmarks/training.py ") and result["versions"]
    for row in result["rows"]:
        assert row["work"] in result["command"] and row["gibibytes"] > 1.0
        assert row["tokens_per_second"] > 1e3 and 0.0 < row["mfu"] < 1.0
        assert abs(row["loss"] - 11.8) < 2.0
        if row["work"] == "utilisation_torch":
            assert row["window_seconds"] >= 60.0 and row["samples"] > row["window_seconds"]
            assert 0.0 <= row["share_of_samples_at_95"] <= 1.0
            assert 0.0 < row["gpu_utilization"] <= 100.0
        else:  # a note says why the steps' own times are missing
            assert "note" in result or len(row["seconds"]) == 10


@pytest.mark.parametrize("path", [p for p in RESULTS if p not in TRAINING], ids=lambda p: p.stem)
def test_results_kept_here_can_be_drawn_and_printed(path, tmp_path):
    result = json.loads(path.read_text())
    for row in result["rows"]:
        assert f"{row['rows']} x {row['dim']}" in run._line(row) or row["shape"] in run._line(row)
    if any("of_copy" in row for row in result["rows"]):
        pytest.importorskip("matplotlib")
        run.plot(result, tmp_path / "result.png")
        assert (tmp_path / "result.png").stat().st_size > 10_000
