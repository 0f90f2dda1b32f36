"""A checkpoint scored in a device's own vLLM: what it is here. A stand-in takes vLLM's place on both machines."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import standin_vllm

from devices.local import local
from devices.tiny_home import tiny_home
from quantkit.bundle import Bundle
from quantkit.devices.measure import measure_on
from quantkit.devices.named import demand_sessions
from quantkit.errors import InputError
from quantkit.measurement.timing.schedule import TimingPlan
from quantkit.pipeline.measure import measure_bundle
from quantkit.runtimes import apart
from quantkit.runtimes.vllm import OWN

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Iterator[Path]:
    with tiny_home(tmp_path_factory.mktemp("home"), byte_tokenizer, {"packed": "int4"}) as path:
        yield path


@pytest.fixture
def bundle(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    apart.add(OWN, standin_vllm.python(tmp_path / "p", "0.32.0"))
    return Bundle.load(shutil.copytree(home / "packed", tmp_path / "packed"))


def test_what_vllm_says_there_is_what_it_says_here(bundle: Bundle, home: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"runtime": "vllm", "plan": TimingPlan()}
    decisions: list[Any] = []
    there = measure_on(bundle, local(tmp_path / "there", "box"), str(home / "model"), decisions=decisions, **how)
    assert [one.reason for one in decisions[-1:]] == ["box: its speed is measured under load: --load rate=1,2,4"]
    here = {row.name: row for row in measure_bundle(bundle, str(home / "model"), runtime="vllm", speed=False)}
    assert {row.name for row in there} == {name for name in here if name.startswith("accuracy.")}
    for row in there:
        own = here[row.name]
        assert row.value == pytest.approx(own.value, rel=1e-6, abs=1e-9) and row.n == own.n
        assert (row.data, row.subject, row.on) == (own.data, own.subject, "box")
        assert row.baseline and own.baseline and row.baseline.subject == own.baseline.subject
        assert row.baseline.value == pytest.approx(own.baseline.value, rel=1e-6)
        assert row.versions["vllm"] == "0.32.0" and row.settings == own.settings
    text = (bundle.path / "report.html").read_text()
    assert "<summary>box</summary>" in text


def test_a_device_without_it_and_other_commands_are_refused(bundle: Bundle, home: Path, tmp_path: Path) -> None:
    apart.remove("vllm")
    with pytest.raises(InputError) as caught:
        measure_on(bundle, local(tmp_path / "there"), str(home / "model"), runtime="vllm", plan=TimingPlan())
    # neither has the Python of its jobs vLLM
    assert caught.value.code == "runtime-absent" and "has no vllm" in str(caught.value.value)
    for text in (True, False):
        with pytest.raises(InputError, match="runtime-unsupported"):
            demand_sessions(["vllm"], text=text)
