"""Folders of models: a path, a download of the hub, a model in memory that was saved into the cache."""

from __future__ import annotations

import glob
import io
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.content import cache_dir
from quantkit.errors import InputError, absent
from quantkit.model.sight import not_a_folder
from quantkit.model.source import pretrained
from quantkit.model.source.files import PATTERNS, identity, modules_of
from quantkit.model.source.gguf import GGUF
from quantkit.model.source.weights import Weights, disk_errors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
)
_HUB_FILES = (*PATTERNS, "*.txt", "*.safetensors")


def from_path(ref: str) -> Path:
    """Return the folder or GGUF file of a path. Raises InputError `file-missing`, `not-a-folder`."""
    try:
        path = Path(ref).expanduser().resolve()
    except RuntimeError:  # ~nobody
        path = Path(ref)
    if not path.exists():
        raise absent(ref)
    if not path.is_dir() and not (path.suffix.lower() == GGUF and path.is_file()):
        raise not_a_folder(path, ref)
    return path


def from_hub(ref: str, trust: bool) -> Path:
    """Download a folder of the hub into its own cache; `trust` takes its code too."""
    from huggingface_hub import errors, snapshot_download

    repository, _, revision = ref[3:].partition("@")
    try:
        if repository.count("/") != 1:
            raise errors.HFValidationError("a hub model is hf:org/name")
        allowed, ignored = [*_HUB_FILES, *(["*.py"] if trust else [])], ["*/*", "consolidated*"]
        folder = snapshot_download(
            repository, revision=revision or None, allow_patterns=allowed, ignore_patterns=ignored
        )
        if below := sorted({module.folder for module in modules_of(Path(folder))} - {""}):
            # from the same commit, even if the revision has moved
            allowed = [f"{glob.escape(name)}/*" for name in below]
            snapshot_download(repository, revision=Path(folder).name, allow_patterns=allowed, ignore_patterns=["*.py"])
    except errors.HFValidationError as problem:
        raise InputError("unknown-model", ref, first_line(problem), "hf:org/name[@revision]") from None
    except (errors.GatedRepoError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as problem:
        remedy = "check the name and revision; for a gated model, accept its terms and log in (hf auth login)"
        raise InputError("hub-missing", ref, first_line(problem), remedy=remedy) from None
    except (errors.LocalEntryNotFoundError, OSError) as problem:
        rule = "the model is not in the hub's cache, and the hub does not answer"
        remedy = "connect, or give a folder (./folder) or the alias smollm2-135m"
        raise InputError("hub-unreachable", ref, first_line(problem), rule, remedy) from None
    return Path(folder)


def save_in_memory(model: PreTrainedModel, tokenizer: Any = None) -> Path:
    """Save a model in memory, in its own dtype, into the user's cache, and return the folder: `modules/SHA256/NAME`.

    Args:
        tokenizer: a tokenizer of transformers, or a folder with one; None takes the one where the model came from.

    Raises InputError: `tokenizer-damaged`, those of `Weights.open` and `disk_errors`.
    """
    came_from = str(getattr(model, "name_or_path", "") or "")
    home, name = cache_dir() / "modules", (came_from and Path(came_from).resolve().name) or type(model).__name__
    if tokenizer is None:
        tokenizer = _tokenizer_beside(came_from, getattr(model.config, "_commit_hash", None))
    elif isinstance(tokenizer, str | Path):
        tokenizer = pretrained.tokenizer(from_path(str(tokenizer)))
    with disk_errors(home), quiet_loading():
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as work:
            folder = Path(work) / name
            model.save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            kept = home / identity(folder, Weights.open(folder), False) / name
            if saved_in_memory(kept.parent.name) is None:
                shutil.rmtree(kept.parent, ignore_errors=True)
                Path(work).rename(kept.parent)
                Path(work).mkdir()  # what leaving the context removes
    return kept


def saved_in_memory(sha256: str) -> Path | None:
    """Return the folder of a model that `save_in_memory` kept under this hash; None where it is gone or changed."""
    for folder in (cache_dir() / "modules" / sha256).glob("*"):
        if identity(folder, Weights.open(folder), False) == sha256:
            return folder
    return None


def _tokenizer_beside(came_from: str, revision: str | None) -> Any:
    """Load the tokenizer from a model's folder, or from the hub's cache; None where there is none."""
    from huggingface_hub import errors, snapshot_download

    folder = Path(came_from)
    if came_from and not folder.is_dir():
        try:
            folder = Path(snapshot_download(came_from, revision=revision, local_files_only=True))
        except (errors.HFValidationError, errors.LocalEntryNotFoundError, OSError):
            return None
    return pretrained.tokenizer(folder) if came_from and has_tokenizer(folder) else None


def has_tokenizer(folder: Path) -> bool:
    """Tell whether a folder holds a tokenizer's files."""
    return any((folder / name).is_file() for name in TOKENIZERS)


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Suppress loading reports and progress bars of transformers and compressed-tensors, and what bitsandbytes says of
    kernels that it would download; restore the settings at the end."""
    from transformers.utils import logging as reports

    theirs = logging.getLogger("bitsandbytes")
    level, bars, before = reports.get_verbosity(), reports.is_progress_bar_enabled(), theirs.level
    reports.set_verbosity(reports.CRITICAL)
    reports.disable_progress_bar()
    theirs.setLevel(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):  # transformers gives compressed-tensors no word on its bars
            yield
    finally:
        theirs.setLevel(before)
        reports.set_verbosity(level)
        if bars:
            reports.enable_progress_bar()


def first_line(problem: BaseException) -> str:
    """Return an exception's first line of text, 200 characters at most; its class where it has none."""
    return next((line.strip() for line in str(problem).splitlines() if line.strip()), type(problem).__name__)[:200]
