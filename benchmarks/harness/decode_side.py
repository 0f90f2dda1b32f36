"""One side of `decode_peers.py`: a process that keeps a model loaded and decodes at batch 1 or scores, as it is told.

    PYTHON decode_side.py KIND PATH THREADS
    KIND: quantkit (a bundle, by its own runtime), onnxruntime (a bundle or a folder with `model.onnx`, by I/O binding),
          genai (such a folder with a `genai_config.json`, by its generator), llama.cpp (a GGUF), transformers (a
          folder; the reference of scores, in float32)
    one JSON object a line, in -> out:
    {"do": "load", "prompt": [ids], "room": tokens that may follow} -> {"versions", "settings"}
    {"do": "run", "steps": n, "warm": k} -> {"seconds": [n], "tokens": [n]}
    {"do": "profile", "steps": n} -> {"operators": {type: seconds a step}, "counts", "step"}; of the ONNX
    {"do": "logits", "ids": [S], "to": file} -> {}; of transformers: logits [S, V] as .npy
    {"do": "score", "ids": [S], "reference": file, "piece": p} -> {"kl", "top1", "nll", "nll_reference"}: means over the
        S - 1 positions that a token follows, in nats, p tokens at a time (0: all at once)
    and in every answer "cpu": the processor seconds that it took

Every run starts behind the same prompt: the cache is cut back to it. A step is a token id in, the likeliest next id
out: the model, the logits, the choice. Run by the interpreter of each side's own environment, so only the standard
library, numpy and that side's runtime are imported.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np

Json = dict[str, Any]
Array = np.ndarray[Any, Any]


def versions(*packages: str) -> Json:
    return {"python": sys.version.split()[0], **{name: importlib.metadata.version(name) for name in packages}}


class Quantkit:
    """A bundle through a runtime of quantkit's, as a user of quantkit runs it."""

    runtime = "onnxruntime"

    def __init__(self, path: Path, threads: int) -> None:
        from quantkit.runtimes import load_runtime

        self.model: Any = load_runtime(self.runtime).open(path, threads)
        self.versions = versions("quantkit", "onnxruntime", "numpy")
        self.settings = {"threads": threads, "kv_cache": "float32, in place"}

    def prefill(self, prompt: list[int], room: int) -> None:
        """Make room for the prompt and `room` tokens more, and run the prompt."""
        self.prompt = prompt
        self.state = self.model.state(1, len(prompt) + room)
        self._run(prompt)

    def _run(self, ids: list[int]) -> int:
        return int(self.model.run(self.state, np.asarray([ids]), keep=1)[0, -1].argmax())

    def logits(self, ids: list[int], piece: int) -> Array:
        """Of every position, [S, V]; `piece` tokens at a time, 0: all at once."""
        state = self.model.state(1, len(ids))
        step = piece or len(ids)
        parts = [self.model.run(state, np.asarray([ids[at : at + step]]))[0] for at in range(0, len(ids), step)]
        return np.concatenate(parts)

    def start(self) -> int:
        """Cut the cache back to the prompt; the first token behind it."""
        self.state.length = len(self.prompt) - 1
        return self._run(self.prompt[-1:])

    def step(self, token: int) -> int:
        """The token behind `token`."""
        return self._run([token])


class QuantkitCpu(Quantkit):
    """With quantkit's own products and attention."""

    runtime = "quantkit_cpu"


class OnnxRuntime:
    """A decoder graph by I/O binding, the cache in place: past and present of a layer are one buffer.

    Inputs: input_ids [1, S] and attention_mask [1, T] int64, past_key_values.N.{key,value} [1, H, P, D]; logits_to_keep
    [1] int64 where the graph has it. Outputs: logits [1, S, V], present.N.{key,value}.
    """

    def __init__(self, path: Path, threads: int, profile: Path | None = None) -> None:
        import onnxruntime

        folder = path / "onnx" if (path / "onnx").is_dir() else path
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.force_spinning_stop", "1")  # spin within a step, not between turns
        if profile:
            options.enable_profiling = True
            options.profile_file_prefix = str(profile)
        self.session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
        self.versions = versions("onnxruntime", "numpy")
        self.settings = {"threads": threads, "session.force_spinning_stop": "1", "kv_cache": "float32, in place"}

    def prefill(self, prompt: list[int], room: int) -> None:
        """Make room for the prompt and `room` tokens more, and run the prompt."""
        self.binding = self.session.io_binding()
        self.prompt, self.filled = prompt, 0
        length = len(prompt) + room
        inputs = {one.name: one for one in self.session.get_inputs()}
        self.kept = np.ones(1, dtype=np.int64)  # 0 is all
        self.prunes = "logits_to_keep" in inputs
        if self.prunes:
            self._bind(self.binding.bind_input, "logits_to_keep", self.kept)
        self.vocabulary = self.session.get_outputs()[0].shape[-1]
        self.mask = np.ones((1, length), dtype=np.int64)
        self.cache = {}
        for name, one in inputs.items():
            if not name.startswith("past_key_values."):
                continue
            _, heads, _, width = one.shape
            # "kv_cache_dim" and the like: the graph leaves the head size open
            width = width if isinstance(width, int) else self._head_size()
            self.cache[name] = np.zeros((1, heads, length, width), dtype=np.float32)
            self._bind(self.binding.bind_input, name, self.cache[name])
            self._bind(self.binding.bind_output, name.replace("past_key_values", "present"), self.cache[name])
        self._run(prompt)

    def _head_size(self) -> int:
        places = [Path(self.session._model_path).parent / name for name in ("genai_config.json", "config.json")]
        content = json.loads(next(place for place in places if place.exists()).read_text())
        return int(content["model"]["decoder"]["head_size"] if "model" in content else content["head_dim"])

    @staticmethod
    def _bind(bind: Any, name: str, array: Any, shape: tuple[int, ...] | None = None) -> None:
        bind(name, "cpu", 0, array.dtype.type, shape or array.shape, array.ctypes.data)

    def _run(self, ids: list[int]) -> int:
        return int(self._logits(ids)[-1].argmax())

    def logits(self, ids: list[int], piece: int) -> Array:
        """Of every position, [S, V]; `piece` tokens at a time, 0: all at once."""
        self.prefill(ids[:1], len(ids))
        self.filled, self.kept[0] = 0, 0
        step = piece or len(ids)
        return np.concatenate([self._logits(ids[at : at + step]) for at in range(0, len(ids), step)])

    def _logits(self, ids: list[int]) -> Array:
        count, total = len(ids), self.filled + len(ids)
        given = np.asarray([ids], dtype=np.int64)
        logits = np.empty((1, 1 if self.prunes and self.kept[0] else count, self.vocabulary), dtype=np.float32)
        self._bind(self.binding.bind_input, "input_ids", given)
        self._bind(self.binding.bind_input, "attention_mask", self.mask, (1, total))
        self._bind(self.binding.bind_output, "logits", logits)
        self.session.run_with_iobinding(self.binding)
        self.filled = total
        return logits[0]

    def start(self) -> int:
        """Cut the cache back to the prompt; the first token behind it."""
        self.filled = len(self.prompt) - 1
        return self._run(self.prompt[-1:])

    def step(self, token: int) -> int:
        """The token behind `token`."""
        return self._run([token])


class LlamaCpp:
    """llama.cpp through its C interface; numpy takes the likeliest id, which is quicker than llama.cpp's sampler."""

    def __init__(self, path: Path, threads: int) -> None:
        import llama_cpp

        self.lib, self.threads = llama_cpp, threads
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), model)
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.versions = versions("llama-cpp-python", "numpy")
        self.settings = {
            "threads": threads,
            "kv_cache": "float16 (its default)",
            "system": llama_cpp.llama_print_system_info().decode(),
        }

    def prefill(self, prompt: list[int], room: int) -> None:
        """Make room for the prompt and `room` tokens more, and run the prompt."""
        context = self.lib.llama_context_default_params()
        context.n_ctx = len(prompt) + room
        context.n_threads = context.n_threads_batch = self.threads
        self.context = self.lib.llama_init_from_model(self.model, context)
        self.memory = self.lib.llama_get_memory(self.context)
        self.prompt = prompt
        self._run(prompt)

    def logits(self, ids: list[int], piece: int) -> Array:
        """Of every position, [S, V]; all at once, whatever `piece` says."""
        self.prefill(ids[:1], len(ids))
        self.lib.llama_memory_clear(self.memory, True)
        batch = self.lib.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for at, token in enumerate(ids):
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, at, 1
            batch.seq_id[at][0], batch.logits[at] = 0, True
        if status := self.lib.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode: {status}")
        self.lib.llama_batch_free(batch)
        found = self.lib.llama_get_logits(self.context)
        logits = np.array(np.ctypeslib.as_array(found, (len(ids), self.vocabulary)))
        self.lib.llama_free(self.context)
        return logits

    def _run(self, ids: list[int]) -> int:
        array = (self.lib.llama_token * len(ids))(*ids)
        if status := self.lib.llama_decode(self.context, self.lib.llama_batch_get_one(array, len(ids))):
            raise RuntimeError(f"llama_decode: {status}")
        logits = self.lib.llama_get_logits_ith(self.context, -1)
        return int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())

    def start(self) -> int:
        """Cut the cache back to the prompt; the first token behind it."""
        if not self.lib.llama_memory_seq_rm(self.memory, 0, len(self.prompt) - 1, -1):
            raise RuntimeError("llama_memory_seq_rm: the cache cannot be cut back")
        return self._run(self.prompt[-1:])

    def step(self, token: int) -> int:
        """The token behind `token`."""
        return self._run([token])


class GenAi:
    """onnxruntime-genai's own generator; it feeds its own choice, and the id of the end of a text is out of its way."""

    def __init__(self, path: Path, threads: int) -> None:
        import onnxruntime_genai

        self.lib = onnxruntime_genai
        path = path / "onnx" if (path / "onnx").is_dir() else path
        config = onnxruntime_genai.Config(str(path))
        options = {"intra_op_num_threads": threads, "session.force_spinning_stop": "1"}
        about = json.loads((path / "genai_config.json").read_text())["model"]
        self.window = int(about["decoder"].get("sliding_window", {}).get("window_size", 0))
        decoder = {"decoder": {"session_options": options}, "eos_token_id": about["vocab_size"] - 1}
        config.overlay(json.dumps({"model": decoder}))
        self.model = onnxruntime_genai.Model(config)
        self.versions = versions("onnxruntime-genai", "onnxruntime", "numpy")
        self.settings = {"threads": threads, **options, "kv_cache": "float32, in place"}

    def prefill(self, prompt: list[int], room: int) -> None:
        """Make room for the prompt and `room` tokens more, and run the prompt."""
        asked = self.lib.GeneratorParams(self.model)
        # a cache shorter than a sliding window is refused
        longest = max(len(prompt) + room, self.window)
        asked.set_search_options(do_sample=False, max_length=longest, batch_size=1)
        self.generator = self.lib.Generator(self.model, asked)
        self.prompt = prompt
        self.generator.append_tokens(np.asarray(prompt, dtype=np.int32))

    def logits(self, ids: list[int], piece: int) -> Array:
        """Of every position, [S, V]; all at once, whatever `piece` says."""
        self.prefill(ids, 1)
        return np.array(self.generator.get_output("logits"), dtype=np.float32)[0]

    def start(self) -> int:
        """Cut the cache back to the prompt; the first token behind it."""
        self.generator.rewind_to(len(self.prompt) - 1)
        self.generator.append_tokens(np.asarray(self.prompt[-1:], dtype=np.int32))
        return self.step(0)  # chooses; the next step runs the model on it

    def step(self, token: int) -> int:
        """The token behind `token`."""
        self.generator.generate_next_token()
        return int(self.generator.get_next_tokens()[0])


class Transformers:
    """The reference: the model's own class, in float32, whole sequences at once."""

    def __init__(self, path: Path, threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self.torch = torch
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, local_files_only=True
        ).eval()

    def logits(self, ids: list[int], piece: int) -> Array:
        """Of every position, [S, V]; all at once, whatever `piece` says."""
        with self.torch.no_grad():
            found: Array = self.model(self.torch.tensor([ids]), use_cache=False).logits[0].numpy()
        return found


KINDS: dict[str, Any] = {"quantkit": Quantkit, "quantkit_cpu": QuantkitCpu, "onnxruntime": OnnxRuntime} | {
    "genai": GenAi,
    "llama.cpp": LlamaCpp,
    "transformers": Transformers,
}


def run(side: Any, steps: int, warm: int) -> Json:
    token = side.start()
    for _ in range(warm):
        token = side.step(token)
    seconds, tokens = [], []
    for _ in range(steps):
        began = time.perf_counter()
        token = side.step(token)
        seconds.append(time.perf_counter() - began)
        tokens.append(token)
    return {"seconds": seconds, "tokens": tokens}


def score(reference: Array, logits: Array, ids: list[int]) -> Json:
    """How far logits [S, V] are from a reference's, at the positions that a token follows: means, in nats.

    With o, c the logits of both at a position, and p, q what a softmax makes of them:
    KL(p || q) = Σ p (o − c) − log Σ exp o + log Σ exp c.
    """
    kl, agree, own, others = [], [], [], []
    for at, following in enumerate(ids[1:]):
        o, c = reference[at], logits[at]
        weights = np.exp(o - o.max())
        total = weights.sum(dtype=np.float64)
        sum_o = float(np.log(total)) + float(o.max())
        sum_c = float(np.log(np.exp(c - c.max()).sum(dtype=np.float64))) + float(c.max())
        kl.append(float(np.dot(weights.astype(np.float64), (o - c).astype(np.float64)) / total) - sum_o + sum_c)
        agree.append(bool(o.argmax() == c.argmax()))
        own.append(sum_c - float(c[following]))
        others.append(sum_o - float(o[following]))
    found = {"kl": kl, "top1": agree, "nll": own, "nll_reference": others}
    return {name: statistics.fmean(values) for name, values in found.items()}


def profile(path: Path, threads: int, prompt: list[int], steps: int) -> Json:
    """Seconds a step in each type of operator, by onnxruntime's profiler.

    The sum over nodes of the median over steps. The profiler's own work stands between the operators, so `step`, timed
    meanwhile, is longer than a step is without it; what the operators take is to be set against the latter.
    """
    with tempfile.TemporaryDirectory() as place:
        side = OnnxRuntime(path, threads, Path(place) / "profile")
        side.prefill(prompt, steps + 16)
        seconds = run(side, steps, 8)["seconds"]
        events = json.loads(Path(side.session.end_profiling()).read_text())
    durations: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            durations[event["args"]["op_name"], event["name"]].append(event["dur"] * 1e-6)
    spent: dict[str, float] = defaultdict(float)
    for (kind, _), of_node in durations.items():
        spent[kind] += statistics.median(of_node[-steps:])
    return {
        "operators": dict(sorted(spent.items(), key=lambda item: -item[1])),
        "counts": dict(Counter(kind for kind, _ in durations)),
        "step": statistics.median(seconds),
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    kind, path, threads = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    side, prompt = KINDS[kind](path, threads), []
    for line in sys.stdin:
        asked, began = json.loads(line), time.process_time()
        if asked["do"] == "load":
            prompt = asked["prompt"]
            side.prefill(prompt, asked["room"])
            answer = {"versions": side.versions, "settings": side.settings}
        elif asked["do"] == "run":
            answer = run(side, asked["steps"], asked["warm"])
        elif asked["do"] == "logits":
            np.save(asked["to"], side.logits(asked["ids"], 0))
            answer = {}
        elif asked["do"] == "score":
            reference = np.load(asked["reference"], mmap_mode="r")
            answer = score(reference, side.logits(asked["ids"], asked["piece"]), asked["ids"])
        else:
            answer = profile(path, threads, prompt, asked["steps"])
        answers.write(json.dumps({**answer, "cpu": time.process_time() - began}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
