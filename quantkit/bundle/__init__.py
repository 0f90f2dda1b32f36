"""Write, read and verify bundles. Nothing here imports torch."""

from quantkit.bundle.build import Build, exists_already
from quantkit.bundle.bundle import Bundle
from quantkit.bundle.disk import stopping_when_full
from quantkit.bundle.manifest import (
    HEARS,
    SEES,
    AdapterEntry,
    CalibrationEntry,
    Check,
    CodeEntry,
    Decision,
    FileEntry,
    LayerEntry,
    Manifest,
    ModelEntry,
    PromptVerdict,
    SourceEntry,
    Verdict,
    WeightsEntry,
    content_sha256,
    decision,
    inventory,
    role_of,
)

__all__ = [
    "HEARS",
    "SEES",
    "AdapterEntry",
    "Build",
    "Bundle",
    "CalibrationEntry",
    "Check",
    "CodeEntry",
    "Decision",
    "FileEntry",
    "LayerEntry",
    "Manifest",
    "ModelEntry",
    "PromptVerdict",
    "SourceEntry",
    "Verdict",
    "WeightsEntry",
    "content_sha256",
    "decision",
    "exists_already",
    "inventory",
    "role_of",
    "stopping_when_full",
]
