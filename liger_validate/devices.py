"""Where the tensors and the arrays of a validation live."""

import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

FRAMEWORKS = ("torch", "jax")


class DeviceMissing(RuntimeError):
    """The device that was asked for is not there."""


@dataclass(frozen=True)
class Place:
    """One device of each framework that is in use; None where it is not.

    torch: PyTorch's name of it. jax: JAX's own object.
    """

    torch: str | None = None
    jax: Any = None

    def on_gpu(self, framework: str) -> bool:
        """Whether this framework computes on a GPU here."""
        if framework == "torch":
            return self.torch is not None and self.torch != "cpu"
        return self.jax is not None and self.jax.platform == "gpu"

    def described(self) -> dict[str, str]:
        """Of each framework in use: the device's name, and the GPU's."""
        names = {}
        if self.torch:
            names["torch"] = _with_kind(self.torch, _torch_kind(self.torch))
        if self.jax is not None:
            names["jax"] = _with_kind(_name(self.jax), self.jax.device_kind)
        return names


def installed(framework: str) -> bool:
    """Whether "torch" or "jax" can be imported."""
    return importlib.util.find_spec(framework) is not None


def found(framework: str) -> list[str]:
    """The devices that a framework has: "cpu", "cuda:0" and so on."""
    if framework == "torch":
        import torch

        return ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    return list(_jax_devices())


def find(name: str | None, frameworks: Iterable[str] = FRAMEWORKS) -> Place:
    """The device `name` in each of the frameworks.

    Args:
        name: "cpu", "cuda:N", or "cuda" and "gpu" for the first; None for what each framework
            takes by itself, the first GPU if it has one.

    Raises:
        ValueError: for another name.
        DeviceMissing: if one of the frameworks has no such device, naming those it has.
    """
    frameworks = [f for f in frameworks if installed(f)]
    if name is None:
        return Place(
            torch=default_of_torch() if "torch" in frameworks else None,
            jax=_default_of_jax() if "jax" in frameworks else None,
        )
    matched = re.fullmatch(r"cpu|(?:gpu|cuda)(?::(\d+))?", name)
    if matched is None:
        raise ValueError(f"device must be cpu, gpu, cuda or cuda:N; got {name!r}")
    wanted = "cpu" if name == "cpu" else f"cuda:{matched[1] or 0}"
    have = {framework: found(framework) for framework in frameworks}
    if any(wanted not in names for names in have.values()):
        lists = "; ".join(f"{framework} found {', '.join(n)}" for framework, n in have.items())
        raise DeviceMissing(f"device {name} is not here: {lists}")
    return Place(
        torch=wanted if "torch" in have else None,
        jax=_jax_devices()[wanted] if "jax" in have else None,
    )


def _jax_devices() -> dict[str, Any]:
    """JAX's own objects by name. Of a CPU's devices one: what it is cut into decides no number."""
    import jax

    devices = {}
    for platform, name in (("cpu", "cpu"), ("gpu", "cuda:{}")):
        try:
            local = jax.local_devices(backend=platform)
        except RuntimeError:  # this jax knows no such backend, or JAX_PLATFORMS leaves it out
            continue
        for index, device in enumerate(local):
            devices.setdefault(name.format(index), device)
    return devices


def default_of_torch() -> str:
    """The first GPU where there is one."""
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"


def _default_of_jax() -> Any:
    import jax

    return jax.local_devices()[0]


def _name(device: Any) -> str:
    return next((name for name, d in _jax_devices().items() if d == device), str(device))


def _torch_kind(name: str) -> str:
    import torch

    return name if name == "cpu" else torch.cuda.get_device_name(name)


def _with_kind(name: str, kind: str) -> str:
    return name if kind == name else f"{name} ({kind})"
