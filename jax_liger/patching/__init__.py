"""Other people's Flax models by the fused kernels, and back."""

from jax_liger.patching.patch import patch as patch
from jax_liger.patching.patch import report as report
from jax_liger.patching.patch import unpatch as unpatch
from jax_liger.patching.report import PatchReport as PatchReport
