"""Loading a model and patching it in one call."""

from typing import Any

from torch_liger.patching.apply import apply_liger_kernel
from torch_liger.patching.families import FAMILIES
from torch_liger.patching.switches import SPELLINGS


class AutoLigerKernelForCausalLM:
    """`transformers.AutoModelForCausalLM`, with the model patched before it is returned.

    Keywords that are switches of `apply_liger_kernel` go there; all others go to transformers.
    """

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As `AutoModelForCausalLM.from_pretrained`."""
        return cls._made("from_pretrained", args, kwargs)

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        """As `AutoModelForCausalLM.from_config`."""
        return cls._made("from_config", args, kwargs)

    @staticmethod
    def _made(constructor: str, args: Any, kwargs: dict[str, Any]) -> Any:
        from transformers import AutoModelForCausalLM

        names = {switch for family in FAMILIES for switch in family.switches()} | set(SPELLINGS)
        switches = {name: kwargs.pop(name) for name in names & set(kwargs)}
        model = getattr(AutoModelForCausalLM, constructor)(*args, **kwargs)
        apply_liger_kernel(model, **switches)
        return model
