"""The crash-safe build folder: killed anywhere, full disk, two at once, resumed with something else."""

import errno
import hashlib
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_build import FINGERPRINT, STEPS, compile_fake, manifest

from quantkit.bundle import Build, Bundle
from quantkit.errors import InputError, QuantkitError, Stopped

SCRIPT = Path(__file__).with_name("fake_build.py")
# so that the scripts find the package that is under test, installed or not
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _committed(out: Path, steps: int) -> None:
    """A build that was left after some steps."""
    with Build.open(out, FINGERPRINT, resume=False) as build:
        for step in range(steps):
            file = build.temporary("x")
            file.write_bytes(bytes([step]) * 10)
            build.commit(f"block {step}", {"step": step}, {file: build.bundle / "model" / f"{step}.safetensors"})


def test_a_finished_build_is_a_verified_bundle_and_leaves_nothing_else(tmp_path: Path) -> None:
    bundle = compile_fake(tmp_path / "out", resume=False)
    assert [check.ok for check in Bundle.load(tmp_path / "out").verify()] == [True] * 7
    assert len(bundle.manifest.files) == STEPS + 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("together", ["1", "2"])
def test_killed_at_every_single_change_to_the_disk(tmp_path: Path, together: str) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "out", "--kill-at-every-call", together],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 35


def test_killed_at_random_moments(tmp_path: Path) -> None:
    expected = compile_fake(tmp_path / "calm", resume=False).manifest.content_sha256
    rng = random.Random(7)
    kills = 0
    for attempt in range(30):
        # later attempts get more time, so that the test ends on a slow machine too
        child = subprocess.Popen(
            [sys.executable, SCRIPT, tmp_path / "out", "0.1"], env=ENVIRONMENT, stdout=subprocess.PIPE
        )
        try:
            child.wait(timeout=rng.uniform(0.2, 0.7) + 0.1 * attempt)
            break
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            child.wait()
            kills += 1
    assert kills > 0
    assert Bundle.load(tmp_path / "out").manifest.content_sha256 == expected


def test_resume_goes_on_where_it_stopped(tmp_path: Path) -> None:
    _committed(tmp_path / "out", 3)
    with Build.open(tmp_path / "out", FINGERPRINT, resume=True) as build:
        assert build.done() == {f"block {step}": {"step": step} for step in range(3)}


def test_steps_that_wait_are_committed_together_and_their_files_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
    )
    build = Build.open(tmp_path / "out", FINGERPRINT, resume=False)
    synced.clear()
    journal, last = build.steps / "journal.jsonl", build.steps / "hidden-0"
    for step in range(3):
        file = build.temporary("x")
        file.write_bytes(b"%d" % step)
        digest = hashlib.sha256(b"%d" % step).hexdigest()
        remove = [last] if step else []
        last = build.steps / f"hidden-{step}"
        build.commit(f"{step}", {}, {file: last}, remove=remove, hashes={file: digest}, sync=False)
    assert list(build.done()) == ["0", "1", "2"]
    assert not journal.exists() and not synced and (build.steps / "hidden-0").exists()
    with pytest.raises(ValueError, match="already"):
        build.commit("1", {}, {})
    build.sync()
    assert synced == ["hidden-0", "hidden-1", "hidden-2", "steps", "journal.jsonl", "steps"]
    assert [path.name for path in build.steps.glob("hidden-*")] == ["hidden-2"]
    build.sync()
    assert len(synced) == 6
    build._release()  # as if it were killed
    with Build.open(tmp_path / "out", FINGERPRINT, resume=True) as build:
        assert list(build.done()) == ["0", "1", "2"]
        assert not build.dropped


@pytest.mark.parametrize(("killed", "kept"), [(True, ["0"]), (False, ["0", "1", "2"])])
def test_steps_that_wait_are_lost_by_a_kill_alone(tmp_path: Path, killed: bool, kept: list[str]) -> None:
    build = Build.open(tmp_path / "out", FINGERPRINT, resume=False)
    for step in range(3):
        file = build.temporary("x")
        file.write_bytes(b"x")
        build.commit(f"{step}", {}, {file: build.steps / f"{step}"}, sync=step == 0)
    if killed:
        build._release()
    else:
        with pytest.raises(KeyboardInterrupt), build:
            raise KeyboardInterrupt
    assert list(build.done()) == (["0", "1", "2"])
    with Build.open(tmp_path / "out", FINGERPRINT, resume=True) as build:
        assert list(build.done()) == kept
        assert sorted(path.name for path in build.steps.iterdir()) == [*kept, "journal.jsonl", "temporary"]


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_a_torn_last_line_of_the_journal_is_dropped(tmp_path: Path, cut: int) -> None:
    _committed(tmp_path / "out", 3)
    journal = tmp_path / "out.partial/steps/journal.jsonl"
    os.truncate(journal, journal.stat().st_size - cut)
    with Build.open(tmp_path / "out", FINGERPRINT, resume=True) as build:
        assert list(build.done()) == ["block 0", "block 1"]
        # the files of the dropped step are gone, its name is free again, and the journal is whole
        assert not (build.bundle / "model/2.safetensors").exists()
        file = build.temporary("x")
        file.write_bytes(b"again")
        build.commit("block 2", {}, {file: build.bundle / "model/2.safetensors"})
    with Build.open(tmp_path / "out", FINGERPRINT, resume=True) as build:
        assert list(build.done()) == ["block 0", "block 1", "block 2"]


@pytest.mark.parametrize("harm", ["missing", "short", "changed", "link"])
def test_a_step_whose_file_is_not_whole_is_dropped_with_all_that_follow(tmp_path: Path, harm: str) -> None:
    _committed(tmp_path / "out", 4)
    file = tmp_path / "out.partial/bundle/model/1.safetensors"
    if harm == "missing":
        file.unlink()
    elif harm == "short":
        os.truncate(file, 3)
    elif harm == "changed":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    else:
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    with Build.open(tmp_path / "out", FINGERPRINT, resume=True) as build:
        assert list(build.done()) == ["block 0"]
        assert build.dropped == (
            "bundle/model/1.safetensors is missing or has changed: block 1, block 2, block 3 done again"
        )
        assert [path.name for path in (build.bundle / "model").iterdir()] == ["0.safetensors"]


def test_losing_a_file_that_replaced_a_removed_one_goes_back_to_the_start(tmp_path: Path) -> None:
    with Build.open(tmp_path / "out", FINGERPRINT, resume=False) as build:
        for step in range(3):
            file = build.temporary("h")
            file.write_bytes(b"hidden")
            remove = [build.steps / f"hidden-{step - 1}"] if step else []
            build.commit(f"block {step}", {}, {file: build.steps / f"hidden-{step}"}, remove=remove)
    (tmp_path / "out.partial/steps/hidden-2").unlink()
    with Build.open(tmp_path / "out", FINGERPRINT, resume=True) as build:
        assert build.done() == {}


def test_files_outside_the_journal_are_never_shipped(tmp_path: Path) -> None:
    _committed(tmp_path / "out", 1)
    stray = tmp_path / "out.partial/bundle/model/stray.json"
    stray.write_text("half a file")
    with Build.open(tmp_path / "out", FINGERPRINT, resume=True) as build:
        assert not stray.exists()
        assert [entry.path for entry in build.finish(manifest(build.bundle)).manifest.files] == ["model/0.safetensors"]


def test_finish_refuses_a_manifest_that_does_not_fit_the_folder(tmp_path: Path) -> None:
    with Build.open(tmp_path / "out", FINGERPRINT, resume=False) as build:
        before = manifest(build.bundle)
        (build.bundle / "late.txt").write_text("late")
        with pytest.raises(ValueError, match=r"late\.txt"):
            build.finish(before)


def test_a_step_or_a_path_is_committed_once(tmp_path: Path) -> None:
    with Build.open(tmp_path / "out", FINGERPRINT, resume=False) as build:
        for name in ("a", "b"):
            build.temporary(name).write_text(name)
        build.commit("one", {}, {build.temporary("a"): build.steps / "x"})
        with pytest.raises(ValueError, match="already"):
            build.commit("one", {}, {})
        with pytest.raises(ValueError, match="earlier step"):
            build.commit("two", {}, {build.temporary("b"): build.steps / "x"})


def _code(out: Path, fingerprint: object = FINGERPRINT, *, resume: bool = False) -> str:
    with pytest.raises(QuantkitError) as caught, Build.open(out, fingerprint, resume=resume):  # type: ignore[arg-type]
        pass
    assert "\n" not in caught.value.line()
    return caught.value.code


def test_an_existing_out_is_refused(tmp_path: Path) -> None:
    for name in ("folder", "file", "link"):
        out = tmp_path / name
        {"folder": out.mkdir, "file": out.touch, "link": lambda out=out: out.symlink_to("nowhere")}[name]()
        assert _code(out) == "out-exists"
        assert _code(out, resume=True) == "out-exists"
        assert not (tmp_path / f"{name}.partial").exists()


def test_resuming_a_finished_bundle_gives_it_back(tmp_path: Path) -> None:
    first = compile_fake(tmp_path / "out", resume=False)
    with Build.open(tmp_path / "out", FINGERPRINT, resume=True) as build:
        assert build.finished == first


def test_an_unfinished_build_is_kept_unless_resumed(tmp_path: Path) -> None:
    _committed(tmp_path / "out", 2)
    assert _code(tmp_path / "out") == "unfinished-build"
    with Build.open(tmp_path / "out", FINGERPRINT, resume=True) as build:
        assert len(build.done()) == 2
    with pytest.raises(InputError, match="unfinished-build"):
        Bundle.load(tmp_path / "out")


def test_a_folder_of_ours_name_but_not_our_making_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "out.partial/thesis.txt"
    precious.parent.mkdir()
    precious.write_text("years of work")
    assert _code(tmp_path / "out") == "unfinished-build"
    assert _code(tmp_path / "out", resume=True) == "unfinished-build"
    assert [path.name for path in precious.parent.iterdir()] == ["thesis.txt"]


def test_resume_with_something_else_names_the_first_difference(tmp_path: Path) -> None:
    _committed(tmp_path / "out", 1)
    other = {**FINGERPRINT, "recipe": {"bits": 4, "group": 128}, "seed": 1}
    with pytest.raises(InputError) as caught:
        Build.open(tmp_path / "out", other, resume=True)
    assert caught.value.code == "resume-mismatch"
    assert caught.value.where.endswith(": recipe.group")
    assert "64" in caught.value.value
    assert "128" in caught.value.value
    # and the lock is free again
    Build.open(tmp_path / "out", FINGERPRINT, resume=True).__exit__(None, None, None)


def test_resume_with_nothing_there_starts(tmp_path: Path) -> None:
    with Build.open(tmp_path / "new/deep/out", FINGERPRINT, resume=True) as build:
        assert build.done() == {}
        assert build.bundle.is_dir()


def test_an_error_before_the_first_step_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Build.open(tmp_path / "out", FINGERPRINT, resume=False) as build:
        build.temporary("x").write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_two_at_once_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    out = tmp_path / "out"
    child = subprocess.Popen([sys.executable, SCRIPT, out, "30"], env=ENVIRONMENT)
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "out.partial/steps/temporary/shard").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert _code(out) == "build-locked"
        assert _code(out, resume=True) == "build-locked"
    finally:
        child.kill()
        child.wait()
    assert len(compile_fake(out, resume=True).manifest.files) == STEPS + 1


def _as_nobody(out: str) -> None:
    if os.getuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    try:
        Build.open(out, FINGERPRINT, resume=False)
    except InputError as error:
        os._exit(10 if error.code == "out-not-writable" else 11)
    os._exit(12)


def test_a_read_only_parent(tmp_path: Path) -> None:
    parent = tmp_path / "read-only"
    parent.mkdir()
    parent.chmod(0o555)
    # root may write anywhere, so the attempt is made as somebody else
    child = multiprocessing.get_context("fork").Process(target=_as_nobody, args=(str(parent / "out"),))
    child.start()
    child.join()
    assert child.exitcode == 10


def test_a_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert _code(tmp_path / "file/out") == "out-not-writable"


def _limited(out: str, limit: int) -> None:
    """A build in a process whose files the system cuts off at `limit` bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        compile_fake(Path(out), resume=False)
    except Stopped as error:
        os._exit(error.exit if error.code == "disk-full" else 1)
    os._exit(2)


# the first file of all; of the shards, which grow by 20,000 bytes, the first and the third
@pytest.mark.parametrize(("limit", "committed"), [(0, 0), (10_000, 0), (50_000, 2)])
def test_where_the_disk_takes_no_more_it_stops_and_resumes(tmp_path: Path, limit: int, committed: int) -> None:
    child = multiprocessing.get_context("fork").Process(target=_limited, args=(str(tmp_path / "out"), limit))
    child.start()
    child.join()
    assert child.exitcode == 75
    assert [path.name for path in tmp_path.iterdir()] == (["out.partial"] if committed else [])
    if committed:
        shard = tmp_path / "out.partial/steps/temporary/shard"
        assert shard.stat().st_size == limit  # half a file
        journal = tmp_path / "out.partial/steps/journal.jsonl"
        assert journal.read_bytes().count(b"\n") == committed
    bundle = compile_fake(tmp_path / "out", resume=True)
    assert all(check.ok for check in bundle.verify())
    whole = compile_fake(tmp_path / "whole", resume=False)
    assert bundle.manifest.content_sha256 == whole.manifest.content_sha256


def test_a_full_disk_while_the_journal_is_written_spoils_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _committed(tmp_path / "out", 2)
    journal = tmp_path / "out.partial/steps/journal.jsonl"
    whole = journal.read_bytes()
    with pytest.raises(Stopped), Build.open(tmp_path / "out", FINGERPRINT, resume=True) as build:
        file = build.temporary("x")
        file.write_bytes(b"abc")
        real, calls = os.fsync, []

        def full_at_the_journal(descriptor: int) -> None:
            calls.append(descriptor)
            if journal.stat().st_size > len(whole):
                raise OSError(errno.ENOSPC, "No space left on device")
            real(descriptor)

        monkeypatch.setattr(os, "fsync", full_at_the_journal)
        build.commit("block 2", {}, {file: build.bundle / "model/2.safetensors"})
    assert journal.read_bytes() == whole


def test_a_full_disk_told_by_a_rust_library(tmp_path: Path) -> None:
    with pytest.raises(Stopped), Build.open(tmp_path / "out", FINGERPRINT, resume=False):
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    with pytest.raises(RuntimeError), Build.open(tmp_path / "out", FINGERPRINT, resume=False):
        raise RuntimeError("No such file or directory (os error 2)")


def test_a_link_planted_as_the_build_s_folder_is_left_alone(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    (victim / "bundle").mkdir(parents=True)
    (victim / "bundle" / "thesis.txt").touch()
    (tmp_path / "out.partial").symlink_to(victim)
    with pytest.raises(InputError, match="unfinished-build"):
        Build.open(tmp_path / "out", FINGERPRINT, resume=False)
    assert [path.name for path in victim.rglob("*")] == ["bundle", "thesis.txt"]
