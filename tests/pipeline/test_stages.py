"""What a stage took: its own share of the clock, and none of the next one's."""

from __future__ import annotations

import time

from quantkit.pipeline.progress import Stages


def test_each_stage_has_its_own_share() -> None:
    stages = Stages("open")
    time.sleep(0.02)
    stages.begin("quantize")
    stages.begin("export")
    opened, quantized, exported = stages.end()
    assert [each.name for each in (opened, quantized, exported)] == ["open", "quantize", "export"]
    assert opened.seconds >= 0.02 > quantized.seconds >= 0
    assert opened.cpu_seconds < 0.02  # asleep
    assert 0 < opened.memory_peak_bytes <= exported.memory_peak_bytes


def test_processes_that_were_waited_for_count() -> None:
    import subprocess
    import sys

    stages = Stages()
    program = "import time\nwhile time.process_time() < 0.1: pass"
    subprocess.run([sys.executable, "-S", "-c", program], check=True)
    (only,) = stages.end()
    assert only.cpu_seconds >= 0.05  # the clock ticks in hundredths
