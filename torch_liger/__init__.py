"""Fused training kernels for PyTorch: the functions; modules are in `torch_liger.nn`."""

from typing import TYPE_CHECKING, Any

from torch_liger.activations import geglu as geglu
from torch_liger.activations import swiglu as swiglu
from torch_liger.adapters import LoraProjection as LoraProjection
from torch_liger.adapters import lora_linear as lora_linear
from torch_liger.adapters import lora_linears as lora_linears
from torch_liger.angles import RopeFrequencies as RopeFrequencies
from torch_liger.angles import rope_angles as rope_angles
from torch_liger.angles import rope_frequencies as rope_frequencies
from torch_liger.lora import fuse_lora as fuse_lora
from torch_liger.lora import unfuse_lora as unfuse_lora
from torch_liger.losses import cross_entropy as cross_entropy
from torch_liger.losses import fused_linear_cross_entropy as fused_linear_cross_entropy
from torch_liger.losses import per_token_logps as per_token_logps
from torch_liger.norms import fused_add_rms_norm as fused_add_rms_norm
from torch_liger.norms import layer_norm as layer_norm
from torch_liger.norms import rms_norm as rms_norm
from torch_liger.rotary import rope as rope

if TYPE_CHECKING:
    from torch_liger.callback import LigerCallback as LigerCallback


def __getattr__(name: str) -> Any:
    """LigerCallback when it is asked for: its module imports transformers."""
    if name == "LigerCallback":
        from torch_liger.callback import LigerCallback

        return LigerCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
