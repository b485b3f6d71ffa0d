"""Instruction tasks for training: a JSON-lines file becomes padded token ids and masked labels."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

IGNORE_INDEX = -100  # the label of a token that is not supervised
PAD, BOS, EOS = 0, 1, 2
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>"]

FORMATS = (
    "instruction and instances, a list of objects with output and optionally input; or "
    "instruction, output and optionally input; or prompt and completion"
)


class DataError(ValueError):
    """A data file that does not hold instruction tasks."""


def load_examples(path: Path) -> list[tuple[str, str]]:
    """Reads the (prompt, answer) pairs of a JSON-lines file; blank lines are skipped.

    A line has one of the three forms in `FORMATS`. Raises DataError, naming the file, the line and
    its keys, on any other.
    """
    pairs = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                pairs += parse_record(json.loads(line))
            except (json.JSONDecodeError, DataError) as error:
                raise DataError(f"{path}, line {number}: {error}") from error
    if not pairs:
        raise DataError(f"{path} holds no examples")
    return pairs


def parse_record(record: object) -> list[tuple[str, str]]:
    if isinstance(record, dict) and "prompt" in record:
        prompt, completion = _texts(record, "prompt", "completion")
        return [(prompt, completion)]
    if not (isinstance(record, dict) and "instances" in record):
        instruction, output, context = _texts(record, "instruction", "output", optional="input")
        return [(_format_prompt(instruction, context), output)]

    (instruction,) = _texts(record, "instruction")
    instances = record["instances"]
    if not isinstance(instances, list):
        raise DataError(f"instances must be a list, found {type(instances).__name__}")
    pairs = []
    for instance in instances:
        output, context = _texts(instance, "output", optional="input")
        pairs.append((_format_prompt(instruction, context), output))
    return pairs


def _texts(record: object, *required: str, optional: str | None = None) -> list[str]:
    """Returns the named values in order; an optional one that is absent or null is empty."""
    if not isinstance(record, dict):
        raise DataError(f"expected an object, found {type(record).__name__}; expected {FORMATS}")
    if missing := [key for key in required if key not in record]:
        raise DataError(f"missing {missing}, found the keys {sorted(record)}; expected {FORMATS}")
    values = {key: record[key] for key in required}
    if optional:
        values[optional] = "" if record.get(optional) is None else record[optional]
    for key, value in values.items():
        if not isinstance(value, str):
            raise DataError(f"{key} must be a string, found {type(value).__name__}")
    return list(values.values())


def _format_prompt(instruction: str, context: str) -> str:
    context = f"Input: {context}\n" if context else ""
    return f"Instruction: {instruction}\n{context}Response: "


def train_tokenizer(pairs: list[tuple[str, str]], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer: every byte is a token, so no text is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for pair in pairs for text in pair), trainer)
    # A task may quote "</s>"; in a text it is four characters and never the end of the answer.
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode_examples(
    tokenizer: Tokenizer, pairs: list[tuple[str, str]], max_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokenizes, masks and pads: input ids and labels, each (examples, T), int32.

    Only the answer and its end token carry labels. The labels are not shifted: both losses compare
    the logits at t with the label at t + 1. Examples are cut at `max_length` tokens, those with no
    answer token left are dropped, and both are counted in a printed line.
    """
    rows = []
    cut = 0
    for prompt, answer in pairs:
        # Two calls, so that no token spans the border between the prompt and the answer.
        prompt_ids = [BOS, *tokenizer.encode(prompt).ids]
        answer_ids = [*tokenizer.encode(answer).ids, EOS]
        cut += len(prompt_ids) + len(answer_ids) > max_length
        if len(prompt_ids) < max_length:
            ids = prompt_ids + answer_ids
            labels = [IGNORE_INDEX] * len(prompt_ids) + answer_ids
            rows.append((ids[:max_length], labels[:max_length]))
    if not rows:
        raise DataError(f"no prompt leaves room for an answer within {max_length} tokens")
    if cut:
        dropped = len(pairs) - len(rows)
        print(
            f"{cut} of {len(pairs)} examples are longer than {max_length} tokens: "
            f"{cut - dropped} lost their end, {dropped} with no room for an answer are left out"
        )
    length = max(len(ids) for ids, _ in rows)
    input_ids = np.full((len(rows), length), PAD, np.int32)
    labels = np.full((len(rows), length), IGNORE_INDEX, np.int32)
    for row, (ids, answer_labels) in enumerate(rows):
        input_ids[row, : len(ids)] = ids
        labels[row, : len(ids)] = answer_labels
    return input_ids, labels


def batch_rows(examples: int, batch_size: int, steps: int, seed: int) -> Iterator[np.ndarray]:
    """Yields the row numbers of each batch; every epoch goes through the data in a new order."""
    rng = np.random.default_rng(seed)
    order = np.empty(0, int)
    for _ in range(steps):
        while len(order) < batch_size:
            order = np.concatenate([order, rng.permutation(examples)])
        yield order[:batch_size]
        order = order[batch_size:]
