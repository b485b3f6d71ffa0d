"""The rotary embedding inside one attention module.

transformers calls it as a global function of the modelling file, which all models of the family
share. So the attention's own code is used with other globals, where that one name is ours. The
file's functions, and every other instance, are left alone.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from torch_liger import rotary
from torch_liger.patching.patched import Replacement
from torch_liger.patching.redecorating import copied, redecorated
from torch_liger.patching.shared_input import together


def half(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1, layout: str = "half") -> Any:
    """Heads before time, as transformers has them, unless `unsqueeze_dim` is 2."""
    if unsqueeze_dim == 2:
        return rotary.rope(q, k, cos, sin, layout=layout)
    # Views: the kernel reads by strides, and gives back what lies as q and k do.
    q, k = rotary.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, layout=layout)
    return q.transpose(1, 2), k.transpose(1, 2)


def interleaved(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    """Cohere: neighbours are a pair, and cos has each angle twice in a row."""
    return half(q, k, cos, sin, unsqueeze_dim, "interleaved")


def interleaved_from_halves(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    """GLM: neighbours are a pair, and the first half of cos has the angles."""
    cos, sin = (a[..., : a.shape[-1] // 2].repeat_interleave(2, dim=-1) for a in (cos, sin))
    return half(q, k, cos, sin, unsqueeze_dim, "interleaved")


def half_from_angles(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    """gpt-oss: the halves are pairs, and cos has each angle once."""
    cos, sin = (torch.cat([a, a], dim=-1) for a in (cos, sin))
    return half(q, k, cos, sin, unsqueeze_dim)


def half_from_axes(
    q: Any, k: Any, cos: Any, sin: Any, sections: Any, unsqueeze_dim: int = 1
) -> Any:
    """Qwen2-VL in older versions: cos is (3, B, T, H), and each section is of one of the axes."""
    cos, sin = (
        torch.cat([a[i % 3] for i, a in enumerate(angle.split(list(sections) * 2, dim=-1))], dim=-1)
        for angle in (cos, sin)
    )
    return half(q, k, cos, sin, unsqueeze_dim)


def interleaved_from_complex(xq: Any, xk: Any, freqs_cis: Any) -> Any:
    """LLaMA 4: neighbours are a complex number, time comes before heads."""
    cos, sin = (a.repeat_interleave(2, dim=-1) for a in (freqs_cis.real, freqs_cis.imag))
    return rotary.rope(xq, xk, cos, sin, layout="interleaved")


@dataclass(frozen=True)
class Rope(Replacement):
    """The attention's forward with `name` in its globals replaced by `function`."""

    name: str
    function: Callable[..., Any]
    op: ClassVar[str] = "rope"

    def make(self) -> Callable[..., Any]:
        stock: Any = self.owner.forward  # type: ignore[attr-defined]
        return together(
            redecorated(stock, with_global(inspect.unwrap(stock), self.name, self.function))
        )


def calls(function: Any, name: str) -> bool:
    """Whether the code, below its decorators, refers to this global name."""
    return name in inspect.unwrap(function).__code__.co_names


def with_global(function: Any, name: str, value: Any) -> Any:
    """A copy of a function in whose code the global `name` is `value`."""
    # Without __name__ torch.compile takes the globals as they are, and not as the module's.
    names = {k: v for k, v in function.__globals__.items() if k != "__name__"} | {name: value}
    return copied(function, names, function.__closure__)
