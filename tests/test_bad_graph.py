"""Bad graphs and bad samples, as a user meets them: one clear line, exit code 2, and nothing left on disk."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import networks
import numpy as np
import onnx_ir as ir
import pytest

import quantkit
from quantkit import cli
from quantkit.errors import InputError

RNG = np.random.default_rng(0)


def constant(name: str, shape: tuple[int, ...] = (4, 4)) -> str:
    sizes = ",".join(map(str, shape))
    return f"float[{sizes}] {name} = {{{', '.join(map(str, RNG.standard_normal(shape).reshape(-1)))}}}"


@dataclass
class Given:
    """A good command; a case spoils one part of it."""

    folder: Path
    more: list[str] = field(default_factory=list)

    @property
    def model(self) -> Path:
        return self.folder / "model.onnx"

    def samples(self, **arrays: Any) -> None:
        np.savez(self.folder / "set.npz", **arrays)

    def graph(
        self,
        body: str,
        inputs: str = "float[N,4] x",
        outputs: str = "float[N,4] y",
        opset: int = 21,
        more: str = "",
        constants: str = "",
    ) -> None:
        """Another graph, of four numbers a sample."""
        head = f'<ir_version: 8, opset_import: ["" : {opset}{more}]> g ({inputs}) => ({outputs})'
        model = ir.from_onnx_text(f"{head} <{constants or constant('w')}> {{ {body} }}")
        self.model.write_bytes(ir.to_proto(model).SerializeToString())
        self.samples(x=RNG.standard_normal((60, 4)).astype(np.float32))

    def outside(self, place: str) -> None:
        """The graph with its weights in a file that is said to be there."""
        model = ir.load(self.model)
        ir.save(model, self.folder / "apart.onnx", external_data="weights.bin", size_threshold_bytes=64)
        model = ir.load(self.folder / "apart.onnx")
        for value in model.graph.initializers.values():
            held = value.const_value
            if isinstance(held, ir.ExternalTensor):
                value.const_value = ir.ExternalTensor(
                    place, held.offset, held.length, held.dtype, shape=held.shape, name=held.name or ""
                )
        self.model.write_bytes(ir.to_proto(model).SerializeToString())


def no_file(given: Given) -> None:
    given.model.unlink()


def no_graph(given: Given) -> None:
    given.model.write_bytes(b"\x08\x09junk")


def cut_short(given: Given) -> None:
    given.model.write_bytes(given.model.read_bytes()[:3000])


def custom_operator(given: Given) -> None:
    given.graph("y = my.ops.Magic(x)", more=', "my.ops" : 1')


def unknown_operator(given: Given) -> None:
    given.graph("y = Wobble(x)")


def quantized_already(given: Given) -> None:
    scale = "s = Constant <value = float {0.5}> () z = Constant <value = uint8 {0}> () "
    given.graph(f"{scale} q = QuantizeLinear(x, s, z) h = DequantizeLinear(q, s, z) y = MatMul(h, w)")


def old_opset(given: Given) -> None:
    given.graph("y = MatMul(x, w)", opset=9)


def computed_by_nothing(given: Given) -> None:
    given.graph("y = MatMul(z, w)")


def without_shape(given: Given) -> None:
    model = ir.load(given.model)
    model.graph.inputs[0].shape = None
    ir.save(model, given.model)


def without_samples(given: Given) -> None:
    given.graph("h = MatMul(x, w) y = Mul(h, s)", inputs="float[N,4] x, float s")


def of_text(given: Given) -> None:
    given.graph("y = MatMul(x, w)", inputs="float[N,4] x, string[N] s")


def in_doubles(given: Given) -> None:
    weights = constant("w").replace("float[", "double[")
    given.graph("y = MatMul(x, w)", "double[N,4] x", "double[N,4] y", constants=weights)


def gives_no_floats(given: Given) -> None:
    given.graph("h = MatMul(x, w) n = Neg(h) b = Greater(h, n) y = Cast <to = 7> (b)", outputs="int64[N, M] y")


def gives_nan(given: Given) -> None:
    given.graph("h = MatMul(x, w) s = Mul(h, h) n = Neg(s) y = Log(n)")


def dead_activation(given: Given) -> None:
    body = "h = MatMul(x, w) m = Constant <value_float = -1000.0> () a = Add(h, m) r = Relu(a) y = MatMul(r, v)"
    given.graph(body, constants=f"{constant('w')}, {constant('v')}")


def nothing_to_quantize(given: Given) -> None:
    given.graph("y = Relu(x)")


def traversal(given: Given) -> None:
    given.outside("../weights.bin")


def absolute(given: Given) -> None:
    given.outside("/etc/passwd")


def link(given: Given) -> None:
    given.outside("link.bin")
    (given.folder / "link.bin").symlink_to(given.folder / "weights.bin")


def no_calibration(given: Given) -> None:
    given.more = []


def text_calibration(given: Given) -> None:
    given.more = ["--calibration", "prose-en"]


def wrong_shape(given: Given) -> None:
    given.samples(images=networks.images(60)[:, :, :5])


def wrong_range(given: Given) -> None:
    given.samples(images=RNG.integers(0, 255, (60, 3, 12, 12)).astype(np.float32))


def wrong_dtype(given: Given) -> None:
    given.samples(images=RNG.integers(0, 255, (60, 3, 12, 12)))


def one_value_everywhere(given: Given) -> None:
    given.samples(images=np.ones((60, 3, 12, 12), np.float32))


def not_a_number(given: Given) -> None:
    given.samples(images=np.full((60, 3, 12, 12), np.nan, np.float32))


def bytes_without_preprocessing(given: Given) -> None:
    given.samples(images=RNG.integers(0, 255, (60, 12, 12, 3), dtype=np.uint8))


def labels_of_other_classes(given: Given) -> None:
    given.samples(images=networks.images(60), labels=np.full(60, 99))


def objects(given: Given) -> None:
    given.samples(images=np.array([None] * 60, dtype=object))


def fewer_than_a_batch(given: Given) -> None:
    model = ir.load(given.model)
    model.graph.inputs[0].shape = ir.Shape([64, 3, 12, 12])
    ir.save(model, given.model)


def scheme_of_its_own(given: Given) -> None:
    given.more += ["--set", "overrides=[{match: '*', weights: {format: int4}}]"]


def keeps_what_is_not_there(given: Given) -> None:
    given.more += ["--set", "keep=[nothing]"]


# what is spoilt -> code
CASES: dict[Callable[[Given], None], str] = {
    no_file: "file-missing",
    no_graph: "onnx-unreadable",
    cut_short: "onnx-unreadable",
    custom_operator: "onnx-operator",
    unknown_operator: "onnx-unrunnable",
    quantized_already: "onnx-quantized",
    old_opset: "onnx-opset",
    computed_by_nothing: "onnx-unreadable",
    without_shape: "onnx-shape",
    without_samples: "onnx-inputs",
    of_text: "onnx-inputs",
    in_doubles: "onnx-dtype",
    gives_no_floats: "onnx-outputs",
    gives_nan: "onnx-outputs",
    dead_activation: "activations-constant",
    nothing_to_quantize: "no-linears",
    traversal: "onnx-external",
    absolute: "onnx-external",
    link: "onnx-external",
    no_calibration: "calibration-kind",
    text_calibration: "calibration-kind",
    wrong_shape: "calibration-shape",
    wrong_range: "calibration-range",
    wrong_dtype: "calibration-dtype",
    one_value_everywhere: "calibration-constant",
    not_a_number: "calibration-nonfinite",
    bytes_without_preprocessing: "calibration-preprocess",
    labels_of_other_classes: "label-out-of-range",
    objects: "calibration-pickle",
    fewer_than_a_batch: "calibration-short",
    scheme_of_its_own: "scheme-unsupported",
    keeps_what_is_not_there: "keep-unmatched",
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return networks.write(tmp_path_factory.mktemp("good") / "tiny.onnx").read_bytes()


@pytest.fixture
def given(good: bytes, tmp_path: Path) -> Given:
    (tmp_path / "model.onnx").write_bytes(good)
    made = Given(tmp_path, ["--calibration", str(tmp_path / "set.npz")])
    made.samples(images=networks.images(60))
    return made


@pytest.mark.parametrize("spoil", CASES, ids=lambda spoil: spoil.__name__)
def test_one_clear_line_and_nothing_left(
    spoil: Callable[[Given], None], given: Given, capfd: pytest.CaptureFixture[str]
) -> None:
    spoil(given)
    before = sorted(given.folder.rglob("*"))
    capfd.readouterr()
    command = ["compile", str(given.model), "--recipe", "int8", "--no-speed", "--out", str(given.folder / "out")]
    left = cli.run([*command, *given.more, "--json"])
    out, err = capfd.readouterr()
    error = json.loads(out)["error"]
    assert (error["code"], left) == (CASES[spoil], 2), error
    assert all("\n" not in error[part] for part in ("where", "value", "rule", "remedy"))
    assert error["value"] and (error["rule"] or error["remedy"])
    assert "Traceback" not in err
    assert sorted(given.folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("recipe", "target", "remedy"),
    [("int8-dynamic", "rtx-4090", "int8-tensorrt"), ("int4-tensorrt", "cpu-x86", "--target a100")],
)
def test_a_target_that_cannot_read_a_graph_says_what_can(recipe: str, target: str, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="target-cannot-run") as caught:
        quantkit.compile("fashion-mnist-cnn", recipe, target, out=tmp_path / "out")
    assert remedy in str(caught.value.remedy)
    assert list(tmp_path.iterdir()) == []
