"""The shipped network fashion-mnist-cnn: right on at least 0.90 of the 5,000 test images, in at most 2 MB.

    python benchmarks/train_fashion_mnist.py                             score the shipped weights
    python benchmarks/train_fashion_mnist.py --data fashion_mnist.npz    train them anew first, and put them in place

The data is a sample of Fashion-MNIST as one file: `train_images` [20000, 28, 28] uint8, `train_labels`, `test_images`
[5000, 28, 28], `test_labels`, in the data set's order. The 1,000 training images of `calibration/fashion-mnist`'s tune
split are left out of training, so that tune is new to the network; test images are scored once, at the end. An image is
shifted by up to two pixels and mirrored half of the time; targets are smoothed by 0.1; stochastic gradient descent with
momentum, the rate up to its peak and down again (Smith and Topin 2018). Seeded, on one thread.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch
from harness.record import layout, parsing, record, show, verdicts
from torch import Tensor, nn

from quantkit.calibrate.sets.images import load_images
from quantkit.model import cnn

FOLDER = Path(cnn.__file__).parent / "networks" / "fashion-mnist-cnn"
SET = "fashion-mnist"
RIGHT, BYTES = 0.90, 2_000_000
RATE, DECAY, SMOOTHING, SHIFT = 0.2, 5e-4, 0.1, 2


def images(split: str) -> tuple[Tensor, Tensor]:
    found = load_images(
        SET, split, samples=None, seed=0, shape=(None, 1, 28, 28), dtype="float32", where="fashion-mnist-cnn"
    )
    assert found.labels is not None
    return torch.from_numpy(found.images), torch.from_numpy(found.labels)


def training_images(data: Path) -> tuple[Tensor, Tensor]:
    """Normalised as the set's card says, without those of its tune split."""
    from quantkit import content
    from quantkit.calibrate.sets.card import Card

    how = Card.load(content.find("calibration", SET)).preprocess
    assert how is not None
    tune, _ = images("tune")
    with np.load(data, allow_pickle=False) as arrays:
        pixels = torch.from_numpy(arrays["train_images"].astype(np.float32) / 255)[:, None]
        labels = torch.from_numpy(arrays["train_labels"].astype(np.int64))
    normal = (pixels - how.mean[0]) / how.std[0]
    held = {image.numpy().round(3).tobytes() for image in tune}
    kept = torch.tensor([image.numpy().round(3).tobytes() not in held for image in normal])
    return normal[kept], labels[kept]


def varied(batch: Tensor, generator: torch.Generator) -> Tensor:
    """[n, 1, s, s], each shifted and mirrored in its own way; what comes in at the edge is background."""
    count, _, size, _ = batch.shape
    wide = nn.functional.pad(batch[:, 0], (SHIFT,) * 4, value=float(batch.min()))
    down, right = torch.randint(0, 2 * SHIFT + 1, (2, count, 1), generator=generator)
    across = torch.arange(size).expand(count, size)
    mirrored = torch.rand(count, 1, generator=generator) < 0.5
    columns = right + torch.where(mirrored, size - 1 - across, across)
    return wide[torch.arange(count)[:, None, None], (down + across)[:, :, None], columns[:, None, :]][:, None]


def train(data: Path, *, epochs: int, batch: int, seed: int) -> cnn.Cnn:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    inputs, labels = training_images(data)
    tune = images("tune")
    network = cnn.Cnn(cnn.CnnConfig.load(FOLDER / cnn.CONFIG)).to(memory_format=torch.channels_last)
    decayed = [value for value in network.parameters() if value.ndim > 1]
    others = [value for value in network.parameters() if value.ndim == 1]
    optimizer = torch.optim.SGD(
        [{"params": decayed, "weight_decay": DECAY}, {"params": others}], lr=RATE, momentum=0.9, nesterov=True
    )
    steps = len(inputs) // batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=epochs * steps, pct_start=0.25)
    for epoch in range(epochs):
        network.train()
        order = torch.randperm(len(inputs), generator=generator)
        total = 0.0
        for step in range(steps):
            chosen = order[step * batch : (step + 1) * batch]
            seen = varied(inputs[chosen], generator).to(memory_format=torch.channels_last)
            loss = nn.functional.cross_entropy(network(seen), labels[chosen], label_smoothing=SMOOTHING)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach())
        print(f"epoch {epoch + 1} of {epochs}: loss {total / steps:.4f}, tune {right(network, *tune):.4f}", flush=True)
    return network.to(memory_format=torch.contiguous_format).eval()


def right(network: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """The share of images whose class is the network's first choice."""
    network.eval()
    with torch.no_grad():
        found = torch.cat([network(part).argmax(1) for part in inputs.split(500)])
    return float((found == labels).double().mean())


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--data", type=Path, help="train on this file first")
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=FOLDER, help="where trained weights go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    row: dict[str, float | str] = {"network": FOLDER.name}
    folder = FOLDER
    if options.data is not None:
        began = time.process_time()
        trained = train(options.data, epochs=options.epochs, batch=options.batch, seed=options.seed)
        row["training_cpu_s"] = round(time.process_time() - began, 1)
        folder = options.out
        (folder / cnn.CONFIG).write_bytes((FOLDER / cnn.CONFIG).read_bytes())
        cnn.save(trained, folder)
    network = cnn.load(folder)
    row |= {f"{split}_top1": right(network, *images(split)) for split in ("tune", "eval")}
    row["bytes"] = (folder / "model.safetensors").stat().st_size
    row["parameters"] = sum(value.numel() for value in network.parameters())
    show(
        "fashion-mnist-cnn",
        [row],
        layout(
            "training_cpu_s=trained in CPU s:.1f | parameters:, | bytes:, | tune_top1=top-1, tune:.4f | "
            "eval_top1=top-1, 5,000 test images:.4f"
        ),
    )
    settings = {"epochs": options.epochs, "batch": options.batch, "seed": options.seed, "rate": RATE} | {
        "decay": DECAY,
        "smoothing": SMOOTHING,
        "shift": SHIFT,
        "trained": options.data is not None,
    }
    claim = f"top-1 of at least {RIGHT} on the test images, in at most {BYTES:,} bytes"
    record("train_fashion_mnist", claim, [row], settings)
    return verdicts(
        {
            f"at least {RIGHT} of the test images are right": float(row["eval_top1"]) >= RIGHT,
            f"at most {BYTES:,} bytes": int(row["bytes"]) <= BYTES,
        }
    )


if __name__ == "__main__":
    sys.exit(main())
