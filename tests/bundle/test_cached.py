"""The cache gives what was put there, or nothing."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.bundle import cached
from quantkit.errors import Rebuilt


def _put(tmp_path: Path) -> Path:
    made, place = tmp_path / "made", tmp_path / "cache" / "kept"
    (made / "inner").mkdir(parents=True)
    (made / "inner" / "file").write_bytes(b"content")
    place.parent.mkdir(exist_ok=True)
    cached.put(made, place)
    return place


def test_what_was_put_is_there(tmp_path: Path) -> None:
    place = _put(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cached.is_intact(place)
        assert not cached.is_intact(place.with_name("other"))
    assert (place / "inner" / "file").read_bytes() == b"content"


@pytest.mark.parametrize(
    "harm",
    [
        lambda place: (place / "inner" / "file").write_bytes(b"contend"),
        lambda place: (place / "inner" / "more").touch(),
        lambda place: (place / "inner" / "file").unlink(),
        lambda place: ((place / "inner" / "file").unlink(), (place / "inner" / "file").symlink_to("/dev/null")),
        lambda place: place.with_name(".kept.sums").unlink(),
    ],
    ids=["changed", "more", "less", "link", "no-hashes"],
)
def test_what_was_harmed_is_gone_and_said(tmp_path: Path, harm: Callable[[Path], object]) -> None:
    place = _put(tmp_path)
    harm(place)
    with pytest.warns(Rebuilt, match="kept"):
        assert not cached.is_intact(place)
    assert not place.exists()
    assert cached.is_intact(_put(tmp_path)), "and it can be made again"


def test_a_file_is_kept_as_a_folder_is(tmp_path: Path) -> None:
    (tmp_path / "made").write_bytes(b"content")
    cached.put(tmp_path / "made", tmp_path / "kept")
    assert cached.is_intact(tmp_path / "kept")
    (tmp_path / "kept").write_bytes(b"contend")
    with pytest.warns(Rebuilt):
        assert not cached.is_intact(tmp_path / "kept")
