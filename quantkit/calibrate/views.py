"""More of the same images, to compare two models on: parts of each, mirrored or not, at the size of the whole.

Two models can be held against each other on any image of the kind that they are for: nothing need be known of it. Views
of one image are alike, so intervals are taken by image.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
# of an image's sides, what a view shows at least
_LEAST = 0.6


def views(images: Array, count: int, seed: int) -> tuple[Array, Array]:
    """`count` views of each image, the whole as it is among them.

    Args:
        images: [n, C, H, W].
        count: 1 leaves them as they are.
        seed: of where parts lie.

    Returns:
        [n · count, C, H, W], and of each view the number of its image.
    """
    import torch

    generator = np.random.default_rng(seed)
    height, width = images.shape[2:]
    found = [images]
    for number in range(1, count):
        side = generator.uniform(_LEAST, 1.0)
        tall, wide = (max(1, math.ceil(side * size)) for size in (height, width))
        top, left = (int(generator.integers(0, rest + 1)) for rest in (height - tall, width - wide))
        part = images[:, :, top : top + tall, left : left + wide]
        part = part[..., ::-1] if number % 2 else part
        tensor = torch.from_numpy(np.ascontiguousarray(part, np.float32))
        whole = torch.nn.functional.interpolate(tensor, (height, width), mode="bilinear", align_corners=False)
        found.append(whole.numpy().astype(images.dtype))
    return np.concatenate(found), np.tile(np.arange(len(images)), count)
