"""Two real raylets on this machine, one of which is killed in mid-run."""

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quantkit.devices.named import NamedDevice
from quantkit.errors import InputError
from quantkit.nightly.records import BuildJob, NightCell
from quantkit.nightly.store import Store
from quantkit.pipeline.many.executors import Ray
from quantkit.pipeline.progress import Progress

from . import fake_work
from .conftest import FIRST, night

_OF_A_NODE = {"object_store_memory": 80 * 2**20, "num_cpus": 1, "resources": {"cpu-x86": 1}}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    # the nodes import what they run
    roots = [str(Path(__file__).parents[depth]) for depth in (1, 2)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*roots, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={**_OF_A_NODE, "include_dashboard": False})
    yield found
    found.shutdown()


def test_every_cell_is_committed_once_though_a_node_dies(cluster: Any, tmp_path: Path) -> None:
    # as a machine of its own: on one machine builds wait for each other
    dying = cluster.add_node(**_OF_A_NODE, env_vars={"QUANTKIT_CACHE": str(tmp_path / "elsewhere"), "NODE": "dying"})
    store = Store.open(tmp_path / "store", create=True)
    cells = [NightCell("tiny", recipe, "cpu-x86", "torch", batch) for recipe in "abcd" for batch in (1, 8)]
    elsewhere = NightCell("tiny", "a", "h100", "torch", 1)
    # of a device: to the node that reaches it, which has no target's name
    cluster.add_node(**{**_OF_A_NODE, "resources": {"pi5": 1}}, env_vars={"NODE": "near-pi5"})
    on_pi5 = NightCell("tiny", "a", "cpu-arm", "onnxruntime@pi5", 1)
    device = NamedDevice(name="pi5", address="ssh://pi@pi5").text()
    store.begin(night(FIRST, (*cells, elsewhere, on_pi5)))
    jobs = [
        BuildJob(FIRST, str(tmp_path / "nightly.yaml"), "", tuple(each.key for each in pair), 1, 600.0)
        for pair in ((elsewhere,), *zip(cells[::2], cells[1::2], strict=True))
    ]
    jobs.append(BuildJob(FIRST, jobs[0].config, "", (on_pi5.key,), 1, 600.0, device))
    log = tmp_path / "log"
    (tmp_path / "seconds").write_text("0.5")

    def kill() -> None:
        while not log.exists() or " dying " not in log.read_text():  # else it may die with nothing in work
            time.sleep(0.01)
        cluster.remove_node(dying, allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    outcomes = list(Ray(cluster.address, patience=1.0).run(jobs, fake_work.work, Progress()))
    killer.join()
    assert not [each.error for each in outcomes if each.state == "failed"]
    states = {each.job.name: each.state for each in outcomes}
    assert states == {each.build: "missing" if each is elsewhere else "done" for each in (*cells, elsewhere, on_pi5)}
    (missing,) = [each.error for each in outcomes if each.state == "missing"]
    assert missing is not None and missing["code"] == "no-machine" and "h100" in missing["value"]
    assert store.committed(FIRST) == {each.key for each in (*cells, on_pi5)}
    assert len(store.results()) == len(cells) + 1
    lines = [line.split() for line in log.read_text().splitlines()]
    assert {tuple(line[3:]) for line in lines if line[0] == on_pi5.build} == {("near-pi5", "ssh://pi@pi5")}
    assert {line[3] for line in lines if line[0] != on_pi5.build} == {"None", "dying"}
    began = Counter(line[0] for line in lines)
    assert set(began) == {each.build for each in (*cells, on_pi5)} and max(began.values()) == 2, (
        "no build was begun anew"
    )


def test_without_a_cluster_it_says_how_to_start_one() -> None:
    with pytest.raises(InputError) as caught:
        list(Ray("127.0.0.1:1").run([], fake_work.work, Progress()))
    assert caught.value.code == "ray-unreachable"
