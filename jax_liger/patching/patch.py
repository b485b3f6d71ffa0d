"""Someone else's Flax model by the fused kernels, and back.

print(patch(model))         # nnx: the model itself
unpatch(model)

patched = patch(module)     # linen: a copy, since a linen module never changes
module = unpatch(patched)
"""

from typing import TYPE_CHECKING, Any, overload

from jax_liger.patching.report import PatchReport

if TYPE_CHECKING:
    from flax import linen, nnx


@overload
def patch(model: "nnx.Module", *, implementation: str | None = None) -> PatchReport: ...
@overload
def patch(model: "linen.Module", *, implementation: str | None = None) -> "linen.Module": ...
def patch(model: Any, *, implementation: str | None = None) -> Any:
    """Lets a Flax model's norms, gated MLPs and rotations run by the fused kernels.

    Args:
        model: an `nnx.Module`, which is changed in place, or a `linen.Module` that is not bound.
            A second call changes nothing.
        implementation: that of `jax_liger.rms_norm`, `swiglu` and the others.

    Returns:
        Of an nnx model a `PatchReport`. Of a linen module a copy with the same parameters and the
        same names; as its submodules come into being when it runs, `report(copy)` is whole then.

    What is taken over:
        Flax's own `RMSNorm` and `LayerNorm`, but for norms over other than the last axis or
            across devices. The results are rounded as theirs are.
        RMSNorms of other classes that have "norm" in their names: with any one parameter, weight
            or 1 + weight, any epsilon, and any of the kernel's casting modes.
        MLPs with layers named gate_proj, up_proj and down_proj, or w1, w3 and w2, or wi_0, wi_1
            and wo, whatever those layers are, with silu or either gelu.
        Functions named `apply_rope` and the like that rotate heads x (B, T, N, H), looked up by
            the code of a module in its own namespace. They are ours for as long as that module
            runs, and nowhere else.

    Whether one of the latter three is what a kernel computes is found out by calling its own code
    with a few random numbers, in float32, bfloat16 and float16. Where the results are not equal
    up to rounding nothing is changed, and the report says so; in a dtype, or in a way of calling
    it, in which they are not, the module's own code runs.

    Raises:
        TypeError: for what is no Flax module.
        ValueError: for a linen module that is bound.
    """
    return _package(model).patch(model, implementation)


@overload
def unpatch(model: "nnx.Module") -> list[str]: ...
@overload
def unpatch(model: "linen.Module") -> "linen.Module": ...
def unpatch(model: Any) -> Any:
    """Undoes `patch`.

    Of an nnx model all modules get their own class back; the paths of those that changed are
    returned. Of a linen module the very module that was given to `patch` is returned.
    """
    return _package(model).unpatch(model)


def report(model: "nnx.Module | linen.Module") -> PatchReport:
    """What of a model runs by the kernels now, and why the rest does not.

    Of a patched linen module it is what was seen in its calls so far.
    """
    return _package(model).report(model)


def _package(model: Any) -> Any:
    from flax import linen, nnx

    if isinstance(model, linen.Module):
        from jax_liger.patching import linen_models

        return linen_models
    if isinstance(model, nnx.Module):
        from jax_liger.patching import nnx_models

        return nnx_models
    raise TypeError(f"model must be a Flax nnx or linen module; got {type(model).__name__}")
