"""What the house has to know of a pass or an exporter, the plug-in declares in its own file; its name decides nothing.

A plug-in that is used for what it is, not for what it declares, is imported: who renames it finds `Gptq.name`.
"""

import ast

from house.source import files, nodes, words
from quantkit import plugins

# (module, word) -> what else the word stands for there
OTHER_WORDS = {
    ("quantkit.passes.awq", "gptq"): "a value of its setting `cost`: what is left of an error behind GPTQ",
    ("quantkit.measurement.compared", "mixed"): "a verdict: better in one thing, worse in another",
    ("quantkit.report.compared", "mixed"): "that verdict",
    ("quantkit.nightly.page.data", "round"): "a column: the round of a timing",
    ("quantkit.measurement.timing.rounds", "round"): "that column",
    ("quantkit.devices.there", "round"): "that column",
    ("quantkit.nightly.timing", "round"): "that column",
    ("quantkit.planning.matrix", "tensorrt"): "a runtime, with what people call it",
    ("quantkit.planning.matrix", "openvino"): "a runtime, with what people call it",
    **{
        (f"quantkit.model.{place}.quantized", word): "a quantization method of a source's config"
        for place in ("sizes", "source")
        for word in ("awq", "gptq")
    },
    ("quantkit.model.sizes.configs", "onnx"): "a folder of a bundle",
    ("quantkit.bundle.manifest", "onnx"): "a folder of a bundle, and a file's role",
    ("quantkit.report.bundle.document", "onnx"): "a file's role",
    ("quantkit.report.bundle.document", "gguf"): "a file's role",
}
# the name itself: five reasons at most
EXCEPTIONS = {
    ("quantkit.recipe.recipe", "checkpoint"): "a recipe that names no export gets this one",
    ("quantkit.cli.commands.export", "tensorrt"): "an option that is for this exporter alone",
    ("quantkit.pipeline.blocks.prepared", "checkpoint"): "a decision that is about it",
    ("quantkit.pipeline.blocks.prepared", "onnx"): "a decision that is about it",
    ("quantkit.pipeline.reload", "tensorrt"): "a runtime that is asked for by its name",
    ("quantkit.measurement.engine_layers", "tensorrt"): "a decision that is about it",
}
REASONS = {**OTHER_WORDS, **EXCEPTIONS}


def test_no_pass_is_named_outside_its_own_file() -> None:
    names = set(plugins.PASSES.names())
    found = {
        (module, word)
        for module in files()
        # a layout is called like the pass that first wrote it
        if not module.startswith("quantkit.model.layouts.")
        for word in names & words(module)
        if module != f"quantkit.passes.{word}"
    }
    assert found <= REASONS.keys(), found - REASONS.keys()


def test_nobody_decides_by_the_name_of_an_exporter() -> None:
    """Compared, loaded or asked for by name; the words stand for packages, folders and roles elsewhere."""
    names = set(plugins.EXPORTERS.names())
    deciding = {"load_exporter", "ExportStep", "load", "decision"}
    found = set()
    for module in files():
        if module.startswith(("quantkit.exporters.", "quantkit.runtimes.")) or not names & words(module):
            continue
        for node in nodes(module):
            called = isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in deciding
            if isinstance(node, ast.Compare) or called:
                found |= {
                    (module, each.value)
                    for each in ast.walk(node)
                    if isinstance(each, ast.Constant) and each.value in names
                }
    assert found <= REASONS.keys(), found - REASONS.keys()


def test_a_plan_names_no_exporter_at_all() -> None:
    names = set(plugins.EXPORTERS.names())
    found = {
        (module, word) for module in files() if module.startswith("quantkit.planning") for word in names & words(module)
    }
    assert found <= REASONS.keys(), found - REASONS.keys()


def test_exceptions_are_few_and_needed() -> None:
    assert len(set(EXCEPTIONS.values())) <= 5
    for module, word in REASONS:
        assert word in words(module), f"{module} does not say {word!r} any more"
