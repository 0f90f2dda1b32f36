"""Images and text through a model's own processor: ids with placeholders, pixels, and what else its forward takes.

images    [height, width, 3] uint8 each
text      <bos> User: <image> Describe the image. Assistant:
-> ids    <bos> User: <image> <image> ... <image> Describe the image. Assistant: [1, tokens]
   beside attention_mask, pixel_values, image_grid_thw, mm_token_type_ids, ...
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quantkit import limits
from quantkit.calibrate.tokens.pack import stopped_clock
from quantkit.errors import InputError, MissingDependency
from quantkit.lazy import torch
from quantkit.model.source import pretrained
from quantkit.model.structure.kinds import TORCHVISION, demand_torchvision

if TYPE_CHECKING:
    from transformers import ProcessorMixin

# packages that some processors need; the extra `vision` installs them
_PACKAGES = ("torchvision", "num2words")


@dataclass(frozen=True)
class ImageProcessor:
    """A model's own processor.

    Args:
        processor: processor of transformers.
        code: code of the errors.
        without: command or setting that does without images, the last part of each remedy.
    """

    processor: ProcessorMixin
    code: str
    without: str

    @classmethod
    def load(cls, folder: Path, code: str, without: str, *, where: str, trust: bool | None = None) -> ImageProcessor:
        """Load the processor of a folder.

        Args:
            where: name of the model, for errors.
            trust: as for `pretrained.config`.

        Raises:
            InputError: `code`, without a processor's file or for a damaged one.
            MissingDependency: a package that the processor needs.
        """
        if not any((folder / name).is_file() for name in pretrained.PROCESSORS):
            rule = f"images go through the model's processor: {' or '.join(pretrained.PROCESSORS)}"
            remedy = f"copy the original's file into the folder, or {without}"
            raise InputError(code, where, "no processor in the folder", rule, remedy)
        try:
            return cls(pretrained.processor(folder, trust=trust), code, without)
        except InputError:
            raise
        except Exception as problem:  # it may need another library, or be damaged
            _demand_packages(str(problem), code)
            rule, remedy = "transformers loads the model's processor", f"see what it lacks, or {without}"
            raise InputError(code, where, _reason(problem), rule, remedy) from None

    @property
    def image_token(self) -> str:
        """Placeholder of an image in a text."""
        return str(self.processor.image_token)  # type: ignore[attr-defined]

    def turn(self, asked: str, where: str, images: int = 1, *, today: bool = False) -> str | None:
        """Return a user's turn with images and some words, by the chat template.

        Args:
            today: whether a template that writes the date writes today's, instead of one day for all time.

        Returns:
            None without a template, or for one of text alone: a processor takes over its tokenizer's.
        """
        if not isinstance(template := getattr(self.processor, "chat_template", None), str):
            return None
        content = [*[{"type": "image"}] * images, {"type": "text", "text": asked}]
        options = {"chat_template": template if today else stopped_clock() + template, "add_generation_prompt": True}
        try:
            with limits.guarded(where):
                text = str(self.processor.apply_chat_template([{"role": "user", "content": content}], **options))
        except InputError:
            raise
        except Exception:  # a template may raise anything
            return None
        return text if self.image_token in text else None

    def __call__(
        self, text: str, images: Sequence[NDArray[np.uint8]], where: str, *, special: bool = False
    ) -> dict[str, torch.Tensor]:
        """Return the arguments of the model's forward for one text with images, `input_ids` [1, tokens] among them.

        Args:
            where: name of the images, for errors.
            special: whether the tokenizer adds the tokens that begin and end a text.

        Raises InputError: `code`.
        """
        from PIL import Image

        try:
            answer = self.processor(
                images=[Image.fromarray(image).convert("RGB") for image in images],
                text=[text],
                return_tensors="pt",
                add_special_tokens=special,
            )
        except InputError:
            raise
        except Exception as problem:  # a processor may raise anything
            rule, remedy = "the model's processor must take every image", f"leave that image out, or {self.without}"
            raise InputError(self.code, where, _reason(problem), rule, remedy) from None
        return {key: value for key, value in answer.items() if isinstance(value, torch.Tensor)}


def _demand_packages(problem: str, code: str) -> None:
    """Refuse a missing package by the library's message, and a torchvision for another torch."""
    for package in _PACKAGES:
        if package in problem.lower() and importlib.util.find_spec(package) is None:
            purpose = "the model's processor of images"
            if package == "torchvision" and torch.version.cuda is None:
                value = f"{package} is not installed"
                raise InputError("missing-dependency", package, value, f"{purpose} needs it", TORCHVISION)
            raise MissingDependency(package, extra="vision", purpose=purpose)
    demand_torchvision(code)


def _reason(problem: Exception) -> str:
    return " ".join(str(problem).split())[:200] or type(problem).__name__
