"""Adapters of the decoder: equal to PEFT's both ways, alone in training, and merged."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import peft
import pytest
import torch
from flax import nnx
from jax.extend.core import jaxprs_in_params
from safetensors.torch import load_file, save_file

import model_cases
from jax_liger.models import (
    LoRAParam,
    add_lora,
    from_pretrained,
    load_adapters,
    loss_fn,
    merge_lora,
    save_adapters,
    save_pretrained,
)
from jax_liger.models.lora import LoRALinear, adapters
from model_cases import CASES, relative

# transformers deprecates what PEFT asks for.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
BATCH = {"input_ids": model_cases.tokens(2, 12)}
# Biases and grouped heads; a family's fused projections; experts, of which PEFT's names differ.
NAMES = ["qwen2", "phi3", "qwen3 moe"]
WAYS = {
    "lora": {},
    "rslora": dict(use_rslora=True),
    "dora": dict(use_dora=True),
    "patterns": dict(rank_pattern={"o_proj": 2}, alpha_pattern={"o_proj": 3, "layers.1.mlp.*": 5}),
}
OURS = {"lora": {}, "rslora": dict(rslora=True), "dora": dict(dora=True)}


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A checkpoint of a case."""

    @functools.cache
    def make(name, **config):
        folder = tmp_path_factory.mktemp("checkpoint")
        case = CASES[name]
        model_cases.checkpoint(model_cases.Case(case.model_type, case.config | config), folder)
        return folder

    return make


def randomised(model):
    """Every adapter random: at first they change nothing."""
    for path, param in nnx.to_flat_state(nnx.state(model, LoRAParam)):
        key = jax.random.key(sum(map(ord, str(path))))
        noise = 0.1 * jax.random.normal(key, param.shape, param.dtype)
        param[...] = param[...] * (1.0 + 3.0 * noise) if path[-1] == "magnitude" else noise
    return model


def theirs(folder, **settings):
    """PEFT's model, with every adapter random."""
    model = peft.get_peft_model(
        model_cases.loads_cleanly(folder),
        peft.LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "lora_alpha": 6} | settings),
    )
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1.0 + 0.3 * torch.randn(parameter.shape))
            elif "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape))
    return model.eval()


def loss_and_gradients(model):
    return nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, LoRAParam))(model, BATCH)


def gradients_of(model):
    """The adapters' gradients, by paths."""
    _, grads = model_cases.quick_jit(loss_and_gradients)(model)
    return {".".join(map(str, path)): grad[...] for path, grad in nnx.to_flat_state(grads)}


def assert_same_logits(ours, model, base=None):
    want = model_cases.hf_logits(model, BATCH["input_ids"])
    assert relative(ours(BATCH["input_ids"]), want).max() < 1e-5
    if base is not None:  # and the adapters change much of them
        assert relative(base(BATCH["input_ids"]), want).max() > 1e-2


@pytest.mark.parametrize(
    ("name", "way"),
    [*((name, "lora") for name in NAMES), *(("qwen2", way) for way in list(WAYS)[1:])],
)
def test_adapters_that_peft_has_saved(folder_of, tmp_path, name, way):
    folder = folder_of(name)
    targets = ["q_proj", "o_proj"] if "moe" in name else "all-linear"
    model = theirs(folder, target_modules=targets, **WAYS[way])
    model.save_pretrained(tmp_path)
    ours = from_pretrained(folder)
    assert load_adapters(ours, tmp_path)
    assert_same_logits(ours, model, from_pretrained(folder))

    # The gradients of every adapter, and back into files that hold the same numbers.
    ids = torch.as_tensor(BATCH["input_ids"], dtype=torch.long)
    model.train()(input_ids=ids, labels=ids).loss.backward()
    grads = gradients_of(ours)
    assert len(grads) == sum(p.requires_grad for p in model.parameters())
    for path, grad in grads.items():
        layer, kind = path.rsplit(".", 1)
        their = {"lora_a": "lora_A", "lora_b": "lora_B", "magnitude": "lora_magnitude_vector"}[kind]
        want = model.get_parameter(f"base_model.model.{layer}.{their}.default.weight").grad.numpy()
        np.testing.assert_allclose(grad.T, want, rtol=0, atol=2e-5 * np.abs(want).max())

    save_adapters(ours, tmp_path / "again")
    a, b = (load_file(f / "adapter_model.safetensors") for f in (tmp_path / "again", tmp_path))
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize(
    ("name", "way", "targets"),
    [
        ("qwen2", "lora", "all-linear"),
        ("qwen2", "lora", ("q_proj", "layers.1.mlp.up_proj")),
        ("qwen2", "rslora", r".*\.0\..*_proj"),
        ("llama 3, square, with biases", "dora", ("v_proj", "down_proj")),
        ("phi3", "lora", ("qkv_proj", "gate_up_proj")),
        ("qwen3 moe", "lora", "all-linear"),
    ],
)
def test_peft_loads_what_we_save(folder_of, tmp_path, name, way, targets):
    ours = from_pretrained(folder_of(name))
    names = add_lora(ours, rank=3, alpha=5.0, targets=targets, rngs=nnx.Rngs(0), **OURS[way])
    save_adapters(randomised(ours), tmp_path)
    model = peft.PeftModel.from_pretrained(model_cases.loads_cleanly(folder_of(name)), tmp_path)
    found = {n for n, m in model.get_base_model().named_modules() if hasattr(m, "lora_A")}
    assert found == set(names)  # and no other
    assert_same_logits(ours, model.eval(), from_pretrained(folder_of(name)))


@pytest.mark.parametrize("way", OURS)
def test_fused_projections_of_a_split_checkpoint(folder_of, tmp_path, way):
    """One lora_a for q, k and v: PEFT gets three adapters that share it, and we take them back."""
    folder = folder_of("qwen2")
    ours = from_pretrained(folder, fused_projections=True)
    add_lora(
        ours, rank=3, alpha=5.0, targets=("qkv_proj", "gate_up_proj"), rngs=nnx.Rngs(0), **OURS[way]
    )
    save_adapters(randomised(ours), tmp_path)
    model = peft.PeftModel.from_pretrained(model_cases.loads_cleanly(folder), tmp_path)
    assert_same_logits(ours, model.eval(), from_pretrained(folder))
    for fused in (True, False):
        again = from_pretrained(folder, fused_projections=fused)
        assert any("qkv_proj" in path for path in load_adapters(again, tmp_path)) == fused
        assert_same_logits(again, model)

    theirs(folder, target_modules=["q_proj", "k_proj", "v_proj"]).save_pretrained(tmp_path / "own")
    with pytest.raises(ValueError, match="theirs differ; load the model with fused_projections=F"):
        load_adapters(from_pretrained(folder, fused_projections=True), tmp_path / "own")


@pytest.mark.parametrize("way", OURS)
def test_merged_equals_unmerged(folder_of, tmp_path, way):
    folder = folder_of("llama 3, square, with biases")
    model, base = from_pretrained(folder), from_pretrained(folder)
    plain = nnx.graphdef(base)
    names = add_lora(model, rank=4, alpha=8, rngs=nnx.Rngs(0), **OURS[way])
    ids = BATCH["input_ids"]
    assert relative(model(ids), base(ids)).max() < 1e-6  # they begin without an effect
    want = randomised(model)(ids)
    assert relative(base(ids), want).max() > 1e-2
    with pytest.raises(ValueError, match=r"unexpected .*lora_a"):
        save_pretrained(model, tmp_path)
    assert merge_lora(model) == names and not adapters(model)
    assert relative(model(ids), want).max() < 1e-5
    save_pretrained(model, tmp_path)
    assert_same_logits(model, model_cases.loads_cleanly(tmp_path))
    assert str(nnx.graphdef(model)) == str(plain)


def test_the_scaling(folder_of):
    """What an adapter adds, with rank 16: alpha / 16, and alpha / 4 for rank-stabilised LoRA."""
    x = jnp.ones((1, 64))
    for rslora, scaling in ((False, 2.0 / 16), (True, 2.0 / 4)):
        model = from_pretrained(folder_of("qwen2"))
        kernel = model.model.layers[0].mlp.up_proj(x)
        add_lora(model, rank=16, alpha=2.0, rslora=rslora, rngs=nnx.Rngs(0))
        layer = randomised(model).model.layers[0].mlp.up_proj
        want = scaling * x @ layer.lora_a[...] @ layer.lora_b[...]
        np.testing.assert_allclose(layer(x) - kernel, want, atol=1e-5)


def shapes_computed(jaxpr):
    """Of all results in a jaxpr and those within it."""
    for equation in jaxpr.eqns:
        yield from (var.aval.shape for var in equation.outvars if hasattr(var.aval, "shape"))
        for inner in jaxprs_in_params(equation.params):
            yield from shapes_computed(inner)


def test_nothing_is_computed_for_the_base(folder_of):
    model = from_pretrained(folder_of("qwen2"), remat="cheap")
    kernels = {a.shape for a in model_cases.parameters(model).values() if a.ndim == 2}
    add_lora(model, rank=3, alpha=6, rngs=nnx.Rngs(0))
    assert len(kernels) >= 4
    graphdef, trained, rest = nnx.split(model, LoRAParam, ...)

    def loss(trained, rest):
        return loss_fn(nnx.merge(graphdef, trained, rest, copy=True), BATCH)

    # The whole of it, as a check that such products would be seen, then the adapters alone.
    every = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(trained, rest)
    alone = jax.make_jaxpr(jax.grad(loss))(trained, rest)
    matrices = kernels - {(97, 64), (64, 97)}  # the tied or untied head's layout is not copied
    assert matrices <= set(shapes_computed(every.jaxpr))
    assert not kernels & set(shapes_computed(alone.jaxpr))

    grads = gradients_of(model)
    assert len(grads) == 2 * 7 * 2 and all(p.endswith(("lora_a", "lora_b")) for p in grads)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=LoRAParam)
    moments = [a for a in jax.tree.leaves(nnx.state(optimizer)) if a.ndim == 2]
    assert len(moments) == 2 * len(grads) and all(3 in array.shape for array in moments)


@pytest.mark.parametrize(
    "settings", [dict(dropout=0.1, targets=["q_proj", "down_proj"]), dict(dora=True)]
)
def test_training(folder_of, settings):
    """The loss falls, by the adapters alone; dropout has other elements at every step."""
    remat = "full" if "dropout" in settings else "activation"
    model = from_pretrained(folder_of("qwen2", num_hidden_layers=1), remat=remat)
    before = model_cases.parameters(model)
    add_lora(model, rank=4, alpha=8, rngs=nnx.Rngs(0), **settings)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=LoRAParam)

    @model_cases.quick_jit
    def step(model, optimizer):
        loss, grads = loss_and_gradients(model)
        optimizer.update(model, grads)
        return loss, model, optimizer

    losses = []
    for _ in range(12):
        loss, model, optimizer = step(model, optimizer)
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]
    after = model_cases.parameters(model)
    assert all(np.array_equal(after[path], before[path]) for path in before)

    if "dropout" in settings:

        def twice(model):
            return [loss_fn(model, BATCH) for _ in range(2)]

        first, second = model_cases.quick_jit(twice)(model)
        assert first != second
        model.eval()
        first, second = model_cases.quick_jit(twice)(model)
        assert first == second


def test_mixed_precision_and_dtypes(folder_of, tmp_path):
    """Adapters in float32 by a model in bfloat16, kept bit for bit in files."""
    model = from_pretrained(folder_of("qwen2"), dtype="bfloat16")
    add_lora(model, rank=4, alpha=8, targets=["up_proj"], rngs=nnx.Rngs(0))
    save_adapters(randomised(model), tmp_path)
    assert model(BATCH["input_ids"]).dtype == jnp.bfloat16
    layer = model.model.layers[0].mlp.up_proj
    text = str(jax.make_jaxpr(lambda x: layer(x))(jnp.ones((2, 64), jnp.bfloat16)))
    assert re.findall(r"(\w+)\[[\d,]*\] = dot_general", text) == ["bf16"] * 3
    for dtype in (None, "bfloat16"):
        again = from_pretrained(folder_of("qwen2"), dtype="bfloat16")
        load_adapters(again, tmp_path, param_dtype=dtype)
        got = again.model.layers[0].mlp.up_proj.lora_b[...]
        np.testing.assert_array_equal(got, layer.lora_b[...].astype(dtype or "float32"))


def test_dropout_of_the_file(folder_of, tmp_path):
    theirs(folder_of("qwen2"), target_modules=["q_proj"], lora_dropout=0.25).save_pretrained(
        tmp_path
    )
    for rngs, want in ((None, 0.0), (nnx.Rngs(0), 0.25)):
        model = from_pretrained(folder_of("qwen2"))
        load_adapters(model, tmp_path, rngs=rngs)
        assert {layer.dropout for layer in adapters(model).values()} == {want}
    with pytest.raises(ValueError, match="rngs must be given where dropout is above 0"):
        load_adapters(from_pretrained(folder_of("qwen2")), tmp_path, dropout=0.1)


def test_errors_of_add_lora(folder_of):
    model = from_pretrained(folder_of("qwen3 moe"))
    add = functools.partial(add_lora, model, alpha=1, rngs=nnx.Rngs(0))
    known = "'q_proj', 'k_proj', 'v_proj', 'o_proj'"
    for targets, got in (
        (["q_proj", "query"], "'query'"),
        (["lm_head"], "'lm_head'"),
        (["router"], "'router'"),
        (["gate_proj"], "'gate_proj'"),  # PEFT means the experts
        ("q_proj", "'q_proj'"),  # an expression for a whole path
        (["_proj"], "'_proj'"),
        ([], "none"),
    ):
        with pytest.raises(ValueError) as error:
            add(rank=4, targets=targets)
        assert all(name in str(error.value) for name in known.split(", "))
        assert str(error.value).endswith(f"got {got}")
    with pytest.raises(ValueError, match="rank must be at least 1; got 0"):
        add(rank=0)
    with pytest.raises(ValueError, match=r"dropout must be 0 with dora=True; got 0\.1"):
        add(rank=4, dora=True, dropout=0.1)
    with pytest.raises(ValueError, match=r"dropout_p .* 1.0"):
        add(rank=4, dropout=1.0)
    assert not adapters(model)
    add(rank=4, targets=["q_proj"])
    with pytest.raises(ValueError, match=r"q_proj has an adapter already, of rank 4"):
        add(rank=2)
    assert len(adapters(model)) == 2
    assert isinstance(model.model.layers[1].self_attn.q_proj, LoRALinear)


def test_errors_of_files(folder_of, tmp_path):
    folder = folder_of("qwen2")
    model = from_pretrained(folder)
    with pytest.raises(ValueError, match="the model has no adapters"):
        save_adapters(model, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no adapter_config\.json"):
        load_adapters(model, tmp_path)
    theirs(folder, target_modules=["q_proj", "up_proj"]).save_pretrained(tmp_path)
    path, file = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    settings, tensors = json.loads(path.read_text()), load_file(file)

    for field, value in (
        ("peft_type", "IA3"),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("init_lora_weights", "pissa"),
        ("lora_bias", True),
        ("a_new_field", 1),
    ):
        path.write_text(json.dumps(settings | {field: value}))
        with pytest.raises(ValueError, match=f"not supported: {{'{field}': "):
            load_adapters(model, tmp_path)
    path.write_text(json.dumps(settings))

    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    save_file({k: v for k, v in tensors.items() if k != key}, file)
    with pytest.raises(ValueError, match=f"q_proj needs '{key}' as well"):
        load_adapters(model, tmp_path)
    save_file(tensors | {key: tensors[key][:-1].contiguous()}, file)
    with pytest.raises(ValueError, match=r"kernel of shape \(64, 128\); got .*\(127, 4\)"):
        load_adapters(model, tmp_path)
    save_file(tensors | {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}, file)
    with pytest.raises(ValueError, match=r"lm_head\.lora_A\.weight"):
        load_adapters(model, tmp_path)
    assert not adapters(model)
    save_file(tensors, file)
    load_adapters(model, tmp_path)
    with pytest.raises(ValueError, match="the model has adapters already"):
        load_adapters(model, tmp_path)

    # A part of a projection that the family's checkpoints have fused.
    split = from_pretrained(folder_of("phi3"), fused_projections=False)
    add_lora(split, rank=4, alpha=1, targets=["q_proj"], rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="make the model with fused_projections=True"):
        save_adapters(split, tmp_path)
