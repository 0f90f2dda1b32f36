"""Load a bundle and its original in vLLM's server, in turns, and keep what they deliver.

    original, bundle, bundle, original     one server at a time, each at every rate

A server runs on the loopback address, in the process group of vLLM's generator (`runtimes/vllm/inside.py`), and ends
with it. An endpoint is loaded alone: whatever runs there is not known to be the bundle, so nothing is kept.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quantkit import machine
from quantkit.bundle import Bundle
from quantkit.errors import InputError
from quantkit.measurement import load as loads
from quantkit.measurement.load import ServerLoad
from quantkit.measurement.rows import Row
from quantkit.pipeline.measure import opened_original
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.verdict import keep
from quantkit.runtimes import apart
from quantkit.runtimes.child import Report
from quantkit.runtimes.generate import demand_decoder, too_long
from quantkit.runtimes.torch import RUNTIME as TORCH
from quantkit.runtimes.vllm import OWN, RUNTIME, dtype_of, environment
from quantkit.runtimes.vllm.inside import JobRefused, served_name

# (load, side -> folder, sides of the visits, progress) -> answers, fields of their rows
Turns = Callable[[ServerLoad, Mapping[str, Path], Sequence[str], Report], tuple[list[Any], dict[str, Any]]]
ENDPOINT = "endpoint"
# seconds for a server to start, and for its answers beyond ten times the arrivals
_READY, _IDLE = 900.0, 600.0
# GiB of a server's KV cache on a processor, and bytes of its processes besides cache and weights
_CACHE, _PROCESSES = 4, 3_000_000_000
# tokens of a prompt that a tokenizer may add
_MORE = 32


def load_bundle(
    bundle: Bundle,
    load: ServerLoad,
    baseline: str | None = None,
    progress: Progress | None = None,
    turns: Turns | None = None,
) -> list[Row]:
    """Load the original and a bundle in vLLM's server, A B B A; the rows replace those of an earlier load.

    Args:
        turns: function that starts and loads the servers; None: `in_turns`, on this machine.

    Raises:
        InputError: `runtime-not-here`, `not-a-decoder`, `prompt-too-long`, `out-of-memory`, `server-failed`,
            `load-failed`; those of `opened_original`.
    """
    progress = progress or Progress()
    demand_decoder(bundle)
    if turns is None:
        apart.demand(OWN.name)
    bundle.demand_writable()
    folders = {"bundle": RUNTIME.checked(bundle)}
    original = opened_original(bundle, baseline, None)
    if original.stream is None:
        rule = "vLLM loads the original as a checkpoint of transformers"
        raise InputError("baseline-needed", "--baseline", "no checkpoint", rule, "a folder, or a bundle that has one")
    folders["original"] = original.stream.source.in_files().path
    progress.plan({"load": 1.0})
    progress.note("one server runs at a time: original, bundle, bundle, original")
    report: Report = lambda share, words: progress.at("load", share, words)  # noqa: E731 (typed)
    answers, about = (turns or in_turns)(load, folders, loads.ORDER, report)
    form = dtype_of(folders["original"]) if original.format == "float32" else original.format
    about["settings"] |= {"baseline_format": form}
    subject = bundle.manifest.content_sha256
    rows = loads.rows(load, answers, against=original.subject, subject=subject, **about)
    keep(bundle, rows, None, OWN.name, original.subject, progress)
    return rows


def in_turns(
    load: ServerLoad, folders: Mapping[str, Path], order: Sequence[str], report: Report
) -> tuple[list[Any], dict[str, Any]]:
    """Load the servers of some checkpoints, one after another.

    Args:
        folders: side -> folder of its checkpoint; the first one's tokenizer writes the prompts.
        order: sides of the visits.

    Returns:
        The answers of the job `load`; runtime, device, versions and settings of their rows.

    Raises InputError: `prompt-too-long`, `out-of-memory`, `server-failed`, `load-failed`.
    """
    for folder in folders.values():
        most = RUNTIME.context(folder)
        if load.prompt + load.output > most:
            raise too_long(
                "--prompt", load.prompt + load.output, f"the context holds {most}", "shorter prompts, or --output"
            )
    on_gpu = bool(machine.gpus()[0])
    space = None if on_gpu else cache_space(folders.values())
    dtypes = {side: dtype_of(folder) for side, folder in folders.items()}
    visits = [_visit(side, folders[side], dtypes[side], load, eager=not on_gpu) for side in order]
    tokenizer = next(iter(folders.values()))
    answers = _answers(load, visits, tokenizer, report, {"VLLM_CPU_KVCACHE_SPACE": str(space or 0)})
    settings = {"dtype": next(iter(dtypes.values())), "eager": not on_gpu, **({"cache_gib": space} if space else {})}
    where = machine.gpu(str(machine.gpus()[0][0]["name"])) if on_gpu else machine.device()
    return answers, {"runtime": OWN.name, "device": where, "versions": _versions(), "settings": settings}


def load_endpoint(bundle: Bundle, load: ServerLoad, url: str, progress: Progress | None = None) -> list[Row]:
    """Load a running server twice, with the bundle's tokenizer; nothing is kept.

    Raises:
        InputError: `usage` for no URL, `load-failed`, before any work where no server answers; `runtime-not-here`.
    """
    place = urlsplit(url)
    if place.scheme not in ("http", "https") or not place.hostname:
        raise InputError("usage", "--endpoint", url, "the address of a server", "http://127.0.0.1:8000")
    base = url.rstrip("/").removesuffix("/v1")
    try:
        served_name(base)
    except JobRefused as problem:
        code, value, rule = problem.args
        raise InputError(code, "--endpoint", value, rule, "start the server, or give its address") from None
    apart.demand(OWN.name, "the generator of the load is vLLM's")
    folder = TORCH.folder(bundle)
    visits = [{"side": side, "command": None, "url": base, "where": "--endpoint"} for side in loads.ALONE]
    progress = progress or Progress()
    progress.plan({"load": 1.0})
    answers = _answers(load, visits, folder, lambda share, words: progress.at("load", share, words), {})
    about: dict[str, Any] = {"runtime": ENDPOINT, "settings": {"url": base}, "versions": _versions()}
    return loads.rows(load, answers, against=None, subject=bundle.manifest.content_sha256, **about)


def cache_space(folders: Any) -> int:
    """Return the GiB of KV cache for each of some servers, which run one after another: 4, or what is free.

    Raises InputError `out-of-memory`: less than one.
    """
    weights = max(sum(file.stat().st_size for file in folder.glob("*.safetensors")) for folder in folders)
    free = machine.memory_available() - weights - _PROCESSES
    if free < 1 << 30:
        value = f"{machine.memory_available() / 1e9:.1f} GB are free"
        rule = f"a server takes {weights / 1e9:.1f} GB of weights, {_PROCESSES / 1e9:.0f} GB and 1 GiB of KV cache"
        raise InputError("out-of-memory", "--load", value, rule, "end other programs, or use a larger machine")
    return int(min(_CACHE, free >> 30))


def free_port() -> int:
    """Find a free port of the loopback address."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _visit(side: str, folder: Path, dtype: str, load: ServerLoad, *, eager: bool) -> dict[str, Any]:
    port = free_port()
    words = ["--model", str(folder.absolute()), "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype]
    words += ["--max-model-len", str(min(RUNTIME.context(folder), load.prompt + load.output + _MORE))]
    words += ["--no-enable-prefix-caching", "--disable-uvicorn-access-log", *(["--enforce-eager"] if eager else [])]
    program = [apart.demand(OWN.name).python, "-I", "-m", "vllm.entrypoints.openai.api_server"]
    return {"side": side, "command": [*program, *words], "url": f"http://127.0.0.1:{port}", "where": str(folder)}


def _answers(
    load: ServerLoad, visits: Sequence[Mapping[str, Any]], tokenizer: Path, report: Report, more: Mapping[str, str]
) -> list[Any]:
    job = {"do": "load", "visits": list(visits), "rates": load.runs(), "prompt": load.prompt, "output": load.output}
    job |= {"tokenizer": str(tokenizer.absolute()), "ready": _READY, "idle": _IDLE}
    variables = {**environment(), **more, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    variables |= dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1") if visits[0]["command"] else {}
    return apart.demand(OWN.name).run(OWN, job, report, where="--load", environment=variables)


def _versions() -> dict[str, str]:
    return dict(apart.demand(OWN.name).versions)
