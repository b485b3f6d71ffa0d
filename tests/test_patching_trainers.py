"""The Trainer of transformers and those of TRL train patched models."""

import copy

import pytest
import torch
from transformers import TrainingArguments

import torch_liger
from liger_ops import backend_triton
from patching_models import VOCAB, made

pytest.importorskip("accelerate")
datasets = pytest.importorskip("datasets")
from transformers import Trainer  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def plain_versions(monkeypatch):
    monkeypatch.setattr(backend_triton, "INTERPRET", False)


def rows(count=8):
    """Rows of unequal numbers of tokens that count."""
    ids = torch.randint(3, VOCAB, (count, 10), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    for i in range(count):
        labels[i, : i + 1] = -100
    return [{"input_ids": i, "labels": label} for i, label in zip(ids, labels, strict=True)]


def trained(tmp_path, patch, compute_metrics=None, **settings):
    model = made("llama", use_cache=False)
    if patch:
        torch_liger.apply_liger_kernel(model)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2,
        gradient_accumulation_steps=2, report_to=[], save_strategy="no", logging_steps=1,
        disable_tqdm=True, use_cpu=not torch.cuda.is_available(), eval_strategy="no", **settings,
    )  # fmt: skip
    trainer = Trainer(
        model, arguments, train_dataset=rows(), eval_dataset=rows(4),
        compute_metrics=compute_metrics,
    )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return model, trainer, losses


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"label_smoothing_factor": 0.1},
        {"prediction_loss_only": True},
        {"bf16": True},
        {"average_tokens_across_devices": False, "max_grad_norm": 0.1},
    ],
    ids=lambda s: next(iter(s), "as it is"),
)
def test_trainer(tmp_path, settings):
    shapes = []

    def metrics(prediction):
        shapes.append(prediction.predictions.shape)
        return {"accuracy": 1.0}

    plain, patched = (trained(tmp_path, patch, metrics, **settings) for patch in (False, True))
    tolerance = {"rtol": 2e-2, "atol": 0} if "bf16" in settings else {"rtol": 1e-4, "atol": 0}
    torch.testing.assert_close(patched[2], plain[2], **tolerance)
    evaluated = [trainer.evaluate() for _, trainer, _ in (plain, patched)]
    losses = [e["eval_loss"] for e in evaluated]
    torch.testing.assert_close(*losses, rtol=2e-2 if "bf16" in settings else 1e-4, atol=0)
    asked = not settings.get("prediction_loss_only")
    assert shapes == ([(4, 10, VOCAB)] * 2 if asked else [])
    if "bf16" not in settings:
        for a, e in zip(patched[0].parameters(), plain[0].parameters(), strict=True):
            torch.testing.assert_close(a, e, rtol=1e-2, atol=1e-3)
    assert torch_liger.report(patched[0]).applied["rms_norm"] == 5
    prompt = torch.tensor([[5, 6, 7]], device=patched[0].device)
    assert patched[0].generate(prompt, max_new_tokens=2, do_sample=False).shape == (1, 5)


def test_logits_for_metrics_may_be_reduced_first(tmp_path):
    _, trainer, _ = trained(tmp_path, True)
    trainer.preprocess_logits_for_metrics = lambda logits, labels: logits.argmax(-1)
    trainer.compute_metrics = lambda prediction: {"shape": prediction.predictions.shape[1]}
    assert trainer.evaluate()["eval_shape"] == 10


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(VOCAB - 3)} | {"<pad>": 254, "<eos>": 255, "<unk>": 256}
    wordwise = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    wordwise.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=wordwise, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


COMMON = {
    "max_steps": 2, "per_device_train_batch_size": 2, "report_to": [], "save_strategy": "no",
    "logging_steps": 1, "disable_tqdm": True, "use_cpu": not torch.cuda.is_available(),
    "bf16": False, "gradient_checkpointing": False, "learning_rate": 1e-2,
}  # fmt: skip


def losses_of(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_sft_trainer(tmp_path):
    trl = pytest.importorskip("trl")
    data = datasets.Dataset.from_list([{"text": f"w{i} w{i + 1} w{i + 2} w5"} for i in range(8)])
    found = []
    for patch in (False, True):
        model = made("llama", use_cache=False)
        if patch:
            torch_liger.apply_liger_kernel(model)
        trainer = trl.SFTTrainer(
            model, trl.SFTConfig(output_dir=str(tmp_path), **COMMON), train_dataset=data,
            processing_class=tokenizer(),
        )  # fmt: skip
        found.append(losses_of(trainer))
        assert bool(torch_liger.report(model).applied) is patch
    torch.testing.assert_close(*found, rtol=1e-3, atol=0)


def test_dpo_trainer(tmp_path):
    trl = pytest.importorskip("trl")
    data = datasets.Dataset.from_list(
        [{"prompt": f"w{i} w1", "chosen": f" w{i + 1}", "rejected": " w9 w8"} for i in range(8)]
    )
    found = []
    for patch in (False, True):
        model = made("llama", use_cache=False)
        reference = copy.deepcopy(model)
        if patch:
            torch_liger.apply_liger_kernel(model)
        trainer = trl.DPOTrainer(
            model, reference, trl.DPOConfig(output_dir=str(tmp_path), **COMMON),
            train_dataset=data, processing_class=tokenizer(),
        )  # fmt: skip
        found.append(losses_of(trainer))
    torch.testing.assert_close(*found, rtol=1e-3, atol=0)
