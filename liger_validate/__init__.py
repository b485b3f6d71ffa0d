"""Cross-framework validation: operations by their oracle, models layer by layer.

The command `liger-validate` is in `cli`. `assert_matches_oracle` and `assert_frameworks_agree` are
for the tests of other projects; pytest has them as fixtures, too. `capture_torch` and `capture_nnx`
write what any model computes to a file, for `liger-validate compare`; `capture` is whichever of
them the model asks for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from liger_validate.any_model import capture as capture
    from liger_validate.any_model import capture_nnx as capture_nnx
    from liger_validate.any_model import capture_torch as capture_torch
    from liger_validate.judge import Error as Error
    from liger_validate.judge import assert_agree as assert_frameworks_agree
    from liger_validate.judge import assert_matches_oracle as assert_matches_oracle

__all__ = [
    "Error",
    "assert_frameworks_agree",
    "assert_matches_oracle",
    "capture",
    "capture_nnx",
    "capture_torch",
]


def __getattr__(name: str) -> Any:
    """What is asked for, when it is: pytest loads this package in every project's tests."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(
        "liger_validate.any_model" if name.startswith("capture") else "liger_validate.judge"
    )
    return getattr(module, "assert_agree" if name == "assert_frameworks_agree" else name)
