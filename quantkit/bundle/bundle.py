"""`Bundle`: the folder that a compile writes, opened by its manifest."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from quantkit import given, limits
from quantkit.bundle import frame as frames
from quantkit.bundle import seal
from quantkit.bundle.disk import fsync_tree, one_writer, remove, stopping_when_full, write_atomic
from quantkit.bundle.manifest import (
    MANIFEST,
    MEASUREMENTS,
    Check,
    FileEntry,
    Manifest,
    Verdict,
    content_sha256,
    inventory,
    role_of,
)
from quantkit.bundle.verify import content_offenders, verify_files
from quantkit.content import near
from quantkit.errors import InputError
from quantkit.plugins import Kind


class _ModelLoader(Protocol):
    """Method of a runtime that `Bundle.model` calls."""

    def load(self, bundle: Bundle, **settings: Any) -> Any: ...
    def generate(self, bundle: Bundle, prompt: str, **how: Any) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Bundle:
    """A finished bundle on disk.

    Args:
        path: folder of the bundle.
        manifest: parsed `manifest.json`.
    """

    path: Path
    manifest: Manifest

    @classmethod
    def load(cls, path: str | Path) -> Bundle:
        """Open a bundle; only the manifest is read.

        Raises:
            InputError: `usage`, `not-a-bundle`, `unfinished-build`, `manifest-invalid`, `manifest-schema`.
        """
        folder = Path(given.demand("bundle", path, (str, Path), "a path")).expanduser()
        if not (folder / MANIFEST).is_file():
            partial = folder.with_name(f"{folder.name}.partial")
            if not folder.exists() and partial.is_dir():
                value, remedy = f"only {partial.name} is there", "finish it: the same compile command with --resume"
                raise InputError("unfinished-build", where=str(folder), value=value, remedy=remedy)
            value = f"no {MANIFEST} in it" if folder.is_dir() else "no such folder"
            rule = "a bundle is the folder that `quantkit compile` leaves"
            model = (folder / "config.json").is_file()
            remedy = (
                f"it is a model: `quantkit compile {near(folder)}` makes a bundle of it" if model else "check the path"
            )
            raise InputError("not-a-bundle", str(folder), value, rule, remedy)
        return cls(folder, Manifest.read(folder / MANIFEST))

    @property
    def model_folder(self) -> Path:
        """Folder with the checkpoint for transformers and vLLM."""
        return self.path / "model"

    @property
    def measurements(self) -> list[dict[str, Any]]:
        """Rows of `measurements.jsonl`; empty when nothing was measured.

        Raises:
            InputError: `measurements-invalid` with the line number.
        """
        path = self.path / MEASUREMENTS
        if not path.is_file():
            return []
        rows = []
        for number, line in enumerate(limits.read(path, limits.DATA).decode("utf-8").splitlines(), start=1):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                where, rule = f"{path}:{number}", "one JSON object a line"
                remedy = "measure again"
                raise InputError("measurements-invalid", where, line[:80], rule, remedy)
            rows.append(row)
        return rows

    @property
    def verdict(self) -> Verdict | None:
        """Verdict on its target; None if its speed was not measured."""
        return self.manifest.verdict

    def frame(self, library: frames.Library = "pandas") -> Any:
        """Return the measurements as a `pandas.DataFrame` or a `pyarrow.Table`, one column for each field.

        Raises:
            InputError: `measurements-invalid`.
            MissingDependency: pandas or pyarrow.
        """
        return frames.frame(self.measurements, library)

    def plot(self, title: str | None = None) -> Any:
        """Return one figure of the bundle's page as a `plotly.graph_objects.Figure`.

        Args:
            title: title of the figure; None is the first figure, the speed-up where speed was measured.

        Raises:
            InputError: `unknown-figure` with the known titles, `nothing-to-plot`, `measurements-invalid`.
            MissingDependency: plotly, extra `report`.
        """
        return self._notebook().plot(self, title)

    def __repr__(self) -> str:
        return f"Bundle({str(self.path)!r})"

    def __str__(self) -> str:
        """Name the model, recipe and folder in one line, and the verdict in another."""
        manifest, verdict = self.manifest, self.verdict
        name, target = manifest.recipe["name"], (manifest.target or {}).get("name", "any target")
        answer = "speed not measured" if verdict is None else verdict.answer.replace("_", " ")
        batch = "" if verdict is None or verdict.batch is None else f" batch {verdict.batch}"
        state = manifest.state.replace("_", " ")
        return f"{manifest.model.name}, {name}, for {target}: {self.path}\n{state}; {answer}{batch}"

    def _repr_html_(self) -> str:
        """Show the verdict and the figures in a notebook."""
        return str(self._notebook().html(self))

    def _notebook(self) -> Any:
        # the report is on a higher floor than the bundle, so it is looked up by name, as `model` looks up its runtime
        return import_module("quantkit.report.notebook")

    def model(self, **settings: Any) -> Any:
        """Load the quantized model in torch; needs the extra `compile`."""
        return Kind[_ModelLoader]("runtimes").load("torch").load(self, **settings)

    def generate(
        self,
        prompt: str,
        *,
        runtime: str | None = None,
        new_tokens: int = 64,
        chat: bool = False,
        images: Sequence[str | Path] = (),
    ) -> str:
        """Continue a prompt with the most likely tokens and return the new text.

        Args:
            runtime: name of a runtime; None is the first runtime of the bundle that is installed.
            chat: whether to put the prompt into the model's chat template.
            images: image files before the prompt, for a vision-language model in torch.

        Raises:
            InputError, MissingDependency: those of the runtime; `generate-images`.
        """
        name = runtime or import_module("quantkit.pipeline.measure").default_runtime(self)
        runner = Kind[_ModelLoader]("runtimes").load(name, where="runtime")
        how: dict[str, Any] = {"new_tokens": new_tokens, "chat": chat}
        how |= {"images": [Path(image) for image in images]} if images else {}
        return str(runner.generate(self, prompt, **how)["text"])

    def measure(
        self,
        baseline: str | Path | None = None,
        runtime: str | None = None,
        *,
        calibration: str | Path | None = None,
        speed: bool = True,
        quick: bool = False,
        seconds: float | None = None,
        batches: Sequence[int] = (),
        progress: bool = False,
    ) -> list[dict[str, Any]]:
        """Measure again; the arguments are those of `quantkit.measure`.

        The timing alone takes about five minutes: `quick=True` or `seconds=60` shortens it, `speed=False`
        leaves it out.
        """
        how: dict[str, Any] = {"calibration": calibration, "speed": speed, "quick": quick, "seconds": seconds}
        how |= {"batches": batches, "progress": progress}
        rows: list[dict[str, Any]] = import_module("quantkit").measure(self, baseline, runtime, **how)
        return rows

    def demand_writable(self) -> None:
        """Refuse a bundle in a read-only folder, before hours of work are lost there.

        Raises:
            InputError: `bundle-not-writable`.
        """
        try:
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as problem:
            where, value = str(self.path), problem.strerror or str(problem)
            rule = "measurements and exports are written into the bundle"
            remedy = "copy it to a place that can be written"
            raise InputError("bundle-not-writable", where, value, rule, remedy) from None

    def demand_free(self, place: str) -> None:
        """Refuse a folder name already in the bundle. Raises InputError `export-exists`."""
        if any(entry.path.startswith(f"{place}/") for entry in self.manifest.files):
            value, rule = "the bundle has it already", "content never changes after the build"
            remedy = "compile again with another recipe"
            raise InputError("export-exists", str(self.path / place), value, rule, remedy)

    def demand_intact(self, under: str | None = None) -> None:
        """Refuse a bundle if its content differs from its manifest.

        An unlisted file, a link or an empty folder is refused too where a library would read it: in the folders of the
        files that are checked.

        Args:
            under: prefix of the paths to check (`model/`); "" checks all listed files, None those of `content_sha256`.

        Raises:
            InputError: `hash-mismatch` with the file.
        """
        files = self.manifest.files
        entries = [entry for entry in files if (entry.deterministic if under is None else entry.path.startswith(under))]
        places = {entry.path.partition("/")[0] for entry in entries if "/" in entry.path}
        places |= {under.partition("/")[0]} if under else {"model", "onnx"}
        for check, names in content_offenders(self.path, self.manifest, entries, places).items():
            if names:
                where, rule = f"{self.path}/{names[0]}", "every file is as the manifest says, and none lies beside them"
                remedy = "fetch or compile the bundle again"
                raise InputError("hash-mismatch", where, check, rule, remedy)

    def verify(self) -> list[Check]:
        """Check every listed file for changes, and the folder for files without an entry."""
        return verify_files(self.path, self.manifest)

    def put(self, name: str, data: bytes) -> Bundle:
        """Write one file (measurements, report), then the manifest that lists it.

        For files outside `content_sha256` only. If the process is killed between the two writes, `verify` names the
        file and the same call repairs it.

        Raises:
            ValueError: the file is deterministic content.
            Stopped: `disk-full`.
        """
        return self.put_all({name: data})

    def put_all(self, files: Mapping[str, bytes | None], **changes: Any) -> Bundle:
        """Write several files as `put` does, then the manifest with the changed fields, such as the verdict.

        A value of None deletes the file: a report that is out of date.
        """
        entries = {entry.path: entry for entry in self.manifest.files}
        with stopping_when_full(self.path), one_writer(self.path):
            for name, data in files.items():
                role, deterministic = role_of(name)
                if deterministic:
                    raise ValueError(f"{name} is content, which never changes after the build")
                path = self.path / name
                if data is None:
                    entries.pop(name, None)
                    remove(path, inside=self.path)
                    continue
                digest = write_atomic(path, data, inside=self.path)
                entries[name] = FileEntry(path=name, bytes=len(data), sha256=digest, role=role, deterministic=False)
            ordered = sorted(entries.values(), key=lambda old: old.path)
            manifest = self.manifest.model_copy(update={"files": ordered, **changes})
            assert content_sha256(ordered) == manifest.content_sha256
            seal.write_manifest(self.path, manifest.as_bytes())
        return Bundle(self.path, manifest)

    def add_content(self, place: str, folder: Path, **changes: Any) -> Bundle:
        """Move a finished folder into the bundle as content (`onnx`), and compute the bundle's new `content_sha256`.

        Existing measurements move to the new hash: the files that they were measured on have not changed. Files in the
        manifest keep their recorded hashes, so one that was damaged since is still detected. If the process is killed
        before the manifest is written, `verify` names the files of `place` as unlisted, and the same call repairs it.

        Raises:
            InputError: `export-exists`.
            Stopped: `disk-full`.
        """
        home = self.path / place
        self.demand_free(place)
        if home.is_symlink():
            home.unlink()
        elif home.exists():  # left by a call that was killed
            shutil.rmtree(home)
        with stopping_when_full(self.path), one_writer(self.path):
            # copied instead of renamed if the bundle is on another file system
            shutil.move(folder, home)
            fsync_tree(home)
            added = [entry for entry in inventory(self.path) if entry.path.startswith(f"{place}/")]
            entries = {entry.path: entry for entry in [*self.manifest.files, *added]}
            identity = content_sha256(entries.values())
            rows = entries.get(MEASUREMENTS)
            if rows is not None:
                data = (self.path / MEASUREMENTS).read_bytes()
                # set again: a call that was killed may have changed them
                for subject in {row["subject"] for row in self.measurements if "subject" in row}:
                    data = data.replace(subject.encode(), identity.encode())
                digest = write_atomic(self.path / MEASUREMENTS, data)
                update = {"bytes": len(data), "sha256": digest}
                entries[MEASUREMENTS] = rows.model_copy(update=update)
            files = sorted(entries.values(), key=lambda entry: entry.path)
            manifest = self.manifest.model_copy(update={"files": files, "content_sha256": identity, **changes})
            seal.write_manifest(self.path, manifest.as_bytes())
        return Bundle(self.path, manifest)
