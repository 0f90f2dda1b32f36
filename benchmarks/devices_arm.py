"""Bundles on Arm, without an Arm machine: Debian's arm64 Python and PyPI's arm64 onnxruntime in qemu-user.

    apt-get install qemu-user
    python benchmarks/devices_arm.py BUNDLE... --work FOLDER --out FILE.json

What is run is what a device runs (`quantkit.devices.there`), in an install of its own: Python from
Debian's packages, the rest from PyPI's wheels, both unpacked into FOLDER; nothing of this machine is changed. The
emulated core is a Cortex-A76, a Raspberry Pi 5's. Of each bundle:

    apart     the largest difference of outputs, Arm against x86, as a share of the largest output
    rounding  the same of x86 alone, what the runtime itself rounds: its products of 8-bit inputs against products in
              float32 (accuracy level 0); of a network, its fused kernels against each operator by itself
    exact     the same of each side against the graph's own arithmetic, of a network with pairs: products of its codes
              in float64, in which they are exact, by neither runtime
    kl        nats, of decoders: random tokens, scored by the same runner there and here

Times are an emulator's: rows carry `emulated`, take part in no verdict, and none is printed here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import numpy as np
import onnx
import torch
from devices.local import BEGIN, local

from quantkit import load, machine
from quantkit.devices.answers import DeviceFacts, ScoredStretch
from quantkit.devices.named import Reached
from quantkit.pipeline.graphs.bundles import file_of, holds_graph, samples_of
from quantkit.pipeline.measure import original_of

_DEBS = (
    *("python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "libc6", "libstdc++6", "libgcc-s1"),
    *("libssl3", "zlib1g", "libexpat1", "libffi8", "libbz2-1.0", "liblzma5", "libsqlite3-0", "libuuid1", "libgomp1"),
)
_WHEELS = ("onnxruntime", "numpy", "pydantic", "pyyaml", "rich", "typer", "jinja2", "safetensors")
_PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
# the kernel's file of the machine underneath would be an x86's
_CPU = (
    "processor\t: {}\nBogoMIPS\t: 108.00\nFeatures\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp"
    " cpuid asimdrdm lrcpc dcpop asimddp\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x4\n"
    "CPU part\t: 0xd0b\nCPU revision\t: 1\n\n"
)
# of decoders: sequences and tokens of the score
_SEQUENCES, _TOKENS = 2, 33
# what a graph gives, or a decoder's logits of the first tokens
_OUTPUTS = """
import sys, numpy as np
from quantkit.runtimes.onnxruntime.open import open_graph
from quantkit.runtimes.onnxruntime.session import OnnxModel
from pathlib import Path
graph, data, level, out = sys.argv[1:]
level = None if level == "-" else int(level)
given = dict(np.load(data))
if "ids" in given:
    model = OnnxModel(Path(graph).parent, threads=2, accuracy_level=level)
    found = np.stack([model.run(model.state(1, len(row)), row[None])[0] for row in given["ids"]])
else:
    session = open_graph(Path(graph), 2)
    if level == 0:
        import onnxruntime
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    found = np.asarray(session.run(None, given)[0])
np.save(out, found)
"""


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    work = args.work.resolve()
    link = installed(work)
    size = sum(path.stat().st_size for path in (work / "site").rglob("*") if path.is_file())
    about = asked(link)
    print(f"{about.machine}, {about.isa}, emulated: {about.emulated}; the small install: {size / 1e6:.0f} MB")
    found = [compared(link, work, bundle) for bundle in args.bundles]
    for each in found:
        print(json.dumps(each))
    if args.out:
        data = {"device": about.model_dump(mode="json"), "install_bytes": size, "bundles": found}
        data["here"] = {"machine": machine.device(), "versions": machine.versions()}
        args.out.write_text(json.dumps(data, indent=1) + "\n")


def installed(work: Path) -> Reached:
    """The arm64 Python with the small install and this checkout, made where it is not there yet."""
    root, site, python = work / "root", work / "site", work / "python"
    if not (root / "usr/bin/python3.11").is_file():
        unpack_debs(work, root)
    if not (site / "onnxruntime").is_dir():
        wheels = work / "wheels"
        platforms = [word for each in _PLATFORMS for word in ("--platform", each)]
        here = ["--python-version", "3.11", "--only-binary=:all:", "--dest", str(wheels)]
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", *platforms, *here, *_WHEELS], check=True)
        for wheel in wheels.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(site)
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/cpuinfo").write_text("".join(map(_CPU.format, range(machine.cores()))))
    own = f'PYTHONHOME={root}/usr PYTHONPATH="$PYTHONPATH:{site}" PYTHONNOUSERSITE=1 QEMU_CPU=cortex-a76'
    python.write_text(f'#!/bin/sh\nexec env {own} qemu-aarch64 -0 {python} -L {root} {root}/usr/bin/python3.11 "$@"\n')
    python.chmod(0o755)
    reached = local(work / "there", "qemu", begin=BEGIN, python=str(python))
    reached.link.install()
    return reached


def unpack_debs(work: Path, root: Path) -> None:
    """Debian's arm64 packages, by an apt whose lists are in `work`."""
    debs, state = work / "debs", work / "apt"
    for folder in (debs, state / "lists/partial", state / "cache/archives/partial", root):
        folder.mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    options = ["APT::Architecture=arm64", "APT::Architectures=arm64", f"Dir::State={state}"]
    options += [f"Dir::State::status={state}/status", f"Dir::Cache={state}/cache", "APT::Sandbox::User=root"]
    apt = ["apt-get", "-qq", *(word for each in options for word in ("-o", each))]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "download", *_DEBS], check=True, cwd=debs)
    for deb in debs.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(deb), str(root)], check=True)


def asked(reached: Reached) -> DeviceFacts:
    """What the device says of itself. A program that only loads quantkit."""
    program = (
        "from quantkit.devices.there import about; from quantkit.devices.answers import dumped; import json;"
        " print(json.dumps(dumped(about())))"
    )
    return DeviceFacts.model_validate_json(there(reached, program))


def there(reached: Reached, program: str, *arguments: object) -> str:
    """What a program prints in the device's Python."""
    workdir = Path(reached.device.workdir)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (workdir / "wheels").iterdir()))}
    command = [str(workdir.parent / "python"), "-c", program, *map(str, arguments)]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def compared(link: Reached, work: Path, path: Path) -> dict[str, Any]:
    """One bundle; see the module."""
    bundle = load(path)
    data = work / "data.npz"
    network = holds_graph(bundle)
    graph = file_of(bundle) if network else bundle.path / "onnx" / "model.onnx"
    if network:
        np.savez(data, **samples_of(bundle, None).first(4))
    else:
        ids = np.random.default_rng(0).integers(0, 49_000, (_SEQUENCES, _TOKENS))
        np.savez(data, ids=ids)
    arm, x86, floats = (work / f"{name}.npy" for name in ("arm", "x86", "floats"))
    there(link, _OUTPUTS, graph, data, "-", arm)
    here = [sys.executable, "-c", _OUTPUTS]
    subprocess.run([*here, graph, data, "-", x86], check=True)
    subprocess.run([*here, graph, data, "0", floats], check=True)
    ours, theirs = np.load(arm), np.load(x86)
    found: dict[str, Any] = (
        {"bundle": path.name, "outputs": list(theirs.shape)}
        | {"apart": apart(ours, theirs), "rounding": apart(np.load(floats), theirs)}
        | {"same_best": float((ours.argmax(-1) == theirs.argmax(-1)).mean())}
    )
    if not network:
        return found | scored(link, bundle, data)
    wanted = evaluated(graph, dict(np.load(data)))
    return found | {"exact_arm": apart(ours, wanted), "exact_x86": apart(theirs, wanted)}


def evaluated(path: Path, feeds: dict[str, Any]) -> Any:
    """The first output of a graph of convolutions and pairs, in float64."""
    model = onnx.load(str(path)).graph
    known = {each.name: torch.tensor(onnx.numpy_helper.to_array(each)) for each in model.initializer}
    known |= {name: torch.tensor(array) for name, array in feeds.items()}
    for node in model.node:
        given = [known[name].double() if name else None for name in node.input]
        how = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        known[node.output[0]] = _OPERATORS[node.op_type](how, *given)
    return known[model.output[0].name].numpy()


def _along(x: torch.Tensor, values: torch.Tensor | None, how: dict[str, Any]) -> torch.Tensor:
    """Scales or zero points, one for each place of an axis."""
    values = torch.zeros(()) if values is None else values
    return values if values.dim() == 0 else values.reshape([-1] + [1] * (x.dim() - how.get("axis", 1) - 1))


def _quantize(how: dict[str, Any], x: Any, scale: Any, zero: Any = None) -> torch.Tensor:
    return (torch.round(x / _along(x, scale, how)) + _along(x, zero, how)).clamp(0, 255)


def _dequantize(how: dict[str, Any], q: Any, scale: Any, zero: Any = None) -> torch.Tensor:
    return (q - _along(q, zero, how)) * _along(q, scale, how)


def _conv(how: dict[str, Any], x: Any, weight: Any, bias: Any = None) -> torch.Tensor:
    top, left, bottom, right = how["pads"]
    x = torch.nn.functional.pad(x, (left, right, top, bottom))
    return torch.nn.functional.conv2d(x, weight, bias, how["strides"], 0, how["dilations"], how["group"])


_OPERATORS: dict[str, Any] = (
    {"QuantizeLinear": _quantize, "DequantizeLinear": _dequantize, "Conv": _conv}
    | {"Add": lambda how, a, b: a + b, "GlobalAveragePool": lambda how, x: x.mean((2, 3), keepdim=True)}
    | {"Squeeze": lambda how, x, axes: x.squeeze([int(axis) for axis in axes])}
    | {"Gemm": lambda how, x, weight, bias: x @ (weight.T if how.get("transB") else weight) + bias}
)


def apart(one: Any, other: Any) -> float:
    """The largest difference as a share of the largest output."""
    return float(np.abs(one - other).max() / np.abs(other).max())


def scored(device: Reached, bundle: Any, data: Path) -> dict[str, Any]:
    """KL by what runs there, and by the same code here."""
    found = original_of(bundle, None, "onnxruntime")
    theirs, _ = found.floats(bundle, "onnxruntime")
    kl = {}
    here = local(Path(device.device.workdir).parent / "here", "here")
    here.link.install()
    for reached in (device, here):
        began, link = time.monotonic(), reached.link
        job: dict[str, Any] = {"of": "decoder", "runtime": "onnxruntime", "floats": "onnxruntime"}
        for name, folder in (("ours", bundle.path / "onnx"), ("theirs", theirs)):
            files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
            job[name] = {"place": link.carry(f"{name}-{bundle.path.name}", files)}
        job["data"] = f"{link.carry(f'ids-{bundle.path.name}', {data.name: data})}/{data.name}"
        cells = link.run("accuracy", job)
        rows = [row for cell, rows in cells.items() if cell.startswith("scored") for row in rows]
        kl[link.name] = float(np.mean([x for row in rows for x in ScoredStretch.model_validate(row).found["kl"]]))
        print(f"{bundle.path.name} on {link.name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    return {"kl_arm": kl["qemu"], "kl_x86": kl["here"]}


if __name__ == "__main__":
    main()
