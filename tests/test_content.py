"""Content: names against paths, YAML that reads numbers as numbers and refuses a key given twice."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from quantkit import content
from quantkit.errors import InputError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4.0e9", 4e9),  # plain PyYAML makes text of the first four
        ("1e-3", 1e-3),
        (".5e1", 5.0),
        ("-2E+3", -2000.0),
        ("12", 12),
        ("1.5", 1.5),
        ("0x1f", 31),
        ("e5", "e5"),
        ("1e", "1e"),
        ("1.2.3", "1.2.3"),
        ("'1e3'", "1e3"),
    ],
)
def test_numbers_are_numbers(tmp_path: Path, text: str, value: Any) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(f"key: {text}\n")
    found = content.read_yaml(path)["key"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("raw", "code", "says"),
    [
        (b"a: 1\nb: 2\na: 3\n", "yaml-invalid", "'a' given twice"),
        (b"a: {b: 1, b: 2}\n", "yaml-invalid", "'b' given twice"),
        (b"a: [1\n", "yaml-invalid", ""),
        (b"a: !!python/object/apply:os.getcwd []\n", "yaml-invalid", "could not determine a constructor"),
        (b"\xff\xfe", "file-unreadable", ""),
    ],
)
def test_bad_yaml_names_the_place(tmp_path: Path, raw: bytes, code: str, says: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(raw)
    with pytest.raises(InputError) as caught:
        content.read_yaml(path)
    assert caught.value.code == code
    assert str(path) in caught.value.where
    assert says in caught.value.value


def test_a_bare_word_is_never_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "l5").write_text("schema: 1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="did you mean 'l4'"):
        content.find("export", "l5")
    assert content.find("export", "./l5") == Path("l5")


@pytest.mark.parametrize("kind", ["recipes", "calibration", "export"])
def test_every_folder_says_what_lives_there_and_all_it_holds_is_plain_yaml(kind: content.Kind) -> None:
    assert "How to add one" in (content.folder(kind) / "README.md").read_text(encoding="utf-8")
    for name in content.names(kind):
        data = yaml.safe_load(content.find(kind, name).read_text(encoding="utf-8"))
        assert data["schema"] == 1
        assert data["summary"].strip()
        assert content.find(kind, name).read_bytes().isascii() or kind == "calibration"


@pytest.mark.parametrize(
    ("reference", "path"),
    [
        *((path, True) for path in ("./x", "/x", "~/x", "x.yaml", "dir/x.json", "texts/")),
        *((name, False) for name in ("x", "qwen2.5-7b", "llama-3.1-405b", "awq-int4+kv-fp8")),
    ],
)
def test_a_version_number_is_no_suffix(reference: str, path: bool) -> None:
    assert content.is_path(reference) is path


@pytest.mark.parametrize(
    "number",
    [10**5000, -(10**400), 1 << 63, float("inf"), float("-inf"), float("nan")],
    ids=["5000", "-400", "64", "inf", "-inf", "nan"],
)
def test_numbers_are_finite_and_of_64_bits_wherever_they_come_in(number: float) -> None:
    """In fields that have a type, in those that have none, and in what has unknown keys; the place is named."""
    from quantkit.bundle.manifest import Decision
    from quantkit.recipe import Recipe

    plain = {"summary": "s", "scheme": {"weights": {"format": "int8"}}, "passes": ["rtn"]}
    for place, more in {
        "seed": {"seed": number},
        "scheme.weights.group": {"scheme": {"weights": {"format": "int4", "group": number}}},
        "gates.kl_max": {"gates": {"kl_max": number}},
        "passes.0.gptq.damping": {"passes": [{"gptq": {"damping": number}}]},
        "export.0.onnx.x": {"export": [{"onnx": {"x": number}}]},
        "scheme.mixture.0": {"scheme": {"mixture": [number]}},
    }.items():
        with pytest.raises(InputError, match="recipe-invalid") as caught:
            Recipe.from_dict({**plain, **more}, name="r")
        assert place in caught.value.where and len(caught.value.line()) < 300
    with pytest.raises(ValueError, match=r"a number is finite|a whole number has 64 bits"):
        Decision.model_validate({"pass": "p", "code": "c", "where": "w", "from": [number], "to": 1, "reason": "r"})
