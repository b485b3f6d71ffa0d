"""`liger-validate ops`: which implementations run, where, and how far they are apart."""

import dataclasses
import json

import pytest
import torch

import torch_liger
from liger_validate import cli, devices, implementations, ops, peers
from liger_validate.problems import problems

SMALL = ["ops", "--op", "swiglu", "--case", "shape-3x7"]


def first(op, *names):
    return next(iter(problems(op, cases=names)))


def eager_swiglu(gate, up, *, implementation):
    return torch_liger.swiglu(gate, up, implementation="eager")


def a_peer(name="fake", **changed):
    return peers.Peer(
        name, **{"module": "json", "framework": "torch", "ops": {"swiglu": eager_swiglu}} | changed
    )


@pytest.fixture
def fake(monkeypatch):
    """A peer whose module is there in every Python."""

    def register(**changed):
        monkeypatch.setitem(peers.PEERS, "fake", a_peer(**changed))

    return register


def report_of(tmp_path, *arguments):
    file = tmp_path / "report.json"
    status = cli.main([*arguments, "--json", str(file)])
    return status, json.loads(file.read_text())


def test_a_peer_is_a_further_column(fake, tmp_path, capsys):
    fake()
    file = tmp_path / "report.html"
    arguments = (*SMALL, "--against", "triton", "--peer", "fake", "--html", str(file))
    status, report = report_of(tmp_path, *arguments)
    assert status == 0
    assert {row["implementation"] for row in report["rows"]} == {"triton", "fake"}
    assert {row["verdict"] for row in report["rows"]} == {"pass"}
    assert report["versions"]["fake"] == "unknown"  # json comes with Python
    out = capsys.readouterr().out
    assert "fake" in out and "furthest apart: " in out
    assert "<td>fake</td>" in file.read_text() and "<th>apart_from</th>" in file.read_text()


def test_a_peer_that_is_off_fails_alone(fake):
    fake(ops={"swiglu": lambda *args, **kw: eager_swiglu(*args, **kw) * 1.02})
    rows = list(ops.rows_of(first("swiglu", "shape-3x7"), ["triton", "eager", "fake"]))
    verdicts = {name: {r.verdict for r in rows if r.implementation == name} for name in
                ("triton", "eager", "fake")}  # fmt: skip
    assert verdicts == {"triton": {"pass"}, "eager": {"plain"}, "fake": {"FAIL"}}
    # The right ones show how far it is off, and from whom.
    (y,) = (r for r in rows if r.implementation == "triton" and r.result == "y")
    assert y.apart_from == "fake" and y.apart == pytest.approx(0.02, rel=0.3)
    assert y.apart_ulp == pytest.approx(y.apart / 2**-7)


def test_what_a_peer_does_not_offer_never_passes(fake, tmp_path, capsys):
    fake()
    status, report = report_of(
        tmp_path, "ops", "--op", "geglu", "--case", "gelu-bfloat16-fused", "--against", "eager,fake"
    )
    (row,) = (r for r in report["rows"] if r["implementation"] == "fake")
    assert status == 0 and row["verdict"] == "not offered" and row["message"] == "fake has no geglu"
    assert row["rms"] is None and row["apart"] is None
    assert "fake: 1 of 1 cases of geglu not offered: fake has no geglu" in capsys.readouterr().out
    # Nothing was judged at all: that is no agreement.
    arguments = ("ops", "--op", "geglu", "--case", "gelu-bfloat16-fused", "--against", "fake")
    assert report_of(tmp_path, *arguments)[0] == 2


@pytest.mark.parametrize(
    "fault",
    [
        lambda y: (y[:1],),  # another shape
        lambda y: (y, y),  # a result too many
    ],
)
def test_a_peer_of_another_shape_is_an_error(fake, fault):
    problem = first("swiglu", "shape-3x7")
    fake()

    def call(package, implementation, given):
        return fault(*problem.call(package, implementation, given))

    (row,) = ops.rows_of(dataclasses.replace(problem, call=call), ["fake"])
    assert row.verdict == "ERROR" and row.message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peer", "liger"], "peer must be of liger-kernel, tokamax"),
        (["--peer", "gone"], "gone is not installed: no module 'not_there'"),
        (["--against", "eager,gone"], "gone is not installed"),
        (["--peer", "interpreted"], "interpreted: the tensors are not on a GPU"),
        (["--device", "tpu"], "device must be cpu, gpu, cuda or cuda:N; got 'tpu'"),
        (["--device", "cuda:99"], "device cuda:99 is not here: torch found cpu"),
        (["--device", "cuda:99", "--against", "xla"], "device cuda:99 is not here: jax found cpu"),
    ],
)
def test_what_is_not_there_is_status_2(arguments, message, monkeypatch, capsys):
    monkeypatch.setitem(peers.PEERS, "gone", a_peer("gone", module="not_there"))
    monkeypatch.setitem(peers.PEERS, "interpreted", a_peer("interpreted", needs="triton"))
    if arguments[-1] == "interpreted":
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        arguments = [*arguments, "--device", "cpu"]
    assert cli.main([*SMALL, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_against_and_peer_name_what_runs(monkeypatch):
    monkeypatch.setitem(peers.PEERS, "liger-kernel", a_peer("liger-kernel"))
    chosen = implementations.chosen
    assert chosen() == ["triton", "eager", "pallas", "xla"]
    assert chosen(["jax", "eager", "xla"]) == ["pallas", "xla", "eager"]
    assert chosen(["liger"]) == ["liger-kernel"]
    assert chosen(["triton"], ["liger-kernel", "liger-kernel"]) == ["triton", "liger-kernel"]
    arguments = cli.parser().parse_args(["ops", "--peer", "a,b", "--peer", "c"])
    assert arguments.peer == ["a", "b", "c"]


def test_a_peers_own_plain_version_is_its_frameworks(monkeypatch):
    monkeypatch.setitem(peers.PEERS, "fake", a_peer(framework="jax"))
    assert implementations.plain_of("fake") == "xla"
    assert [implementations.plain_of(n) for n in ("triton", "xla")] == ["eager", "xla"]


def test_the_cpu_is_a_device_of_both():
    place = devices.find("cpu")
    assert place.described() == {"torch": "cpu", "jax": "cpu"}
    assert not place.on_gpu("torch") and not place.on_gpu("jax")
    assert devices.find("cpu", ["jax"]).torch is None


def test_a_gpu_is_found_by_number(monkeypatch):
    gpus = {"cpu": "a cpu", "cuda:0": "a gpu", "cuda:1": "another gpu"}
    monkeypatch.setattr(devices, "_jax_devices", lambda: gpus)
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.found("torch") == devices.found("jax") == list(gpus)
    for name, torchs, jaxs in (
        ("gpu", "cuda:0", "a gpu"),
        ("cuda", "cuda:0", "a gpu"),
        ("cuda:1", "cuda:1", "another gpu"),
        ("cpu", "cpu", "a cpu"),
    ):
        assert devices.find(name) == devices.Place(torchs, jaxs)
    assert devices.find("gpu").on_gpu("torch")
    # One framework alone has it: that is not enough for both.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(devices.DeviceMissing, match="torch found cpu, cuda:0; jax found cpu, cuda"):
        devices.find("cuda:1")
    assert devices.find("cuda:1", ["jax"]) == devices.Place(None, "another gpu")


def test_arrays_and_tensors_live_on_the_device():
    seen = []
    problem = first("swiglu", "shape-3x7")

    def call(package, implementation, given):
        seen.append(next(iter(given.values())).device)
        return problem.call(package, implementation, given)

    place = devices.find("cpu")
    list(ops.rows_of(dataclasses.replace(problem, call=call), ["eager"], place))
    assert {device.type for device in seen} == {"cpu"}
    # A device that is not PyTorch's default is asked for by its name.
    elsewhere = dataclasses.replace(place, torch="meta")
    (row,) = ops.rows_of(problem, ["eager"], elsewhere)
    assert row.verdict == "ERROR"


def test_two_that_err_to_either_side_fail_by_each_other(fake):
    fake()
    problem = first("swiglu", "silu-float32")
    # The plain version is off by 1e-4, and each of the others by less than 1.5 times that.
    factors = {"eager": 1 + 1e-4, "triton": 1 + 1.4e-4, "fake": 1 - 1.4e-4}

    def call(package, implementation, given):
        (y,) = problem.call(torch_liger, "eager", given)
        return (y * factors[implementation],)

    rows = list(ops.rows_of(dataclasses.replace(problem, call=call), list(factors)))
    for row in rows:
        assert row.verdict == ("plain" if row.implementation == "eager" else "FAIL"), row
        if row.verdict == "FAIL":
            other = {"triton": "fake", "fake": "triton"}[row.implementation]
            assert row.rms < 1.5e-4 and f"apart from {other} by 2.8" in row.message
    only = list(ops.rows_of(dataclasses.replace(problem, call=call), ["eager", "triton"]))
    assert {row.verdict for row in only} == {"plain", "pass"}


def test_liger_kernels_own_operations_pass():
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    case = ("half-float32",)
    rows = list(ops.rows_of(first("rope", *case), ["liger-kernel", "eager"]))
    assert {r.verdict for r in rows if r.implementation == "liger-kernel"} == {"pass"}
    rows = list(ops.rows_of(first("cross_entropy", "float32-none"), ["liger-kernel"]))
    assert {r.verdict for r in rows} == {"pass"}
    (row,) = ops.rows_of(first("rope", "interleaved-float32"), ["liger-kernel"])
    assert row.verdict == "not offered" and row.message == "takes no interleaved layout"
