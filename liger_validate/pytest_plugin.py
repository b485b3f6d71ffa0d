"""The judge as fixtures of pytest, in every project of an environment that has this package.

    def test_my_kernel(assert_matches_oracle):
        assert_matches_oracle({"y": mine(x)}, {"y": plain(x)}, {"y": exact(x)})

`from liger_validate import assert_matches_oracle, assert_frameworks_agree` gives the same
functions. pytest loads this module when it starts, so it imports nothing but pytest.
"""

from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def assert_matches_oracle() -> Callable[..., None]:
    """`liger_validate.assert_matches_oracle`."""
    from liger_validate import assert_matches_oracle

    return assert_matches_oracle


@pytest.fixture(scope="session")
def assert_frameworks_agree() -> Callable[..., None]:
    """`liger_validate.assert_frameworks_agree`."""
    from liger_validate import assert_frameworks_agree

    return assert_frameworks_agree
