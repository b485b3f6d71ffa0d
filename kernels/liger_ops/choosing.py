"""Which implementation runs: the kernel or the plain version. The same rule in both frameworks."""

import functools
import logging


def choose(
    op: str,
    implementation: str | None,
    kernel: str,
    plain: str,
    why_not: str | None,
    on_gpu: bool,
    also: tuple[str, ...] = (),
) -> str:
    """Returns `kernel` or `plain`, or what was asked for of `also`.

    Args:
        op: the operation's name, for messages.
        implementation: what the caller asked for: one of the two names, or None.
        why_not: the reason why the kernel cannot run here, or None if it can.
        on_gpu: whether the plain version would run on a GPU, which is logged once with the reason.
        also: other names than `kernel` of what runs where it does.
    Raises:
        ValueError: if `implementation` is none of the names and not None.
        RuntimeError: if the kernel, or one of `also`, was asked for by name and cannot run.
    """
    if implementation == plain:
        return plain
    if implementation not in (None, kernel, *also):
        names = ", ".join(repr(name) for name in (kernel, *also, plain))
        raise ValueError(f"implementation must be one of None, {names}; got {implementation!r}")
    if why_not is None:
        return implementation or kernel
    if implementation is not None:
        raise RuntimeError(f"{op}: implementation={implementation!r} cannot run here: {why_not}")
    if on_gpu:
        _log_once(f"{op}: using the {plain} version on a GPU: {why_not}")
    return plain


@functools.cache
def _log_once(message: str) -> None:
    logging.getLogger("liger_ops").warning(message)
