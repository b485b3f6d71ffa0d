"""Fused training kernels for PyTorch: the functions; modules are in `torch_liger.nn`."""

from torch_liger.functions import fused_add_rms_norm as fused_add_rms_norm
from torch_liger.functions import geglu as geglu
from torch_liger.functions import rms_norm as rms_norm
from torch_liger.functions import swiglu as swiglu
