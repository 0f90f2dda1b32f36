import hashlib
from pathlib import Path

import pytest
import yaml

from quantkit import content
from quantkit.calibrate.sets.card import Card
from quantkit.errors import InputError


def write_card(folder: Path, data: dict[str, bytes] | None = None, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for name, text in (data or {"calib.txt": b"to calibrate on", "eval.txt": b"to score on"}).items():
        (folder / name).write_bytes(text)
        digest = hashlib.sha256(text).hexdigest()
        entries.append({"split": name.split(".")[0], "path": name, "bytes": len(text), "sha256": digest})
    card = {
        "schema": 1,
        "summary": "two lines",
        "kind": "text",
        "source": {"title": "made up", "retrieved": "2026-01-01"},
        "licence": "CC0-1.0",
        "files": entries,
        "sampling": {
            "pack": "concatenate",
            "drop_remainder": True,
            "special_tokens": False,
            "shuffle": True,
            "seed": 0,
        },
        "preprocess": None,
    }
    card |= changes
    (folder / "card.yaml").write_text(yaml.safe_dump({key: value for key, value in card.items() if value is not ...}))
    return folder / "card.yaml"


def test_reads_a_split(tmp_path):
    card = Card.load(write_card(tmp_path / "small"))
    assert card.name == "small"
    assert card.read("eval") == [(tmp_path / "small/eval.txt", b"to score on")]
    assert Card.load(tmp_path / "small") == card


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"licence": ...}, "licence"),
        ({"licence": ""}, "licence"),
        ({"licens": "x"}, "unknown key.*did you mean 'licence'"),
        ({"schema": 2}, "schema"),
        ({"kind": "sounds"}, "kind"),
        ({"files": []}, "files"),
        ({"source": {"retrieved": "2026-01-01"}}, "source.title"),
        ({"sampling": {"packing": "concatenate"}}, "did you mean 'pack'"),
        ({"sampling": {"drop_remainder": False}}, "drop_remainder"),
    ],
)
def test_a_card_is_closed(tmp_path, changes, message):
    with pytest.raises(InputError, match=message) as caught:
        Card.load(write_card(tmp_path, **changes))
    assert caught.value.code == "card-invalid"


@pytest.mark.parametrize("path", ["/etc/passwd", "../other.txt", "a/../../b", "", "a\\..\\b"])
def test_files_stay_in_the_folder(tmp_path, path):
    entry = {"split": "calib", "path": path, "bytes": 3, "sha256": "0" * 64}
    with pytest.raises(InputError, match="inside the card's folder") as caught:
        Card.load(write_card(tmp_path, files=[entry]))
    assert caught.value.code == "card-invalid"


def test_a_link_does_not_lead_out(tmp_path):
    card = Card.load(write_card(tmp_path / "set"))
    (tmp_path / "set/eval.txt").rename(tmp_path / "eval.txt")
    (tmp_path / "set/eval.txt").symlink_to(tmp_path / "eval.txt")
    with pytest.raises(InputError, match="link that leads out"):
        card.read("eval")


def test_one_file_is_not_two_splits(tmp_path):
    with pytest.raises(InputError, match="disjoint"):
        Card.load(write_card(tmp_path, {"calib.txt": b"same", "eval.txt": b"same"}))


@pytest.mark.parametrize("data", [b"to score oN", b"to score on and on", b""])
def test_a_changed_file_is_caught(tmp_path, data):
    card = Card.load(write_card(tmp_path))
    (tmp_path / "eval.txt").write_bytes(data)
    with pytest.raises(InputError) as caught:
        card.read("eval")
    assert caught.value.code == "calibration-checksum"
    assert "11 bytes" in caught.value.rule


def test_missing_split_and_missing_file(tmp_path):
    card = Card.load(write_card(tmp_path))
    with pytest.raises(InputError, match=r"'tune'.*calib, eval") as caught:
        card.read("tune")
    assert caught.value.code == "calibration-split"
    (tmp_path / "eval.txt").unlink()
    with pytest.raises(InputError, match=r"\[file-missing\]"):
        card.read("eval")


@pytest.mark.parametrize("name", content.names("calibration"))
def test_shipped_cards_are_true(name):
    card = Card.load(content.find("calibration", name))
    assert card.name == name
    for split in {file.split for file in card.files}:
        assert all(data for _, data in card.read(split))
