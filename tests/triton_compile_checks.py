"""Run by test_triton_compile.py in a process of its own, where Triton's interpreter is off.

Compiles each kernel for the compute capability given as the argument, and prints one line a kernel:
its name and the bytes of shared memory a program needs.
"""

import itertools
import sys
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from liger_ops import row_sums
from liger_ops.cross_entropy import triton_reduce, triton_rows
from liger_ops.cross_entropy.cases import Config as CrossEntropyConfig
from liger_ops.fused_linear_cross_entropy import triton_parts, triton_products
from liger_ops.layer_norm import triton_kernel as layer_norm_kernel
from liger_ops.layer_norm import triton_wide as layer_norm_wide
from liger_ops.layer_norm.cases import Config as LayerNormConfig
from liger_ops.lora_linear import triton_dropout, triton_terms
from liger_ops.lora_linear.cases import Config as DropoutConfig
from liger_ops.rms_norm import triton_kernel, triton_wide
from liger_ops.rms_norm.cases import Config
from liger_ops.rms_norm_linear_rope import triton_product
from liger_ops.rms_norm_linear_rope.cases import Config as ProductConfig
from liger_ops.rope import triton_kernel as rope_kernel
from liger_ops.rope.cases import Config as RopeConfig
from liger_ops.rope.cases import power_of_two
from liger_ops.swiglu import triton_kernel as swiglu_kernel
from liger_ops.swiglu.cases import Config as SwigluConfig

TARGET = GPUTarget("cuda", int(sys.argv[1]), 32)
TYPE_NAMES = {"i32", "fp32", "fp64", "*fp32", "*bf16", "*fp16", "*i32", "*i64"}
TYPES = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}


def compile_kernel(kernel: Any, arguments: dict[str, Any], num_warps: int, **options: Any) -> Any:
    """`arguments`: a type for what is given at run time, anything else is a constant."""
    names = kernel.arg_names
    is_type = lambda value: (  # noqa: E731
        isinstance(value, str) and (value in TYPE_NAMES or value.startswith("tensordesc"))
    )
    source = ASTSource(
        fn=kernel,
        signature={n: arguments[n] if is_type(arguments[n]) else "constexpr" for n in names},
        constexprs={(i,): arguments[n] for i, n in enumerate(names) if not is_type(arguments[n])},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(names)
            if is_type(arguments[n]) and arguments[n].startswith(("*", "i"))
        },
    )
    compiled = compile(source, target=TARGET, options={"num_warps": num_warps, **options})
    print(kernel.__name__, compiled.metadata.shared, flush=True)
    return compiled


def rms_norm(
    dim: int, dtype: str, weight: bool, residual: bool, scalar: str = "fp32", casting: str = "llama"
) -> None:
    config, pointer = Config.for_shape(dim), TYPES[dtype]
    common = {"eps": scalar, "offset": scalar, "num_rows": "i32", "D": dim, "CASTING": casting}
    common["weight_ptr"] = pointer if weight else None
    forward = {
        **common, "x_ptr": pointer, "y_ptr": pointer, "x_stride": "i32", "residual_stride": "i32",
        "residual_ptr": pointer if residual else None, "h_ptr": pointer if residual else None,
        "BLOCK_ROWS": config.forward_rows, "BLOCK_D": config.forward_block_d,
    }  # fmt: skip
    wide = dim > config.forward_block_d
    kernel = triton_wide.forward_wide_kernel if wide else triton_kernel._forward_kernel
    compile_kernel(kernel, forward, config.forward_warps)
    backward = {
        **common, "h_ptr": pointer, "dy_ptr": pointer, "dh_ptr": pointer if residual else None,
        "dx_ptr": pointer, "dweight_ptr": "*fp32" if weight else None,
        "h_stride": "i32", "dy_stride": "i32", "dh_stride": "i32",
        "BLOCK_ROWS": config.backward_rows, "BLOCK_D": config.backward_block_d,
    }  # fmt: skip
    kernel = triton_kernel._backward_kernel
    if config.backward_two_pass:
        kernel = triton_wide.backward_two_pass_kernel
    compile_kernel(kernel, backward, config.backward_warps)


def layer_norm(dim: int, dtype: str, weight: bool, bias: bool, eps: str = "fp32") -> None:
    config, pointer = LayerNormConfig.for_shape(dim), TYPES[dtype]
    common = {
        "x_ptr": pointer, "weight_ptr": pointer if weight else None,
        "statistics_ptr": "*fp32", "num_rows": "i32", "x_stride": "i32", "D": dim,
    }  # fmt: skip
    forward = {
        **common, "bias_ptr": pointer if bias else None, "y_ptr": pointer, "eps": eps,
        "BLOCK_ROWS": config.forward_rows, "BLOCK_D": config.forward_block_d,
    }  # fmt: skip
    kernel = layer_norm_kernel._forward_kernel
    if dim > config.forward_block_d:
        kernel = layer_norm_wide.forward_wide_kernel
    compile_kernel(kernel, forward, config.forward_warps)
    backward = {
        **common, "dy_ptr": pointer, "dx_ptr": pointer, "dy_stride": "i32",
        "partial_ptr": "*fp32" if weight or bias else None,
        "BLOCK_ROWS": config.backward_rows, "BLOCK_D": config.backward_block_d,
        "WITH_DWEIGHT": int(weight), "WITH_DBIAS": int(bias),
    }  # fmt: skip
    kernel = layer_norm_kernel._backward_kernel
    if config.backward_two_pass:
        kernel = layer_norm_wide.backward_two_pass_kernel
    compile_kernel(kernel, backward, config.backward_warps, maxnreg=config.backward_registers)


def swiglu(dim: int, dtype: str, activation: str) -> None:
    config, pointer = SwigluConfig.for_shape(dim), TYPES[dtype]
    names = ("gate_ptr", "up_ptr", "y_ptr", "dy_ptr", "dgate_ptr", "dup_ptr")
    strides = ("num_rows", "gate_stride", "up_stride", "dy_stride", "gradient_stride")
    arguments = {
        **dict.fromkeys(names, pointer), **dict.fromkeys(strides, "i32"), "F": dim,
        "BLOCK_ROWS": config.block_rows, "BLOCK_F": config.block_f, "ACTIVATION": activation,
    }  # fmt: skip
    compile_kernel(swiglu_kernel._forward_kernel, arguments, config.num_warps)
    compile_kernel(swiglu_kernel._backward_kernel, arguments, config.num_warps)


def cross_entropy(classes: int, dtype: str, everything: bool, scalar: str = "fp32") -> None:
    config = CrossEntropyConfig.for_shape(classes)
    extra = "*fp32" if everything else None
    arguments = {
        "logits_ptr": TYPES[dtype], "dlogits_ptr": TYPES[dtype], "labels_ptr": "*i64",
        **dict.fromkeys(("ce_ptr", "statistics_ptr", "dloss_ptr"), "*fp32"),
        **dict.fromkeys(("loss_ptr", "factors_ptr"), "*fp32"),
        **dict.fromkeys(("weight_ptr", "weight_sum_ptr", "z_ptr", "dz_ptr", "z_loss_ptr"), extra),
        **dict.fromkeys(("num_items_ptr", "accuracy_ptr"), extra),
        "predicted_ptr": "*i64" if everything else None,
        **dict.fromkeys(("logits_stride", "dloss_stride", "dz_stride", "num_rows"), "i32"),
        "ignore_index": "i32",
        **dict.fromkeys(("label_smoothing", "softcap", "z_loss", "logit_scale"), scalar),
        "first_class": "i32", "V": classes, "CLASSES": classes,
        "STEPS": config.forward_steps, "COLUMNS": config.forward_columns,
        "bias_ptr": extra, "label_weight_ptr": extra, "SCALE": everything,
        "SMOOTH": everything, "CAP": everything, "ADD_Z": everything,
    }  # fmt: skip
    compile_kernel(triton_rows.forward_kernel, arguments, config.forward_warps)
    arguments["BLOCK"] = config.backward_block
    compile_kernel(triton_rows.backward_kernel, arguments, config.backward_warps)
    bias = {"dbias_ptr": "*fp32", "dz_ptr": None, "ROWS": 16, "BLOCK": 128}
    compile_kernel(triton_rows.bias_gradient_kernel, {**arguments, **bias}, 4)
    compile_kernel(triton_reduce.reduce_kernel, {**arguments, "BLOCK": 1024}, 8)


def finish(source: str, target: str) -> None:
    arguments = {
        "source_ptr": TYPES[source], "target_ptr": TYPES[target], "factor_ptr": "*fp32",
        "size": "i32", "IN_PLACE": source == target, "BLOCK": 4096,
    }  # fmt: skip
    compile_kernel(triton_parts._finish_kernel, arguments, 8)


def product(dtype: str, sum_dtype: str, a_across: bool, b_across: bool, add: bool) -> None:
    config = triton_products.Config.for_sum(4 if sum_dtype == "float32" else 2)
    m, n, k = config.block_m, config.block_n, config.block_k
    descriptor = lambda dtype, *block: f"tensordesc<{TYPES[dtype][1:]}{list(block)}>"  # noqa: E731
    arguments = {
        "a_desc": descriptor(dtype, *((k, m) if a_across else (m, k))),
        "b_desc": descriptor(dtype, *((n, k) if b_across else (k, n))),
        "c_desc": descriptor(sum_dtype, m, n // config.pieces),
        "live_ptr": "*i32", "first_row": "i32", "M": "i32", "N": "i32", "K": "i32",
        "scale": "fp32", "A_ACROSS": a_across, "B_ACROSS": b_across, "DEPTH": a_across,
        "ADD": add, "SCALE": add, "PROGRAMS": 132, "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k,
        "PIECES": config.pieces, "GROUP": config.group,
    }  # fmt: skip
    compile_kernel(
        triton_products._product_kernel, arguments, config.num_warps, num_stages=config.num_stages
    )


def rope(heads: int, kv_heads: int, head_dim: int, size: int, dtype: str, layout: str) -> None:
    config, pointer = RopeConfig.for_shape(4096, heads, kv_heads, head_dim), TYPES[dtype]
    shares, block_n, block_k = config.deal(heads, kv_heads)
    kernel = rope_kernel._rotate_kernel
    arguments = {
        **{name: "i32" for name in kernel.arg_names if "stride" in name},
        **dict.fromkeys(("q_ptr", "q_out_ptr"), pointer if heads else None),
        **dict.fromkeys(("k_ptr", "k_out_ptr"), pointer if kv_heads else None),
        "cos_ptr": "*fp32", "sin_ptr": "*fp32", "num_rows": "i32", "T": "i32", "N": heads,
        "K": kv_heads, "H": head_dim, "R": size,
        "HALF": power_of_two(size // 2), "REST": power_of_two(head_dim - size), "SHARES": shares,
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_N": block_n, "BLOCK_K": block_k, "INTERLEAVED": layout == "interleaved",
        "BACKWARDS": size < head_dim,
    }  # fmt: skip
    compile_kernel(kernel, arguments, config.num_warps)


def dropout(
    dim: int, source: str, target: str, add: bool, scale: str = "fp32", adapter: str | int = "i32"
) -> None:
    config = DropoutConfig.for_shape(dim)
    arguments = {
        "source_ptr": TYPES[source], "target_ptr": TYPES[target], "seed_ptr": "*i64",
        **dict.fromkeys(("num_rows", "first_row", "source_stride", "target_stride"), "i32"),
        "threshold": "i32", "adapter": adapter, "scale": scale, "D": dim,
        "BLOCK_ROWS": config.block_rows, "BLOCK_COLUMNS": config.block_columns, "ADD": add,
    }  # fmt: skip
    compile_kernel(triton_dropout._dropout_kernel, arguments, config.num_warps)


def terms_of_adapters(columns: int, terms: tuple[int, int, int]) -> None:
    arguments = {
        "source_ptr": "*fp32", "target_ptr": "*bf16", "COLUMNS": columns, "BLOCK": 1024,
        **dict.fromkeys(("num_rows", "source_stride", "target_stride", "target_step"), "i32"),
        **dict(zip(("FIRST", "SECOND", "THIRD"), terms, strict=True)),
    }  # fmt: skip
    compile_kernel(triton_terms._split_kernel, arguments, 4)


def rms_norm_linear_rope(
    rows: int, head_dim: int, rotary_dim: int, dtype: str, norm: bool, everything: bool,
    scalar: str = "fp32",
) -> None:  # fmt: skip
    heads, kv_heads, pointer = 32, 8, TYPES[dtype]
    itemsize = 4 if dtype == "float32" else 2
    config = ProductConfig.for_shape(rows, head_dim, everything, itemsize, 99 * 1024)
    of_tile, half, shares = config.tile(head_dim)
    extra, names = pointer if everything else None, triton_product.tile_kernel.arg_names
    arguments = {
        **{name: "i32" for name in names if "stride" in name}, "num_rows": "i32", "T": "i32",
        **{name: pointer for name in ("x_ptr", "weight_ptr", "q_ptr", "k_ptr", "v_ptr")},
        **{name: extra for name in ("bias_ptr", "q_norm_ptr", "k_norm_ptr")},
        "norm_ptr": pointer if norm else None, "cos_ptr": "*fp32", "sin_ptr": "*fp32",
        "r_ptr": "*fp32" if not norm or dtype == "float16" else None,
        "eps": scalar, "offset": scalar,
        "D": 4096 if norm else 1000, "N": heads, "K": kv_heads, "H": head_dim, "R": rotary_dim,
        "BLOCK_ROWS": config.block_rows, "HEADS": of_tile, "HALF": half, "SHARES": shares,
        "BLOCK_D": config.block_dim, "GROUP": config.group, "PRECISION": "ieee",
        "COLUMN_BLOCKS": config.column_blocks(heads, kv_heads, head_dim),
    }  # fmt: skip
    options = {"num_stages": config.num_stages}
    tile = compile_kernel(triton_product.tile_kernel, arguments, config.num_warps, **options)
    if not norm and not everything:  # x is multiplied, and nothing else is made of it
        assert "tt.dot" in tile.asm["ttir"] and "tt.reduce" not in tile.asm["ttir"]
        check_buffers(tile, config, pointer)
    scales = {name: arguments.get(name) for name in triton_product.scale_kernel.arg_names}
    scales |= {"r_ptr": "*fp32", "BLOCK_D": 4096 if norm else 1024}
    compile_kernel(triton_product.scale_kernel, scales, 4)
    scaled = {"weight_stride": "i32", **{name: scales.get(name) or arguments.get(name) for name in
              triton_product.weight_kernel.arg_names if name != "weight_stride"},
              "norm_ptr": pointer, "scaled_ptr": pointer}  # fmt: skip
    compile_kernel(triton_product.weight_kernel, scaled, 4)


def rms_norm_linear_rope_persistent(
    config: ProductConfig, head_dim: int, everything: bool, dtype: str = "bfloat16"
) -> None:
    heads, kv_heads, pointer = 32, 8, TYPES[dtype]
    of_tile, half, _ = config.tile(head_dim)
    extra, names = pointer if everything else None, triton_product.persistent_kernel.arg_names

    def blocks(*shape: int) -> str:
        return f"tensordesc<{pointer.removeprefix('*')}[{','.join(map(str, shape))}]>"

    arguments = {
        **{name: "i32" for name in names if "stride" in name}, "num_rows": "i32", "T": "i32",
        **{name: extra for name in ("bias_ptr", "q_norm_ptr", "k_norm_ptr")},
        **{name: "*fp32" for name in ("cos_ptr", "sin_ptr", "r_ptr")}, "eps": "fp32",
        "x_desc": blocks(config.block_rows, config.block_dim),
        "weight_desc": blocks(of_tile * head_dim, config.block_dim),
        "y_desc": blocks(config.block_rows, of_tile, half // 2), "steps": "i32",
        "offset": "fp32", "D": 4096, "N": heads, "K": kv_heads, "H": head_dim,
        "BLOCK_ROWS": config.block_rows, "HEADS": of_tile, "BLOCK_D": config.block_dim,
        "GROUP": config.group, "PRECISION": "tf32",
        "COLUMN_BLOCKS": config.column_blocks(heads, kv_heads, head_dim),
    }  # fmt: skip
    options = {"num_stages": config.num_stages}
    options |= {"num_warps": config.num_warps}
    compiled = compile_kernel(triton_product.persistent_kernel, arguments, **options)
    assert everything or "tt.reduce" not in compiled.asm["ttir"]
    check_buffers(compiled, config, pointer)


def check_buffers(compiled: Any, config: ProductConfig, pointer: str) -> None:
    """That x has one for each stage. On a Hopper a product goes on while the next tiles arrive, and
    with one buffer less, which x had when its squares were added up too, they overwrite its own.
    """
    buffers = (config.num_stages, config.block_rows, config.block_dim)
    of_x = f"{'x'.join(map(str, buffers))}x{pointer.removeprefix('*')},"
    assert TARGET.arch < 90 or of_x in compiled.asm["ttgir"], of_x


if __name__ == "__main__":
    for source, target in itertools.product(TYPES, TYPES):
        dropout(4096, source, target, add=False)
        dropout(81, target, source, add=True)
    dropout(14336, "bfloat16", "bfloat16", add=True, scale="fp64")
    dropout(14336, "bfloat16", "bfloat16", add=False, adapter=1)  # as Triton specialises a 1
    for columns, terms in itertools.product((1, 64, 3584), ((0, 1, 2), (0, 1, 0), (0, 0, 1))):
        terms_of_adapters(columns, terms)
    for rows, dtype in itertools.product((1, 64, 8192), TYPES):
        rms_norm_linear_rope(rows, 128, 128, dtype, norm=True, everything=False)
    for dtype in TYPES:
        rms_norm_linear_rope(8192, 64, 64, dtype, norm=False, everything=True)
    rms_norm_linear_rope(8192, 128, 32, "bfloat16", norm=True, everything=True)
    if TARGET.arch == 90:
        for rows, columns, stages in ((128, 256, 4), (256, 128, 4), (128, 128, 4)):
            persistent = ProductConfig(rows, columns, 64, 8, stages, "weight", persistent=True)
            assert persistent.bytes_of(2) <= 227 * 1024
            rms_norm_linear_rope_persistent(persistent, 128, everything=False)
            rms_norm_linear_rope_persistent(persistent, 64, everything=True)
    rms_norm_linear_rope(8192, 128, 128, "bfloat16", norm=False, everything=False)
    rms_norm_linear_rope(16, 80, 80, "bfloat16", norm=True, everything=True, scalar="fp64")
    for classes, dtype, everything in itertools.product((1000, 128256), TYPES, (False, True)):
        cross_entropy(classes, dtype, everything)
    # Float arguments as torch.compile hands them on, here and below.
    cross_entropy(1000, "bfloat16", everything=True, scalar="fp64")
    for source, target in itertools.product(TYPES, TYPES):
        finish(source, target)
    if TARGET.arch == 90:
        for dtype in ("bfloat16", "float16"):
            product(dtype, dtype, a_across=False, b_across=True, add=False)
            for into in (dtype, "float32"):  # the latter where it is summed over processes
                product(dtype, into, a_across=False, b_across=False, add=False)
            product(dtype, "float32", a_across=True, b_across=False, add=True)
        product("bfloat16", "bfloat16", a_across=True, b_across=False, add=True)
    for layout in ("half", "interleaved"):
        for dtype in TYPES:
            rope(32, 8, 128, 128, dtype, layout)
        rope(71, 1, 64, 64, "bfloat16", layout)
        rope(28, 4, 80, 32, "bfloat16", layout)
        rope(0, 2, 256, 256, "bfloat16", layout)  # q frozen
    for dim, dtype in itertools.product((80, 14336), TYPES):
        for activation in ("silu", "gelu_tanh", "gelu"):
            swiglu(dim, dtype, activation)
    for dim, dtype in itertools.product((80, 768, 4096, 16384, 20000), TYPES):
        rms_norm(dim, dtype, weight=True, residual=dtype == "bfloat16")
        layer_norm(dim, dtype, weight=True, bias=True)
    rms_norm(768, "bfloat16", weight=False, residual=False)
    for dim, weight in itertools.product((768, 20000), (True, False)):
        layer_norm(dim, "bfloat16", weight, bias=False)
    for dim in (80, 768, 20000):
        layer_norm(dim, "bfloat16", weight=True, bias=True, eps="fp64")
        for casting in ("llama", "none"):
            rms_norm(dim, "bfloat16", True, residual=False, scalar="fp64", casting=casting)
    shapes = {"programs": "i32", "D": 4096, "BLOCK_PROGRAMS": 512, "BLOCK_D": 16}
    for pointer in TYPES.values():
        for second in (None, pointer):
            arguments = {
                **shapes, "partial_ptr": "*fp32", "first_ptr": pointer, "second_ptr": second,
            }  # fmt: skip
            compile_kernel(row_sums.sum_kernel, arguments, 8)
