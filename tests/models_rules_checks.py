"""Run by test_models_rules.py in a process of its own, with four devices.

Prints one line a check: its name, then "ok" or what went wrong.
"""

import os
import re
import sys
import tempfile
import traceback
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["PALLAS_INTERPRET"] = "1"

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import model_cases
from jax_liger.models import LoRAParam, add_lora, from_pretrained, loss_fn
from jax_liger.models.mesh import lookup
from jax_liger.models.sharding import batch_sharding, make_mesh, rules_for, shard

T = 61  # in no other size
SIZES = dict(num_hidden_layers=1, vocab_size=96)
BATCH = {"input_ids": model_cases.tokens(8, T, vocab=96)}
MESH = make_mesh(fsdp=2, tensor=2)
COLLECTIVES = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"


def saved(name, **settings):
    """A folder with a checkpoint, and our model of it on one device."""
    case = model_cases.CASES[name]
    folder = Path(tempfile.mkdtemp())
    model_cases.checkpoint(model_cases.Case(case.model_type, case.config | SIZES), folder)
    return folder, from_pretrained(folder, **settings)


def of_vocab(model, batch):
    return loss_fn(model, batch, vocab_mesh_axis="tensor")


def on_mesh(function, model, mesh=MESH):
    """The function's results, and the collectives of its compiled text: names and shapes."""
    batch = jax.device_put(BATCH, batch_sharding(mesh))
    with jax.set_mesh(mesh):
        compiled = model_cases.quick_jit(function).lower(model, batch).compile()
        found = []
        for line in compiled.as_text().splitlines():
            match = re.search(rf"= (.*?) ({COLLECTIVES})(?:-start)?\(", line)
            if match:
                operation = re.search(r'op_name="(.*?)"', line)
                shapes = re.findall(r"\w+\[([\d,]*)\]", match[1])
                found += [(match[2], shape, operation[1] if operation else "") for shape in shapes]
        return compiled(model, batch), found


def the_rules():
    folder, _ = saved("qwen2")
    model = from_pretrained(folder, mesh=MESH, rules=rules_for(MESH))
    specs = {p: a.sharding.spec for p, a in model_cases.parameters(model).items()}
    layer = "model.layers.0."
    assert specs == {
        "model.embed_tokens.embedding": P("tensor", "fsdp"),
        layer + "input_layernorm.scale": P(),
        layer + "post_attention_layernorm.scale": P(),
        **{layer + f"self_attn.{n}_proj.kernel": P("fsdp", "tensor") for n in "qkv"},
        **{layer + f"self_attn.{n}_proj.bias": P("tensor") for n in "qkv"},
        layer + "self_attn.o_proj.kernel": P("tensor", "fsdp"),
        **{layer + f"mlp.{n}_proj.kernel": P("fsdp", "tensor") for n in ("gate", "up")},
        layer + "mlp.down_proj.kernel": P("tensor", "fsdp"),
        "model.norm.scale": P(),
        "lm_head.kernel": P("fsdp", "tensor"),
    }, specs
    # The same for a model that is there already, and what does not fit is not split.
    other = from_pretrained(folder)
    shard(other, MESH)
    assert specs == {p: a.sharding.spec for p, a in model_cases.parameters(other).items()}
    four = rules_for(make_mesh(tensor=4))
    assert four("lm_head.kernel", (64, 97)) == P("fsdp", None)
    assert four("model.embed_tokens.embedding", (96, 64)) == P("tensor", "fsdp")
    assert rules_for(jax.make_mesh((4,), ("fsdp",)))("lm_head.kernel", (64, 96)) == P("fsdp", None)


def the_loss_and_gradients_of_one_device():
    for name, mesh in (
        ("qwen2", MESH),
        ("llama 3, square, with biases", MESH),  # a tied head
        ("phi3", MESH),  # fused projections
        ("mixtral", MESH),
        ("qwen2", make_mesh(data=2, fsdp=2)),
        ("qwen2", make_mesh(tensor=4)),
    ):
        folder, alone = saved(name, implementation="xla")
        want = model_cases.gradients(alone, BATCH)
        model = from_pretrained(folder, mesh=mesh, rules=rules_for(mesh), implementation="xla")
        function = of_vocab if mesh.shape["tensor"] > 1 else loss_fn
        got, _ = on_mesh(jax.value_and_grad(function), model, mesh)
        model_cases.assert_close(got, want, 1e-4)


def the_kernels_gather_no_activation():
    folder, alone = saved("qwen3", implementation="xla")
    want = model_cases.gradients(alone, BATCH)
    model = from_pretrained(folder, mesh=MESH, rules=rules_for(MESH), implementation="pallas")
    got, found = on_mesh(jax.value_and_grad(loss_fn), model)
    model_cases.assert_close(got, want, 1e-4)
    # A device has 4 of 8 rows of T tokens, and 96 / 2 classes; the MLP's features differ.
    tokens, others = {str(T), str(4 * T), str(8 * T)}, []
    for kind, shape, operation in found:
        sizes = set(shape.split(","))
        assert not {"96", "48"} & sizes or not tokens & sizes, "logits crossed devices"
        if kind != "all-reduce" and "custom_partitioning" in operation:
            assert (kind, shape) == ("all-gather", "48,64"), shape  # the head's classes, over fsdp
        elif kind != "all-reduce" and tokens & sizes:
            others.append((kind, shape, operation))
    # Activations are summed behind products that are split over tensor, and the lookup; and only
    # the lookup's gradient moves anything else: the ids, and rows to where their features are.
    summed = [shape for kind, shape, _ in found if kind == "all-reduce" and f",{T}," in shape]
    assert summed and set(summed) == {f"4,{T},64"} and len(summed) <= 8, summed
    assert {shape for kind, shape, _ in others if kind == "all-gather"} <= {f"8,{T},1"}, others
    assert all(o.endswith("transpose(jvp())/shard_map/scatter-add") for _, _, o in others), others
    # Parameters are gathered from fsdp.
    assert {"64,64", "64,32"} <= {shape for kind, shape, _ in found if kind == "all-gather"}


def adapters_train_in_shards():
    folder, alone = saved("qwen2", implementation="xla")
    losses = []
    for mesh in (None, MESH):
        model = alone
        if mesh is not None:
            model = from_pretrained(folder, mesh=mesh, rules=rules_for(mesh), implementation="xla")
        add_lora(model, rank=4, alpha=8, targets=["up_proj", "o_proj"], rngs=nnx.Rngs(0))
        if mesh is not None:
            mlp, attention = model.model.layers[0].mlp, model.model.layers[0].self_attn
            specs = [
                p[...].sharding.spec
                for layer in (mlp.up_proj, attention.o_proj)
                for p in (layer.lora_a, layer.lora_b)
            ]
            assert specs == [P("fsdp", None), P(None, "tensor"), P("tensor", None), P(None, "fsdp")]
            before = specs
            shard(model, mesh)  # says the same
            assert before == [
                p[...].sharding.spec
                for layer in (mlp.up_proj, attention.o_proj)
                for p in (layer.lora_a, layer.lora_b)
            ]
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=LoRAParam)

        @model_cases.quick_jit
        def step(model, optimizer, batch):
            grad = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, LoRAParam))
            loss, grads = grad(model, batch)
            optimizer.update(model, grads)
            return loss, model, optimizer

        batch = BATCH if mesh is None else jax.device_put(BATCH, batch_sharding(mesh))
        losses.append([])
        for _ in range(3):
            loss, model, optimizer = step(model, optimizer, batch)
            losses[-1].append(float(loss))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    assert losses[0][2] < losses[0][0]


def a_lookup_in_a_split_table():
    """Bit for bit what one device looks up, in bfloat16 too; NaN for what is no class."""
    folder, _ = saved("qwen2")
    for dtype in ("float32", "bfloat16"):
        table = from_pretrained(folder, mesh=MESH, rules=rules_for(MESH), dtype=dtype).model
        ids = BATCH["input_ids"].copy()
        want = np.array(table.embed_tokens(ids), np.float32)
        ids[0, 0], want[0, 0] = 96, np.nan
        with jax.set_mesh(MESH):
            got = jax.jit(lookup)(table.embed_tokens, jax.device_put(ids, batch_sharding(MESH)))
        assert got.dtype == dtype
        np.testing.assert_array_equal(np.asarray(got, np.float32), want)


CHECKS = {
    "a_lookup_in_a_split_table": a_lookup_in_a_split_table,
    "the_rules": the_rules,
    "the_loss_and_gradients_of_one_device": the_loss_and_gradients_of_one_device,
    "the_kernels_gather_no_activation": the_kernels_gather_no_activation,
    "adapters_train_in_shards": adapters_train_in_shards,
}


def main():
    chosen = sys.argv[1:] or CHECKS
    for name in chosen:
        try:
            with jax.default_matmul_precision("highest"):
                CHECKS[name]()
            print(name, "ok", flush=True)
        except Exception:
            print(name, traceback.format_exc().replace("\n", " | ")[-1500:], flush=True)


if __name__ == "__main__":
    sys.exit(main())
