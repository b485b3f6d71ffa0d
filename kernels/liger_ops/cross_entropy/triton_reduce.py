"""The Triton kernel of what cross-entropy has one of a batch: sums, factors, accuracy."""

# Names that exist on one side of a constexpr:
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl


@triton.jit
def _inverse(count):
    """1 / count, and 0 of 0: nothing to average is 0 and not NaN."""
    return tl.where(count == 0.0, 0.0, 1.0 / tl.where(count == 0.0, 1.0, count))


@triton.jit
def reduce_kernel(
    labels_ptr,  # (M,)
    ce_ptr,  # (M,) or None with loss_ptr
    z_ptr,  # (M,) or None
    weight_ptr,  # (V,) or None
    predicted_ptr,  # (M,) or None
    num_items_ptr,  # scalar float32 or None
    loss_ptr,  # scalar, or None to work out the factors or the accuracy alone
    z_loss_ptr,  # scalar or None
    accuracy_ptr,  # scalar or None
    factors_ptr,  # (2,) or None: what a token's ce and z are multiplied by in the mean
    num_rows,
    ignore_index,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Everything that is one number a batch, in a fixed order, by one program."""
    ce = tl.zeros((BLOCK,), tl.float32)
    z = tl.zeros((BLOCK,), tl.float32)
    weights = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.int32)
    right = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = row < num_rows
        label = tl.load(labels_ptr + row, mask=inside, other=0)
        supervised = inside & (label != ignore_index)
        count += supervised.to(tl.int32)
        if loss_ptr is not None:
            ce += tl.load(ce_ptr + row, mask=inside, other=0.0)
            if z_ptr is not None:
                z += tl.load(z_ptr + row, mask=inside, other=0.0)
        if weight_ptr is not None:
            valid = supervised & (label >= 0) & (label < V)
            weights += tl.load(weight_ptr + label, mask=valid, other=0.0).to(tl.float32)
        if predicted_ptr is not None:
            predicted = tl.load(predicted_ptr + row, mask=inside, other=-1)
            right += (supervised & (predicted == label)).to(tl.int32)
    tokens = tl.sum(count, axis=0).to(tl.float32)
    if accuracy_ptr is not None:
        tl.store(accuracy_ptr, tl.sum(right, axis=0) / tl.maximum(tokens, 1.0))
    ce_factor = 1.0
    z_factor = 1.0
    if factors_ptr is not None:
        ce_items = tokens
        z_items = tokens
        if weight_ptr is not None:
            ce_items = tl.sum(weights, axis=0)
        if num_items_ptr is not None:
            ce_items = tl.load(num_items_ptr)
            z_items = ce_items
        ce_factor = _inverse(ce_items)
        z_factor = _inverse(z_items)
        tl.store(factors_ptr, ce_factor)
        tl.store(factors_ptr + 1, z_factor)
    if loss_ptr is not None:
        z_loss = tl.sum(z, axis=0) * z_factor
        tl.store(loss_ptr, tl.sum(ce, axis=0) * ce_factor + z_loss)
        if z_loss_ptr is not None:
            tl.store(z_loss_ptr, z_loss)
