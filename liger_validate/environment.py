"""What a report states of the machine, and whether both frameworks compute at one precision."""

import importlib.metadata
import platform
from typing import Any

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


def precision() -> dict[str, Any]:
    """The settings as they are, with what they mean."""
    import jax
    import torch

    on_gpu = jax.default_backend() == "gpu"
    config: Any = jax.config
    torchs, jaxs = torch.get_float32_matmul_precision(), config.jax_default_matmul_precision
    ours, theirs = meaning(torchs, jaxs, on_gpu)
    return {"torch": torchs, "jax": jaxs, "torch_means": ours, "jax_means": theirs}


def set_precision(name: str) -> None:
    """Sets both frameworks: "highest" or "tf32"."""
    import jax
    import torch

    torch.set_float32_matmul_precision({"highest": "highest", "tf32": "high"}[name])
    jax.config.update(
        "jax_default_matmul_precision", {"highest": "highest", "tf32": "tensorfloat32"}[name]
    )


def same_precision() -> dict[str, Any]:
    """The settings, if they mean the same.

    Raises:
        PrecisionMismatch: if they do not, naming both.
    """
    found = precision()
    if found["torch_means"] != found["jax_means"]:
        raise PrecisionMismatch(
            f"torch multiplies float32 at {found['torch_means']!r} (set_float32_matmul_precision: "
            f"{found['torch']!r}) and jax at {found['jax_means']!r} "
            f"(jax_default_matmul_precision: {found['jax']!r}); pass --precision to set both"
        )
    return found


def described(seed: int) -> dict[str, Any]:
    """What every report begins with."""
    return {
        "versions": versions(),
        "device": device(),
        "precision": precision(),
        "seed": seed,
    }
