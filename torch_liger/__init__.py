"""Fused training kernels for PyTorch: the functions; modules are in `torch_liger.nn`."""

from typing import TYPE_CHECKING, Any

from torch_liger.activations import gated_linear as gated_linear
from torch_liger.activations import geglu as geglu
from torch_liger.activations import swiglu as swiglu
from torch_liger.adapters import LoraProjection as LoraProjection
from torch_liger.adapters import lora_linear as lora_linear
from torch_liger.adapters import lora_linears as lora_linears
from torch_liger.angles import RopeFrequencies as RopeFrequencies
from torch_liger.angles import rope_angles as rope_angles
from torch_liger.angles import rope_frequencies as rope_frequencies
from torch_liger.attention import rms_norm_linear_rope as rms_norm_linear_rope
from torch_liger.lora import fuse_lora as fuse_lora
from torch_liger.lora import unfuse_lora as unfuse_lora
from torch_liger.losses import cross_entropy as cross_entropy
from torch_liger.losses import fused_linear_cross_entropy as fused_linear_cross_entropy
from torch_liger.losses import per_token_logps as per_token_logps
from torch_liger.norms import fused_add_rms_norm as fused_add_rms_norm
from torch_liger.norms import layer_norm as layer_norm
from torch_liger.norms import rms_norm as rms_norm
from torch_liger.patching import AutoLigerKernelForCausalLM as AutoLigerKernelForCausalLM
from torch_liger.patching import Report as Report
from torch_liger.patching import _apply_liger_kernel_to_instance as _apply_liger_kernel_to_instance
from torch_liger.patching import apply_liger_kernel as apply_liger_kernel
from torch_liger.patching import apply_liger_kernel_to_bert as apply_liger_kernel_to_bert
from torch_liger.patching import apply_liger_kernel_to_cohere as apply_liger_kernel_to_cohere
from torch_liger.patching import apply_liger_kernel_to_gemma as apply_liger_kernel_to_gemma
from torch_liger.patching import apply_liger_kernel_to_gemma2 as apply_liger_kernel_to_gemma2
from torch_liger.patching import apply_liger_kernel_to_gemma3 as apply_liger_kernel_to_gemma3
from torch_liger.patching import (
    apply_liger_kernel_to_gemma3_text as apply_liger_kernel_to_gemma3_text,
)
from torch_liger.patching import apply_liger_kernel_to_glm4 as apply_liger_kernel_to_glm4
from torch_liger.patching import apply_liger_kernel_to_gpt_oss as apply_liger_kernel_to_gpt_oss
from torch_liger.patching import apply_liger_kernel_to_granite as apply_liger_kernel_to_granite
from torch_liger.patching import apply_liger_kernel_to_llama as apply_liger_kernel_to_llama
from torch_liger.patching import apply_liger_kernel_to_llama4 as apply_liger_kernel_to_llama4
from torch_liger.patching import (
    apply_liger_kernel_to_llama4_text as apply_liger_kernel_to_llama4_text,
)
from torch_liger.patching import apply_liger_kernel_to_mistral as apply_liger_kernel_to_mistral
from torch_liger.patching import apply_liger_kernel_to_mixtral as apply_liger_kernel_to_mixtral
from torch_liger.patching import apply_liger_kernel_to_nemotron as apply_liger_kernel_to_nemotron
from torch_liger.patching import apply_liger_kernel_to_norms as apply_liger_kernel_to_norms
from torch_liger.patching import apply_liger_kernel_to_olmo2 as apply_liger_kernel_to_olmo2
from torch_liger.patching import apply_liger_kernel_to_olmo3 as apply_liger_kernel_to_olmo3
from torch_liger.patching import apply_liger_kernel_to_phi as apply_liger_kernel_to_phi
from torch_liger.patching import apply_liger_kernel_to_phi3 as apply_liger_kernel_to_phi3
from torch_liger.patching import apply_liger_kernel_to_qwen2 as apply_liger_kernel_to_qwen2
from torch_liger.patching import apply_liger_kernel_to_qwen2_5 as apply_liger_kernel_to_qwen2_5
from torch_liger.patching import (
    apply_liger_kernel_to_qwen2_5_vl as apply_liger_kernel_to_qwen2_5_vl,
)
from torch_liger.patching import apply_liger_kernel_to_qwen2_vl as apply_liger_kernel_to_qwen2_vl
from torch_liger.patching import apply_liger_kernel_to_qwen3 as apply_liger_kernel_to_qwen3
from torch_liger.patching import apply_liger_kernel_to_qwen3_moe as apply_liger_kernel_to_qwen3_moe
from torch_liger.patching import apply_liger_kernel_to_smollm3 as apply_liger_kernel_to_smollm3
from torch_liger.patching import apply_liger_kernel_to_t5 as apply_liger_kernel_to_t5
from torch_liger.patching import liger_kernel as liger_kernel
from torch_liger.patching import report as report
from torch_liger.patching import unpatch as unpatch
from torch_liger.rotary import rope as rope

if TYPE_CHECKING:
    from torch_liger.callback import LigerCallback as LigerCallback


def __getattr__(name: str) -> Any:
    """LigerCallback when it is asked for: its module imports transformers."""
    if name == "LigerCallback":
        from torch_liger.callback import LigerCallback

        return LigerCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
