"""What goes into and comes out of every module of a decoder, by the names of its checkpoint.

Here of transformers' models; `captures_flax` has Flax's.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from liger_validate.batches import Batch
from liger_validate.hooks import torch_calls

LOGITS = "logits"
ANGLES = "rotary_emb"
# Where a value is: going into a module or coming out of it.
IN, OUT = "in", "out"


class Later(Mapping[str, Any]):
    """Arrays that are fetched when they are asked for, since not all may fit at once."""

    def __init__(self, fetch: Mapping[str, Callable[[], Any]]):
        self._fetch = fetch

    def __getitem__(self, name: str) -> Any:
        return self._fetch[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._fetch)

    def __len__(self) -> int:
        return len(self._fetch)


@dataclass
class Capture:
    """One forward of one model, and perhaps its backward.

    Attributes:
        inputs, outputs: the first array into and out of every module, by its name. A module that
            returns a tuple counts by the tuple's first.
        angles: cos and sin by type of layer; None stands for every type.
        head: gives the head's weight (V, D) as the model has it.
        gradients: of the loss for every parameter, by its name in PyTorch, if asked for; NumPy's
            arrays, or tensors that are still where they were made.
        output_gradients: of the loss for every module's output, if asked for. input_gradients: for
            its input, as far as the input goes through that module.
        skipped: by name, why something is not in it.
    """

    label: str
    dtype: str
    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    angles: dict[str | None, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    head: Callable[[], np.ndarray] | None = None
    loss: float | None = None
    gradients: Mapping[str, Any] = field(default_factory=dict)
    input_gradients: dict[str, np.ndarray] = field(default_factory=dict)
    output_gradients: dict[str, np.ndarray] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def angles_of(self, layer_type: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Cos and sin of the layers of this type."""
        return self.angles.get(layer_type, self.angles.get(None))

    def complete(self) -> None:
        """Fills in what the models spell differently, from what came next.

        Norms that a fused kernel stands for are not called. The embedding's multiplier is in its
        module for some, and behind it for others. A router has two names.
        """
        for inputs, outputs in (
            (self.inputs, self.outputs),
            (self.input_gradients, self.output_gradients),
        ):
            for name in [n for n in outputs if n.endswith(".mlp.router")]:
                outputs[name.removesuffix("router") + "gate"] = outputs[name]
            if "model.layers.0" in inputs:
                outputs["model.embed_tokens"] = inputs["model.layers.0"]
            for name in [n for n in inputs if n.endswith(".mlp")]:
                layer = name.removesuffix(".mlp")
                for norm in ("pre_feedforward_layernorm", "post_attention_layernorm"):
                    if f"{layer}.{norm}" in outputs:
                        break
                else:
                    outputs[f"{layer}.post_attention_layernorm"] = inputs[name]

    def add_gradients_at(self, found: Mapping[tuple[str, str], np.ndarray]) -> None:
        """Gradients by place (IN or OUT) and module."""
        for (place, name), gradient in found.items():
            kept = self.input_gradients if place == IN else self.output_gradients
            kept[name] = gradient
        self.complete()


def first(value: Any) -> Any:
    """Of a tuple its first, else the value."""
    return value[0] if isinstance(value, tuple) and value else value


def of_torch(model: Any, batch: Batch, label: str, config: Any) -> Capture:
    """A forward of a model of transformers, in eval mode, with the batch's positions."""
    import torch

    from liger_validate.tensors import from_torch

    capture = Capture(label, str(next(model.parameters()).dtype).removeprefix("torch."))

    def keep(name, args, kwargs, output):
        if name.endswith(ANGLES):
            kind = kwargs.get("layer_type", args[2] if len(args) > 2 else None)
            cos, sin = (from_torch(a) for a in output)
            capture.angles[kind] = (cos, sin)
            return output
        given = args[0] if args else kwargs.get("hidden_states")
        for kept, value in ((capture.inputs, given), (capture.outputs, first(output))):
            if name and isinstance(value, torch.Tensor) and value.is_floating_point():
                kept[name] = _time_first(name, from_torch(value), config)
        return output

    with _evaluated(model), torch_calls(model, keep), torch.no_grad():
        out = model(**_torch_inputs(model, batch), use_cache=False)
    capture.outputs[LOGITS] = from_torch(out.logits)
    capture.head = partial(from_torch, model.get_output_embeddings().weight)
    capture.complete()
    return capture


@contextlib.contextmanager
def _evaluated(model: Any) -> Iterator[None]:
    training, model = model.training, model.eval()
    try:
        yield
    finally:
        model.train(training)


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


def _loss(model: Any, batch: Batch) -> Any:
    import torch

    inputs = _torch_inputs(model, batch)
    # transformers has padding predict the token behind it, which Flax's loss does not count.
    behind_a_token = np.pad(batch.counted[:, :-1], ((0, 0), (1, 0)))
    predicted = torch.tensor(batch.counted & behind_a_token, device=inputs["input_ids"].device)
    labels = inputs["input_ids"].masked_fill(~predicted, -100)
    return model(**inputs, labels=labels, use_cache=False).loss


def gradients_of_torch(model: Any, batch: Batch, capture: Capture) -> None:
    """Adds the loss and the parameters' gradients to the capture; nothing watches the modules.

    A parameter that has got no gradient has one of zeros. They stay tensors, where they are.
    """
    import torch

    model.zero_grad(set_to_none=True)
    loss = _loss(model, batch)
    loss.backward()
    capture.loss = loss.item()
    capture.gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }


def gradients_at_modules_of_torch(model: Any, batch: Batch, capture: Capture, config: Any) -> None:
    """Adds the gradients of all inputs and outputs of modules to the capture.

    One that autograd does not come past has a gradient of zeros.
    """
    import torch

    from liger_validate.tensors import from_torch

    met: dict[tuple[str, str], Any] = {}

    def floating(name, value):
        return (
            name
            and not name.endswith(ANGLES)
            and isinstance(value, torch.Tensor)
            and value.is_floating_point()
        )

    def before(name, args, kwargs):
        given = args[0] if args else kwargs.get("hidden_states")
        if not floating(name, given):
            return args, kwargs
        # A name of its own for what goes into this module, and not elsewhere as well.
        met[IN, name] = given.view_as(given)
        if args:
            return (met[IN, name], *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": met[IN, name]}

    def after(name, args, kwargs, output):
        if floating(name, first(output)):
            met[OUT, name] = first(output)
        return output

    with _evaluated(model), torch_calls(model, after, before):
        loss = _loss(model, batch)
    on_the_way = {place: t for place, t in met.items() if t.requires_grad}
    found = torch.autograd.grad(loss, list(on_the_way.values()), allow_unused=True)
    gradients = dict(zip(on_the_way, found, strict=True))
    capture.add_gradients_at(
        {
            place: _time_first(place[1], _or_zeros(gradients.get(place), t, from_torch), config)
            for place, t in met.items()
        }
    )


def _or_zeros(gradient: Any, like: Any, from_torch: Any) -> np.ndarray:
    return from_torch(like.new_zeros(like.shape) if gradient is None else gradient)
