"""Run by test_models_sharding.py in a process of its own, with four devices.

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
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import model_cases
from jax_liger.models import checkpoint, from_pretrained, loss_fn, save_pretrained

MESH = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
RULES = (
    (r".*\.embedding", P("tensor", "fsdp")),
    (r".*\.experts\..*\.kernel", P("tensor", "fsdp", None)),
    (r".*\.(o_proj|down_proj)\.kernel", P("tensor", "fsdp")),
    (r".*(_proj|lm_head)\.kernel", P("fsdp", "tensor")),
    (r".*", P()),
)
SIZES = dict(num_hidden_layers=1, vocab_size=96)  # an even number of classes
BATCH = {"input_ids": model_cases.tokens(4, 12, vocab=96)}


def rules(path, shape):
    return next(spec for pattern, spec in RULES if re.fullmatch(pattern, path))


def saved(name, **settings):
    """A folder with a checkpoint, and our model of it on one device."""
    case = model_cases.Case(
        model_cases.CASES[name].model_type, model_cases.CASES[name].config | SIZES
    )
    folder = Path(tempfile.mkdtemp())
    model_cases.checkpoint(case, folder)
    return folder, from_pretrained(folder, **settings)


def on_mesh(function, model, batch, spec):
    """The function's results and its compiled text, with the batch's rows split as `spec` says."""
    batch = jax.device_put(batch, NamedSharding(MESH, spec))
    compiled = jax.jit(function).lower(model, batch).compile()
    return compiled(model, batch), compiled.as_text()


def loaded_into_its_shards():
    read = checkpoint._Assembled.part
    parts = []

    def recorded(self, index):
        parts.append(read(self, index))
        return parts[-1]

    checkpoint._Assembled.part = recorded
    for name in ("qwen3", "phi3", "mixtral"):
        folder, _ = saved(name)
        for settings in ({}, {"fused_projections": name != "phi3"}):
            parts.clear()
            model = from_pretrained(folder, mesh=MESH, rules=rules, **settings)
            shards = [array.addressable_shards[0].data for array in jax.tree.leaves(model)]
            # What is read from the files at one time is never more than the largest shard.
            assert max(part.size for part in parts) == max(shard.size for shard in shards)
            split = 0
            for path, array in model_cases.parameters(model).items():
                assert array.sharding == NamedSharding(MESH, rules(path, array.shape)), path
                split += array.addressable_shards[0].data.size < array.size
            assert split >= 5, split
            again = Path(tempfile.mkdtemp())
            save_pretrained(model, again)
            model_cases.assert_same_files(again, folder)


def the_loss_and_gradients_of_one_device():
    for name in ("llama", "mixtral"):
        folder, alone = saved(name, implementation="xla")
        want = jax.value_and_grad(loss_fn)(alone, BATCH)
        model = from_pretrained(folder, mesh=MESH, rules=rules, implementation="xla")
        got, _ = on_mesh(jax.value_and_grad(loss_fn), model, BATCH, P("fsdp"))
        model_cases.assert_close(got, want, 1e-4)


def the_kernels_on_split_rows_gather_nothing(**settings):
    folder, alone = saved("qwen3", implementation="xla")
    want = jax.value_and_grad(loss_fn)(alone, BATCH)
    model = from_pretrained(folder, mesh=MESH, implementation="pallas", **settings)
    got, text = on_mesh(jax.value_and_grad(loss_fn), model, BATCH, P(("fsdp", "tensor")))
    model_cases.assert_close(got, want, 1e-4)
    assert "all-gather" not in text, re.findall(r".*all-gather.*", text)[:4]
    assert "all-reduce" in text  # of the gradients, once


def nor_does_the_one_before_attention():
    the_kernels_on_split_rows_gather_nothing(fused_qkv=True)


CHECKS = {
    "loaded_into_its_shards": loaded_into_its_shards,
    "the_loss_and_gradients_of_one_device": the_loss_and_gradients_of_one_device,
    "the_kernels_on_split_rows_gather_nothing": the_kernels_on_split_rows_gather_nothing,
    "nor_does_the_one_before_attention": nor_does_the_one_before_attention,
}


def main():
    for name, check in CHECKS.items():
        try:
            with jax.default_matmul_precision("highest"):
                check()
            print(name, "ok")
        except Exception:
            print(name, traceback.format_exc().replace("\n", " | ")[-1500:])


if __name__ == "__main__":
    sys.exit(main())
