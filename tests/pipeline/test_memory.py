"""Memory is one block: twice the layers, and the peak of a whole compile grows by less than one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import in_child
import pytest
import transformers
import zoo

# 4 x 384 x 384 + 3 x 384 x 768 weights, float32
BLOCK = 4 * (4 * 384 * 384 + 3 * 384 * 768)
FEW, MANY = 2, 6


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_does_not_grow_with_the_number_of_layers(
    tmp_path: Path, byte_tokenizer: transformers.PreTrainedTokenizerBase
) -> None:
    command = [sys.executable, in_child.__file__]
    reports = {layers: tmp_path / f"report-{layers}.json" for layers in (FEW, MANY)}
    for layers, report in reports.items():
        folder = tmp_path / f"model-{layers}"
        sizes = {"hidden_size": 384, "intermediate_size": 768, "num_key_value_heads": 4, "num_hidden_layers": layers}
        model = zoo.tiny("llama", vocab_size=len(byte_tokenizer), **sizes)
        model.save_pretrained(folder, max_shard_size="10MB")  # type: ignore[operator]
        byte_tokenizer.save_pretrained(folder)
        command += [str(folder), str(tmp_path / f"out-{layers}"), str(report)]
    # the allocator keeps what it got by brk; tensors that are mapped are gone when they are freed
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    subprocess.run(command, env=env, check=True)
    few, many = (json.loads(report.read_text())["peak"] for report in reports.values())
    assert many - few < BLOCK
