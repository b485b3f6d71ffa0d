"""Low-rank adapters for the decoder: linear layers become `LoRALinear`, and back.

    add_lora(model, rank=64, alpha=128, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-4), wrt=LoRAParam)
    step = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, LoRAParam))
    loss, gradients = step(model, batch)

Only the adapters are of the type `LoRAParam`, so nothing is computed or kept for the gradients of
the other parameters, nor does the optimizer have any state for them. All of them keep their paths
in the model, and so rules for sharding keep their meaning.
"""

import functools
import math
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jax_liger.adapters import lora_linear
from jax_liger.models.basics import linear
from jax_liger.models.config import Config
from jax_liger.models.decoder import CausalLM
from liger_ops.checking import listed
from liger_ops.lora_linear.check import check_dropout

LoRAParam = nnx.LoRAParam

ALL_LINEAR = "all-linear"
# Linear layers whose weight is read by other code than their own: the head's by the loss, and the
# router's choice of experts is no matrix product to adapt.
NOT_ADAPTED = ("lm_head", "router")


class LoRALinear(nnx.Module):
    """A linear layer with a low-rank adapter, by `jax_liger.lora_linear`.

        y = x kernel + bias + scaling dropout(x) lora_a lora_b

    With DoRA, where `magnitude` is a parameter,

        y = (x kernel + scaling x lora_a lora_b) magnitude / norm + bias

    and norm (O,) is that of the columns of kernel + scaling lora_a lora_b, a constant to the
    gradient.

    Args:
        base: the layer, whose `kernel` (D, O) and `bias` (O,) or None become this one's.
        lora_a: (D, r).
        lora_b: (r, O).
        magnitude: (O,), or None without DoRA.
        alpha: scaling is alpha / r.
        rslora: scaling is alpha / sqrt(r) instead.
        dropout: the probability that an element of the adapter's x is dropped in training, which is
            between `model.train()` and `model.eval()`.
        rngs: the keys for the dropout.

    The adapter's products are made in the dtype of the layer's.
    """

    def __init__(
        self,
        base: nnx.Linear,
        lora_a: jax.Array,
        lora_b: jax.Array,
        magnitude: jax.Array | None,
        *,
        alpha: float,
        rslora: bool,
        dropout: float,
        rngs: nnx.Rngs | None,
    ):
        self.kernel, self.bias = base.kernel, base.bias
        self.lora_a, self.lora_b = LoRAParam(lora_a), LoRAParam(lora_b)
        self.magnitude = nnx.data(None if magnitude is None else LoRAParam(magnitude))
        self.dtype = base.dtype
        self.alpha, self.rslora, self.dropout = alpha, rslora, dropout
        self.deterministic = False
        self.rngs = nnx.data(rngs.dropout.fork() if rngs is not None and dropout else None)

    @property
    def rank(self) -> int:
        return self.lora_a.shape[1]

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (..., D) to (..., O)."""
        dtype = self.dtype or x.dtype
        x, kernel, lora_a, lora_b = (
            array[...].astype(dtype) for array in (x, self.kernel, self.lora_a, self.lora_b)
        )
        bias = None if self.bias is None else self.bias[...].astype(dtype)
        dropping = self.rngs is not None and not self.deterministic
        y = lora_linear(
            *(x, kernel, lora_a, lora_b),
            bias=bias if self.magnitude is None else None,
            scaling=self.scaling,
            dropout_p=self.dropout if dropping else 0.0,
            seed=self.rngs() if dropping else None,  # type: ignore[misc]
        )
        if self.magnitude is None:
            return y
        factor = self.magnitude[...] / jax.lax.stop_gradient(norm_of(self.adapted()))
        y = y * factor if bias is None else y * factor + bias
        return y.astype(x.dtype)

    def adapted(self) -> jax.Array:
        """kernel + scaling lora_a lora_b, in float32."""
        wide = jnp.promote_types(self.kernel.dtype, jnp.float32)
        kernel, lora_a, lora_b = (
            p[...].astype(wide) for p in (self.kernel, self.lora_a, self.lora_b)
        )
        return kernel + self.scaling * jnp.matmul(lora_a, lora_b, precision="highest")

    def merged(self, config: Config) -> nnx.Linear:
        """A layer without an adapter whose kernel is this one's with it, rounded once."""
        kernel = self.adapted()
        if self.magnitude is not None:
            kernel = kernel * (self.magnitude[...] / norm_of(kernel))
        kernel = _placed(kernel.astype(self.kernel.dtype), self.kernel[...], (0, 1))
        make = functools.partial(linear, config, *kernel.shape, use_bias=self.bias is not None)
        layer = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
        layer.kernel, layer.bias = self.kernel, self.bias
        layer.kernel.set_value(kernel)
        return layer

    def set_view(self, deterministic: bool | None = None) -> None:
        """What `nnx.view` calls."""
        if deterministic is not None:
            self.deterministic = deterministic


def norm_of(kernel: jax.Array) -> jax.Array:
    """(O,), of each output's column of a kernel (D, O)."""
    return jnp.sqrt(jnp.sum(kernel * kernel, axis=0))


def add_lora(
    model: CausalLM,
    *,
    rank: int,
    alpha: float,
    targets: str | Iterable[str] = ALL_LINEAR,
    rslora: bool = False,
    dora: bool = False,
    dropout: float = 0.0,
    param_dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
) -> list[str]:
    """Gives linear layers of the model adapters, in place. At first they change no output.

    Args:
        model: the model. Its other parameters stay what and where they are.
        rank: r, the inner size of the adapters.
        alpha: the adapter's output is multiplied by alpha / r.
        targets: which layers, as PEFT's target_modules: names such as "q_proj", or ends of paths
            such as "layers.0.mlp.up_proj"; or one string, a regular expression for whole paths; or
            "all-linear", every linear layer but the head. Fused projections are named "qkv_proj"
            and "gate_up_proj". Of a mixture of experts only the attention can have adapters.
        rslora: alpha / sqrt(r) instead of alpha / r.
        dora: whether the columns' norms are parameters of their own (`magnitude`).
        dropout: the probability that an element of an adapter's input is dropped, between
            `model.train()`, which is the state at first, and `model.eval()`. 0 with DoRA.
        param_dtype: of the adapters. Their products are made in the config's dtype.
        rngs: the keys for the adapters and the dropout.

    Returns:
        The paths of the layers that have adapters now.

    Raises:
        ValueError: for a target that matches no layer, naming those that there are, a layer that
            has an adapter already, a rank below 1, a dropout outside [0, 1), or one with DoRA.

    Source: Hu et al. (2021), arXiv:2106.09685; Kalajdzievski (2023), arXiv:2312.03732 (rsLoRA);
        Liu et al. (2024), arXiv:2402.09353 (DoRA).
    """
    if rank < 1:
        raise ValueError(f"rank must be at least 1; got {rank}")
    check_settings(dropout, dora)
    layers = linear_layers(model)
    chosen = _chosen(targets, layers)
    for path in chosen:
        layer = layers[path]
        if isinstance(layer, LoRALinear):
            raise ValueError(f"{path} has an adapter already, of rank {layer.rank}")
    for path in chosen:
        base: Any = layers[path]
        kernel = base.kernel[...]
        inputs, outputs = kernel.shape
        bound = 1.0 / math.sqrt(inputs)
        lora_a = jax.random.uniform(rngs.params(), (inputs, rank), param_dtype, -bound, bound)
        magnitude = norm_of(kernel.astype(jnp.float32)).astype(param_dtype) if dora else None
        attach(
            *(model, path, lora_a, jnp.zeros((rank, outputs), param_dtype), magnitude),
            alpha=alpha, rslora=rslora, dropout=dropout, rngs=rngs,
        )  # fmt: skip
    return chosen


def merge_lora(model: CausalLM) -> list[str]:
    """Adds the adapters to the kernels, in place; the model has only its config's parameters then.

    Returns the paths of the layers that had adapters. The sums are made in float32 and rounded once
    to the kernel's dtype.
    """
    merged = list(adapters(model))
    for path, layer in adapters(model).items():
        _replace(model, path, layer.merged(model.config))
    return merged


def adapters(model: CausalLM) -> dict[str, LoRALinear]:
    """The layers with adapters, by their paths."""
    return {p: layer for p, layer in linear_layers(model).items() if isinstance(layer, LoRALinear)}


def linear_layers(model: CausalLM) -> dict[str, nnx.Linear | LoRALinear]:
    """The layers that may have adapters, by their paths, such as model.layers.0.mlp.up_proj.

    Beside experts, whose matrices have none, the feed-forward parts of dense layers have none
    either: by their names PEFT means the experts.
    """
    excluded = {*NOT_ADAPTED, "mlp"} if model.config.num_experts else set(NOT_ADAPTED)
    return {
        ".".join(map(str, path)): module
        for path, module in nnx.iter_modules(model)
        if isinstance(module, nnx.Linear | LoRALinear) and excluded.isdisjoint(path)
    }


def attach(
    model: CausalLM,
    path: str,
    lora_a: jax.Array,
    lora_b: jax.Array,
    magnitude: jax.Array | None,
    **settings: Any,
) -> None:
    """Puts a LoRALinear in the layer's place, its parts beside those of the kernel."""
    base: Any = linear_layers(model)[path]
    kernel = base.kernel[...]
    parts = (
        _placed(lora_a, kernel, (0, None)),
        _placed(lora_b, kernel, (None, 1)),
        None if magnitude is None else _placed(magnitude, kernel, (1,)),
    )
    _replace(model, path, LoRALinear(base, *parts, **settings))


def check_settings(dropout: float, dora: bool) -> None:
    """Raises ValueError for what cannot be computed."""
    check_dropout(dropout)
    if dropout and dora:
        raise ValueError(f"dropout must be 0 with dora=True; got {dropout}")


def _chosen(targets: str | Iterable[str], layers: Iterable[str]) -> list[str]:
    """The paths that the targets match, in the model's order."""
    if targets == ALL_LINEAR:
        return list(layers)
    if isinstance(targets, str):
        matches = {targets: {path for path in layers if re.fullmatch(targets, path)}}
    else:
        matches = {t: {p for p in layers if f".{p}".endswith(f".{t}")} for t in targets}
    unknown = [target for target, paths in matches.items() if not paths]
    if unknown or not matches:
        known = dict.fromkeys(path.rpartition(".")[2] for path in layers)
        raise ValueError(
            f"targets must match linear layers that may have adapters, {listed(known)}; got "
            f"{listed(unknown) or 'none'}"
        )
    return [path for path in layers if any(path in paths for paths in matches.values())]


def _replace(model: CausalLM, path: str, layer: nnx.Module) -> None:
    *parents, name = path.split(".")
    parent: Any = model
    for part in parents:
        parent = parent[int(part)] if part.isdecimal() else getattr(parent, part)
    setattr(parent, name, layer)


def _placed(array: jax.Array, kernel: Any, axes: tuple[int | None, ...]) -> jax.Array:
    """The array where the kernel is, each axis split as that axis of the kernel, or not."""
    sharding = getattr(kernel, "sharding", None)
    if isinstance(sharding, NamedSharding):
        spec = (*sharding.spec, None, None)
        split = PartitionSpec(*(None if axis is None else spec[axis] for axis in axes))
        return jax.device_put(array, NamedSharding(sharding.mesh, split))
    return array if sharding is None else jax.device_put(array, sharding)
