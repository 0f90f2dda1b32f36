"""What a caller in Python gives and gets: a wrong type is one line; a bundle is a table, a chart, a notebook's cell."""

import html.parser
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import planted
import pytest
from report import timed

import quantkit
from quantkit.bundle import Bundle, Verdict
from quantkit.errors import InputError, MissingDependency
from quantkit.measurement.rows import write_rows
from quantkit.pipeline.progress import showing
from quantkit.report.kit import html as pages
from quantkit.report.kit.progress import Display, notebook

INT8 = {"weights": {"format": "int8"}}
RECIPE = {"summary": "mine", "scheme": INT8, "passes": ["rtn"]}

WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a model that is a number": (lambda: quantkit.plan(3), r"\[usage\] model: got 3; a name or a path"),  # type: ignore[arg-type]
    "a module that is a number": (lambda: quantkit.compile(3), r"\[module-kind\] model: an int; "),  # type: ignore[arg-type]
    "weights alone": (lambda: quantkit.compile({}), r"\[module-kind\] model: a dict; .*load them into one first"),  # type: ignore[arg-type]
    "no time to measure": (lambda: quantkit.measure("./x", seconds=0), r"\[usage\] seconds: got 0; a number from 1 up"),
    "a folder that is there": (lambda: quantkit.compile("./x", out="."), r"out-exists.*in Python, out="),
    "a recipe that is a list": (lambda: quantkit.compile("x", recipe=["rtn"]), r"\[usage\] recipe: got \['rtn'\]"),  # type: ignore[arg-type]
    "a recipe with a slip": (lambda: quantkit.compile("x", recipe={**RECIPE, "pases": []}), r"recipe-invalid.*passes"),
    "changes that are a text": (lambda: quantkit.compile("x", changes="seed=1"), r"\[set-invalid\] changes: got 's"),
    "changes that are a dict": (lambda: quantkit.compile("x", changes={"seed": 1}), r"\[set-invalid\] changes: got"),  # type: ignore[arg-type]
    "a change that is none": (lambda: quantkit.plan(changes=["seed"]), r"\[set-invalid\]"),
    "a number as a change": (lambda: quantkit.Recipe.load("int8", [1]), r"\[set-invalid\] changes: got \[1\]"),  # type: ignore[list-item]
    "one batch": (lambda: quantkit.plan(batches=8), r"\[usage\] batches: got 8; numbers from 1 up"),  # type: ignore[arg-type]
    "a batch of none": (lambda: quantkit.plan(batches=[0]), r"\[usage\] batches: got \[0\]"),
    "batches in words": (lambda: quantkit.plan(batches="1,2"), r"\[usage\] batches: got '1,2'"),  # type: ignore[arg-type]
    "batches that are true": (lambda: quantkit.plan(batches=[True]), r"\[usage\] batches: got \[True\]"),
    "recipes that are a number": (lambda: quantkit.plan(recipes=4), r"\[usage\] recipes: got 4"),  # type: ignore[arg-type]
    "a bundle that is a list": (lambda: quantkit.measure([1]), r"\[usage\] bundle: got \[1\]"),  # type: ignore[arg-type]
    "a budget that is a number": (lambda: quantkit.tune("x", 4.25), r"\[usage\] budget: got 4.25"),  # type: ignore[arg-type]
    "schemes that are texts": (lambda: quantkit.tune("x", "bits=4", schemes=["int4"]), r"\[usage\] schemes"),  # type: ignore[list-item]
    "two numbers to compare": (lambda: quantkit.compare(1, 2), r"\[usage\] a: got 1; a bundle, a path or a name"),  # type: ignore[arg-type]
    "nothing to compare with": (lambda: quantkit.compare("./x", None), r"\[usage\] b: got None"),  # type: ignore[arg-type]
    "no recipe": (lambda: quantkit.Recipe.load(None), r"\[usage\] recipe: got None"),  # type: ignore[arg-type]
    "no target": (lambda: quantkit.Target.load(None), r"\[usage\] target: got None"),  # type: ignore[arg-type]
    "no bundle": (lambda: quantkit.Bundle.load(None), r"\[usage\] bundle: got None"),  # type: ignore[arg-type]
    "a target that is a number": (lambda: quantkit.compile(target=5), r"\[usage\] target: got 5"),  # type: ignore[arg-type]
    "a target that is zero": (lambda: quantkit.plan(target=0), r"\[usage\] target: got 0"),  # type: ignore[arg-type]
    "exporters": (lambda: quantkit.export("./x", ["onnx"]), r"\[usage\] to: got \['onnx'\]"),  # type: ignore[arg-type]
    "no exporter": (lambda: quantkit.export("./x", None), r"\[usage\] to: got None"),  # type: ignore[arg-type]
    "a runtime that is a number": (lambda: quantkit.measure("./x", runtime=5), r"\[usage\] runtime: got 5"),  # type: ignore[arg-type]
    "a flag in words": (lambda: quantkit.compile(speed="no"), r"\[usage\] speed: got 'no'; True or False"),  # type: ignore[arg-type]
    "another": (lambda: quantkit.compile(resume="x"), r"\[usage\] resume: got 'x'"),  # type: ignore[arg-type]
    "texts to calibrate on": (lambda: quantkit.compile(calibration=["a text"]), r"\[usage\] calibration: got \['a"),  # type: ignore[arg-type]
    "a prompt in words": (lambda: quantkit.plan(prompt="long"), r"\[usage\] prompt: got 'long'; a number"),  # type: ignore[arg-type]
    "progress in words": (lambda: showing("bar").__enter__(), r"\[usage\] progress: got 'bar'"),  # type: ignore[arg-type]
    "an out that is a number": (lambda: quantkit.compile("x", out=1), r"\[usage\] out: got 1"),  # type: ignore[arg-type]
    "no weights": (lambda: quantkit.Pipeline(["rtn"]), r"Pipeline: rtn assigns codes.*weights=\{'format': 'int8'\}"),
    "weights that are a text": (lambda: quantkit.Pipeline(["rtn"], weights="int4"), r"recipe-invalid\] Pipeline"),  # type: ignore[arg-type]
    "passes that are a text": (lambda: quantkit.Pipeline("rtn", weights=INT8["weights"]), r"must be a list"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_type_is_one_line(name: str) -> None:
    call, said = WRONG[name]
    with pytest.raises(InputError, match=said) as caught:
        call()
    assert "\n" not in caught.value.line()


def test_a_path_is_a_path_and_a_mapping_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Path("smollm2-135m")` is no alias; what is asked of a recipe is what its YAML would ask."""
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: quantkit.compile(Path("smollm2-135m"), recipe=RECIPE),
        lambda: quantkit.plan(Path("smollm2-135m")),
    ):
        with pytest.raises(InputError) as caught:
            call()
        assert "smollm2-135m" in caught.value.where and caught.value.code != "alias-missing"
    from quantkit.pipeline import Request

    request = Request.of(str(Path("x")), recipe=RECIPE, changes=["seed=7"])
    assert (request.recipe.name, request.recipe.seed, request.recipe.summary) == ("own", 7, "mine")


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    write_rows(tmp_path / "measurements.jsonl", timed.everything())
    found = planted.manifest(verdict={"answer": "ship_up_to", "batch": 8, "because": ["a <script>alert(1)</script>"]})
    (tmp_path / "manifest.json").write_bytes(found.as_bytes())
    return quantkit.load(tmp_path)


def test_the_rows_as_a_table(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = bundle.measurements
    table = bundle.frame()
    assert len(table) == len(rows)
    assert table["name"].tolist() == [row["name"] for row in rows]
    known = [row["baseline"]["ratio"] for row in rows if (row["baseline"] or {}).get("ratio")]
    assert table["baseline.ratio"].dropna().tolist() == known
    arrow = bundle.frame("pyarrow")
    assert arrow.num_rows == len(rows) and arrow.column("value").to_pylist() == [row["value"] for row in rows]
    with pytest.raises(InputError, match="pandas or pyarrow"):
        bundle.frame("polars")  # type: ignore[arg-type]
    for name, remedy in (("pandas", "pip install pandas"), ("pyarrow", r"-e '\.\[data\]'")):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(MissingDependency, match=remedy):
            bundle.frame(name)  # type: ignore[arg-type]


def test_a_bundle_plots_its_speed(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    from plotly import graph_objects

    figure = bundle.plot()
    assert isinstance(figure, graph_objects.Figure)
    assert figure.layout.title.text == "Decode with 128 tokens of context: Speed-up over float32"
    steps = [row for row in bundle.measurements if row["name"] == "latency.decode_step"]
    ratios = [row["baseline"]["ratio"] for row in steps if row["shape"]["context"] == 128]
    assert any(list(trace.y) == pytest.approx(ratios) for trace in figure.data if len(trace.y) == len(ratios))
    blue = pages.read("page.css").partition("--quantized: light-dark(")[2].partition(",")[0]
    assert "var(--" not in figure.to_json() and blue in figure.to_json()
    assert bundle.plot("Weights on disk").layout.title.text == "Weights on disk"
    with pytest.raises(InputError, match=r"unknown-figure.*Weights on disk"):
        bundle.plot("Weight on disk")
    (bundle.path / "measurements.jsonl").unlink()
    bare = Bundle(bundle.path, bundle.manifest.model_copy(update={"layers": []}))
    with pytest.raises(InputError, match=r"nothing-to-plot.*quantkit measure"):
        bare.plot()
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(MissingDependency, match=r"-e '\.\[report\]'"):
        bundle.plot()


class Elements(html.parser.HTMLParser):
    """The elements of a text, and what is in them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.words = list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.append(data.strip())


def test_a_bundle_in_a_notebook(bundle: Bundle) -> None:
    assert bundle.verdict == Verdict(answer="ship_up_to", batch=8, because=["a <script>alert(1)</script>"])
    shown = Elements(bundle._repr_html_())
    assert "Ship it up to batch 8" in " ".join(shown.words)
    assert "script" not in shown.tags and "a <script>alert(1)</script>" in shown.words
    assert {"table", "ul"} <= set(shown.tags) and str(bundle.path) in shown.words
    bare = Bundle(bundle.path, bundle.manifest.model_copy(update={"verdict": None}))
    (bundle.path / "measurements.jsonl").unlink()
    assert "Not measured yet: nothing says whether it is faster" in " ".join(Elements(bare._repr_html_()).words)
    alone = Elements(bundle.verdict._repr_html_())
    assert alone.tags == ["b", "ul", "li"] and alone.words == ["ship up to, batch 8", "a <script>alert(1)</script>"]


class Handle:
    """What IPython gives for a cell that is drawn again."""

    def __init__(self, drawn: list[str]) -> None:
        self.drawn = drawn

    def update(self, shown: str) -> None:
        self.drawn.append(shown)


def test_the_progress_of_a_notebook(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """IPython is not installed here; this is as much of it as is asked for."""
    drawn: list[str] = []

    def display(shown: str, *, display_id: bool) -> Handle:
        assert display_id
        drawn.append(shown)
        return Handle(drawn)

    ipython, inner = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    inner.__dict__.update(display=display, HTML=str)
    ipython.__dict__.update(display=inner, get_ipython=lambda: types.SimpleNamespace(kernel=object()))
    assert notebook() is None
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", inner)
    cell = notebook()
    assert cell is not None
    with Display(sys.stderr, live=True, cell=cell) as shown:
        shown.plan({"quantize": 8.0, "score": 2.0})
        shown.at("quantize", 0.5, "<b>block</b>")
        shown.note("a line that stays")
    assert any("<progress" in each and "&lt;b&gt;block" in each for each in drawn)
    assert drawn[-1] == "", "the bar goes; what it said is in the result"
    assert capsys.readouterr().err == "a line that stays\n"
    ipython.__dict__["get_ipython"] = types.SimpleNamespace
    assert notebook() is None, "IPython on a terminal"


def test_progress_is_shown_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for asked in (False, True):
        with pytest.raises(InputError):
            quantkit.compile("./no-such-model", progress=asked)
        assert ("opening ./no-such-model" in capsys.readouterr().err) == asked
