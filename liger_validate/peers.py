"""Other libraries' operations behind the signatures of ours, so that the same cases run on them.

An adapter is called as the public function of its name is, and raises NotOffered for what the peer
cannot take. Operations without an adapter are not offered either.

liger-kernel: `liger_kernel.transformers.functional`, run with 0.8.5. In Triton's interpreter its
rope and most of its cross-entropies run, in float32 and float16; all else needs a GPU.

tokamax: `tokamax.layer_norm`, with means or without, run with 0.0.17. Its gated_linear_unit holds
the products too, and its linear_softmax_cross_entropy_loss knows no label to ignore: neither is an
operation of ours.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class NotOffered(Exception):
    """The peer has no such operation, or cannot take this case; says why."""


class PeerMissing(RuntimeError):
    """The peer that was asked for is not installed."""


@dataclass(frozen=True)
class Peer:
    """Another library.

    Attributes:
        module: what is imported.
        framework: "torch" or "jax", whose plain version is the yardstick.
        needs: the implementation of ours that runs where the peer's do, if it has kernels alone.
        ops: its adapters by public name.
    """

    name: str
    module: str
    framework: str
    ops: Mapping[str, Callable[..., Any]] = field(repr=False)
    needs: str | None = None

    def check_installed(self) -> None:
        """Raises PeerMissing if it is not."""
        if importlib.util.find_spec(self.module) is None:
            raise PeerMissing(f"{self.name} is not installed: no module {self.module!r} was found")

    def package(self, op: str) -> Any:
        """The adapters as if they were a package of ours."""
        if op not in self.ops:
            raise NotOffered(f"{self.name} has no {op}")
        return SimpleNamespace(__name__=self.name, **self.ops)


def _refuse(reasons: dict[str, bool]) -> None:
    """Raises NotOffered naming what the peer does not take, where the case has it."""
    refused = [what for what, present in reasons.items() if present]
    if refused:
        raise NotOffered(f"takes no {' and no '.join(refused)}")


def _liger() -> Any:
    from liger_kernel.transformers import functional  # pyright: ignore[reportMissingImports]

    return functional


# Liger's kernels write over what they are given, here over copies of it.


def _liger_rms_norm(x, weight=None, *, eps, offset, casting_mode, implementation):
    return _liger().liger_rms_norm(x, weight, eps, offset, casting_mode, in_place=False)


def _liger_fused_add_rms_norm(
    x, residual, weight=None, *, eps, offset, casting_mode, implementation
):
    _refuse({"missing weight": weight is None})
    settings = (eps, offset, casting_mode)
    return _liger().liger_fused_add_rms_norm(x, residual, weight, *settings, in_place=False)


def _liger_layer_norm(x, weight=None, bias=None, *, eps, implementation):
    _refuse({"missing weight": weight is None, "missing bias": bias is None})
    return _liger().liger_layer_norm(x, weight, bias, eps)


def _liger_swiglu(*halves, implementation):
    _refuse({"gate and up in one": len(halves) == 1})
    return _liger().liger_swiglu(*(a.clone() for a in halves))


def _liger_geglu(*halves, approximate, implementation):
    _refuse({"gate and up in one": len(halves) == 1, "exact gelu": approximate != "tanh"})
    return _liger().liger_geglu(*(a.clone() for a in halves))


def _liger_rope(q, k, cos, sin, *, layout, implementation):
    _refuse({"interleaved layout": layout != "half"})
    # Heads before time, as transformers has them.
    q, k = (a.clone().transpose(1, 2) for a in (q, k))
    partial = {"rotary_dim": cos.shape[-1]} if cos.shape[-1] != q.shape[-1] else {}
    return tuple(a.transpose(1, 2) for a in _liger().liger_rope(q, k, cos, sin, **partial))


def _liger_cross_entropy(
    logits, labels, *, class_weight, num_items, z_loss, reduction, implementation, **settings
):
    _refuse({"num_items": num_items is not None, "empty logits": labels.numel() == 0})
    loss = _liger().liger_cross_entropy(
        logits.reshape(-1, logits.shape[-1]).clone(),
        labels.reshape(-1),
        weight=class_weight,
        lse_square_scale=z_loss,
        reduction=reduction,
        **settings,
    )
    return loss.reshape(labels.shape) if reduction == "none" else loss


def _liger_fused_linear_cross_entropy(
    hidden, weight, labels, *, bias, class_weight, logit_scale, memory, num_items, z_loss,
    reduction, implementation, **settings,
):  # fmt: skip
    _refuse(
        {
            "logit_scale": logit_scale != 1.0,
            "num_items": num_items is not None,
            "empty hidden": labels.numel() == 0,
        }
    )
    loss = _liger().liger_fused_linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1),
        bias=bias,
        ce_weight=class_weight,
        lse_square_scale=z_loss,
        reduction=reduction,
        **settings,
    )
    return loss.reshape(labels.shape) if reduction == "none" else loss


def _tokamax_layer_norm(x, weight=None, bias=None, *, eps, implementation):
    import tokamax  # pyright: ignore[reportMissingImports]

    return tokamax.layer_norm(x, weight, bias, epsilon=eps)


def _tokamax_rms_norm(x, weight=None, *, eps, offset, casting_mode, implementation):
    import tokamax  # pyright: ignore[reportMissingImports]

    # It rounds once, behind the weight.
    _refuse({f"casting_mode {casting_mode!r}": casting_mode != "gemma"})
    return tokamax.layer_norm(
        x, weight, None, epsilon=eps, scale_offset=offset, subtract_mean=False
    )


PEERS = {
    "liger-kernel": Peer(
        "liger-kernel",
        module="liger_kernel",
        framework="torch",
        needs="triton",
        ops={
            "rms_norm": _liger_rms_norm,
            "fused_add_rms_norm": _liger_fused_add_rms_norm,
            "layer_norm": _liger_layer_norm,
            "swiglu": _liger_swiglu,
            "geglu": _liger_geglu,
            "rope": _liger_rope,
            "cross_entropy": _liger_cross_entropy,
            "fused_linear_cross_entropy": _liger_fused_linear_cross_entropy,
        },
    ),
    "tokamax": Peer(
        "tokamax",
        module="tokamax",
        framework="jax",
        ops={"layer_norm": _tokamax_layer_norm, "rms_norm": _tokamax_rms_norm},
    ),
}
