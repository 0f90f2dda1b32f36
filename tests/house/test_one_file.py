"""One file adds one thing: a pass, a format, an exporter and a runtime put into a copy of the package, and used.

Nothing else of the copy is touched. What a machine can do with the new ones is content, so the target is a file.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
import zoo

from house.source import PACKAGE

PLUG_INS = {
    "formats/int6.py": '''"""6-bit integers, per tensor, channel or group."""

from quantkit.formats import Format
from quantkit.formats.base.integers import IntegerFormat

FORMAT: Format = IntegerFormat("int6", 6)
''',
    "passes/plain.py": '''"""Round to nearest, once more."""

from quantkit.passes.rtn import Rtn


class Plain(Rtn):
    """See the module."""

    name = "plain"


PASS = Plain()
''',
    "exporters/listing.py": '''"""The names of the quantized layers, a line each."""

from quantkit.bundle import Check
from quantkit.content import Closed
from quantkit.exporters import Exporter


class Listing(Exporter):
    """See the module."""

    name = "listing"
    runtimes = ("slow",)
    stores = "tensors"
    place = "listing"
    Options = Closed

    def accepts(self, options, asked):
        """Everything."""

    def holds(self, options, runtime, asked):
        """Nothing of it but the names."""
        return "emulated"

    def export(self, folder, values, options):
        """One file."""
        folder.mkdir()
        (folder / "names.txt").write_text("\\n".join(sorted(values.schemes)))
        return []

    def check(self, bundle, values=None, options=None, *, inputs=None, blocks=None):
        """As many names as there are layers."""
        missing = len(values.schemes) - len((bundle / "listing" / "names.txt").read_text().split())
        return [Check(name="listing.names", value=missing, limit=0, ok=missing == 0)]


EXPORT = Listing()
''',
    "runtimes/slow.py": '''"""torch, by another name."""

from quantkit.runtimes.torch.runtime import TorchRuntime


class Slow(TorchRuntime):
    """See the module."""

    name = "slow"


RUNTIME = Slow()
''',
}


@pytest.mark.slow
def test_one_file_adds_one_thing(tmp_path: Path, byte_tokenizer: Any) -> None:
    package = tmp_path / "tree" / "quantkit"
    shutil.copytree(PACKAGE, package)  # with its byte code, where there is some
    for content in ("recipes", "calibration", "export"):
        (package.parent / content).symlink_to(PACKAGE.parent / content)
    for name, text in PLUG_INS.items():
        (package / name).write_text(text, encoding="utf-8")
    zoo.tiny("llama", vocab_size=len(byte_tokenizer), max_position_embeddings=128).save_pretrained(tmp_path / "model")
    byte_tokenizer.save_pretrained(tmp_path / "model")
    target = yaml.safe_load((PACKAGE.parent / "export" / "cpu-x86.yaml").read_text(encoding="utf-8"))
    target["runtimes"].append("slow")
    target["formats"]["int6"] = {name: {"state": "emulated", "source": "this test"} for name in ("torch", "slow")}
    (tmp_path / "target.yaml").write_text(yaml.safe_dump(target), encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump(
            {
                "schema": 1,
                "summary": "everything new at once",
                "scheme": {"weights": {"format": "int6", "granularity": "channel"}},
                "passes": ["plain"],
                "export": [{"checkpoint": {"layout": "dense"}}, {"listing": {}}],
            }
        ),
        encoding="utf-8",
    )
    words = ["compile", "./model", "--recipe", "./recipe.yaml", "--target", "./target.yaml", "--out", "out", "--json"]
    new = {"formats": "int6", "passes": "plain", "exporters": "listing", "runtimes": "slow"}
    # all in one process: the compile, then each list
    asked = [words, *(["list", kind, "--json"] for kind in new)]
    program = f"from quantkit.cli import run; print([run(each) for each in {asked!r}])"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=_environment(package.parent),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    compiled, *lines, codes = done.stdout.splitlines()
    assert codes == "[0, 0, 0, 0, 0]", done.stderr + done.stdout
    result = json.loads(compiled)["result"]
    checks = {check["name"]: check["ok"] for check in result["checks"]}
    assert checks["listing.names"] and all(checks.values())
    scored = {row["runtime"] for row in result["measurements"] if row["name"] == "accuracy.kl"}
    assert scored == {"torch", "slow"}
    layers = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))["layers"]
    assert {layer["scheme"]["format"] for layer in layers} == {"int6"}
    for name, line in zip(new.values(), lines, strict=True):
        assert name in line


def _environment(tree: Path) -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(tree)}
