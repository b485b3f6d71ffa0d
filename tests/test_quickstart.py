"""The example that trains in both frameworks: its data, its two models and its verdict."""

import functools
import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

# examples/ is a folder of scripts, not a package.
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import instruction_data
import quickstart
import tiny_llama

EXAMPLES = Path(__file__).parents[1] / "examples"
SEED_TASKS = Path(__file__).parents[2] / "shared" / "data" / "seed_tasks.jsonl"

PAIRS = [("Say one word. ", "Hello!"), ("Name a colour and nothing more. ", "Blue, I think.")]


def write_lines(path: Path, *records: object) -> Path:
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_reads_every_format(tmp_path):
    instances = [{"input": "2, 3", "output": "5"}, {"output": "nothing"}]
    path = write_lines(
        tmp_path / "tasks.jsonl",
        {"id": 7, "instruction": "Add.", "instances": instances},
        "",
        {"instruction": "Add.", "input": "1, 1", "output": "2"},
        {"instruction": "Greet.", "output": "Grüß dich"},
        {"instruction": "Greet.", "input": None, "output": "Hello"},
        {"prompt": "Once upon", "completion": " a time"},
    )
    assert instruction_data.load_examples(path) == [
        ("Instruction: Add.\nInput: 2, 3\nResponse: ", "5"),
        ("Instruction: Add.\nResponse: ", "nothing"),
        ("Instruction: Add.\nInput: 1, 1\nResponse: ", "2"),
        ("Instruction: Greet.\nResponse: ", "Grüß dich"),
        ("Instruction: Greet.\nResponse: ", "Hello"),
        ("Once upon", " a time"),
    ]


def test_the_bundled_tasks_are_enough_and_none_is_cut(capsys):
    pairs = instruction_data.load_examples(EXAMPLES / "data" / "instructions.jsonl")
    assert len(pairs) >= 120 and len(set(pairs)) == len(pairs)
    assert all(answer for _, answer in pairs)
    tokenizer = instruction_data.train_tokenizer(pairs, quickstart.VOCAB_SIZE)
    instruction_data.encode_examples(tokenizer, pairs, quickstart.MAX_LENGTH)
    assert capsys.readouterr().out == ""


@pytest.mark.skipif(not SEED_TASKS.exists(), reason="../shared/data/seed_tasks.jsonl is not there")
def test_reads_the_seed_tasks_and_says_how_many_it_cuts(capsys):
    pairs = instruction_data.load_examples(SEED_TASKS)
    assert len(pairs) == 175
    tokenizer = instruction_data.train_tokenizer(pairs, quickstart.VOCAB_SIZE)
    input_ids, _ = instruction_data.encode_examples(tokenizer, pairs, quickstart.MAX_LENGTH)
    left_out = len(pairs) - len(input_ids)
    said = capsys.readouterr().out
    assert "of 175 examples are longer than 128 tokens" in said
    assert f"{left_out} with no room for an answer are left out" in said


@pytest.mark.parametrize(
    ("line", "reasons"),
    [
        ({"question": "?", "answer": "!"}, ["missing ['instruction', 'output']", "'question'"]),
        ({"instruction": "Add."}, ["missing ['output']", "['instruction']", "completion"]),
        ({"prompt": "Once"}, ["missing ['completion']", "['prompt']"]),
        ({"instances": [{"output": "5"}]}, ["missing ['instruction']", "['instances']"]),
        ({"instruction": "Add.", "instances": [{"input": "1"}]}, ["missing ['output']", "'input'"]),
        ({"instruction": "Add.", "instances": {}}, ["instances must be a list, found dict"]),
        ({"instruction": "Add.", "instances": ["5"]}, ["expected an object, found str"]),
        ({"instruction": "Add.", "output": 5}, ["output must be a string, found int"]),
        ([1, 2], ["expected an object, found list"]),
        ('{"instruction": "Add."', ["delimiter"]),
    ],
)
def test_a_bad_line_names_file_line_and_keys(tmp_path, line, reasons):
    good = {"instruction": "Greet.", "output": "Hello"}
    path = write_lines(tmp_path / "tasks.jsonl", good, "", line)
    with pytest.raises(instruction_data.DataError) as error:
        instruction_data.load_examples(path)
    for part in (f"{path}, line 3: ", *reasons):
        assert part in str(error.value)


@pytest.mark.parametrize("content", [None, "\n", '{"prompt": "Once"}\n'])
def test_unusable_data_is_a_usage_error(tmp_path, capsys, content):
    path = tmp_path / "tasks.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as exit_info:
        quickstart.main(["--data", str(path), "--out", str(tmp_path / "out")])
    assert exit_info.value.code == 2
    assert str(path) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_only_the_answer_and_its_end_are_supervised():
    tokenizer = instruction_data.train_tokenizer(PAIRS, 300)
    input_ids, labels = instruction_data.encode_examples(tokenizer, PAIRS, max_length=128)
    lengths = []
    for ids, row, (prompt, answer) in zip(input_ids, labels, PAIRS, strict=True):
        (supervised,) = np.nonzero(row != instruction_data.IGNORE_INDEX)
        start, end = supervised[0], supervised[-1]
        assert list(supervised) == list(range(start, end + 1))
        assert list(row[supervised]) == list(ids[supervised])
        assert ids[0] == instruction_data.BOS and ids[end] == instruction_data.EOS
        assert tokenizer.decode(list(ids[1:start])) == prompt
        assert tokenizer.decode(list(ids[start:end])) == answer
        assert all(ids[end + 1 :] == instruction_data.PAD)
        lengths.append(end + 1)
    assert input_ids.shape == labels.shape == (len(PAIRS), max(lengths))
    assert len(set(lengths)) > 1  # so that one of the rows is padded


def test_long_examples_are_cut_or_left_out(capsys):
    tokenizer = instruction_data.train_tokenizer(PAIRS, 300)
    pairs = [("a", "b"), ("a", "b" * 20), ("a" * 20, "b")]
    input_ids, labels = instruction_data.encode_examples(tokenizer, pairs, max_length=8)
    assert input_ids.shape == (2, 8)
    assert list((labels != instruction_data.IGNORE_INDEX).sum(axis=1)) == [2, 6]
    assert "1 lost their end, 1 with no room" in capsys.readouterr().out
    with pytest.raises(instruction_data.DataError, match="within 8 tokens"):
        instruction_data.encode_examples(tokenizer, pairs[2:], max_length=8)


def test_a_quoted_end_token_is_text():
    tokenizer = instruction_data.train_tokenizer(PAIRS, 300)
    ids = tokenizer.encode("</s>").ids
    assert instruction_data.EOS not in ids and tokenizer.decode(ids) == "</s>"


def test_every_epoch_sees_every_example_in_an_order_of_its_own():
    rows = np.concatenate(list(instruction_data.batch_rows(6, batch_size=4, steps=3, seed=0)))
    again = np.concatenate(list(instruction_data.batch_rows(6, batch_size=4, steps=3, seed=0)))
    assert list(rows) == list(again)
    assert sorted(rows[:6]) == sorted(rows[6:]) == list(range(6))
    assert list(rows[:6]) != list(rows[6:])


def random_model(**options) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        **options,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():  # norms of 1 and biases of 0 would hide a mistake
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def to_flax(model: LlamaForCausalLM) -> tiny_llama.TinyLlama:
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    return tiny_llama.from_hf_state_dict(model.config, weights)


@pytest.mark.parametrize(
    "options", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}]
)
def test_the_same_weights_give_the_same_logits_at_every_position(options):
    model = random_model(**options)
    input_ids = np.random.default_rng(0).integers(0, 300, (2, 128))
    with torch.no_grad():
        stock = model(torch.from_numpy(input_ids)).logits.numpy()
        quickstart.use_liger_norms(model, None)
        patched = model(torch.from_numpy(input_ids)).logits.numpy()
    flax = np.asarray(to_flax(model)(jnp.asarray(input_ids)))
    for logits in (patched, flax):
        error = np.linalg.norm(logits - stock, axis=-1) / np.linalg.norm(stock, axis=-1)
        assert error.max() < 1e-5  # (B, T): a wrong rotation grows with the position


def test_liger_norms_keep_parameters_and_eps():
    model = random_model()
    before = dict(model.named_parameters())
    quickstart.use_liger_norms(model, None)
    norms = [m for m in model.modules() if isinstance(m, quickstart.LigerRMSNorm)]
    assert len(norms) == 5 and all(norm.variance_epsilon == 1e-6 for norm in norms)
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)


def test_the_flax_model_owns_its_weights():
    model = random_model()
    flax = to_flax(model)
    before = np.array(flax.model.embed_tokens.embedding[...])
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
    assert np.array_equal(before, flax.model.embed_tokens.embedding[...])


def test_weights_that_do_not_fit_are_named():
    model = random_model()
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    weights["lm_head.bias"] = np.zeros(300, np.float32)
    del weights["model.norm.weight"]
    with pytest.raises(ValueError, match=r"missing=.*'norm', 'scale'.*unexpected=.*'bias'"):
        tiny_llama.from_hf_state_dict(model.config, weights)


def test_settings_that_the_model_lacks_are_refused():
    config = LlamaConfig(hidden_act="gelu")
    with pytest.raises(ValueError, match="'hidden_act': 'gelu'"):
        tiny_llama.from_hf_state_dict(config, {})


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the script on a model of one layer; returns the report and the exit's message."""
    monkeypatch.setitem(quickstart.MODEL, "num_hidden_layers", 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # parallel test runs on few cores would wait for each other

    def run(*options: str) -> tuple[dict, str | None]:
        message = None
        try:
            quickstart.main(["--out", str(tmp_path), "--batch-size", "2", *options])
        except SystemExit as exit_info:
            message = exit_info.code
        assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
        return json.loads((tmp_path / "losses.json").read_text()), message

    yield run
    torch.set_num_threads(threads)


def test_a_short_run_stays_within_the_bound(run, tmp_path, capsys):
    report, message = run("--steps", "6", "--implementation", "plain", "--seed", "3")
    assert message is None and report["within_bound"]
    flax, pytorch = np.array(report["flax"]), np.array(report["torch"])
    assert flax.shape == pytorch.shape == (6,)
    assert np.array_equal(report["difference"], np.abs(flax - pytorch))
    assert np.all(np.array(report["difference"]) <= report["bounds"])
    assert flax[-1] < flax[0] - 0.1
    assert report["settings"]["seed"] == 3
    assert len(report["settings"]["adamw"]["learning_rate"]) == 6
    assert report["precision"]["torch_matmul"] == report["precision"]["flax_matmul"] == "highest"
    said = capsys.readouterr()
    assert "first loss" in said.out and str(tmp_path / "losses.json") in said.out
    assert "6/6" in said.err  # the progress bar


def test_the_kernels_stay_within_the_bound(run):
    report, message = run("--steps", "3", "--implementation", "kernels")
    assert message is None and report["within_bound"]
    assert report["settings"]["implementation"] == "kernels"


def other_norm_eps(monkeypatch):
    norm = tiny_llama.RMSNorm

    def wrong_norm(features, *, epsilon, **rest):
        return norm(features, epsilon=1e-3, **rest)

    monkeypatch.setattr(tiny_llama, "RMSNorm", wrong_norm)


def interleaved_rope(monkeypatch):
    monkeypatch.setattr(
        tiny_llama, "rope", functools.partial(tiny_llama.rope, layout="interleaved")
    )


def other_adam_eps(monkeypatch):
    adamw = quickstart.optax.adamw

    def wrong_adamw(learning_rate, **rest):
        return adamw(learning_rate, **rest | {"eps": 1e-6})

    monkeypatch.setattr(quickstart.optax, "adamw", wrong_adamw)


@pytest.mark.parametrize(
    ("fault", "in_the_forward"),
    [(other_norm_eps, True), (interleaved_rope, True), (other_adam_eps, False)],
)
def test_a_planted_fault_parts_the_curves(run, monkeypatch, fault, in_the_forward):
    fault(monkeypatch)
    report, message = run("--steps", "6")
    assert not report["within_bound"]
    step = next(i for i in range(6) if report["difference"][i] > report["bounds"][i])
    assert message.startswith(f"The curves part at step {step}: Flax {report['flax'][step]:.7f}")
    assert (step == 0) == in_the_forward
