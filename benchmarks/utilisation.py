"""How busy the GPU is while a patched LLaMA trains on batches that the host makes as it goes."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

WARMUP = 5  # steps before the window
SECONDS = 60.0  # of the window, at least
BETWEEN_SAMPLES = 0.2  # seconds; NVML's own figure is of the last 1/6 s to 1 s
LOGGING = 10  # steps between two losses that the host waits for


class Utilisation(threading.Thread):
    """Reads NVML's percentage again and again, from when the window begins to its end."""

    def __init__(self, read: Callable[[], float], between: float = BETWEEN_SAMPLES):
        super().__init__(name="GPU utilisation", daemon=True)
        self.read, self.between = read, between
        self.samples: list[float] = []
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(self.between):
            self.samples.append(float(self.read()))

    def stop(self) -> None:
        self._ended.set()
        self.join()


class Window:
    """The steps that count: told of every step's end, it says when there have been enough."""

    def __init__(self, read: Callable[[], float], synchronize: Callable[[], None]):
        self._read, self._synchronize = read, synchronize
        self.steps, self.seconds = 0, 0.0
        self._seen, self._began, self._sampler = 0, 0.0, Utilisation(read)

    def step_ended(self) -> bool:
        """Whether the window is over."""
        self._seen += 1
        if self._seen == WARMUP:
            self._read()  # raises here, and not in a thread, where NVML cannot be asked
            self._synchronize()
            self._began = time.perf_counter()
            self._sampler.start()
        self.steps = self._seen - WARMUP
        if self.steps <= 0 or time.perf_counter() - self._began < SECONDS:
            return False
        self._synchronize()
        self.seconds = time.perf_counter() - self._began
        self._sampler.stop()
        return True

    def figures(self) -> dict[str, Any]:
        samples = self._sampler.samples
        return {
            "window_seconds": self.seconds,
            "steps": self.steps,
            "samples": len(samples),
            "gpu_utilization": sum(samples) / len(samples),
            "share_of_samples_at_95": sum(s >= 95.0 for s in samples) / len(samples),
            "least_sample": min(samples),
        }


class Fresh(torch.utils.data.IterableDataset):
    """Sequences without end, each drawn when it is asked for."""

    def __init__(self, vocab: int, length: int):
        self.vocab, self.length = vocab, length

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = torch.utils.data.get_worker_info()
        generator = torch.Generator().manual_seed(0 if worker is None else worker.id)
        while True:
            ids = torch.randint(self.vocab, (self.length,), generator=generator)
            yield {"input_ids": ids, "labels": ids}


def plain_loop(model: Any, data: Fresh, batch: int, window: Window) -> float:
    """A loop as one writes it by hand. Returns the last loss that was read."""
    on_gpu = model.device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=on_gpu)
    loader = torch.utils.data.DataLoader(
        data, batch, num_workers=2 if on_gpu else 0, pin_memory=on_gpu
    )
    last = float("nan")
    for step, host in enumerate(loader, start=1):
        inputs = {name: value.to(model.device, non_blocking=True) for name, value in host.items()}
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        over = window.step_ended()
        if over or step % LOGGING == 0:
            last = loss.item()
        if over:
            break
    return last


def trainer(model: Any, data: Fresh, batch: int, window: Window) -> float:
    """Hugging Face's Trainer, with this library's callback.

    Two of its settings are not the default: by default it waits for the GPU in every step, to copy
    a batch and to see whether the loss is a number.
    """
    import tempfile

    from transformers import Trainer, TrainerCallback, TrainingArguments

    import torch_liger

    class UntilOver(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = window.step_ended()

    on_gpu = model.device.type == "cuda"
    model.config.use_cache = False
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=1_000_000, per_device_train_batch_size=batch, learning_rate=1e-5,
            optim="adamw_torch_fused" if on_gpu else "adamw_torch", use_cpu=not on_gpu,
            dataloader_num_workers=2 if on_gpu else 0, dataloader_pin_memory=on_gpu,
            accelerator_config={"non_blocking": on_gpu}, logging_nan_inf_filter=False,
            logging_steps=LOGGING, save_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        made = Trainer(model, arguments, train_dataset=data, callbacks=[UntilOver()])
        torch_liger.LigerCallback(warmup_steps=WARMUP).attach(made)
        made.train()
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    return losses[-1]


LOOPS: dict[str, Callable[[Any, Fresh, int, Window], float]] = {
    "torch_liger in a loop": plain_loop,
    "torch_liger in Trainer": trainer,
}


def window(
    train: Callable[[Any, Fresh, int, Window], float],
    settings: dict[str, Any],
    batch: int,
    length: int,
    device: str = "cuda",
    read: Callable[[], float] = torch.cuda.utilization,
) -> dict[str, Any]:
    """What one loop does to the GPU, for the model of these settings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import torch_liger
    from torch_liger.flops import model_flops, peak_flops

    on_gpu = device == "cuda"
    gc.collect()  # the last candidate's model
    torch.cuda.empty_cache()
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**settings)).bfloat16().train()
    torch_liger.apply_liger_kernel_to_llama(model)
    flops_per_token = model_flops(model).at(length)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    measured = Window(read, torch.cuda.synchronize if on_gpu else lambda: None)
    loss = train(model, Fresh(model.config.vocab_size, length), batch, measured)
    figures = measured.figures()
    speed = batch * length * figures["steps"] / figures["window_seconds"]
    peak = peak_flops(torch.cuda.get_device_name()) if on_gpu else None
    return {
        "tokens_per_second": speed,
        **figures,
        "loss": loss,
        "mfu": speed * flops_per_token / peak if peak else float("nan"),
        "gibibytes": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
    }
