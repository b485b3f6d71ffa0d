"""Captures of any model of PyTorch or of Flax nnx, to a file that `liger-validate compare` reads.

Every array that a module returns is kept, in the order in which the modules end:

    layers.0.mlp            what this module returned, if it is an array
    layers.0.mlp@2          ... when it was called for the second time
    encoder[hidden][0]      the first of what it returned under the key `hidden`
    (model)                 what the model itself returned

What is no array is skipped, and so are arrays within a transformation, such as `nnx.jit`, where
they have no values: the capture says which.
"""

import importlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from liger_validate.captures import Capture, Later
from liger_validate.hooks import nnx_calls, torch_calls
from liger_validate.nested import array_of_jax, array_of_torch, dtype_of, leaves, suffix

MODEL = "(model)"


class _Names:
    """Numbers the calls of every module."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()

    def next(self, module: str) -> str:
        self._calls[module] += 1
        number = self._calls[module]
        return (module or MODEL) + (f"@{number}" if number > 1 else "")

    def never(self, modules: Mapping[str, Any]) -> dict[str, str]:
        """Why these modules are in no capture."""
        return {
            name or MODEL: "it was not called, or within a transformation"
            for name in modules
            if not self._calls[name]
        }


def capture_torch(
    model: Any,
    inputs: Any,
    path: str | Path | None = None,
    *,
    grads: bool = False,
    loss: Callable[[Any], Any] | None = None,
    seed: int = 0,
    label: str | None = None,
) -> Capture:
    """One forward of any `nn.Module`, and its backward, as arrays by name; and as a file.

    Args:
        model: in the mode in which it is to run: `model.eval()` turns dropout off.
        inputs: a dict of keyword arguments, a tuple of positional ones, or the only one.
        path: of the .safetensors file, if one is to be written.
        grads: whether to go backward: the gradients of parameters and of modules' outputs.
        loss: makes a scalar of what the model returns. Without it: the output itself if it is a
            scalar, its `loss` if it has one, or else the sum of the mean squares of all arrays.
        seed: of the random numbers that the model draws; the generators are put back afterwards.
        label: the model's name in reports; its class's if left out.

    Returns:
        A Capture with outputs, output_gradients, gradients, loss, and `skipped`.

    Raises:
        ValueError: with grads, if the loss is no scalar or nothing of it asks for a gradient.
    """
    import torch

    capture = Capture(label or type(model).__qualname__, dtype_of(model.parameters()))
    names, met = _Names(), {}
    gradients: dict[str, Any] = {}

    def after(module, args, kwargs, output):
        for name, value in leaves(output, names.next(module)):
            array, why = array_of_torch(value)
            if array is None:
                capture.skipped[name] = why
                continue
            capture.outputs[name] = array
            if grads and value.requires_grad:
                met[name] = value.shape, value.dtype
                # On the tensor as it is now: an operation in place may follow.
                value.register_hook(partial(gradients.__setitem__, name))
        return output

    args, kwargs = _arguments(inputs)
    devices = range(torch.cuda.device_count())
    with torch.random.fork_rng(devices), nullcontext() if grads else torch.no_grad():
        torch.manual_seed(seed)
        with torch_calls(model, after):
            output = model(*args, **kwargs)
        if grads:
            dense = lambda x: x.is_floating_point() and x.layout == torch.strided  # noqa: E731
            value = _loss_of(output, loss, torch.Tensor, dense)
            if not value.requires_grad:
                raise ValueError("nothing that the loss is made of asks for a gradient")
            wanted = {n: p for n, p in model.named_parameters() if p.requires_grad}
            given = [v for _, v in leaves((args, kwargs), "") if getattr(v, "requires_grad", 0)]
            found = torch.autograd.grad(value, [*wanted.values(), *given], allow_unused=True)
            capture.loss = value.item()
            of_parameters = dict(zip(wanted, found, strict=False))
            capture.gradients = Later(
                {n: partial(_gradient, of_parameters[n], p.shape, p.dtype)
                 for n, p in wanted.items()}
            )  # fmt: skip
            capture.output_gradients = {
                n: _gradient(gradients.get(n), *about) for n, about in met.items()
            }
    callable_ = {
        name: module
        for name, module in model.named_modules()
        if type(module).forward is not torch.nn.Module.forward
    }
    capture.skipped |= names.never(callable_)
    _write(path, capture, inputs, array_of_torch, seed, "torch", model.training)
    return capture


def _gradient(gradient: Any, shape: Any, dtype: Any) -> np.ndarray:
    import torch

    found = torch.zeros(shape, dtype=dtype) if gradient is None else gradient
    array, why = array_of_torch(found.to_dense() if found.is_sparse else found)
    assert array is not None, why
    return array


def capture_nnx(
    model: Any,
    inputs: Any,
    path: str | Path | None = None,
    *,
    grads: bool = False,
    loss: Callable[[Any], Any] | None = None,
    seed: int = 0,
    label: str | None = None,
) -> Capture:
    """As `capture_torch`, of any `nnx.Module`. The model itself stays as it is.

    Nothing is jitted. Random numbers come of the model's own `nnx.Rngs`; the seed is only noted.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    def trained(_, variable):
        return isinstance(variable, nnx.Param) and jnp.issubdtype(
            jnp.asarray(variable[...]).dtype, jnp.floating
        )

    graph, parameters, rest = nnx.split(model, trained, ...)
    flat = {".".join(map(str, path)): v[...] for path, v in nnx.to_flat_state(parameters)}
    capture = Capture(label or type(model).__qualname__, dtype_of(flat.values()))
    args, kwargs = _arguments(inputs)

    def run(parameters: Any, at: Callable[[str, Any], Any]) -> tuple[Any, _Names]:
        copy, names = nnx.merge(graph, parameters, rest, copy=True), _Names()

        def after(module, args, kwargs, output):
            name = names.next(module)
            found, structure = jax.tree.flatten_with_path(
                output, is_leaf=lambda x: x is None or isinstance(x, nnx.Module)
            )
            return jax.tree.unflatten(
                structure, [at(name + suffix(path), leaf) for path, leaf in found]
            )

        with nnx_calls(copy, after):
            return copy(*args, **kwargs), names

    def keep(name: str, value: Any) -> Any:
        array, why = array_of_jax(value)
        if array is None:
            capture.skipped[name] = why
        else:
            capture.outputs[name] = array
        return value

    _, names = run(parameters, keep)
    modules = {".".join(map(str, path)): m for path, m in nnx.iter_modules(model) if callable(m)}
    capture.skipped |= names.never(modules)
    if grads:

        def loss_of(parameters: Any, zeros: dict[str, Any]) -> Any:
            output, _ = run(parameters, lambda n, x: x + zeros[n] if n in zeros else x)
            floating = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
            return _loss_of(output, loss, jax.Array, floating)

        zeros = {
            name: jnp.zeros(value.shape, value.dtype)
            for name, value in capture.outputs.items()
            if jnp.issubdtype(value.dtype, jnp.floating)
        }
        value, (of_parameters, at) = jax.value_and_grad(loss_of, (0, 1))(parameters, zeros)
        capture.loss = float(value)
        capture.gradients = Later(
            {".".join(map(str, path)): partial(np.asarray, v[...])
             for path, v in nnx.to_flat_state(of_parameters)}
        )  # fmt: skip
        capture.output_gradients = {name: np.asarray(at[name]) for name in zeros}
    _write(path, capture, inputs, array_of_jax, seed, "jax", None)
    return capture


def capture(model: Any, inputs: Any, path: str | Path | None = None, **options: Any) -> Capture:
    """`capture_torch` or `capture_nnx`, whichever the model is for.

    Raises:
        TypeError: if it is for neither.
    """
    kinds = {kind.__module__.split(".")[0]: kind for kind in type(model).__mro__}
    if "torch" in kinds:
        return capture_torch(model, inputs, path, **options)
    if "flax" in kinds:
        return capture_nnx(model, inputs, path, **options)
    raise TypeError(f"model must be a torch.nn.Module or a flax.nnx.Module; got {type(model)}")


def made_by(target: str) -> tuple[Any, ...]:
    """(model, inputs) or (model, inputs, loss), of calling what `module:factory` names.

    Raises:
        ValueError: if it returns something else.
    """
    module, _, factory = target.partition(":")
    if os.getcwd() not in sys.path:  # as `python -m` has it
        sys.path.insert(0, os.getcwd())
    function: Any = importlib.import_module(module)
    for part in factory.split("."):
        function = getattr(function, part)
    made = function()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ValueError(f"{target} must return (model, inputs) or (model, inputs, loss)")
    return made


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple) else (inputs,)), {}


def _loss_of(output: Any, loss: Any, array: type, floating: Callable[[Any], bool]) -> Any:
    if loss is not None:
        value: Any = loss(output)
        if value.ndim:
            raise ValueError(f"the loss must be a scalar; got the shape {tuple(value.shape)}")
        return value
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    for value in (output, found):
        if isinstance(value, array) and not value.ndim:  # type: ignore[attr-defined]
            return value
    squares = [(x * x).mean() for _, x in leaves(output, "")
               if isinstance(x, array) and floating(x)]  # type: ignore[attr-defined]  # fmt: skip
    if not squares:
        raise ValueError("the model returns no array that a loss could be made of; pass one")
    return sum(squares)


def _write(path, capture, inputs, array_of, seed, framework, training) -> None:
    from liger_validate import environment, files

    if path is None:
        return
    given = {}
    args, kwargs = _arguments(inputs)
    for key, value in [*((str(i), a) for i, a in enumerate(args)), *kwargs.items()]:
        for name, leaf in leaves(value, key):
            array, why = array_of(leaf)
            if array is None:
                capture.skipped[f"inputs/{name}"] = why
            else:
                given[name] = array
    header = {**environment.described(seed), "framework": framework, "training": training}
    files.write(Path(path), capture, given, header)
