"""What every Triton kernel of RMSNorm does with the weight and with the casting mode."""

import triton
import triton.language as tl


@triton.jit
def round_as_llama(n, dtype: tl.constexpr, CASTING: tl.constexpr):
    """Hugging Face's LLaMA casts the normalised value down before it multiplies by the weight."""
    return n.to(dtype).to(tl.float32) if CASTING == "llama" else n


@triton.jit
def load_scale(weight_ptr, cols, mask, offset):
    """weight + offset, or 1 without a weight, float32 (BLOCK_D,)."""
    if weight_ptr is None:
        return tl.full(cols.shape, 1.0, tl.float32)
    else:
        weight = tl.load(weight_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_last")
        # torch.compile hands float arguments on as float64.
        return weight.to(tl.float32) + tl.cast(offset, tl.float32)
