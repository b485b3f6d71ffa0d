"""LigerCallback and the operations it counts: a tiny Trainer, and PyTorch's own counter."""

import subprocess
import sys
import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import torch_liger
from torch_liger import callback as callback_module
from torch_liger.flops import PEAK_FLOPS, ModelFlops, model_flops, peak_flops

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")  # which the Trainer needs
# Newer versions of transformers have another word for it, which PEFT does not use yet.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing. is deprecated:FutureWarning"
)
LigerCallback = torch_liger.LigerCallback

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "attn_implementation": "eager",
}  # fmt: skip


def llama(**settings):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, **settings})
    return transformers.LlamaForCausalLM(config)


def counted(model, batch=2, length=16):
    """Operations of a forward and backward by PyTorch's counter, for one token."""
    ids = torch.zeros(batch, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    return counter.get_total_flops() / (batch * length)


# RoPE's angles are a product too, of the forward alone: a few in ten thousand here.
NEAR = 3e-3


@pytest.mark.parametrize("tied", [False, True])
def test_the_formula_is_what_pytorch_counts(tied):
    model = llama(tie_word_embeddings=tied)
    flops = model_flops(model)
    assert counted(model) == pytest.approx(flops.at(16), rel=NEAR)
    assert counted(model, 1, 40) == pytest.approx(flops.at(40), rel=NEAR)
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48
    assert flops == ModelFlops(6.0 * (2 * layer + 64 * 32), ((12.0 * 32, None),) * 2)


def test_of_experts_those_count_that_a_token_takes():
    config = transformers.MixtralConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
    )
    flops = model_flops(transformers.MixtralForCausalLM(config))
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 2 * 3 * 32 * 48 + 32 * 4  # the last is the router's
    assert flops.per_token == 6 * (2 * layer + 64 * 32)
    assert flops.at(20) == flops.per_token + 2 * 12 * 32 * 8


def test_weights_of_conv1d_count_too():
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, attn_implementation="eager"
    )
    model = transformers.GPT2LMHeadModel(config)
    assert counted(model) == pytest.approx(model_flops(model).at(16), rel=NEAR)


def test_layers_of_a_window_and_without():
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=4, layer_types=kinds
    )
    flops = model_flops(transformers.Qwen2ForCausalLM(config))
    assert flops.at(10) - flops.per_token == 12 * 32 * (4 + 10)


@pytest.mark.parametrize("mlp", [False, True])
def test_frozen_weights_of_lora_have_no_gradient_to_count(mlp):
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    targets += ["gate_proj", "up_proj", "down_proj"] if mlp else []
    config = peft.LoraConfig(r=4, target_modules=targets)
    model = peft.get_peft_model(llama(), config)
    model.enable_input_require_grads()  # as with gradient checkpointing
    assert counted(model) == pytest.approx(model_flops(model).at(16), rel=NEAR)
    full = model_flops(llama()).per_token
    adapters = 6 * 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + (3 * (32 + 48) if mlp else 0))
    assert model_flops(model).per_token == full * 4 / 6 + adapters
    model.add_adapter("idle", peft.LoraConfig(r=8, target_modules=targets))
    assert model_flops(model).per_token == full * 4 / 6 + adapters


def test_what_peft_has_replaced_does_not_count():
    peft = pytest.importorskip("peft")
    plain = peft.LoraConfig(r=4, target_modules=["q_proj"])
    saved = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    frozen, trained = (
        model_flops(peft.get_peft_model(llama(), config)).per_token for config in (plain, saved)
    )
    assert trained - frozen == 2 * 64 * 32  # the head's own gradient


@pytest.mark.parametrize(
    "name, key",
    [
        ("NVIDIA H200", "H200"), ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA GB200", "GB200"), ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"), ("NVIDIA A10G", "A10G"), ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA RTX A4000", None), ("NVIDIA RTX A1000", None), ("the CPU", None),
    ],
)  # fmt: skip
def test_a_devices_peak_by_its_name(name, key):
    assert peak_flops(name) == (None if key is None else PEAK_FLOPS[key])


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows, length, padding=0):
        self.rows, self.length, self.padding = rows, length, padding

    def __len__(self):
        return self.rows

    def __getitem__(self, i):
        ids = torch.arange(self.length) % 60
        mask = torch.ones(self.length, dtype=torch.int64)
        mask[self.length - self.padding :] = 0
        return {"input_ids": ids, "labels": ids, "attention_mask": mask}


class Clock:
    """Stands for the time module: a second for every forward of the model."""

    def __init__(self, model):
        self.now = 100.0
        model.register_forward_hook(lambda *_: setattr(self, "now", self.now + 1.0))

    def perf_counter(self):
        return self.now


def train(tmp_path, measuring, model=None, padding=0, attach=False, others=(), **settings):
    model = llama() if model is None else model
    arguments = transformers.TrainingArguments(
        **{
            "output_dir": str(tmp_path), "max_steps": 8, "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2, "logging_steps": 2, "save_strategy": "no",
            "report_to": [], "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False,
            **settings,
        }
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, arguments, train_dataset=Rows(16, 12, padding), eval_dataset=Rows(4, 12),
        callbacks=[*others, *([] if attach else [measuring])],
    )  # fmt: skip
    if attach:
        assert measuring.attach(trainer) is measuring
    trainer.train()
    return trainer


STEP = 2 * 2 * 12  # tokens: batch, accumulation, length


def test_what_is_logged_and_printed(tmp_path, monkeypatch, capsys):
    model = llama()
    monkeypatch.setattr(callback_module, "time", Clock(model))
    measuring = LigerCallback(warmup_steps=3, peak_flops=1e6)
    trainer = train(tmp_path, measuring, model)
    losses = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in losses] == [2, 4, 6, 8]
    assert "tokens_per_second" not in losses[0]  # warming up
    mfu = STEP * model_flops(model).at(12) / 2.0 / 1e6
    for entry in losses[1:]:  # a step is two forwards, so two seconds
        assert entry["tokens_per_second"] == STEP / 2
        assert entry["mfu"] == pytest.approx(mfu, rel=1e-5)
        assert "gpu_utilization" not in entry and "peak_memory_gib" not in entry
    assert measuring.summary["tokens_per_second"] == STEP / 2
    out = capsys.readouterr().out
    assert f"torch_liger: 5 steps in 10.0 s: 24 tokens/s, {100 * mfu:.1f} % of 1 TFLOP/s" not in out
    assert f"torch_liger: 5 steps in 10.0 s: 24 tokens/s, {100 * mfu:.1f} % of" in out
    assert "'tokens_per_second': " in out  # the Trainer's own printer comes later
    assert not model._forward_pre_hooks


def test_an_evaluation_and_a_checkpoint_take_no_time(tmp_path, monkeypatch):
    model = llama()
    monkeypatch.setattr(callback_module, "time", Clock(model))
    measuring = LigerCallback(warmup_steps=1)
    trainer = train(
        tmp_path, measuring, model, eval_strategy="steps", eval_steps=3, save_strategy="steps",
        save_steps=5, save_only_model=True,
    )  # fmt: skip
    assert any("eval_loss" in entry for entry in trainer.state.log_history)
    assert measuring.summary == {"tokens_per_second": STEP / 2}


def test_an_evaluation_of_each_epoch_takes_no_time(tmp_path, monkeypatch):
    model = llama()
    monkeypatch.setattr(callback_module, "time", Clock(model))
    measuring = LigerCallback(warmup_steps=0)
    train(tmp_path, measuring, model, eval_strategy="epoch", max_steps=-1, num_train_epochs=2)
    assert measuring.summary == {"tokens_per_second": STEP / 2}


def test_padding_counts_only_if_asked(tmp_path, monkeypatch):
    results = {}
    for counting in (True, False):
        model = llama()
        monkeypatch.setattr(callback_module, "time", Clock(model))
        measuring = LigerCallback(count_padding=counting, peak_flops=1e6)
        train(tmp_path, measuring, model, padding=3)
        results[counting] = measuring.summary
    assert results[True]["tokens_per_second"] == STEP / 2
    assert results[False]["tokens_per_second"] == STEP / 2 * 9 / 12
    assert results[True]["mfu"] == results[False]["mfu"]


def test_the_reporters_have_the_figures_if_attached(tmp_path):
    class Reporter(transformers.TrainerCallback):
        seen: list = []  # noqa: RUF012

        def on_log(self, args, state, control, **kwargs):
            self.seen.append("tokens_per_second" in kwargs["logs"])

    for attach in (False, True):
        Reporter.seen = []
        measuring = LigerCallback(warmup_steps=0)
        trainer = train(tmp_path, measuring, attach=attach, others=[Reporter()])
        assert Reporter.seen == [attach] * 4 + [False]  # the last is the summary of the Trainer
        assert trainer.callback_handler.callbacks.count(measuring) == 1


def test_gradient_checkpointing_is_counted_once(tmp_path, monkeypatch):
    model = llama()
    monkeypatch.setattr(callback_module, "time", Clock(model))
    measuring = LigerCallback(peak_flops=1e6)
    train(tmp_path, measuring, model, gradient_checkpointing=True)
    assert measuring.summary["tokens_per_second"] == STEP / 2


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_model_is_counted_on_the_device_and_compiled_once():
    model = llama()
    graphs = []
    compiled = torch.compile(
        model, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward
    )
    measuring = LigerCallback()
    arguments = transformers.TrainingArguments(report_to=[], use_cpu=True)
    state, control = transformers.TrainerState(), transformers.TrainerControl()
    measuring.on_train_begin(arguments, state, control, model=model)
    ids = torch.zeros(2, 12, dtype=torch.int64)
    made = []
    for _ in range(3):
        compiled(input_ids=ids)
        made.append(len(graphs))
    assert made[0] == made[2]
    assert measuring._on_device.tolist() == pytest.approx([72, 72 * model_flops(model).at(12)])
    assert measuring._now.tokens == 0
    measuring.on_train_end(arguments, state, control, model=model)


def test_the_step_reads_nothing_from_the_device(tmp_path, monkeypatch):
    """Between two logs: no number leaves a tensor of the callback's."""
    model = llama()
    measuring = LigerCallback(warmup_steps=1, count_padding=False)
    reads, steps = [], []
    lap = measuring._lap
    monkeypatch.setattr(measuring, "_lap", lambda: reads.append(len(steps)) or lap())
    monkeypatch.setattr(measuring, "_synchronize", lambda: reads.append(len(steps)))

    class Steps(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            steps.append(state.global_step)

    train(tmp_path, measuring, model, logging_steps=4, others=[Steps()])
    assert reads == [1, 4, 8, 8, 8]  # after warm-up, at the logs, and at the end


def test_utilisation_is_sampled_while_training_and_its_absence_is_said(monkeypatch, caplog):
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 80 + device.index)
    sampler = callback_module._Sampler.of(cuda, 0.01)
    assert sampler is not None
    time.sleep(0.05)
    assert sampler.take() == (0, 0.0)  # not training yet
    sampler.sampling = True
    deadline = time.monotonic() + 10.0
    while sampler._samples < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    samples, total = sampler.take()
    assert samples >= 3 and total == 80 * samples
    sampler.stop()
    assert not sampler.is_alive()

    def absent(device):
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", absent)
    assert callback_module._Sampler.of(cuda, 1.0) is None
    assert "nvidia-ml-py is not installed (pip install nvidia-ml-py)" in caplog.text
    assert callback_module._Sampler.of(torch.device("cpu"), 1.0) is None


def test_an_unknown_device_is_said_and_has_no_mfu(tmp_path, caplog):
    with caplog.at_level("INFO", logger="torch_liger"):
        measuring = LigerCallback()
        train(tmp_path, measuring, max_steps=4)
    assert "no peak FLOP/s known for the CPU, so no mfu; peak_flops gives it" in caplog.text
    assert "mfu" not in measuring.summary and measuring.summary["tokens_per_second"] > 0


def test_too_few_steps_to_measure(tmp_path, capsys):
    measuring = LigerCallback(warmup_steps=50)
    trainer = train(tmp_path, measuring, max_steps=2)
    assert measuring.summary == {}
    assert "torch_liger: no step after the 50 of warm-up to measure" in capsys.readouterr().out
    assert all("tokens_per_second" not in entry for entry in trainer.state.log_history)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"warmup_steps": -1}, "warmup_steps must be at least 0; got -1"),
        ({"peak_flops": 0.0}, r"peak_flops must be above 0; got 0\.0"),
        ({"flops_per_token": -1.0}, r"flops_per_token must be above 0; got -1\.0"),
        ({"sample_seconds": 0}, "sample_seconds must be above 0; got 0"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        LigerCallback(**settings)


def test_transformers_is_imported_only_for_the_callback():
    code = "import sys, torch_liger; print('transformers' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        torch_liger.nothing  # noqa: B018


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    measuring = LigerCallback(warmup_steps=1, peak_flops=1e12, sample_seconds=0.05)
    trainer = train(tmp_path, measuring, max_steps=40, logging_steps=10, use_cpu=False)
    last = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    assert last["tokens_per_second"] > 0 and 0 < last["mfu"] < 1 and last["peak_memory_gib"] > 0
