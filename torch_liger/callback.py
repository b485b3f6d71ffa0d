"""A callback for Hugging Face's Trainer: tokens a second, FLOP utilisation, GPU use and memory."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import DefaultFlowCallback

from torch_liger.flops import ModelFlops, model_flops, peak_flops

_logger = logging.getLogger("torch_liger")


@dataclass
class _Counts:
    """Of one stretch of training, on this process."""

    steps: int = 0
    seconds: float = 0.0
    tokens: float = 0.0
    flops: float = 0.0
    samples: int = 0  # of the GPU's utilisation
    sum_of_samples: float = 0.0

    def add(self, other: "_Counts") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class LigerCallback(TrainerCallback):
    """Measures training, and adds what it finds to the Trainer's logs.

        trainer = Trainer(..., callbacks=[LigerCallback()])

    Logged with every training loss, for the steps since the last one:

        tokens_per_second     of all processes together
        mfu                   model FLOP utilisation: the operations that the model needs
                              (`torch_liger.flops.ModelFlops`), over what the device can do
        gpu_utilization       percent of the time in which the GPU ran anything, sampled by NVML
        peak_memory_gib       most memory that PyTorch's tensors took, since training began

    A summary of all steps is printed at the end, and is in `summary` under the same names.

    Args:
        warmup_steps: steps at the start that are not measured.
        peak_flops: operations a second of one device; by default that of dense bfloat16, from the
            table `torch_liger.flops.PEAK_FLOPS`. For a device not in it there is no mfu.
        flops_per_token: operations of one token, forward and backward, instead of ModelFlops'.
        count_padding: whether padded tokens count in tokens_per_second. In mfu they do.
        sample_seconds: between two samples of the GPU's utilisation; it needs nvidia-ml-py.

    The step is never made to wait for the device. Tokens are counted from the shapes of the model's
    inputs, and padding and compiled models in a tensor on the device; this and the clock are read
    when the Trainer logs, which has then waited for the loss. The device is also waited for once
    after warm-up, and before an evaluation or a checkpoint, whose time does not count. Packed
    sequences count as one of the row's length. `attach(trainer)` instead of `callbacks` lets
    reporters, Weights & Biases say, have the figures too: they come before others' callbacks.
    """

    def __init__(
        self,
        warmup_steps: int = 2,
        *,
        peak_flops: float | None = None,
        flops_per_token: float | None = None,
        count_padding: bool = True,
        sample_seconds: float = 1.0,
    ):
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps must be at least 0; got {warmup_steps}")
        for name, value in (("peak_flops", peak_flops), ("flops_per_token", flops_per_token)):
            if value is not None and not value > 0.0:
                raise ValueError(f"{name} must be above 0; got {value}")
        if not sample_seconds > 0.0:
            raise ValueError(f"sample_seconds must be above 0; got {sample_seconds}")
        self.warmup_steps = warmup_steps
        self.peak_flops = peak_flops
        self.flops_per_token = flops_per_token
        self.count_padding = count_padding
        self.sample_seconds = sample_seconds
        self.summary: dict[str, float] = {}
        self._hook: Any = None
        self._sampler: _Sampler | None = None

    def attach(self, trainer: Trainer) -> "LigerCallback":
        """Adds itself to the trainer, before the reporters. Returns itself."""
        trainer.add_callback(self)
        callbacks = trainer.callback_handler.callbacks
        callbacks.remove(self)
        flow = [isinstance(callback, DefaultFlowCallback) for callback in callbacks]
        callbacks.insert(flow.index(True) + 1 if True in flow else 0, self)
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end()
        model = kwargs["model"]
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._processes = args.world_size
        self._flops = model_flops(model)
        if self.flops_per_token is not None:
            self._flops = ModelFlops(self.flops_per_token, ())
        self._device_name = "the CPU"
        if self._device.type == "cuda":
            self._device_name = torch.cuda.get_device_name(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        self._peak = self._peak_of(model)
        self._seen = 0  # steps
        self._started: float | None = None  # when the clock was last set going
        self._now, self._total = _Counts(), _Counts()
        number = torch.float32 if self._device.type == "mps" else torch.float64
        self._on_device = torch.zeros(2, dtype=number, device=self._device)  # tokens, flops
        self.summary = {}
        self._hook = model.register_forward_pre_hook(self._count, with_kwargs=True)
        self._sampler = _Sampler.of(self._device, self.sample_seconds)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._started is not None or self._seen < self.warmup_steps:
            return
        if self._total.steps == 0 and self._now.steps == 0:
            self._forget()
        self._resume()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._seen += 1
        if self._started is not None:
            self._now.steps += 1
        self._pause_before(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._pause_before(control)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs.get("logs")
        if logs is None or "loss" not in logs or self._hook is None:
            return
        figures = self._lap()
        logs.update(figures)
        if state.log_history:  # its entry was made before the callbacks were asked
            state.log_history[-1].update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._hook is None:
            return
        self._pause()
        self._lap()
        self.summary = self._figures(self._total)
        if state.is_world_process_zero:
            print(self._described(), flush=True)
        self._end()

    def _end(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler = None

    def _count(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Before each forward of the model."""
        given = kwargs.get("input_ids", args[0] if args else None)
        if given is None:
            given = kwargs.get("inputs_embeds")
        if given is None or not module.training or not torch.is_grad_enabled():
            return
        batch, length = given.shape[:2]
        tokens: Any = batch * length
        flops = tokens * self._flops.at(length)
        mask = kwargs.get("attention_mask")
        by_mask = not self.count_padding and mask is not None and mask.dim() == 2
        if by_mask:
            tokens = mask.sum()  # type: ignore[union-attr]
        if torch.compiler.is_compiling():
            # A number of Python's that changes would have the model compiled again.
            self._on_device[0].add_(tokens)
            self._on_device[1].add_(flops)
            return
        self._now.flops += flops
        if by_mask:
            self._on_device[0].add_(tokens)
        else:
            self._now.tokens += tokens

    def _forget(self) -> None:
        """Starts all counts anew, after warm-up."""
        self._synchronize()
        self._now = _Counts()
        self._on_device.zero_()
        if self._sampler is not None:
            self._sampler.take()

    def _resume(self) -> None:
        self._started = time.perf_counter()
        if self._sampler is not None:
            self._sampler.sampling = True

    def _pause_before(self, control: Any) -> None:
        if control.should_evaluate or control.should_save:
            self._pause()

    def _pause(self) -> None:
        if self._started is None:
            return
        self._synchronize()
        self._now.seconds += time.perf_counter() - self._started
        self._started = None
        if self._sampler is not None:
            self._sampler.sampling = False

    def _lap(self) -> dict[str, float]:
        """The figures since the last lap; the clock goes on."""
        if self._started is None and self._now.steps == 0:
            return {}  # still warming up
        on_device = self._on_device.tolist()  # waits for the device, where the Trainer has waited
        self._on_device.zero_()
        if self._started is not None:
            now = time.perf_counter()
            self._now.seconds += now - self._started
            self._started = now
        self._now.tokens += on_device[0]
        self._now.flops += on_device[1]
        if self._sampler is not None:
            self._now.samples, self._now.sum_of_samples = self._sampler.take()
        figures = self._figures(self._now)
        self._total.add(self._now)
        self._now = _Counts()
        return figures

    def _figures(self, counts: _Counts) -> dict[str, float]:
        if not counts.steps or not counts.seconds:
            return {}
        figures = {"tokens_per_second": counts.tokens * self._processes / counts.seconds}
        if self._peak is not None:
            figures["mfu"] = counts.flops / counts.seconds / self._peak
        if counts.samples:
            figures["gpu_utilization"] = counts.sum_of_samples / counts.samples
        if self._device.type == "cuda":
            figures["peak_memory_gib"] = torch.cuda.max_memory_allocated(self._device) / 2**30
        return {name: float(f"{value:.6g}") for name, value in figures.items()}

    def _described(self) -> str:
        figures, counts = self.summary, self._total
        if not figures:
            return f"torch_liger: no step after the {self.warmup_steps} of warm-up to measure"
        parts = [f"{figures['tokens_per_second']:,.0f} tokens/s"]
        if self._peak is not None:
            parts.append(
                f"{100 * figures['mfu']:.1f} % of {self._peak / 1e12:,.6g} TFLOP/s "
                f"({self._device_name})"
            )
        if "gpu_utilization" in figures:
            parts.append(f"GPU busy {figures['gpu_utilization']:.0f} % of the time")
        if "peak_memory_gib" in figures:
            parts.append(f"{figures['peak_memory_gib']:.2f} GiB at most")
        return f"torch_liger: {counts.steps} steps in {counts.seconds:.1f} s: {', '.join(parts)}"

    def _peak_of(self, model: Any) -> float | None:
        """Of all devices that this process computes on."""
        peak = self.peak_flops or peak_flops(self._device_name)
        if peak is None:
            _logger.info(
                "LigerCallback: no peak FLOP/s known for %s, so no mfu; peak_flops gives it",
                self._device_name,
            )
            return None
        return peak * max(len({p.device for p in model.parameters()}), 1)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _Sampler(threading.Thread):
    """Reads the GPU's utilisation again and again, beside the training."""

    def __init__(self, read: Callable[[], float], seconds: float):
        super().__init__(name="torch_liger GPU utilisation", daemon=True)
        self.read, self.seconds = read, seconds
        self.sampling = False
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._samples, self._sum = 0, 0.0

    @classmethod
    def of(cls, device: torch.device, seconds: float) -> "_Sampler | None":
        """Started, or None, with the reason in the log, where there is nothing to read."""
        if device.type != "cuda":
            return None
        try:
            torch.cuda.utilization(device)
        except ModuleNotFoundError:
            _logger.warning(
                "LigerCallback: no gpu_utilization: nvidia-ml-py is not installed "
                "(pip install nvidia-ml-py)"
            )
            return None
        except Exception as error:  # NVML's own kinds of error; measuring must not end a training
            _logger.warning("LigerCallback: no gpu_utilization: %s", error)
            return None
        sampler = cls(lambda: torch.cuda.utilization(device), seconds)
        sampler.start()
        return sampler

    def run(self) -> None:
        while not self._ended.wait(self.seconds):
            if self.sampling:
                try:
                    value = self.read()
                except Exception as error:  # as in `of`
                    _logger.warning("LigerCallback: gpu_utilization ends: %s", error)
                    return
                with self._lock:
                    self._samples, self._sum = self._samples + 1, self._sum + value

    def take(self) -> tuple[int, float]:
        """Samples since the last call, and their sum."""
        with self._lock:
            taken = self._samples, self._sum
            self._samples, self._sum = 0, 0.0
        return taken

    def stop(self) -> None:
        self._ended.set()
        self.join(timeout=5.0)
