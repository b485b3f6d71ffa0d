"""The kernel of the head's matrix products in PyTorch, by itself."""

import pytest
import torch

from liger_ops.fused_linear_cross_entropy import triton_products
from liger_ops.fused_linear_cross_entropy.triton_products import Products
from test_rms_norm_torch import assert_close, randn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, DIM, VOCAB = 300, 72, 296  # neither a multiple of a tile
FIRST = 7  # the part's first row
SENTINEL = 7.0


@pytest.fixture(autouse=True)
def _kernel_at_any_size(monkeypatch):
    monkeypatch.setattr(triton_products, "LEAST_WORK", 0)


def products(live, dtype=torch.bfloat16):
    if DEVICE == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel runs on Hopper GPUs")
    counted = torch.tensor(FIRST + live, dtype=torch.int32, device=DEVICE)
    return Products(torch.arange(ROWS, device=DEVICE), counted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("live", [ROWS, 2 * ROWS, 140, 1, 0, -5])
def test_rows_that_do_not_count_are_neither_read_nor_multiplied(live, dtype):
    hidden, weight = randn(ROWS, DIM, dtype=dtype), randn(VOCAB, DIM, dtype=dtype, seed=1)
    live_rows = min(max(live, 0), ROWS)
    tile = -(-live_rows // 128) * 128
    hidden[tile:] = float("nan")
    logits = torch.full((ROWS, VOCAB), SENTINEL, dtype=dtype, device=DEVICE)
    products(live).logits(hidden, weight, logits, FIRST)
    exact = (hidden[:live_rows].double() @ weight.double().t()).to(dtype)
    assert_close([logits[:live_rows]], [exact], rtol=2.0**-8)
    assert (logits[tile:] == SENTINEL).all()


@pytest.mark.parametrize("live", [ROWS, 140, 0])
def test_hidden_gradient_is_zero_in_the_others(live):
    dlogits, weight = randn(ROWS, VOCAB), randn(VOCAB, DIM, seed=1)
    dlogits[live:] = 0.0
    dlogits, weight = dlogits.bfloat16(), weight.bfloat16()
    into = torch.full((ROWS, DIM), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    products(live).hidden_gradient(dlogits, weight, into, 0.5, FIRST)
    exact = 0.5 * dlogits.double() @ weight.double()
    assert_close([into], [exact.bfloat16()], rtol=2.0**-8)
    assert (into[live:] == 0.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("live", [ROWS, 140, 0])
def test_weight_gradient_is_written_first_and_then_added_to(live, dtype):
    dlogits, hidden = randn(ROWS, VOCAB), randn(ROWS, DIM, seed=1).bfloat16()
    dlogits[live:] = 0.0
    dlogits = dlogits.bfloat16()
    tile = -(-live // 128) * 128
    hidden[tile:] = float("nan")
    into = torch.full((VOCAB, DIM), float("nan"), dtype=dtype, device=DEVICE)
    exact = 0.5 * dlogits.double().t() @ hidden.double().nan_to_num()
    for add in (False, True):
        products(live).weight_gradient(dlogits, hidden, into, 0.5, FIRST, add=add)
        rtol = 1e-6 if dtype == torch.float32 else 2.0**-7
        assert_close([into], [((1 + add) * exact).to(dtype)], rtol=rtol)


def test_order_puts_the_rows_that_count_first_and_back():
    labels = torch.tensor([3, -100, 5, -100, 0, 1], device=DEVICE)
    hidden, weight = randn(6, 8, dtype=torch.bfloat16), randn(16, 8, dtype=torch.bfloat16)
    made = Products.over(hidden, weight, labels, -100)
    assert made.live is not None and made.live.item() == 4
    assert made.ordered(labels).tolist() == [3, 5, 0, 1, -100, -100]
    assert torch.equal(made.as_given(made.ordered(hidden)), hidden)
    assert torch.equal(made.ordered(labels, slice(2, 5)), made.ordered(labels)[2:5])


@pytest.mark.parametrize(
    "hidden, weight",
    [
        (randn(6, 8), randn(16, 8)),  # float32: the precision is the library's setting
        (randn(6, 12).bfloat16(), randn(16, 12).bfloat16()),
        (randn(6, 8).bfloat16(), randn(17, 8).bfloat16()),
        (randn(8, 6).bfloat16().t(), randn(16, 8).bfloat16()),
        (randn(0, 8).bfloat16(), randn(16, 8).bfloat16()),
    ],
)
def test_what_the_copy_engine_cannot_read_is_the_library_s(hidden, weight):
    labels = torch.zeros(len(hidden), dtype=torch.int64, device=DEVICE)
    assert Products.over(hidden, weight, labels, -100) == Products()
