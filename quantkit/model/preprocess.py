"""What becomes of an image before a network sees it: stated by a set's card, and known of shipped models."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from quantkit.content import Closed


class Preprocess(Closed):
    """Resized by its shorter side, cut from the middle, then `(x / 255 - mean) / std`.

    Args:
        resize: pixels of the shorter side; None: of the size that it has.
        crop: pixels of each side of what is cut; None: all of it.
        mean, std: of values in 0..1, one a channel.
        layout: [C, H, W] or [H, W, C].
    """

    resize: int | None = Field(default=None, gt=0)
    crop: int | None = Field(default=None, gt=0)
    mean: list[Annotated[float, Field(allow_inf_nan=False)]] = Field(min_length=1)
    std: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(min_length=1)
    layout: Literal["NCHW", "NHWC"] = "NCHW"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.mean) != len(self.std):
            raise ValueError("`mean` and `std` have a value for each channel")
        if self.crop is not None and self.resize is not None and self.crop > self.resize:
            raise ValueError("what is cropped is not larger than what was resized")
        return self
