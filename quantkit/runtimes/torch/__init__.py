"""PyTorch with transformers and what it loads a layout with: loads a bundle's checkpoint as anyone else would.

compressed-tensors keeps the weights packed until the first forward, then expands all of them to floats; so by itself
this runtime proves that a checkpoint is right, and shows what it costs in accuracy, but saves no memory and no time.
What a layout's library is not installed for is expanded by our own reader.

On a GPU `kernels=True` puts quantkit's own kernels in the place of the quantized linears (`runtimes/torch/packed.py`).
`runtimes/torch/decode_graph.py` makes a step of decoding one CUDA graph, as `quantkit measure` times it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import limits
from quantkit.bundle import Bundle
from quantkit.errors import InputError, reading
from quantkit.model import layouts, run_time
from quantkit.model.source import pretrained
from quantkit.runtimes import Runtime
from quantkit.runtimes.generate import demand_decoder, demand_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from quantkit.kernels.dispatch import Table
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.runtimes.torch.decode_graph import TorchDecoder


class TorchRuntime(Runtime):
    """See the module."""

    name = "torch"
    packages = ("compressed-tensors", "greenlet", "safetensors", "transformers")
    installed = ("torch",)

    def load(
        self,
        bundle: Bundle,
        *,
        kernels: bool = False,
        device: str = "cuda",
        table: Table | None = None,
        **settings: Any,
    ) -> Any:
        """The whole model through `from_pretrained`, in the dtype of its config, eval mode.

        Args:
            bundle: its checkpoint is held against the manifest; only safetensors are read, and none of its code runs.
            kernels: keep the weights packed, and multiply with quantkit's own kernels; a linear that none of them takes
                is expanded, with a warning that says why.
            device: of the kernels; without them the model stands where `settings` put it.
            table: which kernel at which batch, as measured on that device; None: what `quantkit tax --device cuda` has
                put into the bundle, with a warning if that was on another one.
            settings: passed to `from_pretrained`; with kernels, `dtype` alone.

        Raises:
            MissingDependency: transformers; triton.
            InputError: `bundle-without-checkpoint`, `hash-mismatch`; `device-absent`, `kernel-dtype`.
        """
        folder = self.checked(bundle)
        if kernels:
            return self._on_kernels(bundle, folder, device, table, **settings)
        return self._whole(folder, **settings)

    def decoder(self, folder: Path) -> TorchDecoder:
        """What goes on with text of a checkpoint's folder, which another machine has of a bundle. Raises as `load`."""
        from quantkit.runtimes.torch.decode_graph import TorchDecoder

        return TorchDecoder(self._whole(folder))

    def _whole(self, folder: Path, **settings: Any) -> Any:
        """The model with every weight expanded, sooner or later."""
        from quantkit.runtimes.torch.reloaded import described

        model_class, config = described(folder)
        quantization = getattr(config, "quantization_config", None) or {}
        packed = quantization and not run_time.weights_are_dense(quantization)
        if packed and layouts.missing(layouts.of(quantization)):
            return self._expanded(model_class, config, folder)
        return pretrained.network(model_class, folder, **{"dtype": "auto", **settings}).eval()

    def _on_kernels(
        self, bundle: Bundle, folder: Path, device: str, table: Table | None, dtype: torch.dtype | None = None
    ) -> Any:
        """The model with `QuantLinear`s."""
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
        found = packed.load(folder, bundle.manifest.layers, device=device, dtype=dtype, table=table)
        for said in (reason, found.said()):
            if said:
                warnings.warn(said, stacklevel=3)
        return found.model

    def _expanded(self, model_class: Any, config: Any, folder: Path) -> Any:
        """The model with weights that our own reader has expanded."""
        import torch

        from quantkit.model.source.open import open_written
        from quantkit.runtimes.torch.reloaded import built, expanded

        weights = expanded(open_written(folder)).weights
        dtype = getattr(torch, str(config.dtype or "float32").removeprefix("torch."))
        return built(model_class, config, {name: weights.read(name) for name in weights.entries}, dtype)

    def folder(self, bundle: Bundle) -> Path:
        """The checkpoint's folder."""
        if not (bundle.model_folder / "config.json").is_file():
            value, rule = "no model/config.json", "this runtime loads the checkpoint"
            remedy = "compile with `export: [checkpoint: {}]`"
            raise InputError("bundle-without-checkpoint", str(bundle.path), value, rule, remedy)
        return bundle.model_folder

    def open(self, path: Path, threads: int | None = None, *, built: Mapping[str, str] | None = None) -> StreamedModel:
        """What scores a bundle, or the folder of one that is being built.

        torch has its own number of threads, and nothing that `built` would have to vouch for.
        """
        return self.stream(path / "model")

    def stream(self, folder: Path, *, cache: bool = True) -> StreamedModel:
        """A checkpoint block by block, expanded by its library's own code; `cache=False` gives it a float cache."""
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
    ) -> dict[str, Any]:
        """Continue a prompt; the chat template is rendered by transformers in a Jinja sandbox."""
        import time

        import torch

        demand_decoder(bundle)
        tokenizer = pretrained.tokenizer(self.checked(bundle))
        model = self.load(bundle)
        if chat:
            messages = [{"role": "user", "content": prompt}]
            with reading(_no_template), limits.guarded("--chat"):
                inputs = tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
                )
        else:
            inputs = tokenizer(prompt, return_tensors="pt")
        demand_tokens(inputs["input_ids"].shape[1])
        torch.manual_seed(seed)
        started = time.perf_counter()
        with torch.no_grad():
            output = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=new_tokens,
                do_sample=sample,
            )
        made = output[0, inputs["input_ids"].shape[1] :]
        return {
            "text": tokenizer.decode(made, skip_special_tokens=True),
            "tokens": int(made.numel()),
            "seconds": time.perf_counter() - started,
        }


def _no_template(said: str) -> InputError:
    return InputError("no-chat-template", where="--chat", value=said, remedy="leave --chat out")


RUNTIME = TorchRuntime()
