"""The projections of one attention as one operation, where they are fused LoRA layers.

The code of an attention calls its projections one by one, and otherwise in every family. So their
outputs are made before it runs, and each layer hands out its own when it is called.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_liger import lora

_NAMES = ("q_proj", "k_proj", "v_proj")


def together(forward: Callable[..., Any]) -> Callable[..., Any]:
    """An attention's forward, before which its adapted projections are one `lora_linears`."""

    def attention(module: Any, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.get("hidden_states")
        layers = [getattr(module, name, None) for name in _NAMES]
        layers = [layer for layer in layers if lora.is_fused(layer)]
        # The compiler need not see layers whose forward changes: it has their products as they are.
        ys = None if x is None or torch.compiler.is_compiling() else lora.together(x, layers)
        if ys is None:
            return forward(module, *args, **kwargs)
        forwards = [layer.__dict__["forward"] for layer in layers]
        for layer, y, stock in zip(layers, ys, forwards, strict=True):
            layer.__dict__["forward"] = functools.partial(_hand_out, stock, x, [y])
        del ys, y  # the layers alone have them now
        try:
            return forward(module, *args, **kwargs)
        finally:
            for layer, stock in zip(layers, forwards, strict=True):
                layer.__dict__["forward"] = stock

    return attention


def _hand_out(stock: Any, x: Any, held: list[Any], given: Any, *args: Any, **kwargs: Any) -> Any:
    """What was made of x, once, and then it is not kept here; of another input, the layer's own."""
    if held and given is x and not args and not kwargs:
        return held.pop()
    return stock(given, *args, **kwargs)
