"""The blocks of docs/tutorial.md, run in their order; timing alone is left out, since no test is a place for it."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from quantkit import cli

TEXT = (Path(__file__).parent.parent / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(python|bash)\n(.*?)```", TEXT, re.DOTALL)
TIMED = {"compile", "measure"}


def test_every_block_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], one_thread: None
) -> None:
    assert [kind for kind, _ in BLOCKS] == ["python", "bash", "bash", "bash", "python", "bash"]
    assert TEXT.count("```") == 2 * len(BLOCKS), "a block of another kind would not be run"
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    said: dict[str, str] = {}
    for kind, block in BLOCKS:
        if kind == "python":
            exec(block, names)
            said["python"] = capfd.readouterr().out
            continue
        for line in block.splitlines():
            command = shlex.split(line)[1:]
            untimed = ["--no-speed"] if command[0] in TIMED and "--dry-run" not in command else []
            code = cli.run([*command, *untimed])
            captured = capfd.readouterr()
            said[command[0]] = captured.out
            assert code in ((0, 3) if command[0] == "compare" else (0,)), (line, captured.err)
    # what the page promises of the files, of the answer that is not decided, and of the network itself
    assert (tmp_path / "net-int8" / "report.html").is_file()
    assert (tmp_path / "compare.html").is_file()
    assert "would have been seen" in said["compare"]
    right = float(said["python"].rpartition("right: ")[2])
    with_floats = names["net"](names["torch"].tensor(names["images"][:500])).argmax(1).numpy()
    assert right == pytest.approx((with_floats == names["labels"][:500]).mean(), abs=0.02)
