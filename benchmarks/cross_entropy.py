"""cross_entropy, the mean over all tokens: the loss alone, and the loss with its gradient."""

import torch

from description import Case, Peer, normal, with_liger

SHAPES = [(8192, 128256), (4096, 32000), (2048, 262144), (128, 128256)]
SHORT = (128, 4096)  # so narrow that the host's time is the longer


def case(rows: int, vocab: int) -> Case:
    def data(device: str) -> tuple[torch.Tensor, ...]:
        # So spread that some probabilities are large: those of a flat softmax would be too small
        # beside the label's entry for an error in them to be seen.
        logits = normal(device, rows, vocab, spread=3.0).requires_grad_()
        return logits, torch.randint(vocab, (rows,), device=device)

    return Case(
        op="cross_entropy",
        rows=rows,
        dim=vocab,
        shape=f"{rows} x {vocab}",
        data=data,
        parameters=lambda device: (),
        reference=_reference,
        others=others,
        elements=rows * vocab,
        # The loss reads the logits; its gradient reads them again and writes as much.
        arrays={"forward": 1, "forward + backward": 3},
        baseline="F.cross_entropy",
    )


def _reference(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    of_label = logits.gather(-1, labels[:, None])[:, 0]
    return (logits.logsumexp(-1) - of_label).mean()


def others() -> dict[str, Peer]:
    return with_liger(
        {"F.cross_entropy": Peer(torch.nn.functional.cross_entropy)},
        "cross_entropy",
        "LigerCrossEntropyFunction",
        lambda apply, logits, labels: apply(logits, labels, None)[0],
        # Its forward waits for the number of labels and so cannot be captured, and where a gradient
        # is asked for it writes it over the logits.
        in_graph=False,
        overwrites=True,
    )
