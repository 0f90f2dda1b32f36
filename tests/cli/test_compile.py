"""Compile, on a tiny random model: what it says, and what of the request arrives."""

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from quantkit.bundle import Bundle
from quantkit.bundle.manifest import MANIFEST, MEASUREMENTS
from quantkit.cli.commands import compile as command
from quantkit.pipeline import DEFAULT_MODEL, Request
from quantkit.recipe import Recipe
from quantkit.report.bundle import usage


def test_defaults_are_the_pipeline_s() -> None:
    assert inspect.signature(command.compile).parameters["model"].default == DEFAULT_MODEL


def test_existing_out_is_refused_before_anything_is_opened(quantkit: Any, tmp_path: Path) -> None:
    assert quantkit("compile", "--recipe", "rtn-int4", "--out", tmp_path).err.startswith("error: [out-exists]")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Path:
    import zoo

    folder = tmp_path_factory.mktemp("models") / "tiny.model"
    return zoo.save(folder, byte_tokenizer, "llama", vocab_size=len(byte_tokenizer))


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small groups, a small calibration set, few scored positions."""
    monkeypatch.setattr("quantkit.pipeline.blocks.tokens.SCORED", 300)
    path = tmp_path / "small.yaml"
    path.write_text(
        "schema: 1\nsummary: small\ncalibration: {set: prose-en, samples: 4, tokens: 32}\n"
        "scheme: {weights: {format: int4, granularity: group, group: 32, symmetric: false}}\n"
        "passes: [rtn]\nexport: [{checkpoint: {layout: pack-quantized}}]\n"
    )
    return path


def test_compile_verify_measure_generate(quantkit: Any, tiny: Path, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = quantkit("compile", tiny, "--recipe", recipe, "--out", out)
    assert ran.code == 0, ran.err
    assert ran.err.startswith(f"opening {tiny}\n")
    assert "Traceback" not in ran.err
    rows = {row["name"]: row for row in map(json.loads, (out / MEASUREMENTS).read_text().splitlines())}
    assert f"quantkit show {out}\n" in ran.out and "bits per weight" not in ran.out
    card = (out / "README.md").read_text()
    assert card.startswith("---\n") and f"{rows['size.bits_per_weight']['value']:.2f}" in card
    assert f"{rows['accuracy.top1_agreement']['value']:.1%}".replace("%", " %") in card

    assert quantkit("verify", out).code == 0
    measured = quantkit("measure", out, "--baseline", tiny, "--json")
    assert measured.code == 0, measured.err
    again = {row["name"]: row["value"] for row in measured.envelope["result"]["measurements"]}
    assert again["accuracy.kl"] == pytest.approx(rows["accuracy.kl"]["value"], rel=1e-6)
    made = quantkit("generate", out, "--prompt", "ab", "--new-tokens", "3", "--json").envelope["result"]
    assert made["tokens"] <= 3
    assert quantkit("generate", out, "--prompt", "x", "--runtime", "torhc").err.count("did you mean 'torch'") == 1
    assert quantkit("verify", out).code == 0


def test_measure_knows_where_the_model_of_a_compile_lies(
    quantkit: Any, tiny: Path, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copytree(tiny, tmp_path / "below" / "tiny.model"))
    monkeypatch.chdir(tmp_path)
    typed = "./below/tiny.model"
    asked = ["compile", typed, "--recipe", recipe]
    ran = quantkit(*asked, "--out", "./bad", "--set", "gates.kl_max=1e-9")
    assert ran.code == 1 and f"\n  quantkit recommend {typed} --target" in ran.out
    ran = quantkit(*asked, "--out", "./out")
    assert ran.code == 0 and "quantkit measure ./out" in ran.out and "--baseline" not in ran.out
    assert typed not in (tmp_path / "out" / "report.html").read_text() + (tmp_path / "out" / MANIFEST).read_text()
    assert f"quantkit recommend {typed} --target" in quantkit("recommend", "./out").err
    assert quantkit("measure", "./out").code == 0
    manifest = Bundle.load("./out").manifest
    assert usage.against(manifest, usage.here(manifest)) == []
    shutil.copytree(model, tmp_path / "second" / "tiny.model")
    assert quantkit("measure", "./out", "--baseline", "./second/tiny.model").code == 0
    shutil.rmtree(tmp_path / "second")
    assert quantkit("measure", "./out").code == 0, "the first place still holds it"
    (model / "config.json").write_text((model / "config.json").read_text() + "\n")
    assert f"which has changed; a bundle holds neither its original nor the path of it; --baseline {typed}" in (
        quantkit("measure", "./out").err
    )
    model.rename(tmp_path / "moved")
    error = quantkit("measure", "./out").err.splitlines()[-1]
    assert error.startswith("error: [baseline-needed]") and "--baseline ./tiny.model, with its path" in error
    assert usage.against(manifest, usage.here(manifest)) == ["--baseline ./tiny.model"]


def test_compile_json_has_result_and_error_of_a_failed_gate(
    quantkit: Any, tiny: Path, recipe: Path, tmp_path: Path
) -> None:
    ran = quantkit("compile", tiny, "--recipe", recipe, "--out", tmp_path / "o", "--set", "gates.kl_max=1e-9", "--json")
    assert ran.code == 1
    found = ran.envelope
    assert found["result"]["state"] == "gate_failed"
    assert {"bundle", "content_sha256", "verdict", "measurements", "seconds", "stages", "memory_peak_bytes"} <= set(
        found["result"]
    )
    assert found["error"]["code"] == "gate-failed"
    assert found["error"]["where"] == "gate.kl_max"
    assert found["error"]["rule"] == "at most 1e-09"
    assert ran.err.splitlines()[-1].startswith("error: [gate-failed] gate.kl_max: ")


def test_dry_run_writes_nothing(quantkit: Any, tiny: Path, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = quantkit("compile", tiny, "--recipe", recipe, "--out", out, "--dry-run")
    assert "expected" not in ran.err, "what is forecast is the answer, not the time that it takes to give it"
    assert ran.code == 0, ran.err
    assert f"it would write {out}" in " ".join(ran.out.split())
    assert "21 layers" in ran.out
    assert not list(tmp_path.glob("out*"))
    plan = quantkit("compile", tiny, "--recipe", recipe, "--out", out, "--dry-run", "--json").envelope["result"]
    assert plan["schemes"][0]["layers"] == 21
    assert plan["schemes"][0]["bits_per_weight"] == pytest.approx(4 + 20 / 32)
    assert plan["seconds"] is None, "time is known after the first block"


def test_dry_run_says_what_a_model_would_write_and_lets_it_write_nothing(
    quantkit: Any, tiny: Path, tmp_path: Path
) -> None:
    asked = ["compile", tiny, "--recipe", "gptq-int4", "--dry-run", "--set", "calibration.generated=0.5"]
    asked += ["--set", "calibration.samples=4", "--set", "calibration.tokens=32", "--set", "scheme.weights.group=32"]
    ran = quantkit(*asked, "--out", tmp_path / "out")
    assert ran.code == 0, ran.err
    assert "4 sequences of 32 tokens, 2 of them written by the model itself" in " ".join(ran.out.split())
    assert quantkit(*asked, "--json").envelope["result"]["calibration"]["generated"] == 2
    assert not (tmp_path / "cache" / "generated").exists()


def test_request_reaches_the_pipeline_whole(quantkit: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Request] = []

    def stop(request: Request, *_: object) -> object:
        seen.append(request)
        raise KeyboardInterrupt

    monkeypatch.setattr("quantkit.pipeline.compile.compile_model", stop)
    out = tmp_path / "x"
    options = ["--recipe", "rtn-int4", "--target", "cpu-arm", "--calibration", "prose-en", "--out", str(out)]
    options += ["--set", "seed=5", "--set", "rtn.range=minmax", "--resume", "--strict", "--trust-remote-code"]
    assert quantkit("compile", "hf:org/name", *options).code == 75
    request = seen[0]
    assert (request.model, request.recipe.name, request.target.name, request.out) == (
        "hf:org/name",
        "rtn-int4",
        "cpu-arm",
        out,
    )
    assert (request.recipe.seed, request.recipe.passes[0].settings.range) == (5, "minmax")
    assert request.resume
    assert request.strict
    assert request.trust_remote_code


def test_an_importance_matrix_that_nothing_weighs_by_names_the_option(quantkit: Any) -> None:
    ran = quantkit("compile", "smollm2-135m", "--recipe", "gptq-int4", "--imatrix", "i.gguf", "--dry-run")
    assert ran.code == 2
    assert "[imatrix-unused] --imatrix: gptq-int4 has no pass `rtn`" in ran.err


def test_an_importance_matrix_stands_in_for_a_solver_of_a_gguf(tmp_path: Path) -> None:
    from quantkit.pipeline.imatrix import weighed_by

    changes, (taken,) = weighed_by(tmp_path / "i m.gguf", "gguf-q4_k_m")
    found = Recipe.load("gguf-q4_k_m", changes)
    (step,) = found.passes
    assert (step.name, step.settings.range, step.settings.imatrix) == (
        "rtn",
        "importance",
        str((tmp_path / "i m.gguf").resolve()),
    )
    assert found.scheme == Recipe.load("gguf-q4_k_m").scheme
    assert (taken.where, taken.from_, taken.to) == ("passes", "gptq", "rtn") and "i m.gguf" in taken.reason
    changes, nothing = weighed_by(tmp_path / "i.gguf", "gguf-q8_0")
    assert nothing == () and Recipe.load("gguf-q8_0", changes).passes[0].settings.range == "importance"


@pytest.mark.parametrize(("taken", "code"), [("out", "out-exists"), ("out.partial", "unfinished-build")])
def test_a_name_that_is_taken_is_refused_before_the_model_is_opened(
    taken: str, code: str, quantkit: Any, recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / taken).mkdir()
    (tmp_path / taken / "build.json").touch()
    (tmp_path / "no-model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "no-model" / name).touch()
    ran = quantkit("compile", tmp_path / "no-model", "--recipe", recipe, "--out", tmp_path / "out")
    assert (ran.code, code in ran.err) == (2, True), ran.err
