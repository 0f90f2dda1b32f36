"""A load: servers in turns, what they deliver beside the original, and nothing left running, whatever goes wrong.

A small OpenAI-compatible server and generator stand in for vLLM's; the real ones run where `quantkit runtime add vllm`
has been done.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import forked
import generator
import openai_server
import psutil
import pytest
import small_onnx
import zoo
from devices.local import local

from quantkit import cli, machine
from quantkit.bundle import Bundle
from quantkit.devices.measure import loaded_on
from quantkit.errors import InputError
from quantkit.measurement.load import ServerLoad
from quantkit.pipeline import load as loads
from quantkit.runtimes import apart
from quantkit.runtimes.vllm import OWN, inside

REAL = apart.find("vllm")
SMALL = ("--load", "rate=20,40", "--requests", "6", "--prompt", "8", "--output", "5", "--json")


def python(place: Path) -> Path:
    """Write a Python with the stand-in for vLLM, which takes `-I`, `-B`, `-m MODULE` and a file."""
    packages = place / "packages"
    for module, source in (("entrypoints/openai/api_server", openai_server), ("benchmarks/serve", generator)):
        (packages / f"vllm/{module}").parent.mkdir(parents=True)
        shutil.copy(str(source.__file__), packages / f"vllm/{module}.py")
    (packages / "vllm-0.32.0.dist-info").mkdir()
    (packages / "vllm-0.32.0.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.32.0\n")
    other = place / "python"
    lines = f"#!{sys.executable}\nimport runpy, sys\nsys.path.insert(0, {str(packages)!r})\n"
    lines += "words = [word for word in sys.argv[1:] if word not in ('-I', '-B')]\n"
    lines += "module = words[0] == '-m'\nsys.argv = words[module:]\n"
    other.write_text(f"{lines}(runpy.run_module if module else runpy.run_path)(sys.argv[0], run_name='__main__')\n")
    other.chmod(0o755)
    return other


@pytest.fixture
def tiny(tmp_path: Path, byte_tokenizer: Any) -> Path:
    """Return a model of 250 ms a token."""
    model: Any = zoo.tiny("llama", vocab_size=len(byte_tokenizer), head_dim=64)
    model.save_pretrained(tmp_path / "tiny")
    byte_tokenizer.save_pretrained(tmp_path / "tiny")
    _slow(tmp_path / "tiny", 0.25)
    return tmp_path / "tiny"


@pytest.fixture
def bundle(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """Return a bundle of 2 ms a token, where the stand-in is known."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("STAND_IN_PIDS", str(tmp_path / "pids"))
    (tmp_path / "p").mkdir()
    apart.add(OWN, python(tmp_path / "p"))
    shutil.copytree(tiny, tmp_path / "b" / "model")
    _slow(tmp_path / "b" / "model", 0.002)
    return small_onnx.bundle(tmp_path / "b")


def _slow(folder: Path, seconds: float) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "delay": seconds}))


def nothing_runs(pids: Path) -> bool:
    """Tell whether every server that was started has ended."""
    started = [int(line) for line in pids.read_text().split()]
    assert started
    return not any(psutil.pid_exists(one) and psutil.Process(one).status() != "zombie" for one in started)


def said(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    capsys.readouterr()
    cli.run(["measure", *map(str, words)])
    return json.loads(capsys.readouterr().out)


def test_a_bundle_and_its_original_are_loaded_in_turns(
    bundle: Bundle, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = said(capsys, bundle.path, "--baseline", tiny, *SMALL, "--slo", "tpot=200ms")
    # a crowded machine may leave open who serves more; it does not change what is measured
    assert answer["exit"] in (0, 3), answer["error"]
    rows = answer["result"]["measurements"]
    (fast,) = [
        row
        for row in rows
        if row["name"] == "load.tpot" and row["settings"]["quantile"] == "p50" and row["settings"]["rate"] == 20
    ]
    assert fast["runtime"] == "vllm" and fast["n"] == 12 and fast["shape"] == {"prompt": 8, "output": 5}
    assert 0.002 <= fast["value"] < 0.2
    assert fast["baseline"]["value"] >= 0.25
    assert fast["baseline"]["ratio_ci95"][0] > 1
    good = {row["settings"]["rate"]: row for row in rows if row["name"] == "load.goodput"}
    assert list(good) == [20, 40] and all(row["baseline"]["value"] == 0 < row["value"] for row in good.values())
    (blocks,) = [row for row in rows if row["name"] == "load.kv_blocks"]
    assert blocks["value"] == 40 and blocks["settings"]["fits"] == 40
    (memory,) = [row for row in rows if row["name"] == "load.memory"]
    assert 1e6 < memory["value"] < 1e9
    assert "requests/s within the limit, the original none" in answer["result"]["load"]
    kept = {(row["name"], row["settings"].get("rate")) for row in Bundle.load(bundle.path).measurements}
    assert ("load.goodput", 40) in kept
    assert len((tmp_path / "pids").read_text().split()) == 4
    assert nothing_runs(tmp_path / "pids")


@pytest.mark.parametrize(
    ("how", "code", "value"),
    [
        ("dies", "server-failed", "RuntimeError: no kernel for int3"),
        ("falls", "server-failed", "MemoryError: bad alloc"),
        ("silent", "server-failed", "not ready"),
        ("refuses", "load-failed", "the prompt is too long"),
    ],
)
def test_a_server_that_fails_is_one_line_and_leaves_nothing(
    how: str, code: str, value: str, bundle: Bundle, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN", how)
    monkeypatch.setattr(loads, "_READY", 2.0)
    with pytest.raises(InputError) as caught:
        loads.load_bundle(bundle, ServerLoad([4], 8, 40, requests=6), str(tiny))
    assert (caught.value.code, caught.value.where) == (code, str(tiny))
    assert value in str(caught.value.value)
    assert nothing_runs(tmp_path / "pids")


@pytest.mark.parametrize(
    ("log", "error"),
    [
        (
            "ValidationError: 1 validation error\n  Value error, no such model [type=value_error]\n  For more, see",
            "no such model",
        ),
        ("(EngineCore pid=3) ERROR 01-01 RuntimeError: no kernel\nleaked 3 instances", "RuntimeError: no kernel"),
        ("loading\nKilled\n", "Killed"),
        ("", ""),
    ],
)
def test_the_last_error_of_a_log(log: str, error: str) -> None:
    assert inside.last_error(io.BytesIO(log.encode())) == error


def test_a_device_loads_its_own_servers(bundle: Bundle, tiny: Path, tmp_path: Path) -> None:
    device = local(tmp_path / "there", "box")
    load = ServerLoad([20, 40], 8, 5, {"tpot": 0.2}, requests=6)
    rows = loads.load_bundle(bundle, load, str(tiny), turns=partial(loaded_on, device))
    good = {row.settings["rate"]: row for row in rows if row.name == "load.goodput"}
    assert list(good) == [20, 40] and all((row.on, row.runtime) == ("box", "vllm") for row in rows)
    assert all(row.baseline and row.baseline.value == 0 < (row.value or 0) for row in good.values())
    assert good[20].n == 12 and good[20].versions["vllm"] == "0.32.0"
    assert {row["name"] for row in Bundle.load(bundle.path).measurements} >= {"load.goodput", "load.kv_blocks"}
    assert nothing_runs(tmp_path / "pids")
    real, sides = device.link.run, {"bundle": bundle.model_folder}

    def fewer(*asked: Any, **how: Any) -> Any:
        cells = real(*asked, **how)
        row = cells["load-0-0"][0]
        cells.add("load-0-0", [row | {"failed": row["failed"][1:]}])
        return cells

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device.link, "run", fewer)
        with pytest.raises(InputError, match="answer-invalid"):
            loaded_on(device, ServerLoad([20], 8, 5, requests=6), sides, ["bundle"], lambda *_: None)


def test_a_port_that_is_taken_is_one_line(bundle: Bundle, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        port = one.getsockname()[1]
        monkeypatch.setattr(loads, "free_port", lambda: port)
        with pytest.raises(InputError) as caught:
            loads.load_bundle(bundle, ServerLoad([4], 8, 4, requests=4), str(tiny))
    assert (caught.value.code, caught.value.value) == ("server-failed", f"port {port} is taken")


def test_the_servers_end_with_quantkit(bundle: Bundle, tiny: Path, tmp_path: Path) -> None:
    words = ["measure", str(bundle.path), "--baseline", str(tiny), *SMALL[:2], *SMALL[4:]]
    process = subprocess.Popen(forked.python("-c", forked.CLI, *words), stdout=subprocess.DEVNULL)
    try:
        _until(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text())
    finally:
        forked.kill(process)
    _until(lambda: nothing_runs(tmp_path / "pids"))


def _until(holds: Any) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_an_endpoint_is_loaded_alone_and_nothing_is_kept(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    before = bundle.measurements
    server = ThreadingHTTPServer(("127.0.0.1", 0), openai_server.Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        answer = said(capsys, bundle.path, "--endpoint", f"{url}/v1/", *SMALL, "--slo", "ttft=5s")
    finally:
        server.shutdown()
        server.server_close()
    assert answer["exit"] == 0, answer["error"]
    rows = answer["result"]["measurements"]
    assert {(row["runtime"], row["settings"]["url"], row["baseline"]) for row in rows} == {("endpoint", url, None)}
    assert {row["settings"].get("share") for row in rows if row["name"] == "load.goodput"} == {1.0}
    assert answer["result"]["load"] is None and Bundle.load(bundle.path).measurements == before


def test_an_endpoint_without_openai_s_interface_is_refused_before_any_work(
    bundle: Bundle, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "_answers", None)
    server = ThreadingHTTPServer(("127.0.0.1", 0), openai_server.Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        other = said(capsys, bundle.path, "--endpoint", f"{url}/other", *SMALL)["error"]
        apart.remove("vllm")
        without = said(capsys, bundle.path, "--endpoint", url, *SMALL)["error"]
    finally:
        server.shutdown()
        server.server_close()
    assert (other["code"], other["value"]) == ("load-failed", f"{url}/other/v1/models answers 404")
    assert (without["code"], without["rule"]) == ("runtime-not-here", "the generator of the load is vLLM's")
    gone = said(capsys, bundle.path, "--endpoint", url, *SMALL)["error"]
    assert (gone["code"], gone["value"]) == ("load-failed", f"no server answers at {url} (connection refused)")


def test_an_endpoint_that_ends_with_its_streams_open_is_refused(
    bundle: Bundle, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_server.Handler, "ends", True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), openai_server.Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    problem = said(capsys, bundle.path, "--endpoint", url, *SMALL)["error"]
    assert (problem["code"], problem["where"]) == ("load-failed", "--endpoint")
    assert problem["value"] == f"no server answers at {url} (connection refused)"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--load", "rate=0"), "usage"),
        (("--load", "rate=fast"), "usage"),
        (("--load", "4"), "usage"),
        (("--load", "rate=2", "--slo", "tbt=5ms"), "unknown-limit"),
        (("--load", "rate=2", "--slo", "ttft=5"), "usage"),
        (("--load", "rate=2", "--runtime", "torch"), "usage"),
        (("--load", "rate=2", "--on", "pi"), "unknown-device"),
        (("--load", "rate=2", "--on", "pi", "--endpoint", "http://127.0.0.1:1"), "usage"),
        (("--load", "rate=2", "--endpoint", "localhost:80"), "usage"),
        (("--load", "rate=2", "--output", "4000"), "prompt-too-long"),
        (("--slo", "ttft=5ms"), "usage"),
    ],
)
def test_bad_input_is_one_line(
    words: tuple[str, ...], code: str, bundle: Bundle, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = said(capsys, bundle.path, "--baseline", tiny, *words, "--json")
    assert answer["error"]["code"] == code and answer["exit"] == 2
    assert not (tmp_path / "pids").exists()


@pytest.mark.parametrize(("load", "value"), [("rate=1,x", "'x'"), ("rate=2,,1", "''"), ("rate=1,0", "'0'"), ("4", "4")])
def test_a_rate_that_is_none_is_named(load: str, value: str) -> None:
    with pytest.raises(InputError) as caught:
        ServerLoad.parse(load)
    assert (caught.value.code, caught.value.where, caught.value.value) == ("usage", "--load", value)


def test_without_vllm_the_error_names_the_command_that_adds_it(bundle: Bundle, tiny: Path) -> None:
    apart.remove("vllm")
    with pytest.raises(InputError) as caught:
        loads.load_bundle(bundle, ServerLoad([4]), str(tiny))
    assert caught.value.code == "runtime-not-here"


def test_a_machine_without_the_memory_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = (tiny / "model.safetensors").stat().st_size
    monkeypatch.setattr(machine, "memory_available", lambda: weights + loads._PROCESSES + (5 << 29))
    assert loads.cache_space([tiny]) == 2
    monkeypatch.setattr(machine, "memory_available", lambda: weights + loads._PROCESSES)
    with pytest.raises(InputError) as caught:
        loads.cache_space([tiny])
    assert caught.value.code == "out-of-memory"


@pytest.mark.thorough
@pytest.mark.skipif(REAL is None, reason="quantkit runtime add vllm --install")
def test_the_real_server_answers_the_real_generator(bundle: Bundle, tiny: Path) -> None:
    assert REAL is not None
    apart.add(OWN, Path(REAL.python))
    before = {one.pid for one in psutil.process_iter()}
    rows = loads.load_bundle(bundle, ServerLoad([2], 16, 8, {"e2el": 60}, requests=4), str(tiny))
    (good,) = [row for row in rows if row.name == "load.goodput"]
    assert good.settings["share"] == good.settings["baseline_share"] == 1
    assert {row.value for row in rows if row.name == "load.kv_blocks"} != {0}
    mine = [one for one in psutil.process_iter(["cmdline"]) if one.pid not in before]
    assert not [one for one in mine if str(os.path.realpath(tiny)) in " ".join(one.info["cmdline"] or [])]
