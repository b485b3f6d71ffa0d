"""The fused loss keeps what callers of a causal language model rely on."""

import logging

import pytest
import torch
from transformers.models.cohere.modeling_cohere import CohereForCausalLM

import torch_liger
from liger_ops import backend_triton
from patching_models import DEVICE, VOCAB, assert_same, batch, made, results, twin
from torch_liger.patching.report import log_once


@pytest.fixture(autouse=True)
def plain_versions(monkeypatch):
    monkeypatch.setattr(backend_triton, "INTERPRET", False)
    log_once.cache_clear()


def pair(family="llama", **settings):
    plain = made(family, **settings)
    model = twin(plain)
    torch_liger.apply_liger_kernel(model)
    return plain, model


def shifted(labels):
    return torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()


def test_labels_and_shift_labels():
    plain, model = pair()
    inputs = batch()
    labels = inputs.pop("labels")
    expected = plain(**inputs, labels=labels).loss
    for training in (True, False):
        model.train(training)
        for given in (
            {"labels": labels},
            {"shift_labels": shifted(labels)},
            {"labels": labels, "shift_labels": shifted(labels)},
        ):
            torch.testing.assert_close(model(**inputs, **given).loss, expected)


def test_a_sequence_in_two_halves():
    """Each half has its labels shifted before it was cut, as context parallelism has them."""
    _, model = pair()
    inputs = batch()
    labels = shifted(inputs["labels"])
    with torch.no_grad():
        whole = model(**inputs, use_cache=False).loss
        hidden = model.model(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state
    weight = model.lm_head.weight
    parts = [
        torch_liger.fused_linear_cross_entropy(hidden[:, at], weight, labels[:, at], num_items=1)
        for at in (slice(0, 6), slice(6, None))
    ]
    torch.testing.assert_close(sum(parts) / (labels != -100).sum(), whole)


@pytest.mark.parametrize("kind", [int, lambda n: torch.tensor(n), lambda n: torch.tensor([n])])
def test_items_in_an_accumulated_batch(kind):
    """Two batches of unequal numbers of tokens have the gradient of one batch of all."""
    plain, model = pair()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (2, 10), generator=generator).to(DEVICE)
    labels = ids.clone()
    labels[0, 3:] = -100  # 2 tokens that count, and 9
    plain(input_ids=ids, labels=labels).loss.backward()
    losses = []
    for row in (slice(0, 1), slice(1, 2)):
        out = model(input_ids=ids[row], labels=labels[row], num_items_in_batch=kind(11))
        out.loss.backward()
        losses.append(out.loss.detach())
    torch.testing.assert_close(sum(losses), plain(input_ids=ids, labels=labels).loss.detach())
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_no_token_that_counts():
    _, model = pair()
    inputs = batch()
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    for items in (None, 0, 7):
        model.zero_grad()
        loss = model(**inputs, num_items_in_batch=items).loss
        loss.backward()
        assert loss == 0
        assert not model.lm_head.weight.grad.any()
        assert not model.model.layers[0].mlp.up_proj.weight.grad.any()


@pytest.mark.parametrize("keep", [3, torch.tensor([2, 5, 6, 9])], ids=["last", "chosen"])
def test_logits_to_keep(keep):
    plain, model = pair()
    inputs = batch()
    at = slice(-keep, None) if isinstance(keep, int) else keep.to(DEVICE)
    inputs["labels"] = inputs["labels"][:, at]
    keep = keep if isinstance(keep, int) else at
    theirs = plain(**inputs, logits_to_keep=keep)
    ours = model(**inputs, logits_to_keep=keep)
    torch.testing.assert_close(ours.loss, theirs.loss)
    kept = model(**inputs, logits_to_keep=keep, skip_logits=False).logits
    torch.testing.assert_close(kept, theirs.logits)


def test_the_kind_of_output():
    plain, model = pair()
    inputs = batch()
    asked = {"output_hidden_states": True, "use_cache": False, "something_unknown": 3}
    theirs, ours = plain(**inputs, **asked), model(**inputs, **asked)
    assert type(ours) is type(theirs)
    assert set(theirs) - set(ours) == {"logits"}
    for a, e in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        torch.testing.assert_close(a, e)
    theirs = plain(**inputs, **asked, return_dict=False)
    ours = model(**inputs, **asked, return_dict=False)
    assert isinstance(ours, tuple)
    assert len(ours) == len(theirs) - 1
    torch.testing.assert_close(ours[0], theirs[0])
    torch.testing.assert_close(model(**inputs, return_dict=None).loss, ours[0])


def test_by_position():
    plain, model = pair()
    inputs = batch()
    args = (inputs["input_ids"], inputs["attention_mask"], None, None, None, inputs["labels"])
    torch.testing.assert_close(model(*args).loss, plain(*args).loss)


def test_when_there_are_logits():
    plain, model = pair()
    inputs = batch()
    logits = plain(**inputs).logits
    assert model(**inputs).logits is None
    torch.testing.assert_close(model(**inputs, skip_logits=False).logits, logits)
    unlabelled = {k: v for k, v in inputs.items() if k != "labels"}
    torch.testing.assert_close(model(**unlabelled).logits, logits)
    with pytest.raises(ValueError, match="skip_logits=True needs labels or shift_labels"):
        model(**unlabelled, skip_logits=True)
    training = model(**inputs).loss
    model.eval()
    torch.testing.assert_close(model(**inputs).logits, logits)
    torch.testing.assert_close(model(**inputs).loss, training)
    skipped = model(**inputs, skip_logits=True)
    assert skipped.logits is None
    torch.testing.assert_close(skipped.loss, training)


def test_generation_after_training():
    plain, model = pair()
    model(**batch()).loss.backward()
    prompt = batch(rows=1, length=5)["input_ids"]
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    ours, theirs = model.generate(prompt, **settings), plain.generate(prompt, **settings)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("no_grad", [torch.no_grad, torch.inference_mode])
def test_without_gradients(no_grad):
    _, model = pair()
    inputs = batch()
    expected = model(**inputs).loss
    with no_grad():
        torch.testing.assert_close(model(**inputs).loss, expected)
    model.requires_grad_(False)
    loss = model(**inputs).loss
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected)


def test_the_cap_is_applied():
    plain, model = pair("gemma2", final_logit_softcapping=30.0, tie_word_embeddings=False)
    ids = batch()["input_ids"]
    labels = torch.full_like(ids, 3)
    with torch.no_grad():  # at every position logit 7 is 124 before the cap, and all others are 0
        for m in (plain, model):
            m.model.norm.forward = lambda x: torch.full_like(x, 124.0 / 64)
            m.lm_head.weight.zero_()
            m.lm_head.weight[7] = 1.0
    ours, theirs = model(input_ids=ids, labels=labels), plain(input_ids=ids, labels=labels)
    assert ours.logits is None
    torch.testing.assert_close(ours.loss.item(), 29.984634, rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.loss, theirs.loss)


@pytest.mark.parametrize("family", ["granite", "cohere", "phi", "gemma2"])
def test_a_bias_and_a_scale_together(family):
    plain, model = pair(family, tie_word_embeddings=False)
    bias = torch.randn(VOCAB, device=DEVICE)
    for m in (plain, model):
        m.lm_head.bias = torch.nn.Parameter(bias.clone())
    assert model(**batch()).logits is None
    assert_same(results(model, **batch()), results(plain, **batch()))


def test_a_transform_that_the_table_does_not_know_is_refused(monkeypatch):
    def forward(self, input_ids=None, labels=None, **kwargs):
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        return self.lm_head(hidden) * self.config.logit_scaling_factor

    monkeypatch.setattr(CohereForCausalLM, "forward", forward)
    report = torch_liger.apply_liger_kernel(made("cohere"))
    assert report.left_out["fused_linear_cross_entropy"] == (
        "its logits are changed by ['logit_scaling_factor'], not ['logit_scale']"
    )


@pytest.mark.parametrize("tied", [True, False])
def test_a_resized_vocabulary(tied):
    plain = made("llama", tie_word_embeddings=tied)
    plain.resize_token_embeddings(VOCAB + 7, mean_resizing=False)
    torch.nn.init.normal_(plain.lm_head.weight, std=0.2)
    first, second = twin(plain), made("llama", tie_word_embeddings=tied)
    torch_liger.apply_liger_kernel(first)
    torch_liger.apply_liger_kernel(second)
    second.resize_token_embeddings(VOCAB + 7, mean_resizing=False)
    second.load_state_dict(plain.state_dict())
    inputs = batch(vocab=VOCAB + 7)
    inputs["labels"][0, -1] = VOCAB + 6
    expected = results(plain, **inputs)
    for model in (first, second):
        assert model(**inputs).logits is None
        assert_same(results(model, **inputs), expected)
        model.config.vocab_size = VOCAB  # stale, as some trainers leave it
        torch.testing.assert_close(model(**inputs).loss, expected["loss"])


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    plain, model = pair()
    expected = results(plain, **batch())
    model.enable_input_require_grads()
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    assert model.model.layers[0].gradient_checkpointing
    assert_same(results(model, **batch()), expected)


def test_results_may_be_written_to():
    """What norm and rotary embedding return is no view of anything."""
    plain, model = pair()
    for m in (plain, model):
        for norm in (m.model.norm, m.model.layers[0].input_layernorm):
            norm.register_forward_hook(lambda module, args, y: y.add_(1.0))
    assert_same(results(model, **batch()), results(plain, **batch()))
    q, k = (torch.randn(1, 3, 2, 8, device=DEVICE, requires_grad=True) for _ in range(2))
    angle = torch.randn(3, 8, device=DEVICE)
    for tensor in torch_liger.rope(q, k, angle.cos(), angle.sin()):
        tensor.mul_(2.0).sum().backward()
    assert q.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [True, False])
def test_mixed_dtypes(dtype, head, autocast):
    plain, model = pair("llama", tie_word_embeddings=False)
    inputs = batch()
    for m in (plain, model):
        m.to(dtype)
        m.lm_head.to(head)
    if not autocast and dtype != head:  # plain refuses: what it would be in float32
        plain.float()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        loss, expected = model(**inputs).loss, plain(**inputs).loss
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected.float(), rtol=2e-2, atol=0)
    for parameter in model.parameters():
        assert parameter.grad.dtype == parameter.dtype


def test_a_loss_function_of_ones_own_is_kept(caplog):
    _, model = pair()
    model.loss_function = lambda logits, labels, **kwargs: logits.sum() * 0 + 42.0
    with caplog.at_level(logging.WARNING, logger="torch_liger"):
        assert model(**batch()).loss == 42.0
        model(**batch())
    assert caplog.messages == [
        "LlamaForCausalLM: the loss is computed from logits: the model has a loss function of "
        "its own"
    ]


def test_logits_are_not_written_to():
    """Another term of the loss reads the same logits after the cross-entropy."""
    plain, model = made("llama"), made("llama")
    torch_liger.apply_liger_kernel(model, cross_entropy=True, fused_linear_cross_entropy=False)
    gradients = []
    for m in (plain, model):
        out = m(**batch())
        before = out.logits.detach().clone()
        (out.loss + 0.1 * out.logits.square().mean()).backward()
        assert torch.equal(out.logits, before)
        gradients.append(m.lm_head.weight.grad)
    torch.testing.assert_close(*gradients)


def test_packed_documents():
    """Documents of 5, 1 and 3 tokens in one row, told apart by their positions."""
    model = made("llama", attention="sdpa", use_cache=False)
    torch_liger.apply_liger_kernel(model)
    ids = batch(rows=1, length=9)["input_ids"]
    lengths, losses = (5, 1, 3), []
    for document in ids.split(lengths, dim=1):
        if document.shape[1] > 1:
            losses.append(model(input_ids=document, labels=document, num_items_in_batch=1).loss)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(DEVICE)
    labels = ids.masked_fill(positions == 0, -100)
    packed = model(input_ids=ids, position_ids=positions, labels=labels, num_items_in_batch=1)
    torch.testing.assert_close(packed.loss, sum(losses))
