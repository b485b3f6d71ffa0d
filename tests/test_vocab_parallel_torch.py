"""Classes split over processes in PyTorch: equal to one process, and no logits or weight cross.

The checks run in processes of their own. Those on two GPUs need a host with two; those whose only
collective is a sum also run on one, which both processes use.
"""

import functools
import pathlib

import pytest

from test_vocab_parallel import gpus, names, outcomes_of, start, two_gpus

SCRIPT = pathlib.Path(__file__).parent / "vocab_parallel_torch_checks.py"
SUMS_ALONE = (
    "triton_against_the_oracle",
    "metrics_and_frozen_inputs",
    "a_label_of_another_process",
    "labels_that_are_none_or_differ",
    "a_shard_of_masked_classes",
    "second_derivatives",
)


@pytest.fixture(scope="module")
def outcomes_on(tmp_path_factory):
    """Of every check, the outcomes of both processes."""

    @functools.cache
    def outcomes(device: str, *checks: str) -> dict[str, set[str]]:
        meeting = str(tmp_path_factory.mktemp("processes") / device)
        runs = [start(SCRIPT, str(rank), "2", meeting, device, *checks) for rank in range(2)]
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


@pytest.mark.gpu
@pytest.mark.skipif(gpus() > 1, reason="where there are two GPUs, each process has its own")
@pytest.mark.parametrize("name", SUMS_ALONE)
def test_on_a_gpu_that_both_use(name, outcomes_on):
    assert outcomes_on("cuda", *SUMS_ALONE)[name] == {"ok"}
