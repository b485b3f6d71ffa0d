"""Classes split over processes in PyTorch: equal to one process, and no logits or weight cross.

The checks run in processes of their own. Those on two GPUs need a host with two.
"""

import functools
import pathlib

import pytest

from test_vocab_parallel import names, outcomes_of, start, two_gpus

SCRIPT = pathlib.Path(__file__).parent / "vocab_parallel_torch_checks.py"


@pytest.fixture(scope="module")
def outcomes_on(tmp_path_factory):
    """Of every check, the outcomes of both processes."""

    @functools.cache
    def outcomes(device: str) -> dict[str, set[str]]:
        meeting = str(tmp_path_factory.mktemp("processes") / device)
        runs = [start(SCRIPT, str(rank), "2", meeting, device) for rank in range(2)]
        try:
            both = [outcomes_of(run) for run in runs]
        finally:
            for run in runs:
                run.kill()
        return {name: {outcome[name] for outcome in both} for name in both[0]}

    return outcomes


@pytest.mark.parametrize("name", names(SCRIPT))
def test_with_two_processes(name, outcomes_on):
    assert outcomes_on("cpu")[name] == {"ok"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=two_gpus) for n in names(SCRIPT)])
def test_on_two_gpus(name, outcomes_on):
    assert outcomes_on("cuda")[name] == {"ok"}
