"""What goes into and comes out of every module of a model, by the names of its checkpoint.

PyTorch's modules are watched by forward hooks. Flax's have none, so the classes' `__call__` is
wrapped for the length of one forward, which is not jitted: arrays then have their values.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from liger_validate.batches import Batch

LOGITS = "logits"
ANGLES = "rotary_emb"


@dataclass
class Capture:
    """One forward of one model.

    Attributes:
        inputs, outputs: the first array into and out of every module, by its name. A module that
            returns a tuple counts by the tuple's first.
        angles: cos and sin by type of layer; None stands for every type.
        head: the head's weight (V, D) as the model has it.
        gradients: of the loss for every parameter, by its name in PyTorch, if asked for.
    """

    label: str
    dtype: str
    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    angles: dict[str | None, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    head: np.ndarray | None = None
    loss: float | None = None
    gradients: dict[str, np.ndarray] = field(default_factory=dict)

    def angles_of(self, layer_type: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Cos and sin of the layers of this type."""
        return self.angles.get(layer_type, self.angles.get(None))

    def complete(self) -> None:
        """Fills in what the models spell differently, from what came next.

        Norms that a fused kernel stands for are not called. The embedding's multiplier is in its
        module for some, and behind it for others.
        """
        if "model.layers.0" in self.inputs:
            self.outputs["model.embed_tokens"] = self.inputs["model.layers.0"]
        for name in [n for n in self.inputs if n.endswith(".mlp")]:
            layer = name.removesuffix(".mlp")
            for norm in ("pre_feedforward_layernorm", "post_attention_layernorm"):
                if f"{layer}.{norm}" in self.outputs:
                    break
            else:
                self.outputs[f"{layer}.post_attention_layernorm"] = self.inputs[name]


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) and value else value


def of_torch(model: Any, batch: Batch, label: str, config: Any) -> Capture:
    """A forward of a model of transformers, in eval mode, with the batch's positions."""
    import torch

    from liger_validate.tensors import from_torch

    names = {module: name for name, module in model.named_modules() if name}
    capture = Capture(label, str(next(model.parameters()).dtype).removeprefix("torch."))

    def watch(module, args, kwargs, output):
        name = names[module]
        if name.endswith(ANGLES):
            kind = kwargs.get("layer_type", args[2] if len(args) > 2 else None)
            cos, sin = (from_torch(a) for a in output)
            capture.angles[kind] = (cos, sin)
            return
        given = args[0] if args else kwargs.get("hidden_states")
        for kept, value in ((capture.inputs, given), (capture.outputs, _first(output))):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                kept[name] = _time_first(name, from_torch(value), config)

    hooks = [m.register_forward_hook(watch, with_kwargs=True) for m in names]
    training, model = model.training, model.eval()
    try:
        with torch.no_grad():
            out = model(**_torch_inputs(model, batch), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
        model.train(training)
    capture.outputs[LOGITS] = from_torch(out.logits)
    capture.head = from_torch(model.get_output_embeddings().weight)
    capture.complete()
    return capture


def _time_first(name: str, value: np.ndarray, config: Any) -> np.ndarray:
    """Gemma 3 norms heads when they lie before time."""
    swapped = config.model_type == "gemma3_text" and name.endswith(("q_norm", "k_norm"))
    return np.swapaxes(value, 1, 2) if swapped and value.ndim == 4 else value


def _torch_inputs(model: Any, batch: Batch) -> dict[str, Any]:
    import torch

    device = next(model.parameters()).device
    arrays = {"input_ids": batch.ids, "position_ids": batch.positions}
    if batch.padded:
        arrays["attention_mask"] = batch.mask
    return {k: torch.tensor(v, dtype=torch.long, device=device) for k, v in arrays.items()}


@contextlib.contextmanager
def softmax_in_float64() -> Iterator[None]:
    """For a model in float64: transformers asks softmax for float32.

    There the least float64, by which a key is masked, is -inf, and a query that sees no key is NaN.
    """
    import torch

    original = torch.nn.functional.softmax

    def softmax(x: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
        wide = x.dtype == torch.float64
        return original(x, *args, dtype=torch.float64 if wide else dtype, **kwargs)

    torch.nn.functional.softmax = softmax
    try:
        yield
    finally:
        torch.nn.functional.softmax = original


def gradients_of_torch(model: Any, batch: Batch, capture: Capture) -> None:
    """Adds the loss and its gradients to the capture."""
    import torch

    from liger_validate.tensors import from_torch

    inputs = _torch_inputs(model, batch)
    # transformers has padding predict the token behind it, which Flax's loss does not count.
    behind_a_token = np.pad(batch.counted[:, :-1], ((0, 0), (1, 0)))
    predicted = torch.tensor(batch.counted & behind_a_token, device=inputs["input_ids"].device)
    labels = inputs["input_ids"].masked_fill(~predicted, -100)
    model.zero_grad(set_to_none=True)
    loss = model(**inputs, labels=labels, use_cache=False).loss
    loss.backward()
    capture.loss = loss.item()
    capture.gradients = {
        name: from_torch(p.grad) for name, p in model.named_parameters() if p.grad is not None
    }


def of_flax(model: Any, batch: Batch, label: str) -> Capture:
    """A forward of a `jax_liger.models.CausalLM`."""
    import jax.numpy as jnp

    capture = Capture(label, model.config.dtype)
    with _watched(model, capture):
        logits = model(jnp.asarray(batch.ids), **_flax_inputs(batch))
    capture.outputs[LOGITS] = np.asarray(logits)
    weight, vocab_axis = model.head()
    capture.head = np.asarray(weight if vocab_axis == 0 else weight.T)
    capture.complete()
    return capture


def _flax_inputs(batch: Batch) -> dict[str, Any]:
    import jax.numpy as jnp

    inputs = {"positions": jnp.asarray(batch.positions)}
    return inputs | ({"segment_ids": jnp.asarray(batch.mask)} if batch.padded else {})


def gradients_of_flax(model: Any, batch: Batch, capture: Capture) -> None:
    """Adds the loss and its gradients to the capture, laid out as PyTorch has them."""
    capture.loss, grads = loss_and_gradients(model, batch)
    capture.gradients = as_torch(grads, model.config)


def loss_and_gradients(model: Any, batch: Batch) -> tuple[float, Any]:
    """The loss of a Flax model, and a model of its gradients."""
    import jax.numpy as jnp

    inputs = {"input_ids": jnp.asarray(batch.ids), **_flax_inputs(batch)}
    loss, grads = _jitted()(model, inputs)
    return float(loss), grads


@functools.cache
def _jitted() -> Any:
    import jax

    from jax_liger.models import loss_fn

    return jax.jit(jax.value_and_grad(loss_fn))


def as_torch(model: Any, config: Any) -> dict[str, np.ndarray]:
    """A model's parameters, or its gradients, by the names and layouts of PyTorch.

    Of experts none: transformers holds them otherwise than checkpoints do.
    """
    from flax import nnx

    from jax_liger.models.names import pieces_of

    found: dict[str, np.ndarray] = {}
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name = ".".join(map(str, path))
        pieces = pieces_of(name, config)
        if ".experts." in name or len(pieces) != 1:
            continue
        value = np.asarray(param[...])
        key = pieces[0].key.replace("block_sparse_moe", "mlp")
        found[key] = value.T if pieces[0].transposed else value
    return found


@contextlib.contextmanager
def _watched(model: Any, capture: Capture) -> Iterator[None]:
    import jax
    from flax import nnx

    from jax_liger.models import decoder

    names = {
        id(module): ".".join(map(str, path)) for path, module in nnx.iter_modules(model) if path
    }
    before: dict[type, Any] = {}

    def keep(name: str, given: Any, output: Any) -> None:
        for kept, value in ((capture.inputs, given), (capture.outputs, _first(output))):
            if isinstance(value, jax.Array) and jax.numpy.issubdtype(
                value.dtype, jax.numpy.floating
            ):
                kept[name] = np.asarray(value)

    def wrapped(call: Any) -> Any:
        def watch(self, *args, **kwargs):
            output = call(self, *args, **kwargs)
            if id(self) in names:
                keep(names[id(self)], args[0] if args else None, output)
            return output

        return watch

    add_and_norm, rope_angles = decoder.add_and_norm, decoder.rope_angles
    kinds = {layer.layer_type for layer in model.config.layers if layer.rope}

    def watched_norm(norm, x, residual):
        h, total = add_and_norm(norm, x, residual)
        keep(names[id(norm)], total, h)
        return h, total

    def watched_angles(positions, frequencies, **settings):
        cos, sin = rope_angles(positions, frequencies, **settings)
        for kind in kinds:
            if frequencies == model.config.frequencies(kind, _length(model.config, positions)):
                capture.angles[kind] = (np.asarray(cos), np.asarray(sin))
        return cos, sin

    for module in (m for _, m in nnx.iter_modules(model)):
        kind = type(module)
        if "__call__" in vars(kind) and kind not in before:
            before[kind] = vars(kind)["__call__"]
    try:
        for kind, call in before.items():
            kind.__call__ = wrapped(call)
        decoder.add_and_norm, decoder.rope_angles = watched_norm, watched_angles
        yield
    finally:
        for kind, call in before.items():
            kind.__call__ = call
        decoder.add_and_norm, decoder.rope_angles = add_and_norm, rope_angles


def _length(config: Any, positions: Any) -> int:
    return config.max_length or positions.shape[-1]
