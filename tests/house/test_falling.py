"""What may only fall; see `falling.py` for what is counted, and how the limits are written."""

import pytest

from house import falling
from house.walk import walk

LIMITS = falling.limits()


def test_every_package_has_a_limit_and_keeps_it() -> None:
    grown = {name: count for name, count in falling.lines().items() if count > LIMITS.get(name, 0)}
    assert not grown, "a package grows by a commit that says why, and raises house/falling.txt by hand"


@pytest.mark.parametrize("name", falling.LISTED)
def test_there_is_no_more_of_it(name: str) -> None:
    listed = falling.LISTED[name]()
    assert len(listed) <= LIMITS[name], f"cd tests && python -m house.falling {name}"


def test_a_compile_climbs_no_more_and_comes_to_work_as_soon() -> None:
    more = {name: count for name, count in walk().items() if count > LIMITS[name]}
    assert not more, "cd tests && python -m house.walk"
