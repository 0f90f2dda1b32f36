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

# 4 x 384 x 384 + 3 x 384 x 1152 weights, float32
BLOCK = 4 * (4 * 384 * 384 + 3 * 384 * 1152)


def peak(folder: Path, tokenizer: transformers.PreTrainedTokenizerBase, layers: int) -> int:
    model = zoo.tiny(
        "llama",
        vocab_size=len(tokenizer),
        hidden_size=384,
        intermediate_size=1152,
        num_key_value_heads=4,
        num_hidden_layers=layers,
    )
    model.save_pretrained(folder / f"model-{layers}", max_shard_size="10MB")
    tokenizer.save_pretrained(folder / f"model-{layers}")
    del model
    report = folder / f"report-{layers}.json"
    command = [sys.executable, in_child.__file__, folder / f"model-{layers}", folder / f"out-{layers}", report]
    # the allocator keeps what it got by brk; tensors that are mapped are gone when they are freed
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    subprocess.run(command, env=env, check=True)
    return int(json.loads(report.read_text())["peak"])


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_does_not_grow_with_the_number_of_layers(
    tmp_path: Path, byte_tokenizer: transformers.PreTrainedTokenizerBase
) -> None:
    few, many = peak(tmp_path, byte_tokenizer, 6), peak(tmp_path, byte_tokenizer, 12)
    assert many - few < BLOCK
