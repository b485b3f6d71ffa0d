"""What goes into and comes out of every module of a `jax_liger.models.CausalLM`.

Nothing is jitted: arrays then have their values in between, rounded where the modules end. The
gradient at a module's input or output is that of zeros which are added there.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from liger_validate.batches import Batch
from liger_validate.captures import IN, LOGITS, OUT, Capture, Later, first
from liger_validate.hooks import nnx_calls

SUM = "sum"  # what `add_and_norm` norms, which has no array of its own there
# at(place, name, value): called with every array that goes into a module, or comes out of it; what
# it gives takes the array's place.
At = Callable[[str, str, Any], Any]


def of_flax(model: Any, batch: Batch, label: str) -> Capture:
    """A forward of a `jax_liger.models.CausalLM`."""
    import jax.numpy as jnp

    capture = Capture(label, model.config.dtype)
    kinds = {layer.layer_type for layer in model.config.layers if layer.rope}

    def keep(place: str, name: str, value: Any) -> Any:
        kept = capture.outputs if place == OUT else capture.inputs
        kept[name] = np.asarray(value)
        return value

    def angles(positions: Any, frequencies: Any, cos: Any, sin: Any) -> None:
        for kind in kinds:
            if frequencies == model.config.frequencies(kind, _length(model.config, positions)):
                capture.angles[kind] = (np.asarray(cos), np.asarray(sin))

    with _watched(model, keep, angles):
        logits = model(jnp.asarray(batch.ids), **_inputs(batch))
    capture.outputs[LOGITS] = np.asarray(logits)
    capture.head = partial(_head, model)
    capture.complete()
    return capture


def _head(model: Any) -> np.ndarray:
    weight, vocab_axis = model.head()
    return np.asarray(weight if vocab_axis == 0 else weight.T)


def _length(config: Any, positions: Any) -> int:
    return config.max_length or positions.shape[-1]


def _inputs(batch: Batch) -> dict[str, Any]:
    import jax.numpy as jnp

    inputs = {"positions": jnp.asarray(batch.positions)}
    return inputs | ({"segment_ids": jnp.asarray(batch.mask)} if batch.padded else {})


def gradients_of_flax(model: Any, batch: Batch, capture: Capture) -> None:
    """Adds the loss and its gradients to the capture, of parameters and at modules.

    Parameters' are laid out as PyTorch has them.
    """
    import jax
    import jax.numpy as jnp

    from jax_liger.models import loss_fn

    places = [(IN, capture.inputs), (OUT, capture.outputs)]
    zeros = {
        f"{place} {name}": jnp.zeros(value.shape, value.dtype)
        for place, kept in places
        for name, value in kept.items()
    }
    met: dict[str, tuple[str, str]] = {}

    def loss_of(model: Any, zeros: dict[str, Any], inputs: dict[str, Any]) -> Any:
        def add(place: str, name: str, value: Any) -> Any:
            key = f"{place} {name}"
            if key not in zeros:
                return value
            met[key] = (place, name)
            return value + zeros[key]

        with _watched(model, add):
            return loss_fn(model, inputs)

    inputs = {"input_ids": jnp.asarray(batch.ids), **_inputs(batch)}
    loss, (of_model, at) = jax.value_and_grad(loss_of, argnums=(0, 1))(model, zeros, inputs)
    capture.loss = float(loss)
    capture.gradients = as_torch(of_model, model.config)
    capture.add_gradients_at({place: np.asarray(at[key]) for key, place in met.items()})


def loss_and_gradients(model: Any, batch: Batch) -> tuple[float, Any]:
    """The loss of a Flax model, and a model of its gradients, jitted as in training."""
    import jax.numpy as jnp

    inputs = {"input_ids": jnp.asarray(batch.ids), **_inputs(batch)}
    loss, grads = _jitted()(model, inputs)
    return float(loss), grads


@functools.cache
def _jitted() -> Any:
    import jax

    from jax_liger.models import loss_fn

    return jax.jit(jax.value_and_grad(loss_fn))


def as_torch(model: Any, config: Any) -> Later:
    """A model's parameters, or its gradients, by the names and layouts of PyTorch.

    Of experts none: transformers holds them otherwise than checkpoints do.
    """
    from flax import nnx

    from jax_liger.models.names import pieces_of

    found: dict[str, Callable[[], np.ndarray]] = {}
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name = ".".join(map(str, path))
        pieces = pieces_of(name, config)
        if ".experts." in name or len(pieces) != 1:
            continue
        key = pieces[0].key.replace("block_sparse_moe", "mlp")
        found[key] = partial(_laid_out, param[...], pieces[0].transposed)
    return Later(found)


def _laid_out(value: Any, transposed: bool) -> np.ndarray:
    value = np.asarray(value)
    return value.T if transposed else value


@contextlib.contextmanager
def _watched(model: Any, at: At, angles: Callable[..., None] | None = None) -> Iterator[None]:
    """Calls `at` with what modules are given and give, and `angles` with cos and sin.

    The sum and norm of `add_and_norm` are one kernel, which is called for the norm's module.
    """
    import jax
    import jax.numpy as jnp

    from jax_liger.models import decoder

    def floating(value: Any) -> bool:
        return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating)

    def before(name, args, kwargs):
        if name and args and floating(args[0]):
            args = (at(IN, name, args[0]), *args[1:])
        return args, kwargs

    def after(name, args, kwargs, output):
        if not name or not floating(first(output)):
            return output
        value = at(OUT, name, first(output))
        return (value, *output[1:]) if isinstance(output, tuple) else value

    add_and_norm, rope_angles = decoder.add_and_norm, decoder.rope_angles

    with nnx_calls(model, after, before) as names:

        def watched_norm(norm, x, residual):
            h, total = add_and_norm(norm, x, residual)
            name = names[id(norm)]
            at(SUM, name, total)
            return at(OUT, name, h), total

        def watched_angles(positions, frequencies, **settings):
            cos, sin = rope_angles(positions, frequencies, **settings)
            if angles is not None:
                angles(positions, frequencies, cos, sin)
            return cos, sin

        decoder.add_and_norm, decoder.rope_angles = watched_norm, watched_angles
        try:
            yield
        finally:
            decoder.add_and_norm, decoder.rope_angles = add_and_norm, rope_angles
