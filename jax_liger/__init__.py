"""Fused training kernels for JAX: the functions; modules are in `jax_liger.nnx` and `.linen`."""

from jax_liger.functions import fused_add_rms_norm as fused_add_rms_norm
from jax_liger.functions import geglu as geglu
from jax_liger.functions import rms_norm as rms_norm
from jax_liger.functions import swiglu as swiglu
