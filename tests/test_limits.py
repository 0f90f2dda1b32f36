"""A file from outside takes no more memory, time or disk than the limits say; each is refused by name."""

import io
import json
import os
import resource
import signal
import struct
import sys
import time
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import zoo

from quantkit import content, limits
from quantkit.calibrate.sets import images as image_sources
from quantkit.calibrate.tokens import sources
from quantkit.errors import InputError
from quantkit.model.sizes import configs
from quantkit.model.source.open import open_model
from quantkit.model.source.packaged import Preprocess
from quantkit.recipe import Recipe
from quantkit.runtimes.text import Tokenizer


def refused(use: Callable[[], object], code: str = "over-limit", *, memory: int = 200 << 20) -> InputError:
    """The error, for which no more than so much memory was taken."""
    tracemalloc.start()
    started = time.monotonic()
    try:
        with pytest.raises(InputError) as caught:
            use()
        assert tracemalloc.get_traced_memory()[1] < memory
    finally:
        tracemalloc.stop()
    assert time.monotonic() - started < 20
    assert caught.value.code == code, caught.value.line()
    if code == "over-limit":
        assert "QUANTKIT_LIMIT_" in caught.value.remedy
    return caught.value


def png(width: int, height: int) -> bytes:
    """A picture of one colour, of a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(b"\0" * 1000, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_an_image_of_too_many_pixels() -> None:
    found = image_sources.parse(png(60_000, 60_000), suffix=".png", where="a.png")
    refused(lambda: found.read(0))
    found = image_sources.parse(png(13_000, 13_000), suffix=".png", where="a.png")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("QUANTKIT_LIMIT_PIXELS", "1e8")
        assert refused(lambda: found.read(0)).value == "169,000,000 pixels"


def test_an_image_that_is_too_large_when_it_is_resized() -> None:
    how = Preprocess(resize=100_000, crop=224, mean=[0.5] * 3, std=[0.5] * 3)
    image = np.zeros((16, 16, 3), dtype=np.uint8)
    refused(lambda: image_sources.preprocess(image, how, where="a.png"))


def test_postscript_is_no_picture(tmp_path: Path) -> None:
    image = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n"
    found = image_sources.parse(image, suffix=".png", where="a.png")
    refused(lambda: found.read(0), "calibration-unreadable")


LAUGHS = "\n".join(["a0: &a0 [x, x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60))])


@pytest.mark.parametrize(
    ("text", "code"),
    [(LAUGHS, "over-limit"), ("a: &a [*a]", "yaml-invalid"), ("a: &a {b: *a}", "yaml-invalid")],
    ids=["laughs", "itself", "itself-mapped"],
)
def test_aliases_that_expand(text: str, code: str, tmp_path: Path) -> None:
    refused(lambda: content.parse_yaml(text, where="recipe.yaml"), code)
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    refused(lambda: Recipe.load(str(tmp_path / "recipe.yaml")), code)


def test_aliases_that_are_used_twice_are_fine() -> None:
    assert content.parse_yaml("a: &a [1, 2]\nb: *a", where="x") == {"a": [1, 2], "b": [1, 2]}


def test_a_change_on_the_command_line_is_limited_too() -> None:
    flow = "{a0: &a0 [x, x]" + "".join(f", a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)) + "}"
    refused(lambda: Recipe.load("awq-int4", changes=[f"summary={flow}"]))


@pytest.mark.parametrize("name", ["pipe", "zero"])
def test_what_has_no_end_is_not_read(name: str, tmp_path: Path) -> None:
    path = Path("/dev/zero")
    if name == "pipe":
        path = tmp_path / "recipe.yaml"
        os.mkfifo(path)
    refused(lambda: content.read_yaml(path), "not-a-file")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").symlink_to(path) if name == "zero" else os.mkfifo(folder / "config.json")
    refused(lambda: configs.read(str(folder)), "config-missing")
    refused(lambda: configs.read(str(folder / "config.json")), "config-missing")


def test_a_huge_sparse_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    os.truncate(tmp_path / "config.json", 1 << 40)
    refused(lambda: configs.read(str(tmp_path)))
    refused(lambda: open_model(str(tmp_path)))


def test_too_many_layers(tmp_path: Path) -> None:
    zoo.tiny("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"num_hidden_layers": 3_000_000}), encoding="utf-8"
    )
    assert "num_hidden_layers" in refused(lambda: open_model(str(tmp_path))).where


def test_shapes_of_thousands_of_digits(tmp_path: Path) -> None:
    zoo.tiny("llama").save_pretrained(tmp_path)
    header = {"lm_head.weight": {"dtype": "F32", "shape": [10**4000, 10**4000], "data_offsets": [0, 0]}}
    data = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data)
    refused(lambda: open_model(str(tmp_path)), "weights-header")


def test_a_table_of_few_bytes_and_many_rows() -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    file = io.BytesIO()
    table = pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([0] * 3_000_000, pa.int8()), ["x" * 1000])})
    pyarrow.parquet.write_table(table, file, use_dictionary=True, compression="zstd", store_schema=False)
    assert len(file.getvalue()) < 400_000, "three gigabytes"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("QUANTKIT_LIMIT_UNPACKED", "5e7")
        refused(lambda: sources.parse(file.getvalue(), suffix=".parquet", where="a.parquet"))


def test_an_archive_of_arrays_that_unpacks_to_too_much(tmp_path: Path) -> None:
    with (
        zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("images.npy", "w") as f,
    ):
        np.lib.format.write_array_header_1_0(f, {"descr": "|u1", "fortran_order": False, "shape": (1 << 27,)})
        for _ in range(128):
            f.write(bytes(1 << 20))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("QUANTKIT_LIMIT_UNPACKED", "1e8")
        refused(lambda: image_sources.parse(tmp_path / "a.npz", suffix=".npz", where="a.npz"))


TEMPLATES = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "doubles": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "allocates": "{{ 'a' * 99999999999 }}",
}


# in a process of its own, as a command has: other threads of this one, and what its collector throws away meanwhile,
# would live within the same few megabytes
RENDERED = """
import sys
import time
from pathlib import Path
from test_limits import refused
from quantkit import limits
from quantkit.calibrate.tokens import pack
from quantkit.model.source import pretrained
from quantkit.runtimes.text import Tokenizer

for folder in map(Path, sys.argv[1:]):
    refused(lambda: Tokenizer(folder).chat("hello"))
    render = pack.renderer(pretrained.tokenizer(folder))
    refused(lambda: render([{"role": "user", "content": "hello"}], "line 1"))
    print(folder.name)


class Slow:
    def __del__(self):
        while time.monotonic() < started + 1:
            pass


def body():
    Slow()  # what is raised in its end is printed and forgotten
    while True:
        pass


def guarded():
    with limits.guarded("a template"):
        body()


started = time.monotonic()
refused(guarded)
print("finalizer")
"""


def test_what_does_not_end_is_ended(tmp_path: Path, byte_tokenizer: Any) -> None:
    for name, text in TEMPLATES.items():
        byte_tokenizer.save_pretrained(tmp_path / name)
        (tmp_path / name / "chat_template.jinja").write_text(text, encoding="utf-8")
    tight = {"QUANTKIT_LIMIT_SECONDS": "0.5", "QUANTKIT_LIMIT_MEMORY": "3e7"}
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    places = [tmp_path / name for name in TEMPLATES]
    environment = {**os.environ, **tight, "PYTHONPATH": path}
    ran = forked.run("-c", RENDERED, *places, env=environment, timeout=300)
    assert (ran.stdout.split(), ran.returncode) == ([*TEMPLATES, "finalizer"], 0), ran.stderr


def test_a_limit_is_raised_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    limits.LAYERS.demand(10_000, "x")
    monkeypatch.setenv("QUANTKIT_LIMIT_LAYERS", "2e4")
    limits.LAYERS.demand(20_000, "x")
    monkeypatch.setenv("QUANTKIT_LIMIT_LAYERS", "many")
    with pytest.raises(InputError, match="limit-invalid"):
        limits.LAYERS.demand(1, "x")


def test_limits_that_are_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("nan", "-1", "0"):
        monkeypatch.setenv("QUANTKIT_LIMIT_DOCUMENT", text)
        with pytest.raises(InputError, match="limit-invalid"):
            limits.DOCUMENT.demand(1, "x")


def test_a_guard_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA), signal.getsignal(signal.SIGALRM)
    for name, text in (("SECONDS", "inf"), ("MEMORY", "inf"), ("SECONDS", "5"), ("MEMORY", "1e9")):
        monkeypatch.setenv(f"QUANTKIT_LIMIT_{name}", text)
        with limits.guarded("outer"), limits.guarded("inner"):
            pass
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # without a descriptor, as in a notebook
    with limits.guarded("a notebook"):
        pass
    monkeypatch.setattr(limits, "_held", lambda: float("inf"))  # a system without /proc
    with limits.guarded("elsewhere"):
        pass
    assert (resource.getrlimit(resource.RLIMIT_DATA), signal.getsignal(signal.SIGALRM)) == before


def test_a_small_file_takes_little_memory(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"small")
    tracemalloc.start()
    assert limits.read(tmp_path / "small", limits.DATA) == b"small"
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    "template", ["{{ 1//0 }}", "{{ '{a}'.format() }}", "{{ 'a'.encode('x') }}", "{% for %}"], ids=range(4)
)
def test_a_template_that_fails_is_one_error(template: str, tmp_path: Path, byte_tokenizer: Any) -> None:
    byte_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    refused(lambda: Tokenizer(tmp_path).chat("hello"), "no-chat-template")


def test_counts_in_lists_are_limited_too() -> None:
    from quantkit.model.source import pretrained

    refused(lambda: pretrained.demand_layers({"depths": [3_000_000, 1]}, "config.json"))
    refused(lambda: pretrained.demand_layers({"vision": {"num_blocks": 20_000}}, "config.json"))
    # Gemma 4's; a size is no count
    pretrained.demand_layers({"text_config": {"vocab_size_per_layer_input": 262_144}}, "config.json")
