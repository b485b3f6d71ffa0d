"""The judge itself: it passes what is right and catches each planted fault."""

import numpy as np
import pytest
import torch

from compare import assert_agree, assert_matches_oracle, from_torch, poisoned, to_torch
from liger_ops.rms_norm import cases
from test_rms_norm import draw, exact_results, run

ROWS, DIM = 1024, 96


def eager(inputs, upstream, *, mask=None, mean_term=True, weight_sum=None, rounded_first=True):
    """RMSNorm and its gradients written out in PyTorch, with a place for each fault."""
    x, weight, dy = (to_torch(a) for a in (inputs["x"], inputs["weight"], upstream["dy"]))
    x32, dy32, w32 = x.float(), dy.float(), weight.float()
    seen = x32 if mask is None else x32 * mask
    r = torch.rsqrt(seen.square().sum(-1, keepdim=True) / DIM + 1e-6)
    n = x32 * r
    rounded = n.to(x.dtype).float() if rounded_first else n
    g = dy32 * w32
    c = (g * n).mean(-1, keepdim=True) if mean_term else 0.0
    terms = dy32 * rounded
    dweight = terms.sum(0) if weight_sum is None else weight_sum(terms)
    results = {"y": rounded * w32, "dx": r * (g - n * c), "dweight": dweight}
    return {name: from_torch(value.to(x.dtype)) for name, value in results.items()}


def running_sum_in_bfloat16(terms):
    total = torch.zeros(terms.shape[1], dtype=torch.bfloat16)
    for row in terms.to(torch.bfloat16):
        total += row
    return total


def last_column_masked():
    mask = torch.ones(DIM)
    mask[-1] = 0.0
    return mask


FAULTS = {
    "a masked column": {"mask": last_column_masked()},
    "a missing term": {"mean_term": False},
    "a bfloat16 accumulator": {"weight_sum": running_sum_in_bfloat16},
}


def results_for(dtype, **fault):
    case = cases.Case("judge", (ROWS, DIM), dtype, dtype)
    inputs, upstream = draw(case)
    exact = exact_results(case, inputs, upstream)
    return eager(inputs, upstream, **fault), run("eager", case, inputs, upstream), exact


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_passes_a_right_implementation(dtype):
    assert_matches_oracle(*results_for(dtype))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_catches_a_planted_fault(fault, dtype):
    actual, plain, exact = results_for(dtype, **FAULTS[fault])
    with pytest.raises(AssertionError, match="is over"):
        assert_matches_oracle(actual, plain, exact)


def test_catches_a_wrong_dtype_a_missing_result_and_a_wrong_shape():
    actual, plain, exact = results_for("bfloat16")
    with pytest.raises(AssertionError, match="dtype float32"):
        assert_matches_oracle({**actual, "y": actual["y"].astype(np.float32)}, plain, exact)
    with pytest.raises(AssertionError, match="are not the exact"):
        assert_matches_oracle({"y": actual["y"]}, plain, exact)
    with pytest.raises(AssertionError, match="shape"):
        assert_matches_oracle({**actual, "y": actual["y"][:1]}, plain, exact)


def test_catches_an_element_no_kernel_wrote():
    with poisoned():
        unwritten = torch.empty(4, dtype=torch.bfloat16)
    assert unwritten.isnan().all()
    actual, plain, exact = results_for("float32")
    actual["dx"][3, 5] = np.nan
    with pytest.raises(AssertionError, match="dx: rms error inf"):
        assert_matches_oracle(actual, plain, exact)


def test_catches_two_that_err_to_either_side():
    actual, plain, exact = results_for("bfloat16")
    assert_agree(actual, plain, (plain, plain), exact)
    # Each off by 1.4 of the plain version's error: right by the oracle, too far from each other.
    error = plain["y"].astype(np.float64) - exact["y"]
    shift = 1.4 * np.abs(error)
    above = {**plain, "y": (exact["y"] + shift).astype(np.float32)}
    below = {**plain, "y": (exact["y"] - shift).astype(np.float32)}
    wide = {**plain, "y": plain["y"].astype(np.float32)}
    assert_matches_oracle(above, wide, exact)
    assert_matches_oracle(below, wide, exact)
    with pytest.raises(AssertionError, match="y: rms difference"):
        assert_agree(above, below, (wide, wide), exact)
