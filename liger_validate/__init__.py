"""Cross-framework validation: operations by their oracle, models layer by layer.

The command `liger-validate` is in `cli`. `assert_matches_oracle` and `assert_frameworks_agree` are
for the tests of other projects.
"""

from liger_validate.judge import Error as Error
from liger_validate.judge import assert_agree as assert_frameworks_agree
from liger_validate.judge import assert_matches_oracle as assert_matches_oracle

__all__ = ["Error", "assert_frameworks_agree", "assert_matches_oracle"]
