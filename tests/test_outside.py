"""Code from outside: the page's example by path and by package; refused unasked; what is broken names where it is from.

A package is a folder of modules with a `dist-info` beside it, which is all that an installer leaves.
"""

import hashlib
import importlib
import json
import re
import shlex
import sys
import tomllib
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
import zoo

import quantkit
from quantkit import cli, plugins
from quantkit.bundle import Build
from quantkit.errors import InputError
from quantkit.model.device import ComputeDevice
from quantkit.pipeline.blocks import tokens
from quantkit.pipeline.blocks.prepared import fingerprint
from quantkit.plugins import outside
from quantkit.recipe import Recipe

PAGE = (Path(__file__).parent.parent / "docs" / "plugins.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```\w+ (\S+)\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SCHEME = {"weights": {"format": "int8", "granularity": "channel"}}


def said(capsys: pytest.CaptureFixture[str], command: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.run(shlex.split(command))
    return code, *capsys.readouterr()


def install(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    offered: Mapping[str, Mapping[str, str]],
    *,
    package: str = "acme-quant",
    version: str = "1.0",
    modules: Mapping[str, str],
) -> None:
    """A package on the search path: its modules by file name, and what it offers: group -> name -> object."""
    root = folder / f"site-{package}"
    home = root / package.replace("-", "_")
    home.mkdir(parents=True)
    (home / "__init__.py").write_text("", encoding="utf-8")
    for name, text in modules.items():
        (home / name).write_text(text, encoding="utf-8")
    info = root / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n", encoding="utf-8")
    groups = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in each.items()) for group, each in offered.items()]
    (info / "entry_points.txt").write_text("\n".join(groups), encoding="utf-8")
    monkeypatch.syspath_prepend(root)
    forget(monkeypatch, home.name)  # of another test's package


def forget(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """As in a new process: nothing of it is imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)


def files_sha256(folder: Path) -> str:
    """Of what `sha256sum *.py` says in a package's folder."""
    found = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(folder.glob("*.py"))]
    return hashlib.sha256("".join(found).encode()).hexdigest()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_s_example_by_path(
    place: Path, byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    zoo.save(place / "my-model", byte_tokenizer, "llama", vocab_size=len(byte_tokenizer), max_position_embeddings=128)
    monkeypatch.setattr(tokens, "SCORED", 300)
    command = COMMANDS[0].removeprefix("quantkit ")
    code, _, err = said(capsys, command.replace(" --allow-code", ""))
    assert code == 2 and "code-not-allowed" in err and "./my_pass.py" in err and "--allow-code" in err
    assert not (place / "clipped").exists() and not (place / "clipped.partial").exists()

    code, _, err = said(capsys, command)
    assert code == 0, err
    manifest = json.loads((place / "clipped" / "manifest.json").read_text(encoding="utf-8"))
    digest = hashlib.sha256((place / "my_pass.py").read_bytes()).hexdigest()
    assert manifest["code"] == [{"kind": "pass", "name": "my_pass", "path": "./my_pass.py", "sha256": digest}]
    assert manifest["recipe"]["passes"][0] == {"./my_pass.py": {"deviations": 3.0}}
    assert str(place) not in json.dumps(manifest), "a bundle holds no path of the machine that it was made on"
    made_again_from_its_card(place, capsys)
    exec(SNIPPETS[0], {})
    assert digest in capsys.readouterr().out

    # what is finished is given back for that text of the file alone, and measured without it
    assert said(capsys, f"{command} --resume")[0] == 0
    (place / "my_pass.py").write_text(FILES["my_pass.py"] + "\n# another\n", encoding="utf-8")
    code, _, err = said(capsys, f"{command} --resume")
    assert code == 2 and "out-exists" in err and "code of the recipe" in err
    (place / "my_pass.py").unlink()
    code, _, err = said(capsys, "measure ./clipped --baseline ./my-model --no-speed")
    assert code == 0, err


def made_again_from_its_card(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recipe that the card shows, as a file beside the pass, and the command beside it, make the same."""
    card = (place / "clipped" / "README.md").read_text(encoding="utf-8")
    shown, again = re.findall(r"```\w*\n(.*?)```", card.partition("as recipe.yaml it makes")[2], re.DOTALL)
    (place / "recipe.yaml").write_text(shown, encoding="utf-8")
    code, _, err = said(capsys, f"{again.strip().removeprefix('quantkit ')} --out ./again --no-speed")
    assert code == 0, err
    before, made = quantkit.load("./clipped").manifest, quantkit.load("./again").manifest
    assert made.content_sha256 == before.content_sha256 and made.code == before.code
    read = Recipe.from_dict(before.recipe, name="clipped", base=place, allow_code=True)
    assert str(read.passes[0].settings) == "deviations=3.0"
    # what plan proposes is allowed too, as it was itself
    code, out, err = said(capsys, "plan ./my-model --recipe ./mine.yaml --allow-code")
    assert code == 0 and "--recipe ./mine.yaml" in out, err
    printed = next(line for line in out.splitlines() if "quantkit compile" in line)
    assert "--allow-code" in printed


def test_a_changed_file_does_not_resume(place: Path) -> None:
    """The fingerprint that a build begins with holds the bytes of the file, not its path alone."""

    def begun() -> dict[str, Any]:
        request = types.SimpleNamespace(recipe=Recipe.load("./mine.yaml", allow_code=True))
        known = types.SimpleNamespace(ref="path:my-model", sha256="0" * 64)
        asked = {"source": known, "request": request, "calibration": None, "scoring": known, "steps": []}
        asked |= {"device": ComputeDevice(), "training": None, "ranks": None}
        return fingerprint(types.SimpleNamespace(**asked))  # type: ignore[arg-type]

    with Build.open(place / "out", begun(), resume=False):
        pass
    with Build.open(place / "out", begun(), resume=True):
        pass
    changed = FILES["my_pass.py"].replace("4.0", "5.0")
    (place / "my_pass.py").write_text(changed, encoding="utf-8")
    digests = [hashlib.sha256(text.encode()).hexdigest()[:12] for text in (FILES["my_pass.py"], changed)]
    said = rf"resume-mismatch\] .*: code: .* with pass my_pass {digests[0]}, now it is pass my_pass {digests[1]};"
    with pytest.raises(InputError, match=said):
        Build.open(place / "out", begun(), resume=True)


def test_a_file_runs_once_and_only_where_allowed(place: Path) -> None:
    (place / "noted.py").write_text(
        "open('ran', 'a').write('x')\n"
        + FILES["my_pass.py"]
        .replace('name = "my_pass"', 'name = "noted"')
        .replace("from __future__ import annotations\n", ""),
        encoding="utf-8",
    )
    data = {"summary": "x", "scheme": SCHEME, "passes": ["./noted.py", "rtn"]}
    for refused in (
        lambda: Recipe.from_dict(data, name="x"),
        lambda: quantkit.Pipeline(data["passes"], weights=SCHEME["weights"]),
        lambda: quantkit.compile("./none", recipe=data),
    ):
        with pytest.raises(InputError, match=r"code-not-allowed.*allow_code=True"):
            refused()
    assert not (place / "ran").exists()
    recipe = Recipe.from_dict(data, name="x", allow_code=True)
    again = Recipe.from_dict(recipe.as_dict(), name="x", allow_code=True)
    assert again == recipe
    assert (place / "ran").read_text(encoding="utf-8") == "x"


def test_the_page_s_example_as_a_package(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tomllib.loads(FILES["pyproject.toml"])["project"]
    assert set(project["entry-points"]) == {"quantkit.passes"}
    mine = {"my_pass.py": FILES["my_pass.py"] + "\nopen('imported', 'w').close()\n"}
    install(place, monkeypatch, project["entry-points"], package=project["name"], modules=mine)
    listed, shown, recipe = COMMANDS[1:]
    code, out, _ = said(capsys, listed.removeprefix("quantkit "))
    assert code == 0 and "Clip each row" in out and "package acme-quant 1.0" in " ".join(out.split())
    assert not (place / "imported").exists(), "found in its metadata"
    for command in (shown, recipe):
        code, out, err = said(capsys, command.removeprefix("quantkit "))
        assert code == 0 and "my_pass" in out, err
    assert (place / "imported").exists()
    chosen = Recipe.load("./by_name.yaml")
    named = {"kind": "pass", "name": "my_pass", "package": "acme-quant", "version": "1.0"}
    home = place / "site-acme-quant" / "acme_quant"
    assert chosen.outside() == [named | {"sha256": files_sha256(home)}]
    # an edit is noticed where it runs: in the next process, not in this one, which has the module imported
    before = chosen.outside()
    (home / "helper.py").write_text("DEVIATIONS = 5\n", encoding="utf-8")
    assert Recipe.load("./by_name.yaml").outside() == before
    forget(monkeypatch, "acme_quant")
    assert Recipe.load("./by_name.yaml").outside() == [named | {"sha256": files_sha256(home)}] != before
    model = zoo.tiny("llama")
    before = float(model.model.layers[0].mlp.up_proj.weight.detach().abs().max())
    pipeline = quantkit.Pipeline([{"my_pass": {"deviations": 0.5}}, "rtn"], weights=SCHEME["weights"])
    pipeline.apply(model, zoo.ids())
    weight = model.model.layers[0].mlp.up_proj.weight
    assert float(weight.detach().abs().max()) < before / 2


BROKEN = {
    "raises": ("1 / 0", "ZeroDivisionError"),
    "needs": ("import no_such_package_at_all", "ModuleNotFoundError"),
    "leaves": ("raise SystemExit(0)", "SystemExit"),
    "spelt": ("def", "SyntaxError"),
    "empty": ("", "defines no PASS"),
    "other": ("class P:\n    name = 'other'\nPASS = P()", "without"),
    "misnamed": (FILES["my_pass.py"], "its name is 'my_pass'"),
}


def test_a_broken_package_is_named_and_breaks_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = {f"{name}.py": text for name, (text, _) in BROKEN.items()}
    groups = [f"quantkit.{kind}" for kind in ("passes", "formats", "exporters", "runtimes")]
    offered = {group: {name: f"acme_quant.{name}" for name in BROKEN} for group in groups}
    install(tmp_path, monkeypatch, offered, modules=modules)
    for name, (_, why) in BROKEN.items():
        with pytest.raises(InputError) as caught:
            Recipe.from_dict({"summary": "x", "scheme": SCHEME, "passes": [name, "rtn"]}, name="x")
        line = caught.value.line()
        assert caught.value.code == "plugin-broken" and "package acme-quant 1.0" in line and why in line
        assert "\n" not in line
    for command in ("list", "show rtn", "list matrix --format int4", "plan --recipe int4 --target h100", "show h100"):
        code, _, err = said(capsys, command)
        assert code == 0, err
    with pytest.raises(InputError, match=r"exactly one of awq.*|exactly one of"):
        Recipe.from_dict({"summary": "x", "scheme": SCHEME, "passes": ["fold_norms"]}, name="x")
    with pytest.raises(InputError, match="package acme-quant"):
        plugins.RUNTIMES.load("raises")


FORMAT = '''"""6-bit integers."""
from quantkit.formats.base.integers import IntegerFormat
FORMAT = IntegerFormat("int6", 6)
'''


def test_a_package_brings_formats_and_what_ships_keeps_the_same_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantkit.scheme import WeightScheme

    install(tmp_path, monkeypatch, {"quantkit.formats": {"int6": "acme_quant.six:FORMAT"}}, modules={"six.py": FORMAT})
    recipe = Recipe.from_dict({"summary": "x", "scheme": {"weights": {"format": "int6"}}, "passes": ["rtn"]}, name="x")
    assert isinstance(recipe.scheme.weights, WeightScheme) and recipe.scheme.weights.format == "int6"
    digest = files_sha256(tmp_path / "site-acme-quant" / "acme_quant")
    named = {"kind": "format", "name": "int6", "package": "acme-quant", "version": "1.0"}
    assert recipe.outside() == [named | {"sha256": digest}]
    with pytest.raises(InputError, match=r"no format is called 'int5'.*int6"):
        Recipe.from_dict({"summary": "x", "scheme": {"weights": {"format": "int5"}}, "passes": ["rtn"]}, name="x")
    for kind in plugins.KINDS:
        protocol = getattr(importlib.import_module(f"quantkit.{kind.folder}"), kind.singular.title())
        for name in kind.shipped():
            outside.demand_whole(kind.load(name), name, "shipped", protocol, kind.singular)


def test_a_shipped_name_stays_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = plugins.PASSES.load("rtn")
    twice = {"rtn": "acme_quant.rtn", "twice": "acme_quant.rtn"}
    install(tmp_path, monkeypatch, {"quantkit.passes": twice}, modules={"rtn.py": "1 / 0"})
    other = {"quantkit.passes": {"twice": "beta_quant.rtn"}}
    install(tmp_path, monkeypatch, other, package="beta-quant", modules={"rtn.py": "1 / 0"})
    assert plugins.PASSES.load("rtn") is shipped
    about = plugins.PASSES.about()
    assert "refused" in about["rtn"] and "acme-quant" in about["rtn"]
    assert "acme-quant 1.0 and package beta-quant 1.0" in about["twice"]
    with pytest.raises(InputError, match=r"plugin-clash.*acme-quant 1.0 and package beta-quant 1.0"):
        plugins.PASSES.load("twice")
    (tmp_path / "rtn.py").write_text(FILES["my_pass.py"], encoding="utf-8")
    data = {"summary": "x", "scheme": SCHEME, "passes": [str(tmp_path / "rtn.py")]}
    with pytest.raises(InputError, match=r"plugin-clash.*rename the file"):
        Recipe.from_dict(data, name="x", allow_code=True)


@pytest.mark.parametrize(
    ("text", "code"),
    [("1 / 0", "plugin-broken"), (None, "file-missing"), ("\0", "plugin-broken"), ("PASS = 1", "plugin-broken")],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str | None, code: str) -> None:
    if text is not None:
        (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    (tmp_path / "r.yaml").write_text(
        yaml.safe_dump({"summary": "x", "scheme": SCHEME, "passes": ["./mine.py", "rtn"]}), encoding="utf-8"
    )
    with pytest.raises(InputError) as caught:
        Recipe.load(tmp_path / "r.yaml", allow_code=True)
    assert caught.value.code == code and caught.value.where == str(tmp_path / "mine.py")


ROUNDS = """
from pydantic import BaseModel
from quantkit.passes import Pass

class Mine(Pass):
    name = "mine"
    requires, ensures, on_graphs = frozenset({"unassigned"}), frozenset({"codes"}), %r
    class Settings(BaseModel): ...

PASS = Mine()
"""


def test_one_that_promises_codes_of_products_and_gives_none_is_refused_before_any_work(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    (tmp_path / "r.yaml").write_text(
        yaml.safe_dump({"summary": "x", "scheme": SCHEME, "passes": ["./mine.py"]}), encoding="utf-8"
    )
    path.write_text(ROUNDS % "", encoding="utf-8")
    with pytest.raises(InputError, match="without product") as caught:
        Recipe.load(tmp_path / "r.yaml", allow_code=True)
    assert (caught.value.code, caught.value.where) == ("plugin-broken", str(path))
    path.write_text(ROUNDS % "blocks alone", encoding="utf-8")
    Recipe.load(tmp_path / "r.yaml", allow_code=True)


@pytest.mark.parametrize(("returned", "said"), [("", "None"), ("return 1", "an int")])
def test_one_that_returns_nothing_is_named(place: Path, returned: str, said: str) -> None:
    path = place / "my_pass.py"
    path.write_text(FILES["my_pass.py"].replace("return Outcome(changed=True)", returned), encoding="utf-8")
    pipeline = quantkit.Pipeline([path, "rtn"], weights=SCHEME["weights"], allow_code=True)
    with pytest.raises(InputError) as caught:
        pipeline.apply(zoo.tiny("llama"), zoo.ids())
    error = caught.value
    assert (error.code, error.where) == ("plugin-failed", str(path))
    assert error.value == f"run of my_pass returned {said}" and "quantkit.passes.Outcome" in error.rule


def test_one_that_fails_at_work_is_named(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(text: str) -> Callable[..., None]:
        space: dict[str, Any] = {"__name__": "acme_quant.failing"}
        exec(text, space)
        return space["f"]  # type: ignore[no-any-return]

    install(place, monkeypatch, {"quantkit.passes": {"failing": "acme_quant.failing"}}, modules={})
    monkeypatch.setattr("quantkit.report.catalog.listing", failing("def f(kind):\n    return {}[kind]"))
    code, _, err = said(capsys, "list passes")
    assert code == 2 and "[plugin-failed] package acme-quant 1.0: KeyError" in err


def test_a_file_of_the_users_own_is_named_with_the_line_that_failed(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = place / "my_pass.py"
    path.write_text(FILES["my_pass.py"].replace("return Outcome", "return {}['scale'] or Outcome"), encoding="utf-8")
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if "['scale']" in text)
    pipeline = quantkit.Pipeline([path, "rtn"], weights=SCHEME["weights"], allow_code=True)
    monkeypatch.setattr("quantkit.report.catalog.listing", lambda kind: pipeline.apply(zoo.tiny("llama"), zoo.ids()))
    code, _, err = said(capsys, "list passes")
    assert code == 2 and f"[plugin-failed] {path}:{line}: KeyError: 'scale'" in err
    assert "correct that line" in err and "author" not in err


@pytest.mark.parametrize(("text", "number"), [("\n\n1 / 0\n", 3), ("\ndef f(:\n", 2)])
def test_a_file_that_cannot_be_imported_is_named_with_the_line(text: str, number: int, tmp_path: Path) -> None:
    path = tmp_path / "my_pass.py"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=rf"Error: .* \(line {number}\)") as caught:
        quantkit.Pipeline([path, "rtn"], weights=SCHEME["weights"], allow_code=True)
    assert caught.value.code == "plugin-broken"
