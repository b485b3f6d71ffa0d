"""Hugging Face models computed by this library's functions: patched, reported on, unpatched."""

from torch_liger.patching.apply import (
    _apply_liger_kernel_to_instance as _apply_liger_kernel_to_instance,
)
from torch_liger.patching.apply import apply_liger_kernel as apply_liger_kernel
from torch_liger.patching.apply import apply_liger_kernel_to_bert as apply_liger_kernel_to_bert
from torch_liger.patching.apply import apply_liger_kernel_to_cohere as apply_liger_kernel_to_cohere
from torch_liger.patching.apply import apply_liger_kernel_to_gemma as apply_liger_kernel_to_gemma
from torch_liger.patching.apply import apply_liger_kernel_to_gemma2 as apply_liger_kernel_to_gemma2
from torch_liger.patching.apply import apply_liger_kernel_to_gemma3 as apply_liger_kernel_to_gemma3
from torch_liger.patching.apply import (
    apply_liger_kernel_to_gemma3_text as apply_liger_kernel_to_gemma3_text,
)
from torch_liger.patching.apply import apply_liger_kernel_to_glm4 as apply_liger_kernel_to_glm4
from torch_liger.patching.apply import (
    apply_liger_kernel_to_gpt_oss as apply_liger_kernel_to_gpt_oss,
)
from torch_liger.patching.apply import (
    apply_liger_kernel_to_granite as apply_liger_kernel_to_granite,
)
from torch_liger.patching.apply import apply_liger_kernel_to_llama as apply_liger_kernel_to_llama
from torch_liger.patching.apply import apply_liger_kernel_to_llama4 as apply_liger_kernel_to_llama4
from torch_liger.patching.apply import (
    apply_liger_kernel_to_llama4_text as apply_liger_kernel_to_llama4_text,
)
from torch_liger.patching.apply import (
    apply_liger_kernel_to_mistral as apply_liger_kernel_to_mistral,
)
from torch_liger.patching.apply import (
    apply_liger_kernel_to_mixtral as apply_liger_kernel_to_mixtral,
)
from torch_liger.patching.apply import (
    apply_liger_kernel_to_nemotron as apply_liger_kernel_to_nemotron,
)
from torch_liger.patching.apply import apply_liger_kernel_to_norms as apply_liger_kernel_to_norms
from torch_liger.patching.apply import apply_liger_kernel_to_olmo2 as apply_liger_kernel_to_olmo2
from torch_liger.patching.apply import apply_liger_kernel_to_olmo3 as apply_liger_kernel_to_olmo3
from torch_liger.patching.apply import apply_liger_kernel_to_phi as apply_liger_kernel_to_phi
from torch_liger.patching.apply import apply_liger_kernel_to_phi3 as apply_liger_kernel_to_phi3
from torch_liger.patching.apply import apply_liger_kernel_to_qwen2 as apply_liger_kernel_to_qwen2
from torch_liger.patching.apply import (
    apply_liger_kernel_to_qwen2_5 as apply_liger_kernel_to_qwen2_5,
)
from torch_liger.patching.apply import (
    apply_liger_kernel_to_qwen2_5_vl as apply_liger_kernel_to_qwen2_5_vl,
)
from torch_liger.patching.apply import (
    apply_liger_kernel_to_qwen2_vl as apply_liger_kernel_to_qwen2_vl,
)
from torch_liger.patching.apply import apply_liger_kernel_to_qwen3 as apply_liger_kernel_to_qwen3
from torch_liger.patching.apply import (
    apply_liger_kernel_to_qwen3_moe as apply_liger_kernel_to_qwen3_moe,
)
from torch_liger.patching.apply import (
    apply_liger_kernel_to_smollm3 as apply_liger_kernel_to_smollm3,
)
from torch_liger.patching.apply import apply_liger_kernel_to_t5 as apply_liger_kernel_to_t5
from torch_liger.patching.apply import liger_kernel as liger_kernel
from torch_liger.patching.auto import AutoLigerKernelForCausalLM as AutoLigerKernelForCausalLM
from torch_liger.patching.patch import report as report
from torch_liger.patching.patch import unpatch as unpatch
from torch_liger.patching.report import Report as Report
