"""A wheelhouse of what is installed here: wheels for a device that is this machine, without a network."""

import importlib.metadata
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from quantkit.devices.probed import NEEDED


def packed(name: str, folder: Path) -> Path:
    """The wheel of an installed package, with its files as they are."""
    found = importlib.metadata.distribution(name)
    plain = re.sub(r"[-_.]+", "_", found.metadata["Name"])
    *_, tag = (line[5:] for line in (found.read_text("WHEEL") or "").splitlines() if line.startswith("Tag: "))
    wheel = folder / f"{plain}-{found.version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_STORED) as made:
        for file in found.files or []:
            outside = file.parts[0] == ".." or "__pycache__" in file.parts
            if not outside and file.name not in ("INSTALLER", "REQUESTED", "direct_url.json"):
                made.write(str(file.locate()), str(file))
    return wheel


def runners(but: tuple[str, ...] = (), more: tuple[str, ...] = ()) -> Iterator[str]:
    """What runs on a device, more packages, and what they need: names of packages that are installed here."""
    waiting, done = [*(name for name in NEEDED if name not in but), *more], set[str]()
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in done:
            continue
        done.add(name)
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
        yield name
        waiting += [re.split(r"[^A-Za-z0-9_.-]", each)[0] for each in needs if "extra ==" not in each]


def wheelhouse(folder: Path, but: tuple[str, ...] = ()) -> Path:
    """Of `runners`."""
    for name in runners(but):
        packed(name, folder)
    return folder


def small_python(folder: Path, more: tuple[str, ...] = ()) -> Path:
    """A Python that has `runners` and nothing else, torch least of all: links to what is installed here."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site, base = folder / "lib" / version / "site-packages", Path(sys.base_prefix) / "bin"
    site.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin/python").symlink_to(base / version)
    (folder / "pyvenv.cfg").write_text(f"home = {base}\n")
    for name in runners(more=more):
        found = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            (site / top).symlink_to(str(found.locate_file(top)))
    return folder / "bin/python"
