"""The CUDA lowering gate: every kernel lowers for a GPU on a machine without one.

Interpret mode accepts what a GPU rejects (sizes that are no power of two, slices in a kernel), so
passing there is no evidence. Runs with jax alone.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jax_liger
from jax_liger import models
from liger_ops import backend_pallas
from liger_ops.cross_entropy.cases import EVERYTHING


def shapes(*dims, dtype):
    return [jax.ShapeDtypeStruct(dim, dtype) for dim in dims]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "rows, dim", [(1, 1), (7, 15), (33, 80), (64, 768), (8, 4096), (5, 9000), (3, 65536)]
)
@pytest.mark.parametrize("casting_mode", ["llama", "gemma"])
def test_rms_norm(rows, dim, dtype, casting_mode):
    norm = functools.partial(jax_liger.rms_norm, implementation="pallas", casting_mode=casting_mode)
    args = shapes((rows, dim), (dim,), dtype=dtype)
    forward = backend_pallas.lower_to_cuda(norm, *args)
    assert backend_pallas.is_triton_call(forward)
    backward = jax.grad(lambda x, w: jnp.sum(norm(x, w)).astype(jnp.float32), (0, 1))
    assert backend_pallas.is_triton_call(backend_pallas.lower_to_cuda(backward, *args))


@pytest.mark.parametrize("dim", [768, 16384, 20000])
def test_fused_add_rms_norm_and_vmap(dim):
    fused = functools.partial(jax_liger.fused_add_rms_norm, implementation="pallas")

    def loss(x, residual, weight):
        y, h = fused(x, residual, weight)
        return jnp.sum(y).astype(jnp.float32) + jnp.sum(h).astype(jnp.float32)

    args = shapes((8, dim), (8, dim), (dim,), dtype=jnp.bfloat16)
    gradients = jax.grad(loss, (0, 1, 2))
    assert backend_pallas.is_triton_call(backend_pallas.lower_to_cuda(gradients, *args))
    batched = shapes((2, 8, dim), (2, 8, dim), (dim,), dtype=jnp.bfloat16)
    text = backend_pallas.lower_to_cuda(jax.vmap(gradients, (0, 0, None)), *batched)
    assert backend_pallas.is_triton_call(text)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "rows, dim", [(1, 1), (7, 15), (33, 80), (64, 768), (8, 4096), (5, 9000), (3, 65536)]
)
def test_layer_norm_and_vmap(rows, dim, dtype):
    norm = functools.partial(jax_liger.layer_norm, implementation="pallas")
    args = shapes((rows, dim), (dim,), (dim,), dtype=dtype)
    assert backend_pallas.is_triton_call(backend_pallas.lower_to_cuda(norm, *args))
    assert backend_pallas.is_triton_call(backend_pallas.lower_to_cuda(norm, args[0]))

    def loss(*a):
        return jnp.sum(norm(*a)).astype(jnp.float32)

    for argnums in ((0, 1, 2), (2,)):
        gradients = jax.grad(loss, argnums)
        assert backend_pallas.is_triton_call(backend_pallas.lower_to_cuda(gradients, *args))
    batched = shapes((2, rows, dim), dtype=dtype)
    text = backend_pallas.lower_to_cuda(
        jax.vmap(jax.grad(loss, (0, 1, 2)), (0, None, None)), *batched, *args[1:]
    )
    assert backend_pallas.is_triton_call(text)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rows, dim", [(1, 1), (7, 15), (33, 80), (8, 2048), (5, 14336)])
@pytest.mark.parametrize("fused", [False, True])
def test_swiglu_and_geglu(rows, dim, dtype, fused):
    args = (
        shapes((rows, 2 * dim), dtype=dtype) if fused else shapes(*[(rows, dim)] * 2, dtype=dtype)
    )
    ops = [
        jax_liger.swiglu,
        jax_liger.geglu,
        functools.partial(jax_liger.geglu, approximate="none"),
    ]
    for op in ops:
        gated = functools.partial(op, implementation="pallas")
        assert backend_pallas.is_triton_call(backend_pallas.lower_to_cuda(gated, *args))
        argnums = tuple(range(len(args)))
        backward = jax.grad(lambda *a: jnp.sum(gated(*a)).astype(jnp.float32), argnums)  # noqa: B023
        assert backend_pallas.is_triton_call(backend_pallas.lower_to_cuda(backward, *args))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rows, classes", [(1, 1), (7, 15), (33, 50257), (8, 128256)])
@pytest.mark.parametrize("everything", [False, True])
def test_cross_entropy(rows, classes, dtype, everything):
    logits, labels = shapes((rows, classes), dtype=dtype)[0], shapes((rows,), dtype="int32")[0]
    settings = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 30.0} if everything else {}

    def loss(x, y):
        weight = jnp.arange(classes, dtype=jnp.float32) if everything else None
        loss, metrics = jax_liger.cross_entropy(
            x, y, class_weight=weight, return_metrics=True, implementation="pallas", **settings
        )
        return loss, metrics.predicted_tokens

    gradients = jax.value_and_grad(loss, has_aux=True)
    text = backend_pallas.lower_to_cuda(gradients, logits, labels)
    assert backend_pallas.is_triton_call(text)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("heads, kv_heads, size, rotary_dim", [
    (32, 8, 128, 128), (28, 4, 80, 32), (71, 1, 64, 64), (9, 3, 96, 40), (1, 1, 7, 6),
])  # fmt: skip
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rope(heads, kv_heads, size, rotary_dim, dtype, layout):
    rope = functools.partial(jax_liger.rope, layout=layout, implementation="pallas")

    def total(*arrays):
        return sum(jnp.sum(y).astype(jnp.float32) for y in rope(*arrays))

    inputs = shapes((2, 5, heads, size), (2, 5, kv_heads, size), dtype=dtype)
    inputs += shapes((2, 5, rotary_dim), (2, 5, rotary_dim), dtype=jnp.float32)
    for fn in (rope, jax.grad(total, (0, 1)), jax.grad(total, 1)):
        assert backend_pallas.is_triton_call(backend_pallas.lower_to_cuda(fn, *inputs))
    batched = shapes((3, 2, 5, heads, size), dtype=dtype)
    text = backend_pallas.lower_to_cuda(
        jax.vmap(rope, (0, None, None, None)), *batched, *inputs[1:]
    )
    assert backend_pallas.is_triton_call(text)


FUSED_LINEAR = functools.partial(
    jax_liger.fused_linear_cross_entropy, label_smoothing=0.1, z_loss=1e-3, softcap=30.0,
    logit_scale=0.5, implementation="pallas",
)  # fmt: skip
# So many bytes that 700 rows are taken in one, in parts, and the weight's gradient in blocks.
PLANS = {"kept": "fast", "parts": 128 * 1000 * 4 + 1000 * 64 * 4, "blocks": 128 * 1000 * 2}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_fused_linear_cross_entropy(vocab_axis, reduction, plan, dtype):
    def loss(hidden, weight, bias, labels):
        losses = FUSED_LINEAR(
            hidden, weight, labels, bias=bias, class_weight=jnp.arange(1000.0), reduction=reduction,
            memory=PLANS[plan], vocab_axis=vocab_axis,
        )  # fmt: skip
        return jnp.sum(losses)

    head = (1000, 64) if vocab_axis == 0 else (64, 1000)
    args = shapes((700, 64), head, dtype=dtype) + shapes((1000,), dtype="float32")
    args += shapes((700,), dtype="int32")
    for fn in (loss, jax.grad(loss, (0, 1, 2)), jax.grad(loss, 0)):
        text = backend_pallas.lower_to_cuda(fn, *args)
        assert backend_pallas.is_triton_call(text)
        assert "stablehlo.transpose" not in text  # the weight is taken as it lies


@pytest.mark.parametrize("plan", PLANS)
def test_fused_linear_cross_entropy_under_a_checked_shard_map(plan):
    device = jax.sharding.AbstractDevice("NVIDIA H200", 132, "cuda")
    mesh = jax.sharding.AbstractMesh(
        (2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device
    )
    rows, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()

    def gradients(hidden, weight, bias, labels):
        loss = lambda h, w, b: FUSED_LINEAR(  # noqa: E731
            h, w, labels, bias=b, reduction="sum", memory=PLANS[plan]
        )
        return jax.grad(loss, (0, 1, 2))(hidden, weight, bias)

    with jax.sharding.use_abstract_mesh(mesh):
        fn = jax.shard_map(
            gradients, in_specs=(rows, whole, whole, rows), out_specs=(rows, whole, whole)
        )
        args = shapes((1400, 64), (1000, 64), (1000,), dtype=jnp.bfloat16)
        traced = jax.jit(fn).trace(*args, *shapes((1400,), dtype="int32"))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert backend_pallas.is_triton_call(text)
    assert text.count("all_reduce") == 2  # the weight's gradient and the bias's, once each


@pytest.mark.parametrize("plan", PLANS)
def test_with_the_classes_split_under_a_checked_shard_map(plan):
    device = jax.sharding.AbstractDevice("NVIDIA H200", 132, "cuda")
    mesh = jax.sharding.AbstractMesh(
        (2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device
    )
    own, whole = jax.sharding.PartitionSpec("tensor"), jax.sharding.PartitionSpec()

    def loss(hidden, weight, bias, labels, class_weight):
        value, metrics = FUSED_LINEAR(
            hidden, weight, labels, bias=bias, class_weight=class_weight, memory=PLANS[plan],
            vocab_mesh_axis="tensor", return_metrics=True,
            logit_scale=0.5, **EVERYTHING,
        )  # fmt: skip
        return value + metrics.token_accuracy

    with jax.sharding.use_abstract_mesh(mesh):
        fn = jax.shard_map(loss, in_specs=(whole, own, own, whole, own), out_specs=whole)
        args = shapes((1400, 64), (2000, 64), (2000,), dtype=jnp.bfloat16)
        rest = (*shapes((1400,), dtype="int32"), *shapes((2000,), dtype=jnp.float32))
        traced = jax.jit(jax.grad(fn, (0, 1, 2))).trace(*args, *rest)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert backend_pallas.is_triton_call(text)
    assert "all_gather" not in text
    shapes_summed = re.findall(r"all_reduce.*?: \(tensor<([\dx]*)\w+>\)", text, re.DOTALL)
    assert sum(shape == "1400x64x" for shape in shapes_summed) == 1  # hidden's gradient, once
    assert not any("2000" in shape or "1000" in shape for shape in shapes_summed)


def test_under_a_checked_shard_map_the_weight_gradient_is_summed_once():
    norm = functools.partial(jax_liger.rms_norm, implementation="pallas")
    device = jax.sharding.AbstractDevice("NVIDIA H200", 132, "cuda")
    mesh = jax.sharding.AbstractMesh(
        (2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device
    )
    rows, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()

    def gradients(x, weight):
        return jax.grad(lambda x, w: jnp.sum(norm(x, w)).astype(jnp.float32), (0, 1))(x, weight)

    with jax.sharding.use_abstract_mesh(mesh):
        fn = jax.shard_map(gradients, in_specs=(rows, whole), out_specs=(rows, whole))
        traced = jax.jit(fn).trace(*shapes((8, 768), (768,), dtype=jnp.bfloat16))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert backend_pallas.is_triton_call(text)
    assert text.count("all_reduce") == 1


def test_the_gate_sees_what_a_gpu_rejects():
    def kernel(x_ref, y_ref):
        backend_pallas.store(
            y_ref,
            jnp.arange(48),  # not a power of two
            value=backend_pallas.load(x_ref, jnp.arange(48), mask=jnp.ones(48, bool)),
            mask=jnp.ones(48, bool),
        )

    def fn(x, interpret=False):
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return backend_pallas.pallas_call(
            kernel, out, x, programs=1, num_warps=4, interpret=interpret
        )

    assert fn(jnp.ones(48), interpret=True).sum() == 48
    with pytest.raises(Exception, match="power of 2"):
        backend_pallas.lower_to_cuda(fn, *shapes((48,), dtype=jnp.float32))


def test_the_text_tells_a_kernel_from_none():
    plain = functools.partial(jax_liger.rms_norm, implementation="xla")
    text = backend_pallas.lower_to_cuda(plain, *shapes((8, 64), dtype=jnp.float32))
    assert not backend_pallas.is_triton_call(text)


@pytest.mark.parametrize("rows, dim, heads, kv_heads, size, rotary_dim", [
    (8192, 4096, 32, 8, 128, 128), (16, 4096, 32, 8, 128, 128), (300, 2048, 32, 8, 64, 64),
    (7, 100, 5, 1, 80, 32), (40, 64, 3, 3, 7, 6), (64, 64, 2, 1, 256, 256),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("out_axis, everything", [(0, False), (1, False), (0, True), (1, True)])
def test_rms_norm_linear_rope(
    rows, dim, heads, kv_heads, size, rotary_dim, dtype, out_axis, everything
):
    fused = functools.partial(
        jax_liger.rms_norm_linear_rope, num_heads=heads, num_kv_heads=kv_heads, head_dim=size,
        out_axis=out_axis, implementation="pallas",
    )  # fmt: skip
    columns = (heads + 2 * kv_heads) * size
    args = shapes((1, rows, dim), (dim,), (columns, dim)[:: 1 - 2 * out_axis], dtype=dtype)
    args += shapes((rows, rotary_dim), (rows, rotary_dim), dtype="float32")
    if everything:
        args += shapes((columns,), (size,), (size,), dtype="float32")
    names = ("bias", "q_norm_weight", "k_norm_weight")

    def call(*arrays):
        return fused(*arrays[:5], **dict(zip(names, arrays[5:], strict=False)))

    def total(*arrays):
        return sum(jnp.sum(y).astype(jnp.float32) for y in call(*arrays))

    differentiated = (0, 1, 2, *range(5, len(args)))
    for fn in (call, jax.grad(total, differentiated), jax.grad(total, 0)):
        text = backend_pallas.lower_to_cuda(fn, *args)
        assert backend_pallas.is_triton_call(text)
    if size == 128 and not everything:  # the weight is taken as it lies
        assert "stablehlo.transpose" not in backend_pallas.lower_to_cuda(call, *args)
    if rows == 7:
        batched = shapes((3, 1, rows, dim), dtype=dtype)
        axes = (0, *(None,) * (len(args) - 1))
        text = backend_pallas.lower_to_cuda(jax.vmap(call, axes), *batched, *args[1:])
        assert backend_pallas.is_triton_call(text)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "mixtral"])
def test_a_models_gradients(model_type):
    fields = dict(vocab_size=128256, hidden_size=2048, intermediate_size=8192, head_dim=64)
    fields |= dict(num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8)
    config = models.Config.from_hf(
        {"model_type": model_type, **fields, "num_local_experts": 8 * (model_type == "mixtral")},
        dtype="bfloat16",
        implementation="pallas",
        remat="cheap",
    )
    model = nnx.eval_shape(lambda: models.CausalLM(config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)

    def gradients(state, ids):
        return jax.grad(models.loss_fn)(nnx.merge(graphdef, state), {"input_ids": ids})

    (ids,) = shapes((8, 2048), dtype="int32")
    assert backend_pallas.is_triton_call(backend_pallas.lower_to_cuda(gradients, state, ids))
