"""Bad input, as a user meets it: one JSON object, one clear line, the right exit code, and nothing left on disk."""

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zoo

from quantkit import cli

RECIPE = (
    "schema: 1\nsummary: small\ncalibration: {set: prose-en, samples: 4, tokens: 32}\n"
    "scheme: {weights: {format: int4, granularity: group, group: 32, symmetric: false}}\n"
    "passes: [rtn]\nexport: [{checkpoint: {layout: pack-quantized}}]\n"
)
TARGET = (
    "schema: 1\nsummary: a processor without int4\nkind: cpu\narch: {vendor: x86, isa: auto}\n"
    "memory:\n"
    "  capacity: {value: 1.0e+9, unit: B, source: a test}\n"
    "  read_bandwidth: {value: 1.0e+9, unit: B/s, source: a test}\n"
    "  last_level_cache: {value: 1.0e+6, unit: B, source: a test}\n"
    "compute:\n  fp32: {value: 1.0e+9, unit: flop/s, source: a test}\n"
    "formats:\n"
    "  float32:\n    torch: {state: native, source: a test}\n"
    "  int4:\n    torch: {state: absent, source: a test}\n"
    "runtimes: [torch]\nbaseline: fp32\nbatches: [1]\n"
    "profiles:\n  - {name: decode, batch: [1, 1, 1], length: [1, 1, 1], context: [1, 64, 64]}\n"
)
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
LAST = "model.layers.2.mlp.down_proj.weight"


@dataclass
class Given:
    """A good command; a case spoils one part of it."""

    model: Path
    recipe: Path
    out: Path
    folder: Path
    monkeypatch: pytest.MonkeyPatch
    more: list[str]

    def edit_recipe(self, old: str, new: str) -> None:
        text = self.recipe.read_text()
        assert old in text
        self.recipe.write_text(text.replace(old, new))

    def calibrate(self, data: bytes, suffix: str) -> None:
        self.edit_recipe("[rtn]", "[gptq]")  # which looks at the data
        path = self.folder / f"calib{suffix}"
        path.write_bytes(data)
        self.more += ["--calibration", str(path)]

    def header(self, edit: Callable[[dict[str, Any]], Any]) -> None:
        """Rewrites the header; `edit` changes it in place, or returns the text to write instead."""
        header, data = self._parts()
        text = edit(header)
        raw = (text if isinstance(text, str) else json.dumps(header)).encode()
        (self.model / WEIGHTS).write_bytes(struct.pack("<Q", len(raw)) + raw + data)

    def plant(self, value: float) -> None:
        """One wrong number in the last block."""
        header, data = self._parts()
        at = header[LAST]["data_offsets"][0]
        assert header[LAST]["dtype"] == "F32"
        spoilt = data[:at] + struct.pack("<f", value) + data[at + 4 :]
        raw = json.dumps(header).encode()
        (self.model / WEIGHTS).write_bytes(struct.pack("<Q", len(raw)) + raw + spoilt)

    def shard(self) -> Path:
        """Splits the weights in two files; the second."""
        import safetensors.torch

        tensors = safetensors.torch.load_file(self.model / WEIGHTS)
        (self.model / WEIGHTS).unlink()
        names = sorted(tensors)
        parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, held in parts.items():
            safetensors.torch.save_file({name: tensors[name] for name in held}, self.model / file, {"format": "pt"})
        weight_map = {name: file for file, held in parts.items() for name in held}
        (self.model / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        return self.model / "b.safetensors"

    def _parts(self) -> tuple[dict[str, Any], bytes]:
        raw = (self.model / WEIGHTS).read_bytes()
        size = struct.unpack("<Q", raw[:8])[0]
        return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def misspelt_recipe(given: Given) -> None:
    given.recipe = Path("rtn-int5")


def misspelt_pass(given: Given) -> None:
    given.edit_recipe("[rtn]", "[rnt]")


def misspelt_key(given: Given) -> None:
    given.edit_recipe("passes:", "pases:")


def misspelt_target(given: Given) -> None:
    given.more += ["--target", "cpu-x68"]


def misspelt_format(given: Given) -> None:
    given.edit_recipe("int4", "itn4")


def target_without_the_format(given: Given) -> None:
    path = given.folder / "no-int4.yaml"
    path.write_text(TARGET)
    given.more += ["--target", str(path)]


def no_config(given: Given) -> None:
    (given.model / "config.json").unlink()


def no_tokenizer(given: Given) -> None:
    for path in given.model.glob("*token*"):
        path.unlink()


def truncated(given: Given) -> None:
    path = given.model / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


def overlapping(given: Given) -> None:
    def edit(header: dict[str, Any]) -> None:
        first, second = [entry for name, entry in header.items() if ".k_proj." in name][:2]
        assert first["shape"] == second["shape"]
        second["data_offsets"] = first["data_offsets"]

    given.header(edit)


def duplicate_key(given: Given) -> None:
    def edit(header: dict[str, Any]) -> str:
        return f"{json.dumps(header)[:-1]}, {json.dumps(LAST)}: {json.dumps(header[LAST])}}}"

    given.header(edit)


def lying_dtype(given: Given) -> None:
    given.header(lambda header: header[LAST].update(dtype="I32"))


def lying_shape(given: Given) -> None:
    given.header(lambda header: header[LAST].update(shape=header[LAST]["shape"][::-1]))


def path_for_a_name(given: Given) -> None:
    given.header(lambda header: header.update({"../../etc/passwd": header.pop(LAST)}))


def missing_shard(given: Given) -> None:
    given.shard().unlink()


def empty_shard(given: Given) -> None:
    given.shard().write_bytes(b"")


def nan_in_the_last_block(given: Given) -> None:
    given.plant(float("nan"))


def infinity_in_the_last_block(given: Given) -> None:
    given.plant(float("inf"))


def empty_calibration(given: Given) -> None:
    given.calibrate(b"", ".txt")


def short_calibration(given: Given) -> None:
    given.calibrate(b"A few words.", ".txt")


def binary_calibration(given: Given) -> None:
    given.calibrate(bytes(range(256)), ".txt")


def half_a_character(given: Given) -> None:
    given.calibrate(b'{"text": "\\ud800"}\n', ".jsonl")


def ids_beyond_the_vocabulary(given: Given) -> None:
    # one past the last, in one row of four
    rows = [[number] * 32 for number in (1, 2, 3, 258)]
    given.calibrate("\n".join(map(json.dumps, rows)).encode(), ".jsonl")


def out_exists(given: Given) -> None:
    given.out.mkdir()
    (given.out / "precious").write_text("kept")


def out_under_a_file(given: Given) -> None:
    (given.folder / "file").write_text("")
    given.out = given.folder / "file" / "out"


def ctrl_c(given: Given) -> None:
    _interrupt(given, after=0)


def ctrl_c_after_a_block(given: Given) -> None:
    _interrupt(given, after=1)


def _interrupt(given: Given, after: int) -> None:
    from quantkit.passes.rtn import Rtn

    blocks: list[object] = []
    run = Rtn.run

    def interrupted(self: Rtn, block: Any, *others: Any) -> Any:
        if len(blocks) == after:
            raise KeyboardInterrupt
        blocks.append(block)
        return run(self, block, *others)

    given.monkeypatch.setattr(Rtn, "run", interrupted)


# what is spoilt -> (code, exit)
CASES: dict[Callable[[Given], None], tuple[str, int]] = {
    misspelt_recipe: ("unknown-recipe", 2),
    misspelt_pass: ("recipe-invalid", 2),
    misspelt_key: ("recipe-invalid", 2),
    misspelt_target: ("unknown-target", 2),
    misspelt_format: ("recipe-invalid", 2),
    target_without_the_format: ("target-cannot-run", 2),
    no_config: ("config-missing", 2),
    no_tokenizer: ("tokenizer-missing", 2),
    truncated: ("weights-truncated", 2),
    overlapping: ("weights-overlap", 2),
    duplicate_key: ("weights-duplicate", 2),
    lying_dtype: ("weights-dtype", 2),
    lying_shape: ("weights-shape", 2),
    path_for_a_name: ("weights-name", 2),
    missing_shard: ("weights-missing-shard", 2),
    empty_shard: ("weights-empty", 2),
    nan_in_the_last_block: ("weights-nonfinite", 2),
    infinity_in_the_last_block: ("weights-nonfinite", 2),
    empty_calibration: ("calibration-empty", 2),
    short_calibration: ("calibration-short", 2),
    binary_calibration: ("calibration-not-text", 2),
    half_a_character: ("calibration-not-text", 2),
    ids_beyond_the_vocabulary: ("calibration-ids", 2),
    out_exists: ("out-exists", 2),
    out_under_a_file: ("out-not-writable", 2),
    ctrl_c: ("interrupted", 75),
    ctrl_c_after_a_block: ("interrupted", 75),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model: Any = zoo.tiny("llama", vocab_size=len(byte_tokenizer))
    model.save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def given(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Given:
    monkeypatch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 300)
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    recipe = tmp_path / "small.yaml"
    recipe.write_text(RECIPE)
    model = shutil.copytree(tiny, tmp_path / "model")
    return Given(model, recipe, tmp_path / "out", tmp_path, monkeypatch, [])


@pytest.mark.parametrize("spoil", CASES, ids=lambda spoil: spoil.__name__)
def test_one_clear_error_and_nothing_left(
    spoil: Callable[[Given], None], given: Given, capfd: pytest.CaptureFixture[str]
) -> None:
    code, leaves = CASES[spoil]
    spoil(given)
    before = sorted(given.out.rglob("*")) if given.out.exists() else None
    capfd.readouterr()

    command = ["compile", str(given.model), "--recipe", str(given.recipe), "--out", str(given.out), *given.more]
    returned = cli.run([*command, "--json"])

    out, err = capfd.readouterr()
    assert out.count("\n") == 1
    envelope = json.loads(out)
    error = envelope["error"] or {"code": None}
    assert (error["code"], envelope["exit"], returned) == (code, leaves, leaves), error
    assert envelope["result"] is None
    assert all("\n" not in error[part] for part in ("where", "value", "rule", "remedy"))
    assert error["value"]
    assert error["rule"] or error["remedy"] or code == "weights-overlap"
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith(f"error: [{code}] ")
    assert (sorted(given.out.rglob("*")) if given.out.exists() else None) == before
    partial = given.out.with_name(f"{given.out.name}.partial")
    # a stop keeps what `--resume` needs, anything else nothing
    assert partial.exists() == (spoil is ctrl_c_after_a_block), error
