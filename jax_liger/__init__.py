"""Fused training kernels for JAX: the functions; modules are in `jax_liger.nnx` and `.linen`."""

from jax_liger.activations import geglu as geglu
from jax_liger.activations import swiglu as swiglu
from jax_liger.adapters import lora_linear as lora_linear
from jax_liger.angles import RopeFrequencies as RopeFrequencies
from jax_liger.angles import rope_angles as rope_angles
from jax_liger.angles import rope_frequencies as rope_frequencies
from jax_liger.attention import rms_norm_linear_rope as rms_norm_linear_rope
from jax_liger.losses import cross_entropy as cross_entropy
from jax_liger.losses import fused_linear_cross_entropy as fused_linear_cross_entropy
from jax_liger.losses import per_token_logps as per_token_logps
from jax_liger.norms import fused_add_rms_norm as fused_add_rms_norm
from jax_liger.norms import layer_norm as layer_norm
from jax_liger.norms import rms_norm as rms_norm
from jax_liger.patching import PatchReport as PatchReport
from jax_liger.patching import patch as patch
from jax_liger.patching import report as report
from jax_liger.patching import unpatch as unpatch
from jax_liger.rotary import rope as rope
