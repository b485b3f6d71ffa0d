"""What a report states of the machine, and whether both frameworks compute at one precision."""

import importlib.metadata
import platform
from typing import Any

from liger_validate.devices import Place, installed

PACKAGES = ("jax-torch-liger", "numpy", "jax", "jaxlib", "flax", "torch", "transformers", "triton")
# What each framework's own names for the precision of float32 products mean.
_TORCH = {"highest": "highest", "high": "tf32", "medium": "bfloat16"}
_JAX = {
    **dict.fromkeys(("highest", "float32"), "highest"),
    **dict.fromkeys(("high", "tensorfloat32", "bfloat16_3x"), "tf32"),
    **dict.fromkeys(("bfloat16", "fastest"), "bfloat16"),
}


class PrecisionMismatch(RuntimeError):
    """The frameworks would multiply float32 matrices at different precisions."""


def versions() -> dict[str, str]:
    """Of the packages that decide numbers; those that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device() -> str:
    """The GPU's name, or the processor's kind."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"cpu ({platform.machine()})"


def meaning(torch_setting: str, jax_setting: str | None, on_gpu: bool) -> tuple[str, str]:
    """What the two settings mean: "highest", "tf32" or "bfloat16", or JAX's own name.

    JAX without a setting multiplies in TF32 on a GPU, and in full precision on a CPU.
    """
    if jax_setting in (None, "default"):
        jax_meaning = "tf32" if on_gpu else "highest"
    else:
        jax_meaning = _JAX.get(str(jax_setting).lower(), str(jax_setting))
    return _TORCH[torch_setting], jax_meaning


def precision(place: Place | None = None) -> dict[str, Any]:
    """The settings as they are, with what they mean, of the frameworks that `place` is of.

    Of both, where JAX computes by itself, if it is left out.
    """
    found: dict[str, Any] = {}
    if place is None or place.torch:
        import torch

        setting = torch.get_float32_matmul_precision()
        found |= {"torch": setting, "torch_means": _TORCH[setting]}
    if place is None or place.jax:
        import jax

        config: Any = jax.config
        setting = config.jax_default_matmul_precision
        on_gpu = place.on_gpu("jax") if place else jax.default_backend() == "gpu"
        found |= {"jax": setting, "jax_means": meaning("highest", setting, on_gpu)[1]}
    return found


def set_precision(name: str) -> None:
    """Sets both frameworks, or the one that is installed: "highest" or "tf32"."""
    if installed("torch"):
        import torch

        torch.set_float32_matmul_precision({"highest": "highest", "tf32": "high"}[name])
    if installed("jax"):
        import jax

        jax.config.update(
            "jax_default_matmul_precision", {"highest": "highest", "tf32": "tensorfloat32"}[name]
        )


def same_precision(place: Place | None = None) -> dict[str, Any]:
    """The settings, if they mean the same.

    Raises:
        PrecisionMismatch: if they do not, naming both.
    """
    found = precision(place)
    if len({found[name] for name in ("torch_means", "jax_means") if name in found}) > 1:
        raise PrecisionMismatch(
            f"torch multiplies float32 at {found['torch_means']!r} (set_float32_matmul_precision: "
            f"{found['torch']!r}) and jax at {found['jax_means']!r} "
            f"(jax_default_matmul_precision: {found['jax']!r}); pass --precision to set both"
        )
    return found


def described(seed: int, place: Place | None = None) -> dict[str, Any]:
    """What every report begins with."""
    where = "; ".join(f"{f}: {d}" for f, d in place.described().items()) if place else device()
    return {
        "versions": versions(),
        "device": where,
        "precision": precision(place),
        "seed": seed,
    }
