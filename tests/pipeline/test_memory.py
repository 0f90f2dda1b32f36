"""Memory is one block: twice the layers, and the peak of a whole compile grows by less than one of them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import in_child
import psutil
import pytest
import transformers
import zoo

from quantkit import machine
from quantkit.model.source.open import open_model
from quantkit.model.streaming.calls import is_in_file
from quantkit.model.streaming.stream import StreamedModel
from quantkit.pipeline.blocks.subject import TransformerSubject

# 4 x 512 x 512 + 3 x 512 x 1024 weights, float32: more than what a block leaves in the allocator
BLOCK = 4 * (4 * 512 * 512 + 3 * 512 * 1024)
FEW, MANY = 2, 6


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_does_not_grow_with_the_number_of_layers(
    tmp_path: Path, byte_tokenizer: transformers.PreTrainedTokenizerBase
) -> None:
    command = [sys.executable, in_child.__file__]
    reports = {layers: tmp_path / f"report-{layers}.json" for layers in (FEW, MANY)}
    for layers, report in reports.items():
        folder = tmp_path / f"model-{layers}"
        sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_key_value_heads": 4, "num_hidden_layers": layers}
        model = zoo.tiny("llama", vocab_size=len(byte_tokenizer), **sizes)
        model.save_pretrained(folder, max_shard_size="10MB")  # type: ignore[operator]
        byte_tokenizer.save_pretrained(folder)
        command += [str(folder), str(tmp_path / f"out-{layers}"), str(report)]
    # the allocator keeps what it got by brk; tensors that are mapped are gone when they are freed
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    subprocess.run(command, env=env, check=True)
    few, many = (json.loads(report.read_text())["peak"] for report in reports.values())
    assert many - few < BLOCK


def test_a_block_that_is_large_for_the_memory_is_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    zoo.tiny("llama").save_pretrained(tmp_path / "model")  # type: ignore[operator]
    stream = StreamedModel(open_model(str(tmp_path / "model")))
    plain = stream.load(0)
    assert not any(is_in_file(value) for value in plain.parameters())
    size = 4 * sum(value.numel() for value in plain.parameters() if value.dim() == 2)
    for limit, filed in ((4 * size, False), (4 * size - 4, True)):
        monkeypatch.setattr(machine, "memory_limit", lambda limit=limit: limit)
        block = stream.load(0)
        assert all(is_in_file(value) == (filed and value.dim() == 2) for value in block.parameters())
        pairs = zip(block.parameters(), plain.parameters(), strict=True)
        assert all(bool((value == other).all()) for value, other in pairs)


def test_what_is_compared_follows_from_sizes_and_from_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may have had anything in memory before, and still hold some of it."""
    zoo.tiny("llama", num_hidden_layers=6).save_pretrained(tmp_path)  # type: ignore[operator]
    stream = StreamedModel(open_model(str(tmp_path)))
    block, outside = (
        4 * sum(value.numel() for value in module.parameters()) for module in (stream.blocks[0], stream.rest())
    )
    prepared: Any = SimpleNamespace(
        stream=stream, source=stream.source, request=None, out=None, decisions=[], device=None
    )
    open_bytes, rest = 10**8, outside - 6 * block

    def fitting(free: float, resident: int, expected: float, limit: int = 0, mapped: int = 0) -> int:
        """Where `free` is what the machine would have free if this process had just begun; `mapped` bytes of files."""
        monkeypatch.setattr(machine, "memory_available", lambda: int(free - (resident - open_bytes)))
        about = SimpleNamespace(rss=resident + mapped, shared=mapped)
        monkeypatch.setattr(psutil.Process, "memory_info", lambda _: about)
        monkeypatch.setattr(machine, "memory_limit", lambda: limit)
        taken: Any = SimpleNamespace(peak=open_bytes + expected, memory={"open": float(open_bytes)})
        subject = TransformerSubject(prepared)
        subject.expected = taken
        return subject._fitting_blocks()

    monkeypatch.setattr(machine, "peak_bytes", lambda: 10**12)
    room = 2 * (rest + 3.5 * block)
    for resident in (open_bytes, 2 * open_bytes, 8 * open_bytes):
        assert fitting(10**9, resident, room) == 3
        assert fitting(10**9, resident, 0) == 1
        assert fitting(10**9, resident, 0, limit=10**9) == 6  # a small model
        assert fitting(room / 2, resident, room) == fitting(room / 2, resident, room, mapped=10**10) == 1
