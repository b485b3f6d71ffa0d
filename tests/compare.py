"""The judge of the tests: that of `liger_validate`, applied to kernels and their plain versions."""

from collections.abc import Callable

from liger_validate.judge import PLAIN, Results
from liger_validate.judge import Error as Error
from liger_validate.judge import assert_agree as assert_agree
from liger_validate.judge import assert_matches_oracle as assert_matches_oracle
from liger_validate.tensors import from_torch as from_torch
from liger_validate.tensors import poisoned as poisoned
from liger_validate.tensors import to_torch as to_torch


def judge(run: Callable[[str], Results], exact: Results, label: str = "") -> None:
    """Judges "pallas" and "triton" by their plain versions, and then by each other.

    Args:
        run: returns the results of the implementation it is given the name of.
        exact: the oracle's results under the same names.
    """
    results = {name: run(name) for pair in PLAIN.items() for name in pair}
    for name, plain in PLAIN.items():
        assert_matches_oracle(results[name], results[plain], exact, f"{label} {name}")
    plains = (results["xla"], results["eager"])
    assert_agree(results["pallas"], results["triton"], plains, exact, f"{label} pallas and triton")
