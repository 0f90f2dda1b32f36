"""PyTorch with transformers: loads a bundle's checkpoint as any other user of transformers would.

compressed-tensors keeps the weights packed until the first forward, then expands all of them to floats. So this runtime
proves that a checkpoint is right and measures its accuracy, but saves neither memory nor time. If the library of a
layout is not installed, our own reader expands the weights.

On a GPU `kernels=True` puts quantkit's kernels in the place of the quantized linears (`runtimes/torch/packed.py`).
`runtimes/torch/decode_graph.py` runs a decode step as one CUDA graph; `quantkit measure` times it so.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import limits
from quantkit.bundle import Bundle
from quantkit.errors import InputError, reading
from quantkit.model import layouts, run_time
from quantkit.model.source import pretrained
from quantkit.runtimes import Runtime
from quantkit.runtimes.generate import IMAGES, demand_decoder, demand_images, demand_tokens

if TYPE_CHECKING:
    import torch

    from quantkit.kernels.dispatch import Table
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.runtimes.torch.decode_graph import TorchDecoder


class TorchRuntime(Runtime):
    """Runtime `torch`."""

    name = "torch"
    packages = ("compressed-tensors", "greenlet", "safetensors", "transformers")
    installed = ("torch",)
    images = True

    def load(
        self,
        bundle: Bundle,
        *,
        kernels: bool = False,
        device: str = "cuda",
        table: Table | None = None,
        **settings: Any,
    ) -> Any:
        """Load the whole model by `from_pretrained`, in the dtype of its config, in eval mode.

        Args:
            bundle: bundle whose checkpoint is compared with the manifest; only safetensors are read, and no code runs.
            kernels: whether to keep the weights packed and multiply with quantkit's kernels; a linear without a kernel
                is expanded, with a warning that gives the reason.
            device: device of the kernels; without them `settings` decides.
            table: kernel for every batch, as measured on that device; None: the table that `quantkit tax --device cuda`
                wrote into the bundle, with a warning if it was measured on another device.
            settings: arguments of `from_pretrained`; with kernels, only `dtype`.

        Raises:
            MissingDependency: transformers; triton.
            InputError: `bundle-without-checkpoint`, `hash-mismatch`; `device-absent`, `kernel-dtype`.
        """
        folder = self.checked(bundle)
        if kernels:
            return self._on_kernels(bundle, folder, device, table, **settings)
        return self._whole(folder, **settings)

    def decoder(self, folder: Path) -> TorchDecoder:
        """Load a decoder from a checkpoint's folder, such as a device's copy. Raises as `load`."""
        from quantkit.runtimes.torch.decode_graph import TorchDecoder

        return TorchDecoder(self._whole(folder))

    def writer(self, folder: Path) -> TorchDecoder:
        """Open a checkpoint to write text, in float32 as it is scored."""
        from quantkit.runtimes.torch.decode_graph import TorchDecoder

        return TorchDecoder(self.network(folder))

    def network(self, folder: Path) -> Any:
        """Load a checkpoint's model in float32, in eval mode."""
        import torch

        from quantkit.model.source.open import in_float32

        return in_float32(self._whole(folder, dtype=torch.float32), pretrained.config(folder).dtype)

    def _whole(self, folder: Path, **settings: Any) -> Any:
        """Load the model and expand every weight, now or at the first forward."""
        from quantkit.runtimes.torch.reloaded import described, unread

        model_class, config = described(folder)
        quantization = getattr(config, "quantization_config", None) or {}
        packed = quantization and not run_time.weights_are_dense(quantization)
        if packed and (layouts.missing(layouts.of(quantization)) or unread(folder)):
            return self._expanded(model_class, config, folder)
        model = pretrained.network(model_class, folder, **{"dtype": "auto", **settings}).eval()
        if config.is_encoder_decoder and hasattr(model, "ct_decompress_hook"):
            # it expands at the model's first forward, and `generate` asks the encoder alone before
            model.hf_quantizer.compressor.decompress_model(model)
        return model

    def _on_kernels(
        self, bundle: Bundle, folder: Path, device: str, table: Table | None, dtype: torch.dtype | None = None
    ) -> Any:
        """Load the model with `QuantLinear`s."""
        import torch

        from quantkit.kernels.matmul import interpreted
        from quantkit.runtimes.torch import packed

        at = torch.device(device).type
        if not (torch.cuda.is_available() if at == "cuda" else at == "cpu" and interpreted()):
            value, rule = "no GPU that torch sees" if at == "cuda" else f"a {at}", "the kernels are for NVIDIA GPUs"
            remedy = "without kernels=True the weights are expanded, and run anywhere"
            raise InputError("device-absent", f"device {device}", value, rule, remedy)
        reason = ""
        if table is None:
            name = torch.cuda.get_device_name(device) if at == "cuda" else "interpreter"
            table, reason = packed.recorded(bundle.path, name)
        loaded = packed.load(folder, bundle.manifest.layers, device=device, dtype=dtype, table=table)
        for message in (reason, loaded.said()):
            if message:
                warnings.warn(message, stacklevel=3)
        return loaded.model

    def _expanded(self, model_class: Any, config: Any, folder: Path) -> Any:
        """Load the model with weights that our reader expanded."""
        import torch

        from quantkit.model.source.open import open_written
        from quantkit.model.structure.experts import loadable
        from quantkit.runtimes.torch.reloaded import built, expanded

        source = expanded(open_written(folder))
        dtype = getattr(torch, str(config.dtype or "float32").removeprefix("torch."))
        state = loadable(source.skeleton(), list(source.weights.entries), source.weights.read)
        return built(model_class, config, state, dtype)

    def folder(self, bundle: Bundle) -> Path:
        """Return the folder of the checkpoint."""
        if not (bundle.model_folder / "config.json").is_file():
            value, rule = "no model/config.json", "this runtime loads the checkpoint"
            remedy = "compile with `export: [checkpoint: {}]`"
            raise InputError("bundle-without-checkpoint", str(bundle.path), value, rule, remedy)
        return bundle.model_folder

    def open(self, path: Path, threads: int | None = None, *, built: Mapping[str, str] | None = None) -> StreamedModel:
        """Open a bundle, finished or being built, to measure its accuracy.

        `threads` and `built` are ignored: torch has its own number of threads, and nothing is executed.
        """
        return self.stream(path / "model")

    def stream(self, folder: Path, *, cache: bool = True) -> StreamedModel:
        """Stream a checkpoint block by block, expanded by its library's code; `cache=False` gives it a float cache."""
        from quantkit.runtimes.torch.reloaded import reloaded

        return reloaded(folder, cache=cache)

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
        """Continue a prompt; transformers renders the chat template in a Jinja sandbox.

        Args:
            images: image files before the prompt, for a vision-language model. Its processor prepares them, in a
                user's turn where its chat template takes images.

        Raises InputError: as `Runtime.generate`.
        """
        import time

        import torch

        demand_decoder(bundle)
        seen, notes = _seen(bundle, self.checked(bundle), prompt, images, chat) if images else ({}, [])
        tokenizer = pretrained.tokenizer(self.checked(bundle))
        model = self.load(bundle)
        if images:
            takes = inspect.signature(model.forward).parameters
            used = {key: value for key, value in seen.items() if key in takes}
            inputs = {key: value.to(model.dtype) if value.is_floating_point() else value for key, value in used.items()}
        elif chat:
            messages = [{"role": "user", "content": prompt}]
            with reading(_no_template), limits.guarded("--chat"):
                inputs = tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
                )
        else:
            inputs = tokenizer(prompt, return_tensors="pt")
        if not images:
            inputs = {key: inputs[key] for key in ("input_ids", "attention_mask")}
        demand_tokens(inputs["input_ids"].shape[1])
        torch.manual_seed(seed)
        started = time.perf_counter()
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=sample)
        # a decoder beside an encoder begins its own text, with one token
        new = output[0, 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1] :]
        return {
            "text": tokenizer.decode(new, skip_special_tokens=True),
            "tokens": int(new.numel()),
            "seconds": time.perf_counter() - started,
            **({"notes": notes} if notes else {}),
        }


def _seen(
    bundle: Bundle, folder: Path, prompt: str, images: Sequence[Path], chat: bool
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the arguments of a forward for a prompt with images, and a note where no template frames them."""
    from quantkit.calibrate.tokens.processed import ImageProcessor

    pictures, named = demand_images(bundle, RUNTIME, images), ", ".join(path.name for path in images)
    processor = ImageProcessor.load(folder, IMAGES, "leave --image out", where=str(folder))
    turn = processor.turn(prompt, "--image", len(images), today=True)
    if turn is None and chat:
        raise _no_template("it takes no image")
    notes = [] if turn else ["the model has no chat template that takes an image: images stand before the prompt"]
    text = turn or f"{processor.image_token * len(images)}{prompt}"
    return processor(text, pictures, named, special=turn is None), notes


def _no_template(problem: str) -> InputError:
    return InputError("no-chat-template", where="--chat", value=problem, remedy="leave out --chat")


RUNTIME = TorchRuntime()
