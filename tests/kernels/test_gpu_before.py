"""What is made before `benchmarks/gpu/run_all.py`: its kernels compiled, and what is carried to a bare machine."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("triton")  # Linux alone has it

HERE = Path(__file__).parents[2] / "benchmarks/gpu"


@pytest.fixture(autouse=True)
def _its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run imports by its own names."""
    monkeypatch.syspath_prepend(str(HERE))


COMPILED = """
import json, sys, time
import torch
from parts import precompile
from parts.shapes import WHOLE_MODEL, settings
from quantkit.kernels.layout import KINDS
from quantkit.kernels.matmul import weight_only
from quantkit.measurement.cuda.sides import known
from triton import knobs

# a split K, and a whole one
both = settings(known()["int4.g128"], 1)[:2]
wanted = [one for one in precompile.launches(["sweep"], "fp16")
          if (one.what, one.variant, one.decode) == ("product", "int4.g128", True) and one.config in both]
assert len(wanted) == 2
done = precompile.compiled(wanted, 90, time.monotonic() + 600)
hits = []
knobs.compilation.listener = lambda **told: hits.append(told["cache_hit"])
small = precompile._weight(known()["int4.g128"], True)
from quantkit.kernels import decode, matmul

# what a kernel's launch asks of its input on a GPU is answered as there
class OnGpu(torch.Tensor):
    is_cuda = True
torch.cuda.get_device_capability = lambda *_: (9, 0)
for rows, columns in WHOLE_MODEL:
    big = {"words": torch.empty(rows // 16, columns // KINDS["int4"].columns, 128, dtype=torch.int32),
           "scale": torch.empty(columns // 128, rows, dtype=torch.float16), "shape": (rows, columns)}
    packed = type(small)(**{**small.__dict__, **big})
    for batch in (1, 16):
        # as in another process: nothing is known but the files
        matmul.weight_only_matmul.device_caches.clear()
        decode.whole_k_matmul.device_caches.clear()
        for config in both:
            weight_only(torch.empty(batch, columns, dtype=torch.float16).as_subclass(OnGpu), packed, config)

# attention of Llama-3-8B's build, its caches as long as they are there
wanted = [one for one in precompile.launches(["steps"], "fp16") if one.what == "attention"]
found, hits = hits, []
attended = [precompile.compiled(wanted, 90, time.monotonic() + 600)[0], len({one.case.splits for one in wanted})]
hits.clear()
from quantkit.kernels import attention

for batch in (1, 16, 64):
    for room in (768, 4352):
        attention.split_attention.device_caches.clear()
        cache = torch.empty(batch, 8, room, 128, dtype=torch.float16)
        query = torch.empty(batch, 1, 32, 128, dtype=torch.float16).transpose(1, 2)
        seen = torch.ones(1, 1, 1, room, dtype=torch.bool).expand(batch, 1, 1, room)
        attention.split_kv(query, cache, cache, seen, 1.0, splits=attention.splits_of(8 * batch, room, 64, 132))
attended, hits = [*attended, hits], []

# a solver's kernel, looked for by its operator at shapes of a block, whose memory nobody touches
solving = [one for one in precompile.launches(["solvers", "model"], "fp16") if one.what in ("solver", "block")]
wanted = [one for one in solving if (one.variant, one.solver) == ("nf4 g64", "gptq")]
solved = precompile.compiled(wanted, 90, time.monotonic() + 600)
hits.clear()
from quantkit.kernels.solving import gptq

for rows, columns in WHOLE_MODEL[:2]:
    target, row = torch.empty(columns, rows), torch.empty(columns)
    order = torch.empty(columns, dtype=torch.int64)
    for group in (64, columns):
        gptq.choose_rows.device_caches.clear()
        scale = torch.empty(columns // group, rows)
        gptq.choose(target, torch.empty(columns, columns), row, order, scale, None, row[:16], row[:16],
                    -1.0, 1.0, group, "ieee")
print(json.dumps([done, found, attended, solved, hits, len(solving)]))
"""


def test_what_is_compiled_before_is_what_the_stages_look_for(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    made, hits, attended, solved, found, count = json.loads(done.stdout)
    # splits of 2, 8, 16 and 32
    assert attended == [4, 4, [True] * 6]
    assert made == [2, []]
    assert hits == [True] * 16
    # three schemes by GPTQ, its sweeps and ranges, one by AWQ's two searches as well; a factor; what a compile has
    assert count == 3 * 3 + 2 + 1 + 4
    assert solved == [1, []]
    # of two weights, in groups of 64 and by channels: one kernel
    assert found == [True] * 4


def test_what_is_carried_is_made_once_in_pieces_and_unpacked_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried = import_module("carried")
    needed, *_ = carried.wanted()
    # the tested versions, of all that is needed
    assert all("==" in requirement for requirement in needed if requirement != "py-spy")
    asked: list[str] = []

    def fetch(requirement: str, folder: Path) -> None:
        asked.append(requirement)
        if requirement == "absent":
            raise carried.InputError("wheel-missing", where=requirement, value="no such wheel")
        with zipfile.ZipFile(folder / f"{requirement}.whl", "w") as wheel:
            wheel.writestr(f"{requirement}/__init__.py", random.Random(0).randbytes(3000))

    def fill(folder: Path) -> dict[str, str]:
        return carried.packages(["one", "absent", "two"], folder, fetch)  # type: ignore[no-any-return]

    out = tmp_path / "bundle"
    made = carried.build(out, "peers", ["one"], fill, 2048)
    assert made["left_out"] == {"absent": "no such wheel"}
    assert len(made["pieces"]) > 1
    assert all(0 < (out / name).stat().st_size == size <= 2048 for name, size in made["pieces"].items())
    assert sorted(path.name for path in out.iterdir()) == sorted([*made["pieces"], "peers.json"])
    # what is there as it would be made is left alone
    asked.clear()
    assert carried.build(out, "peers", ["one"], fill, 2048) == made
    assert asked == []
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "before")
    there = tmp_path / "there"
    there.mkdir()
    for _ in range(2):
        assert list(carried.unpacked(out, there)) == ["peers: unpacked"]
    assert (there / "quantkit-gpu/site/two/__init__.py").read_bytes() == random.Random(0).randbytes(3000)
    assert os.environ["PYTHONPATH"] == os.pathsep.join([str(there / "quantkit-gpu/site"), "before"])
    (out / "peers-0").write_bytes(b"")
    assert list(carried.unpacked(out, there)) == [f"{out / 'peers.json'}: not all of its pieces are here"]
    carried.build(out, "peers", ["one"], fill, 2048)
    assert asked == ["one", "absent", "two"]
    with pytest.raises(carried.InputError, match="wheel-missing"):
        carried.packages(["absent"], tmp_path, fetch, demand=True)
