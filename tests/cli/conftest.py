"""The command line in this process, and where packages are missing; a bundle with planted figures."""

import functools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import planted
import pytest
from forked import CLI, without

from quantkit import cli
from quantkit.bundle import content_sha256, inventory
from quantkit.bundle.manifest import MANIFEST, MEASUREMENTS
from quantkit.measurement.rows import write_rows

_ABSENT = ("torch", "transformers", "scipy", "datasets", "compressed_tensors", "pandas", "onnx", "accelerate", "gguf")


class Ran:
    """What a command said."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def envelope(self) -> dict[str, Any]:
        """What `--json` printed: one line, one object, nothing else."""
        assert self.out.count("\n") == 1
        found = json.loads(self.out)
        assert list(found) == ["schema", "command", "exit", "result", "decisions", "warnings", "error"]
        assert found["schema"] == "quantkit/1"
        assert found["exit"] == self.code
        assert isinstance(found, dict)
        return found


@pytest.fixture
def quantkit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: object) -> Ran:
        capsys.readouterr()
        code = cli.run([str(argument) for argument in arguments])
        return Ran(code, *capsys.readouterr())

    return run


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle with planted figures; its weights are a text."""
    folder = tmp_path / "a bundle"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "model.safetensors").write_text("weights")
    write_rows(folder / MEASUREMENTS, planted.rows())
    files = inventory(folder)
    manifest = planted.manifest(files=[file.model_dump(by_alias=True) for file in files])
    manifest = manifest.model_copy(update={"content_sha256": content_sha256(files)})
    (folder / MANIFEST).write_bytes(manifest.as_bytes())
    return folder


@pytest.fixture
def without_packages() -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command line where torch and the rest are not installed."""
    return functools.partial(without, _ABSENT, CLI)
