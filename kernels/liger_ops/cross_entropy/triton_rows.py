"""The Triton kernels of cross-entropy, over rows of logits, seen as logit_scale x + bias.

The forward reads the logits once and keeps two numbers a token, the largest logit and the logarithm
of the sum over the others relative to it; the backward reads the logits once more and writes their
gradient.
"""

# Names that exist on one side of a constexpr:
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl


@triton.jit
def _cap(x, softcap):
    """softcap tanh(x / softcap)."""
    u = x / softcap
    e = tl.exp(-2.0 * tl.abs(u))
    large = (1.0 - e) / (1.0 + e)
    # Near 0, where 1 - e cancels, the Taylor series: its next term is below 1e-8 of it.
    u2 = u * u
    series = 1.0 + u2 * (-1.0 / 3 + u2 * (2.0 / 15 + u2 * (-17.0 / 315 + u2 * (62.0 / 2835))))
    tanh = tl.where(u2 < 0.0625, u * series, tl.where(u < 0.0, -large, large))
    return softcap * tanh


@triton.jit
def _cap_slope(x, softcap):
    """1 - tanh(x / softcap)^2, which keeps its precision where tanh is close to 1."""
    e = tl.exp(-2.0 * tl.abs(x / softcap))
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def forward_kernel(
    logits_ptr,  # (M, V)
    labels_ptr,  # (M,) of any integer type
    weight_ptr,  # (V,) or None
    weight_sum_ptr,  # scalar float32 or None: the sum over weight_ptr
    bias_ptr,  # (V,) or None
    ce_ptr,  # (M,) float32
    z_ptr,  # (M,) float32 or None
    statistics_ptr,  # (M, 2) float32: the largest logit, and log sum exp relative to it
    predicted_ptr,  # (M,) int64 or None
    logits_stride,
    ignore_index,
    label_smoothing,
    softcap,
    z_loss,
    logit_scale,
    V: tl.constexpr,
    STEPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SMOOTH: tl.constexpr,
    CAP: tl.constexpr,
    SCALE: tl.constexpr,
    ADD_Z: tl.constexpr,
):
    """One token a program. The maximum and the sum are kept a column, so that a tile costs no
    exchange between threads and little more than one exponential a logit.
    """
    # torch.compile hands float arguments on as float64.
    label_smoothing = tl.cast(label_smoothing, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    z_loss = tl.cast(z_loss, tl.float32)
    logit_scale = tl.cast(logit_scale, tl.float32)
    TILE: tl.constexpr = STEPS * COLUMNS
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    logits_ptr += row * logits_stride
    ce = 0.0
    z = 0.0
    top = 0.0
    log_total = 0.0
    predicted = tl.full((), -1, tl.int64)
    if label != ignore_index:
        valid = (label >= 0) & (label < V)
        y = tl.where(valid, label, 0)
        label_logit = tl.load(logits_ptr + y).to(tl.float32)
        if SCALE:
            label_logit *= logit_scale
        if bias_ptr is not None:
            label_logit += tl.load(bias_ptr + y).to(tl.float32)
        if CAP:
            label_logit = _cap(label_logit, softcap)
        weight = 1.0
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + y).to(tl.float32)
        # What the smoothing's sum is relative to, so that a common offset does not cancel in it.
        base = tl.where(label_logit == float("-inf"), 0.0, label_logit)

        best = tl.full((COLUMNS,), float("-inf"), tl.float32)
        total = tl.zeros((COLUMNS,), tl.float32)
        smooth = tl.zeros((COLUMNS,), tl.float32)
        at = tl.zeros((COLUMNS,), tl.int32)
        tile = tl.arange(0, STEPS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        for start in range(0, V, TILE):
            cols = start + tile
            inside = cols < V
            l = tl.load(logits_ptr + cols, mask=inside, other=float("-inf"))  # noqa: E741
            l = l.to(tl.float32)  # noqa: E741
            if SCALE:
                l = tl.where(inside, l * logit_scale, float("-inf"))  # noqa: E741
            if bias_ptr is not None:
                l += tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)  # noqa: E741
            if CAP:
                l = tl.where(inside, _cap(l, softcap), float("-inf"))  # noqa: E741
            if SMOOTH:
                below = tl.where(inside, l - base, 0.0)
                if weight_ptr is not None:
                    below *= tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
                smooth += tl.sum(below, axis=0)
            highest = tl.max(l, axis=0)
            if predicted_ptr is not None:
                steps = tl.argmax(l, axis=0, tie_break_left=True)
                here = start + steps * COLUMNS + tl.arange(0, COLUMNS)
                at = tl.where(highest > best, here, at)
            new_best = tl.maximum(best, highest)
            shift = tl.where(new_best == float("-inf"), 0.0, new_best)  # nothing but -inf so far
            total = total * tl.exp(best - shift) + tl.sum(tl.exp(l - shift[None, :]), axis=0)
            best = new_best

        top = tl.max(best, axis=0)
        log_total = tl.log(tl.sum(total * tl.exp(best - top), axis=0))
        ce = (1.0 - label_smoothing) * weight * (log_total + (top - label_logit))
        if SMOOTH:
            weight_sum = V * 1.0
            if weight_sum_ptr is not None:
                weight_sum = tl.load(weight_sum_ptr)
            below = weight_sum * (log_total + (top - base)) - tl.sum(smooth, axis=0)
            ce += label_smoothing / V * below
        z = z_loss * (top + log_total) * (top + log_total)
        ce = tl.where(valid, ce, float("nan"))
        z = tl.where(valid, z, float("nan"))
        if ADD_Z:
            ce += z
        if predicted_ptr is not None:
            predicted = tl.min(tl.where(best == top, at.to(tl.int64), V - 1), axis=0)
    tl.store(ce_ptr + row, ce)
    tl.store(statistics_ptr + 2 * row, top)
    tl.store(statistics_ptr + 2 * row + 1, log_total)
    if z_ptr is not None:
        tl.store(z_ptr + row, z)
    if predicted_ptr is not None:
        tl.store(predicted_ptr + row, predicted)


@triton.jit
def _gradient(
    row,
    label,
    cols,
    logits_ptr,
    weight_ptr,
    weight_sum_ptr,
    bias_ptr,
    statistics_ptr,
    label_weight_ptr,
    factors_ptr,
    dloss_ptr,
    dz_ptr,
    logits_stride,
    dloss_stride,
    dz_stride,
    first_class,
    ignore_index,
    label_smoothing,
    softcap,
    z_loss,
    logit_scale,
    V: tl.constexpr,
    CLASSES: tl.constexpr,
    SMOOTH: tl.constexpr,
    CAP: tl.constexpr,
    SCALE: tl.constexpr,
):
    """With respect to logit_scale x + bias, of one row's columns or of several rows'."""
    # torch.compile hands float arguments on as float64.
    label_smoothing = tl.cast(label_smoothing, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    z_loss = tl.cast(z_loss, tl.float32)
    logit_scale = tl.cast(logit_scale, tl.float32)
    supervised = label != ignore_index
    valid = (label >= 0) & (label < CLASSES)
    read = cols < tl.where(supervised, V, 0)  # an ignored row is not read
    x = tl.load(logits_ptr + row * logits_stride + cols, mask=read, other=0.0)
    top = tl.load(statistics_ptr + 2 * row)
    log_total = tl.load(statistics_ptr + 2 * row + 1)
    g = 0.0
    if dloss_ptr is not None:
        g = tl.load(dloss_ptr + row * dloss_stride).to(tl.float32)
    h = g
    if dz_ptr is not None:
        h += tl.load(dz_ptr + row * dz_stride).to(tl.float32)
    if factors_ptr is not None:
        g *= tl.load(factors_ptr)
        h *= tl.load(factors_ptr + 1)
    target = g * (1.0 - label_smoothing)
    if label_weight_ptr is not None:
        target *= tl.load(label_weight_ptr + row)
    elif weight_ptr is not None:
        target *= tl.load(weight_ptr + tl.where(valid, label, 0)).to(tl.float32)
    of_p = target + 2.0 * h * z_loss * (top + log_total)
    if SMOOTH:
        weight_sum = CLASSES * 1.0
        if weight_sum_ptr is not None:
            weight_sum = tl.load(weight_sum_ptr)
        of_p += g * label_smoothing * weight_sum / CLASSES
    of_p = tl.where(valid, of_p, float("nan"))

    x = x.to(tl.float32)
    if SCALE:
        x *= logit_scale
    if bias_ptr is not None:
        x += tl.load(bias_ptr + first_class + cols, mask=cols < V, other=0.0).to(tl.float32)
    x = tl.where(read, x, top)  # nothing that overflows
    l = _cap(x, softcap) if CAP else x  # noqa: E741
    p = tl.exp((l - top) - log_total)
    dl = p * of_p - tl.where(first_class + cols == label, target, 0.0)
    if SMOOTH:
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + first_class + cols, mask=cols < V, other=0.0)
            dl -= g * label_smoothing / CLASSES * weight.to(tl.float32)
        else:
            dl -= g * label_smoothing / CLASSES
    if CAP:
        dl *= _cap_slope(x, softcap)
    return tl.where(read, dl, 0.0)


@triton.jit
def backward_kernel(
    logits_ptr,  # (M, V): of the classes from first_class on
    labels_ptr,  # (M,)
    weight_ptr,  # (CLASSES,) or None
    weight_sum_ptr,  # scalar float32 or None
    bias_ptr,  # (CLASSES,) or None
    statistics_ptr,  # (M, 2) float32
    label_weight_ptr,  # (M,) float32 or None: for labels that are not all in weight_ptr
    factors_ptr,  # (2,) or None
    dloss_ptr,  # (M,), one for all where the stride is 0, or None
    dz_ptr,  # as dloss_ptr
    dlogits_ptr,  # (M, V)
    logits_stride,
    dloss_stride,
    dz_stride,
    first_class,
    ignore_index,
    label_smoothing,
    softcap,
    z_loss,
    logit_scale,
    V: tl.constexpr,
    CLASSES: tl.constexpr,
    BLOCK: tl.constexpr,
    SMOOTH: tl.constexpr,
    CAP: tl.constexpr,
    SCALE: tl.constexpr,
):
    blocks: tl.constexpr = (V + BLOCK - 1) // BLOCK
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    cols = (program % blocks).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(labels_ptr + row)
    gradient = _gradient(
        row, label, cols, logits_ptr, weight_ptr, weight_sum_ptr, bias_ptr, statistics_ptr,
        label_weight_ptr, factors_ptr, dloss_ptr, dz_ptr, logits_stride, dloss_stride, dz_stride,
        first_class, ignore_index, label_smoothing, softcap, z_loss, logit_scale, V, CLASSES,
        SMOOTH, CAP, SCALE,
    )  # fmt: skip
    at = dlogits_ptr + row * V + cols
    tl.store(at, gradient.to(dlogits_ptr.dtype.element_ty), mask=cols < V)


@triton.jit
def bias_gradient_kernel(
    logits_ptr,  # (M, V)
    labels_ptr,  # (M,)
    weight_ptr,  # (V,) or None
    weight_sum_ptr,  # scalar float32 or None
    bias_ptr,  # (V,)
    statistics_ptr,  # (M, 2) float32
    label_weight_ptr,  # (M,) float32 or None
    factors_ptr,  # (2,) or None
    dloss_ptr,  # (M,), one for all where the stride is 0
    dbias_ptr,  # (V,) float32, to which the sum over rows is added
    num_rows,
    logits_stride,
    dloss_stride,
    ignore_index,
    label_smoothing,
    softcap,
    z_loss,
    logit_scale,
    V: tl.constexpr,
    CLASSES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SMOOTH: tl.constexpr,
    CAP: tl.constexpr,
    SCALE: tl.constexpr,
):
    """The sum over rows of what backward_kernel rounds, in float32 and in a fixed order."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_rows, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        label = tl.load(labels_ptr + row, mask=row < num_rows, other=ignore_index)
        row = tl.minimum(row, num_rows - 1).to(tl.int64)
        gradient = _gradient(
            row, label, cols[None, :], logits_ptr, weight_ptr, weight_sum_ptr, bias_ptr,
            statistics_ptr, label_weight_ptr, factors_ptr, dloss_ptr, None, logits_stride,
            dloss_stride, 0, 0, ignore_index, label_smoothing, softcap, z_loss, logit_scale, V,
            CLASSES, SMOOTH, CAP, SCALE,
        )  # fmt: skip
        total += tl.sum(gradient, axis=0)
    inside = cols < V
    total += tl.load(dbias_ptr + cols, mask=inside, other=0.0)
    tl.store(dbias_ptr + cols, total, mask=inside)
