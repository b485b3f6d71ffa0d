"""Cross-framework validation: operations by their oracle, models layer by layer.

The command `liger-validate` is in `cli`. `assert_matches_oracle` and `assert_frameworks_agree` are
for the tests of other projects; pytest has them as fixtures, too.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from liger_validate.judge import Error as Error
    from liger_validate.judge import assert_agree as assert_frameworks_agree
    from liger_validate.judge import assert_matches_oracle as assert_matches_oracle

__all__ = ["Error", "assert_frameworks_agree", "assert_matches_oracle"]


def __getattr__(name: str) -> Any:
    """The judge when it is asked for: pytest loads this package in every project's tests."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from liger_validate import judge

    return judge.assert_agree if name == "assert_frameworks_agree" else getattr(judge, name)
