"""What the Triton kernels need of the machine: whether they can run there, and launching.

On a CPU the kernels run only under Triton's interpreter, which is chosen by TRITON_INTERPRET=1 in
the environment before triton is imported.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch

from liger_ops import choosing

triton: Any = None  # where no wheel exists for the platform, the eager versions still work
with contextlib.suppress(ImportError):
    import triton

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OLDEST_TRITON = (3, 4)


if INTERPRET and triton is not None:
    from liger_ops import triton_interpreter

    triton_interpreter.install()


def choose(
    implementation: str | None,
    op: str,
    x: torch.Tensor,
    *others: Any,
    also: tuple[str, ...] = (),
) -> str:
    """The implementation to run, "triton" or "eager", for tensors as the caller asked.

    also: names of further ones made of kernels, which run where the kernel does.
    """
    why_not = _why_not(x, *others)
    return choosing.choose(op, implementation, "triton", "eager", why_not, x.is_cuda, also)


def _why_not(x: torch.Tensor, *others: torch.Tensor | None) -> str | None:
    if triton is None:
        return "triton is not installed"
    if _TRITON_VERSION < OLDEST_TRITON:
        return f"triton {triton.__version__} is older than {'.'.join(map(str, OLDEST_TRITON))}"
    if not x.is_cuda and not INTERPRET:
        return f"the input is on {x.device}, and TRITON_INTERPRET=1 was not set"
    if x.is_cuda and not _supported_gpu(x.device.index):
        return "the GPU's compute capability is below 8.0"
    for tensor in (x, *others):
        if tensor is not None and tensor.dtype not in KERNEL_DTYPES:
            return f"the kernel takes float32, bfloat16 and float16, not {tensor.dtype}"
    if torch.compiler.is_compiling():  # what follows is handled by the compiler
        return None
    if torch._C._are_functorch_transforms_active():
        return "a torch.func transform is active"
    for tensor in (x, *others):
        # A DTensor, say: its own memory is not what a kernel has to read.
        if tensor is not None and type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return f"{type(tensor).__name__} is a subclass of Tensor"
    return None


_TRITON_VERSION: tuple[int, ...] = ()
if triton is not None:
    _TRITON_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])


def _supported_gpu(index: int) -> bool:
    """Whether the GPU has bfloat16 arithmetic. Looked up at every call, so kept."""
    supported = _SUPPORTED.get(index)
    if supported is None:
        supported = _SUPPORTED[index] = torch.cuda.get_device_capability(index) >= (8, 0)
    return supported


_SUPPORTED: dict[int, bool] = {}


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; under the interpreter a small stand-in."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def shared_memory(device: torch.device) -> int:
    """The bytes of it that one program may have; under the interpreter the least of any GPU's."""
    if device.type != "cuda":
        return 99 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def device_name(device: torch.device) -> str:
    """As the tables of measurements call it; "cpu" under the interpreter."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def allows_tf32() -> bool:
    """Whether products of float32 may be of TF32, as the library's are."""
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:  # it was set by the name that torch 2.9 gave it, and has no old one now
        return torch.backends.cuda.matmul.fp32_precision == "tf32"


class Launch:
    """A kernel and all it is called with but its tensors, to be called again and again.

    Triton's own dispatch works out the specialisation of every argument at each call, which takes
    longer than a small kernel runs. It depends on the dtypes, the scalars and the alignment of the
    pointers, so whoever keeps a Launch for one combination of dtypes and shapes needs it once: the
    compiled kernel is kept here and launched directly the next time.

    The kernel takes its pointers, then its scalars, then its constexprs, all in this order, on a
    one-dimensional grid, and runs on the device of its first tensor. `max_registers` is what the
    compiler may give a thread; torch.compile, which launches kernels itself, has no such option.
    `num_stages` is how many steps of a loop may have their loads under way.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        scalars: tuple[int | float, ...],
        constexprs: tuple[Any, ...],
        num_warps: int,
        max_registers: int | None = None,
        num_stages: int | None = None,
    ):
        self.kernel = kernel
        self.programs = programs
        self.arguments = (*scalars, *constexprs)
        self.everywhere = {"num_warps": num_warps}
        if num_stages is not None:
            self.everywhere["num_stages"] = num_stages
        self.options = {} if max_registers is None else {"maxnreg": max_registers}
        self.compiled: Any = None
        self.device = -1

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        compiled = self.compiled
        if compiled is not None:
            if self.device != torch.cuda.current_device():
                with torch.cuda.device(self.device):
                    return self(*tensors)
            pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
            if _is_aligned(pointers) and not _is_hooked():
                compiled.run(
                    self.programs,
                    1,
                    1,
                    torch._C._cuda_getCurrentRawStream(self.device),
                    compiled.function,
                    compiled.packed_metadata,
                    None,  # launch metadata and the two hooks: only a profiler wants them
                    None,
                    None,
                    *pointers,
                    *self.arguments,
                )
                return
        self._dispatch(tensors)

    def _dispatch(self, tensors: tuple[torch.Tensor | None, ...]) -> None:
        kernel = self.kernel[(self.programs,)]
        if INTERPRET or torch.compiler.is_compiling():
            kernel(*tensors, *self.arguments, **self.everywhere)
            return
        first = tensors[0]
        assert first is not None
        with torch.cuda.device(first.device):
            compiled = kernel(*tensors, *self.arguments, **self.everywhere, **self.options)
        if _is_aligned([0 if tensor is None else tensor.data_ptr() for tensor in tensors]):
            self.compiled, self.device = compiled, first.device.index


def metadata(tensor: torch.Tensor | None) -> Any:
    """What a Launch may depend on besides the pointer, to be part of the key it is kept under."""
    if tensor is None:
        return None
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device()


def kept(plans: dict[Any, Any], key_of: Callable[[], Any], make: Callable[[], Any]) -> Any:
    """plans[key_of()], made if it is not there, in a dict that does not grow without end.

    Batches of ever new lengths make ever new keys, for kernels that Triton has compiled before.
    """
    if torch.compiler.is_compiling():  # the plan becomes part of a graph, and sizes are symbols
        return make()
    key = key_of()
    plan = plans.get(key)
    if plan is None:
        if len(plans) >= 4096:
            plans.clear()
        plan = plans[key] = make()
    return plan


def rows(x: torch.Tensor | None) -> torch.Tensor | None:
    """Rows of adjacent columns at one distance: x itself if it is contiguous, else (M, D)."""
    if x is None or x.is_contiguous():
        return x
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def row_stride(x: torch.Tensor | None) -> int:
    """The distance between the rows of what `rows` returned."""
    if x is None:
        return 0
    return x.shape[-1] if x.is_contiguous() else x.stride(0)


def dense(vector: torch.Tensor | None) -> torch.Tensor | None:
    """With adjacent elements: itself if it is so, else a copy."""
    return vector if vector is None or vector.is_contiguous() else vector.contiguous()


def empty(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Contiguous, of the shape of `like`."""
    if dtype == like.dtype and like.is_contiguous():
        return torch.empty_like(like)  # less than half the host time of the next line
    return torch.empty(like.shape, dtype=dtype, device=like.device)


def creates_graph() -> bool:
    """Whether the backward that is running is to be differentiated again (create_graph=True)."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def differentiable_gradients(y: Any, inputs: tuple[torch.Tensor | None, ...], dy: Any) -> list[Any]:
    """dy's gradients for those of `inputs` that ask for one, by the operations that made y; y and
    dy are a tensor each, or as many.
    """
    wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    found = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))
    return [
        next(found) if tensor is not None and tensor.requires_grad else None for tensor in inputs
    ]


def add_product(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float) -> torch.Tensor:
    """y + alpha a b of matrices of one dtype, where y lies, for a y that a forward returns."""
    if torch.compiler.is_compiling():  # PyTorch 2.11 then loses the gradient of a changed result
        return torch.addmm(y, a, b, alpha=alpha)
    return y.addmm_(a, b, alpha=alpha)


def library_product(
    a: Any, b: Any, into: torch.Tensor, alpha: float = 1.0, beta: float = 0.0
) -> None:
    """into = alpha a b + beta into, of matrices of one dtype; a float32 `into` sums in float32."""
    compiling = torch.compiler.is_compiling()
    if beta == 0.0 and compiling:
        into.zero_()  # inductor multiplies by beta even then, and what is there may be a NaN
    if a.dtype == into.dtype:
        torch.addmm(into, a, b, beta=beta, alpha=alpha, out=into)
    elif not a.is_cuda:  # the library has the products below for GPUs alone
        torch.addmm(into, a.float(), b.float(), beta=beta, alpha=alpha, out=into)
    elif compiling:  # PyTorch 2.11 cannot trace addmm into another dtype
        into.mul_(beta).add_(torch.mm(a, b, out_dtype=into.dtype), alpha=alpha)
    else:
        torch.addmm(into, a, b, out_dtype=into.dtype, beta=beta, alpha=alpha, out=into)


def _is_aligned(pointers: list[int]) -> bool:
    """Whether all are multiples of 16, as a kernel was compiled for; an absent tensor's 0 is."""
    bits = 0
    for pointer in pointers:
        bits |= pointer
    return not bits & 15


def _is_hooked() -> bool:
    """Whether a profiler listens to launches, which Triton's own dispatch then has to make."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    # A chain of callbacks in newer versions; one callback or None in 3.4.
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
