"""The gallery of docs/gallery/: a real page of each kind, and its picture. No claim.

    python benchmarks/gallery.py                   # measures everything: about 40 minutes on two quiet cores
    python benchmarks/gallery.py --work ./gallery  # keeps what was measured there, and measures only what is missing

Every page comes from the command that a user types (`STEPS`), in a folder of its own. Pages of bundles and searches are
drawn again from what lies there, so that a new look of the pages costs no new measurement. In the gallery all pages
share one copy of plotly, which lies beside them; a page that a command writes holds its own. Pictures are taken with a
Chromium (`apt-get install chromium`, or `playwright install chromium`); `--no-pictures` leaves them out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from quantkit import cli
from quantkit.bundle import Bundle
from quantkit.measurement.rows import read_rows
from quantkit.pipeline import verdict
from quantkit.pipeline.verdict import page
from quantkit.report.bundle import figures
from quantkit.report.kit import html
from quantkit.report.tune import document
from quantkit.target import Target

ROOT = Path(__file__).resolve().parents[1]
GALLERY = ROOT / "docs" / "gallery"
MODEL, BUNDLE = "smollm2-135m", "int4"
# page -> the commands that make it; the first is left out where its product lies there already
STEPS: dict[str, list[str]] = {
    "report": [f"compile {MODEL} --recipe awq-int4 --out ./{BUNDLE}"],
    "compare": [f"compare {MODEL} ./{BUNDLE} --html compare.html"],
    "tax": ["tax --shape 576x1536 --format int4,int8.dynamic --batch 1,8,64 --seconds 120 --html tax.html"],
    "tune": [f"tune {MODEL} --budget bits=4.5 --formats int4,int8 --out ./tuned"],
    "plan": ["plan llama-3-70b --compare bf16,fp8,int4 --target h100 --rate 2 --html plan.html"],
    "nightly": [*["nightly run nightly.yaml"] * 3, "nightly page nightly.yaml"],
}
PRODUCTS = {"report": BUNDLE, "tax": "tax.html", "tune": "tuned", "nightly": "nightly"}
NIGHTLY = """\
models: [fashion-mnist-cnn]
recipes: [int8-network, int8]
targets: [cpu-x86]
batches: [1, 8]
gates: {latency: 0.05, accuracy: 0.01, kl: 0.01, size: 0.01}
baseline: last-accepted
budget: {rounds: 4, blocks: 10}
store: nightly/store
bundles: nightly/bundles
page: nightly/page
"""
# fine, a comparison that is lost, noise: pages all the same
PAGES = (0, 1, 3)
WIDTH, HEIGHT, SIDES, BYTES = 1200, 900, 400, 150_000
PACKED = re.compile(r'<script type="application/octet-stream" id="plotly">(.*?)</script>', re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="where it is measured; default: a folder that is removed")
    parser.add_argument("--only", nargs="+", choices=[*STEPS], default=[*STEPS])
    parser.add_argument("--no-pictures", action="store_true")
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        work = given.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        (work / "nightly.yaml").write_text(NIGHTLY, encoding="utf-8")
        stack.enter_context(contextlib.chdir(work))
        for name in given.only:
            measure(name)
            place(name)
    if not given.no_pictures:
        pictures(given.only)
    total = sum(path.stat().st_size for path in GALLERY.rglob("*") if path.is_file())
    print(f"{GALLERY}: {total / 1e6:.1f} MB")
    return 0


def measure(name: str) -> None:
    """Run the commands of one page, as they are typed; what lies there is not measured again."""
    there = Path(PRODUCTS.get(name, "")).exists() if name in PRODUCTS else False
    for command in STEPS[name] if not there else STEPS[name][1:][-1:]:
        print(f"$ quantkit {command}", flush=True)
        code = cli.run(command.split())
        if code not in PAGES:
            raise SystemExit(f"quantkit {command}: exit {code}")


def place(name: str) -> None:
    """Put the page into the gallery; nights are a folder of pages."""
    GALLERY.mkdir(parents=True, exist_ok=True)
    if name == "nightly":
        shutil.rmtree(GALLERY / name, ignore_errors=True)
        shutil.copytree("nightly/page", GALLERY / name)
        return
    drawn: dict[str, Callable[[], str]] = {"report": report, "tune": tuned}
    text = drawn[name]() if name in drawn else Path(f"{name}.html").read_text(encoding="utf-8")
    (GALLERY / f"{name}.html").write_text(apart(text), encoding="utf-8")


def report() -> str:
    """The page of the bundle, from its manifest and its rows, judged as rows are judged today."""
    bundle = Bundle.load(BUNDLE)
    manifest, rows = bundle.manifest, read_rows(bundle.path / "measurements.jsonl")
    target = Target.load(str((manifest.target or {})["name"]))
    own = verdict.of_original(rows, manifest.model.source.sha256)
    judged = verdict.decide(own, manifest.checks, manifest.layers, target)
    manifest = manifest.model_copy(update={"verdict": judged})
    made, why = page(manifest, rows, figures.notes(manifest), bundle.path)
    if made is None:
        raise SystemExit(str(why))
    return made.decode()


def tuned() -> str:
    """The page of the search, from its front and its recipe."""
    data = json.loads(Path("tuned/front.json").read_text(encoding="utf-8"))
    return html.page(document(data, Path("tuned/tuned.yaml").read_text(encoding="utf-8")))


def apart(text: str) -> str:
    """The same page with plotly beside it: its own packed copy goes into `plotly.js`, which puts it back."""
    (packed,) = PACKED.findall(text)
    fill = f'document.getElementById("plotly").textContent = "{packed}";\n'
    (GALLERY / "plotly.js").write_text(fill, encoding="utf-8")
    text = text.replace(f'id="plotly">{packed}</script>', 'id="plotly"></script>\n<script src="plotly.js"></script>')
    return text.replace("script-src ", "script-src 'self' file: ", 1)


def pictures(names: Sequence[str]) -> None:
    """The top of each page as on a desk and on a telephone, light, and the report dark; few colours, few bytes."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name in names:
            page_of = GALLERY / name / "index.html" if name == "nightly" else GALLERY / f"{name}.html"
            shots = [(name, WIDTH, "light"), (f"{name}-narrow", SIDES, "light")]
            for label, width, scheme in [*shots, *([(f"{name}-dark", WIDTH, "dark")] if name == "report" else [])]:
                shot = browser.new_page(viewport={"width": width, "height": HEIGHT}, color_scheme=scheme)  # type: ignore[arg-type]
                shot.goto(page_of.as_uri())
                shot.wait_for_timeout(2000)  # for the figures
                raw = Path(folder) / "shot.png"
                shot.screenshot(path=str(raw))
                shot.close()
                picture = Image.open(raw).convert("RGB")
                for colours in (128, 64, 32):
                    picture.quantize(colours).save(GALLERY / f"{label}.png", optimize=True)
                    if (GALLERY / f"{label}.png").stat().st_size < BYTES:
                        break
        browser.close()


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    raise SystemExit(main())
