"""Compiles on a cluster of real raylets on this machine, one of which is killed, and one that sees other folders."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
import zoo

from quantkit.bundle import Bundle
from quantkit.cli import run
from quantkit.pipeline.many.batch import CompileJob
from quantkit.pipeline.many.executors import largest_first

_OF_A_NODE = {"object_store_memory": 80 * 2**20, "num_cpus": 1}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head that computes nothing; nodes are added by the tests."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    head = {**_OF_A_NODE, "num_cpus": 0, "include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args=head)
    monkeypatch.setenv("RAY_ADDRESS", found.address)
    yield found
    found.shutdown()


@pytest.fixture
def home(tmp_path: Path, byte_tokenizer: Any, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    zoo.save(tmp_path / "tiny", byte_tokenizer, "llama", vocab_size=258, num_hidden_layers=2)
    set_ = ["calibration.samples=2", "calibration.tokens=32", "scheme.weights.group=32", "gates={}"]
    told = {"models": ["./tiny"], "recipes": ["rtn-int4", "int4-symmetric"], "speed": False, "vllm": False}
    (tmp_path / "jobs.yaml").write_text(yaml.safe_dump({**told, "set": set_, "out": "out"}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    capfd.readouterr()
    code = run([*words, "--json"])
    return code, json.loads(capfd.readouterr().out)


def test_the_largest_model_begins(tmp_path: Path) -> None:
    sizes = {"small": 10, "large": 1000, "other": 10}
    for name, size in sizes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(size))
    jobs = [CompileJob(name, str(tmp_path / name), {}, name, (str(tmp_path / name),)) for name in sizes]
    assert [job.name for job in largest_first(jobs)] == ["large", "small", "other"]


@pytest.mark.thorough
def test_jobs_of_a_node_that_dies_go_on_elsewhere_and_the_bundles_are_those_of_one_machine(
    cluster: Any, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dying, *_ = [cluster.add_node(**_OF_A_NODE) for _ in range(3)]
    told = yaml.safe_load((home / "jobs.yaml").read_text())
    more = [{"model": "./tiny", "recipe": recipe, "name": recipe} for recipe in told["recipes"]]
    (home / "jobs.yaml").write_text(yaml.safe_dump({**told, "jobs": more}))

    def kill() -> None:
        # a job on each node, also on the one that dies
        while len([*home.glob("out/*.partial")]) < 3:
            time.sleep(0.01)
        cluster.remove_node(dying, allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    code, told = said(capfd, "batch", "jobs.yaml", "--on", "ray")
    killer.join()
    rows = told["result"]["jobs"]
    assert code == 0, told
    assert [row["state"] for row in rows] == ["done"] * 4
    assert rows[0]["content_sha256"] == rows[2]["content_sha256"] != rows[1]["content_sha256"]
    assert not {dying.node_id[:6]} & {row["node"].partition("(")[2][:6] for row in rows}
    here = ["compile", "./tiny", "--no-speed", "--no-vllm"]
    for change in yaml.safe_load((home / "jobs.yaml").read_text())["set"]:
        here += ["--set", change]
    code, alone = said(capfd, *here, "--recipe", "rtn-int4", "--on", "ray")
    assert code == 0 and alone["result"]["bundle"] == "tiny--rtn-int4" and alone["result"]["seconds"]["total"] > 0
    assert {alone["result"]["content_sha256"]} == {rows[0]["content_sha256"]}
    assert Bundle.load(home / "out" / "tiny--rtn-int4").manifest.threads == 1
    assert not [*home.glob(".*.on")]


def test_a_node_that_sees_another_folder_is_refused_before_a_job_starts(
    cluster: Any, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It has an empty folder of its own under the path of ours; its mounts are its own."""
    apart = ["unshare", "--mount", "--map-root-user"]
    if subprocess.run([*apart, "mount", "-t", "tmpfs", "none", home], capture_output=True, check=False).returncode:
        pytest.skip("no mounts of one's own here")
    ray = Path(sys.executable).with_name("ray")
    start = f"{ray} start --address={cluster.address} --num-cpus=1 --object-store-memory={80 * 2**20} --block"
    node = subprocess.Popen(
        [*apart, "sh", "-c", f"mount -t tmpfs none {home} && mkdir {home}/tiny && exec {start}"],
        stdout=subprocess.DEVNULL,
    )
    try:
        _wait_for(cluster, 2, node)
        code, told = said(capfd, "batch", "jobs.yaml", "--on", "ray")
        assert (code, told["error"]["code"]) == (2, "not-shared")
        assert told["error"]["where"].startswith(str(home)) and os.uname().nodename in told["error"]["where"]
        assert [path.name for path in (home / "out").iterdir()] == ["jobs"]
    finally:
        node.terminate()
        node.wait()


def _wait_for(cluster: Any, count: int, node: subprocess.Popen[bytes]) -> None:
    import ray

    ray.init(cluster.address, log_to_driver=False)
    try:
        until = time.monotonic() + 120
        while len([node for node in ray.nodes() if node["Alive"]]) < count:
            assert node.poll() is None and time.monotonic() < until, "the node did not start"
            time.sleep(0.1)
    finally:
        ray.shutdown()


@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("ray://127.0.0.1:1", "ray-unreachable"),
        ("ray", "ray-unreachable"),
        ("ray://head", "usage"),
        ("pi5", "usage"),
    ],
)
@pytest.mark.parametrize("words", [("batch", "jobs.yaml"), ("compile", "./tiny", "--recipe", "rtn-int4")])
def test_a_cluster_that_is_not_there(
    words: tuple[str, ...],
    address: str,
    code: str,
    home: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    if code == "ray-unreachable" and address.startswith("ray://"):
        pytest.importorskip("grpc")
    found, told = said(capfd, *words, "--on", address)
    assert (found, told["error"]["code"]) == (2, code)
    assert not [path for path in home.rglob("*") if path.name.endswith((".on", ".partial"))]
