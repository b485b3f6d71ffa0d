"""Run by test_vocab_parallel_torch.py, once a process: RANK PROCESSES FILE cpu|cuda [CHECK ...],
where FILE is the processes' meeting point. Where there are too few GPUs, all processes use the
first, and add up through gloo.

Prints one line a check: its name, then "ok" or what went wrong.
"""

import contextlib
import dataclasses
import datetime
import functools
import os
import sys
import traceback

RANK, PROCESSES, DEVICE = int(sys.argv[1]), int(sys.argv[2]), sys.argv[4]
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: E402

import torch_liger  # noqa: E402
from compare import assert_matches_oracle, from_torch, to_torch  # noqa: E402
from liger_ops.cross_entropy.oracle import Arguments  # noqa: E402
from liger_ops.fused_linear_cross_entropy import cases, oracle, triton_products  # noqa: E402
from torch_liger.vocab_parallel import as_forward_of  # noqa: E402

BOTH = ("triton", "eager")
EVERYTHING = {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-2, "logit_scale": 0.7}
flce = torch_liger.fused_linear_cross_entropy


@functools.cache
def mesh():
    return init_device_mesh(DEVICE, (PROCESSES,), mesh_dim_names=("tensor",))


def own(t):
    """The process's part of what the processes have in equal parts."""
    return None if t is None else t.chunk(PROCESSES)[RANK].detach().clone()


def all_of(t):
    """Every process's part together, in NumPy."""
    parts = [None] * PROCESSES
    dist.all_gather_object(parts, from_torch(t))
    return np.concatenate(parts)


def example(rows=12, dim=24, vocab=80, dtype=torch.float32):
    """hidden, weight, bias, class_weight and labels, the same in all processes."""
    rng = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=rng)  # noqa: E731
    labels = torch.randint(0, vocab, (rows,), generator=rng)
    labels[::5] = -100
    given = (draw(rows, dim).to(dtype), (0.6 * draw(vocab, dim)).to(dtype), draw(vocab))
    return [t.to(DEVICE) for t in (*given, draw(vocab).exp(), labels)]


def assert_close(actual, expected, tolerance=2e-5):
    for a, e in zip(actual, expected, strict=True):
        a, e = a.detach().float(), e.detach().float()
        atol = tolerance * max(e.abs().nan_to_num().max().item() if e.numel() else 0.0, 1e-3)
        torch.testing.assert_close(a, e, rtol=tolerance, atol=atol, equal_nan=True)


def cases_of(implementation):
    """Every case of one process. The interpreter takes milliseconds for a row: there those of few
    rows, and every plan once.
    """
    if implementation != "triton" or DEVICE == "cuda":
        return cases.CASES
    few = [case for case in cases.CASES if np.prod(case.rows) <= 20]
    settings = {"bias_dtype": "float32", "class_weight_dtype": "bfloat16", "logit_scale": 0.7}
    everything = {k: v for k, v in EVERYTHING.items() if k != "logit_scale"}
    plans = (("none", "bfloat16", 2 * 128 * 80), ("mean", "float16", 2 * 128 * 80 + 80 * 24 * 4))
    for reduction, dtype, memory in plans:
        arguments = Arguments(reduction=reduction, **everything)
        name = f"everything-{reduction}"
        few.append(cases.Case(name, (130,), 24, 80, dtype, arguments, memory=memory, **settings))
    return few


def against_the_oracle(name):
    """Split evenly over a group, or unevenly in DTensors."""
    for number, case in enumerate(cases_of(name)):
        inputs = case.draw()
        shape = inputs["labels"].shape if case.arguments.reduction == "none" else ()
        dloss = np.asarray(np.random.default_rng(1).standard_normal(shape), np.float32)
        given = [inputs.get(k) for k in ("hidden", "weight", "labels", "class_weight", "bias")]
        exact = oracle.forward(*given, case.arguments, case.logit_scale)
        exact |= oracle.backward(*given, case.arguments, dloss, case.logit_scale)
        memory = case.memory if isinstance(case.memory, str) else case.memory // PROCESSES
        tensors = {k: to_torch(v, DEVICE) for k, v in inputs.items()}
        names = [k for k in ("hidden", "weight", "bias") if k in inputs]

        def run(split, implementation, tensors=tensors, case=case, names=names, memory=memory,
                dloss=dloss):  # fmt: skip
            given, group = {k: t.clone() for k, t in tensors.items()}, None
            of_classes = [k for k in ("weight", "bias", "class_weight") if k in given]
            if split and case.vocab % PROCESSES == 0:
                given |= {k: own(given[k]) for k in of_classes}
                group = mesh().get_group()
            elif split:
                given |= {k: distribute_tensor(given[k], mesh(), [Shard(0)]) for k in of_classes}
            for k in names:
                given[k].requires_grad_()
            loss, z = flce(
                *(given[k] for k in ("hidden", "weight", "labels")), bias=given.get("bias"),
                class_weight=given.get("class_weight"), logit_scale=case.logit_scale,
                memory=memory, return_z_loss=True, implementation=implementation,
                process_group=group, **dataclasses.asdict(case.arguments),
            )  # fmt: skip
            leaves = [given[k] for k in names]
            found = torch.autograd.grad(loss, leaves, to_torch(dloss, DEVICE))
            gradients = {f"d{k}": g for k, g in zip(names, found, strict=True)}
            for k in ("dweight", "dbias") if split else ():
                if k in gradients:
                    part = gradients[k]
                    part = part.to_local() if isinstance(part, DTensor) else part
                    gradients[k] = to_torch(all_of(part))
            return {k: from_torch(t) for k, t in {"loss": loss, "z_loss": z, **gradients}.items()}

        # The plain version's errors are those of one process.
        actual, plain = run(True, name), run(False, "eager")
        assert_matches_oracle(actual, plain, exact, f"{number} {case.name}-{case.dtype}")


def metrics_and_frozen_inputs():
    frozen = ((True, False, False), (False, True, False), (False, False, True), (False,) * 3)
    for implementation, reduction in ((i, r) for i in BOTH for r in ("mean", "none")):
        for needs in frozen:
            hidden, weight, bias, class_weight, labels = example()

            def run(split, hidden, weight, bias, class_weight, labels=labels, needs=needs,
                    implementation=implementation, reduction=reduction):  # fmt: skip
                leaves = (hidden, weight, bias)
                for leaf, need in zip(leaves, needs, strict=True):
                    leaf.requires_grad_(need)
                group = mesh().get_group() if split else None
                loss, z, metrics = flce(
                    hidden, weight, labels, bias=bias, class_weight=class_weight,
                    reduction=reduction, return_z_loss=True, return_metrics=True,
                    process_group=group, implementation=implementation, **EVERYTHING,
                )  # fmt: skip
                assert loss.requires_grad == any(needs)
                if any(needs):
                    weights = torch.arange(loss.numel(), device=DEVICE).view(loss.shape) + 1.0
                    (loss * weights).sum().backward()
                return [loss, z, *metrics], [t.grad for t in leaves]

            whole = [t.clone() for t in (hidden, weight, bias, class_weight)]
            parts = [hidden.clone(), *(own(t) for t in (weight, bias, class_weight))]
            outputs, gradients = run(True, *parts)
            expected, all_gradients = run(False, *whole)
            assert_close(outputs, expected)
            assert torch.equal(outputs[3], expected[3])
            wanted = [all_gradients[0], *(own(g) for g in all_gradients[1:])]
            assert [g is None for g in gradients] == [not n for n in needs]
            pairs = [(g, w) for g, w in zip(gradients, wanted, strict=True) if g is not None]
            assert_close(*(zip(*pairs, strict=True) if pairs else ((), ())))


def a_label_of_another_process():
    """Is no padded column of this one's: the last number of a tile, and the one after the last."""
    for implementation, vocab in ((i, v) for i in BOTH for v in (1000, 514, 1026)):
        hidden, weight, bias, _, _ = example(8, 24, vocab)
        half = vocab // PROCESSES
        at = [0, half - 1, half, half + 1, vocab - 1, half + 12, 2, half + half // 2]
        labels = torch.tensor(at, device=DEVICE)
        run = functools.partial(flce, implementation=implementation, reduction="none")
        part, group = own(weight).requires_grad_(), mesh().get_group()
        loss = run(hidden, part, labels, bias=own(bias), process_group=group)
        whole = weight.clone().requires_grad_()
        expected = run(hidden, whole, labels, bias=bias)
        assert loss.isfinite().all()
        (gradient,) = torch.autograd.grad(loss.sum(), part)
        (exact,) = torch.autograd.grad(expected.sum(), whole)
        assert_close([loss, gradient], [expected, own(exact)])


def labels_that_are_none_or_differ():
    group = mesh().get_group()
    for implementation in BOTH:
        for label in (-1, 80, 2**31 - 1):
            hidden, weight, _, class_weight, labels = example()
            labels[7] = label
            hidden.requires_grad_()
            loss = flce(
                hidden, own(weight), labels, class_weight=own(class_weight), reduction="none",
                process_group=group, implementation=implementation,
            )  # fmt: skip
            (gradient,) = torch.autograd.grad(loss.sum(), hidden)
            assert loss.isnan().nonzero().flatten().tolist() == [7]
            assert gradient.isnan().any(1).nonzero().flatten().tolist() == [7]
        # Another batch in every process, as data parallelism has it, is no plausible number.
        hidden, weight, _, _, labels = example()
        labels = labels.roll(RANK)
        loss = flce(hidden, own(weight), labels, process_group=group, implementation=implementation)
        assert loss.isnan()


def a_shard_of_masked_classes():
    for implementation in BOTH:
        hidden, weight, bias, _, labels = example()
        bias[40:] = -torch.inf
        labels = torch.where(labels >= 40, labels - 40, labels)
        parts = [t.requires_grad_() for t in (hidden.clone(), own(weight), own(bias))]
        wholes = [t.requires_grad_() for t in (hidden.clone(), weight, bias)]
        run = functools.partial(flce, implementation=implementation)
        loss = run(parts[0], parts[1], labels, bias=parts[2], process_group=mesh().get_group())
        expected = run(wholes[0], wholes[1], labels, bias=wholes[2])
        dhidden, *others = torch.autograd.grad(expected, wholes)
        wanted = [expected, dhidden, *(own(g) for g in others)]
        assert_close([loss, *torch.autograd.grad(loss, parts)], wanted)


def second_derivatives():
    for implementation, memory in (("triton", 40 * 24 * 4), ("eager", "fast")):
        hidden, weight, bias, class_weight, labels = example(130)

        def second(split, given, class_weight, group=None, labels=labels, memory=memory,
                   implementation=implementation):  # fmt: skip
            leaves = [t.detach().clone().requires_grad_() for t in given]
            loss = flce(
                leaves[0], leaves[1], labels, bias=leaves[2], class_weight=class_weight,
                process_group=group, memory=memory, implementation=implementation, **EVERYTHING,
            )  # fmt: skip
            first = torch.autograd.grad(loss, leaves, create_graph=True)
            # Of all processes' squares, of which hidden's are the same in each.
            squares = [g.square().sum() for g in first]
            return torch.autograd.grad(squares[0] + 2.0 * (squares[1] + squares[2]), leaves)

        parts = (hidden, own(weight), own(bias))
        found = second(True, parts, own(class_weight), mesh().get_group())
        dhidden, *others = second(False, (hidden, weight, bias), class_weight)
        assert_close(found, [dhidden, *(own(g) for g in others)], 1e-4)


def dtensors():
    """Split evenly and unevenly, with bias and hidden of every kind; and a replicated weight."""
    for implementation, vocab in ((i, v) for i in BOTH for v in (80, 33)):
        hidden, weight, bias, class_weight, labels = example(12, 24, vocab)
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        run = functools.partial(
            flce, class_weight=class_weight, implementation=implementation, **EVERYTHING
        )
        expected = run(leaves[0], leaves[1], labels, bias=leaves[2])
        gradients = torch.autograd.grad(expected, leaves)
        for of_weight, of_bias, of_hidden in (
            (Shard(0), Shard(0), None), (Shard(0), None, Replicate()),
            (Shard(0), Replicate(), Shard(0)),
            (Replicate(), Replicate(), None), (Replicate(), None, Replicate()),
        ):  # fmt: skip
            place = lambda t, p: (  # noqa: E731
                (t.clone() if p is None else distribute_tensor(t, mesh(), [p])).requires_grad_()
            )
            given = [place(hidden, of_hidden), place(weight, of_weight), place(bias, of_bias)]
            loss = run(given[0], given[1], labels, bias=given[2])
            found = torch.autograd.grad(loss, given)
            for g, t in zip(found, given, strict=True):
                assert isinstance(g, DTensor) == isinstance(t, DTensor)
                assert not isinstance(g, DTensor) or g.placements == t.placements
            full = [g.full_tensor() if isinstance(g, DTensor) else g for g in found]
            assert_close([loss, *full], [expected, *gradients])
    columns = distribute_tensor(weight, mesh(), [Shard(1)])
    try:
        run(hidden, columns, labels)
    except ValueError as error:
        assert "Shard(0), over one dimension" in str(error) and "Shard(dim=1)" in str(error), error
    else:
        raise AssertionError("a weight that is split by columns was taken")


def nothing_but_numbers_of_tokens_crosses():
    """No element of the logits or of the weight: a few numbers a token, and hidden's gradient."""
    rows, dim, vocab, sent = 130, 24, 400, []
    all_reduce = dist.all_reduce

    def counting(tensor, *args, **kwargs):
        sent.append(tensor.shape)
        return all_reduce(tensor, *args, **kwargs)

    others = ("all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast")
    hidden, weight, bias, class_weight, labels = example(rows, dim, vocab)
    with contextlib.ExitStack() as stack:
        from unittest import mock

        stack.enter_context(mock.patch.object(dist, "all_reduce", counting))
        for name in others:
            stack.enter_context(mock.patch.object(dist, name, None))
        for implementation, memory in (("triton", 128 * 200 * 4), ("eager", "fast")):
            sent.clear()
            leaves = [t.requires_grad_() for t in (hidden.clone(), own(weight), own(bias))]
            loss = flce(
                leaves[0], leaves[1], labels, bias=leaves[2], class_weight=own(class_weight),
                memory=memory, process_group=mesh().get_group(), implementation=implementation,
                **EVERYTHING,
            )  # fmt: skip
            loss.backward()
            of_hidden = [shape for shape in sent if shape[-1:] == (dim,)]
            others = sum(shape.numel() for shape in sent) - rows * dim
            assert sum(shape.numel() for shape in of_hidden) == rows * dim, sent
            assert others <= 8 * rows + 2, sent
            assert len(of_hidden) == (2 if implementation == "triton" else 1), sent


def without_gradients_and_per_token_logps():
    for implementation in BOTH:
        hidden, weight, bias, _, labels = example()
        group = mesh().get_group()
        run = functools.partial(torch_liger.per_token_logps, implementation=implementation,
                                logit_scale=0.5, softcap=3.0, temperature=0.7)  # fmt: skip
        expected = run(hidden, weight, labels, bias=bias)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                logps = run(hidden, own(weight), labels, bias=own(bias), process_group=group)
            assert_close([logps], [expected])
        part = distribute_tensor(weight, mesh(), [Shard(0)])
        assert_close([run(hidden, part, labels, bias=bias)], [expected])
        for rows in (0, 3):
            given = hidden[:rows].clone().requires_grad_(), own(weight).requires_grad_()
            nothing = torch.full((rows,), -100, device=DEVICE)
            loss = flce(*given, nothing, process_group=group, implementation=implementation)
            gradients = torch.autograd.grad(loss, given)
            assert loss == 0.0 and all(not g.any() and not g.isnan().any() for g in gradients)


def ignored_tokens_cost_no_product():
    """Nothing is even read of those in tiles of their own, where the products are the kernel's:
    there they may be NaN.
    """
    size = (256, 24, 80) if DEVICE == "cpu" else (4096, 1024, 16384)
    hidden, weight, _, _, labels = example(*size, dtype=torch.bfloat16)
    weight, labels = own(weight), labels.abs() % size[2]
    labels[::2] = -100  # as many as fill tiles
    if not triton_products.has_kernel(hidden, weight):
        return
    results = []
    for fill in (0.0, float("nan")):
        for memory in ("fast", weight.numel() * 4 + 128 * weight.shape[0] * 2, 1):
            leaves = [hidden.masked_fill((labels == -100)[:, None], fill), weight.clone()]
            leaves = [leaf.requires_grad_() for leaf in leaves]
            loss = flce(*leaves, labels, memory=memory, process_group=mesh().get_group(),
                        implementation="triton")  # fmt: skip
            gradients = torch.autograd.grad(loss, leaves if memory != 1 else leaves[:1])
            results.append([loss, *gradients])
    half = len(results) // 2
    for of_zeros, of_nans in zip(results[:half], results[half:], strict=True):
        assert_close(of_nans, of_zeros, 0.0)


def fsdp():
    """Every process has rows of its own and a part of the weight, whole inside the head alone."""
    from torch.distributed.fsdp import fully_shard

    for implementation in BOTH:
        hidden, weight, bias, _, labels = example(12)
        head = torch.nn.Linear(24, 80, device=DEVICE)
        head.load_state_dict({"weight": weight, "bias": bias})
        fully_shard(head, mesh=mesh())
        mine = own(hidden).requires_grad_()
        loss = as_forward_of(
            head,
            lambda h, labels, i=implementation, head=head: flce(
                h, head.weight, labels, bias=head.bias, reduction="sum", implementation=i
            ),
            mine,
            own(labels),
        )
        loss.backward()
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        whole = flce(leaves[0], leaves[1], labels, bias=leaves[2], reduction="sum")
        dhidden, *expected = torch.autograd.grad(whole, leaves)
        assert_close([mine.grad], [own(dhidden)])
        # FSDP averages over its processes.
        found = [PROCESSES * p.grad.full_tensor() for p in (head.weight, head.bias)]
        assert_close(found, expected)
        assert "forward" not in head.__dict__


CHECKS = {
    "triton_against_the_oracle": functools.partial(against_the_oracle, "triton"),
    "eager_against_the_oracle": functools.partial(against_the_oracle, "eager"),
    "metrics_and_frozen_inputs": metrics_and_frozen_inputs,
    "a_label_of_another_process": a_label_of_another_process,
    "labels_that_are_none_or_differ": labels_that_are_none_or_differ,
    "a_shard_of_masked_classes": a_shard_of_masked_classes,
    "second_derivatives": second_derivatives,
    "dtensors": dtensors,
    "nothing_but_numbers_of_tokens_crosses": nothing_but_numbers_of_tokens_crosses,
    "without_gradients_and_per_token_logps": without_gradients_and_per_token_logps,
    "ignored_tokens_cost_no_product": ignored_tokens_cost_no_product,
    "fsdp": fsdp,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    device = None
    if DEVICE == "cuda" and torch.cuda.device_count() >= PROCESSES:  # NCCL wants one GPU a process
        device = torch.device("cuda", RANK)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device else "gloo",
        init_method=f"file://{sys.argv[3]}",
        rank=RANK,
        world_size=PROCESSES,
        timeout=datetime.timedelta(seconds=60),
        device_id=device,
    )
    for name in sys.argv[5:] or CHECKS:
        try:
            CHECKS[name]()
            print(name, "ok", flush=True)
        except Exception:
            text = traceback.format_exc().replace("\n", " | ")
            print(name, text[:300], "...", text[-1200:], flush=True)
    dist.destroy_process_group()
