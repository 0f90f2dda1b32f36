"""Show: whatever is listed, a user's own files, a bundle."""

from pathlib import Path
from typing import Any

import planted
import pytest

from quantkit.report import catalog


@pytest.mark.parametrize("kind", catalog.KINDS)
def test_everything_that_is_listed_can_be_shown(kind: str, quantkit: Any) -> None:
    for name, summary in catalog.listing(kind)[kind].items():
        ran = quantkit("show", name)
        assert ran.code == 0, ran.err
        assert " ".join(summary.split()[:5]) in " ".join(ran.out.split())
    entry = quantkit("show", name, "--json").envelope["result"][0]
    assert entry["name"] == name


def test_show_says_a_pass_s_settings_with_defaults_and_paper(quantkit: Any) -> None:
    out = quantkit("show", "gptq").out
    assert "2210.17323" in out
    assert "gptq.damping" in out
    assert "0.01" in out


def test_show_says_a_target_s_figures_with_state_and_source(quantkit: Any) -> None:
    out = " ".join(quantkit("show", "l4").out.split())
    assert "300 GB/s (stated: NVIDIA L4 datasheet)" in out
    assert "not measured" in quantkit("show", "cpu-x86").out


def test_show_reads_a_user_s_own_files(quantkit: Any, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("schema: 1\nsummary: my own\npasses: [rtn]\nscheme: {weights: {format: int8}}\n")
    assert "my own" in quantkit("show", recipe).out
    recipe.write_text("schema: 1\nsummary: my own\npases: [rtn]\n")
    assert "did you mean 'passes'" in quantkit("show", recipe).err


def test_show_of_a_folder_without_dot_says_how_it_is_written(
    quantkit: Any, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bundle.parent)
    assert "a folder is written ./a bundle" in quantkit("show", "a bundle").err


def test_show_a_bundle(quantkit: Any, bundle: Path) -> None:
    ran = quantkit("show", bundle)
    assert ran.code == 0
    assert "19.53" in ran.out
    found = quantkit("show", bundle, "--json").envelope["result"]
    assert found["kind"] == "bundle"
    assert found["manifest"]["model"]["name"] == "a-model"
    assert len(found["measurements"]) == len(planted.rows())
