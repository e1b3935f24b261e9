from collections.abc import Iterator

import pytest

from tests.fleet.fleet import close_all


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    close_all()
