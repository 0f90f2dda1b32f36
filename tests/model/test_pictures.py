"""Vision-language models block by block: on text and on images, held against transformers' own forward."""

from pathlib import Path

import pytest
import torch
from thorough import beside
from zoo import shrink
from zoo.pictures import SEEING, with_image

from quantkit.model.source.open import open_model
from quantkit.model.streaming import own_forward
from quantkit.model.streaming.calls import Pictures
from quantkit.model.streaming.stream import StreamedModel

# the others differ in the class around them, of which `benchmarks/zoo.py` tries all
FIRST = {
    "LlavaForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",  # positions of three axes
    "Qwen3VLForConditionalGeneration",  # adds images between its blocks too
    "Gemma3ForConditionalGeneration",  # attends both ways within an image
}


@torch.no_grad()
def rows(name: str) -> tuple[torch.Tensor, Pictures, list[dict[str, torch.Tensor]]]:
    """Three sequences: an image, text alone, another image."""
    ids = shrink.ids(3, 28)
    seen = [with_image(name, ids[0], 1), (ids[1:2], {}), with_image(name, ids[2], 2)]
    whole = torch.cat([row for row, _ in seen])
    known = {Pictures.key(row[0]): more for row, more in seen if more}
    return whole, Pictures(known), [more for _, more in seen]


@pytest.mark.parametrize("name", beside(FIRST, SEEING))
@torch.no_grad()
def test_a_stream_of_images_gives_what_transformers_gives(name: str, tmp_path: Path) -> None:
    shrink.tiny(name, tmp_path / "m")
    source = open_model(str(tmp_path / "m"))
    assert source.kind == "decoder" and source.sees
    ids, pictures, beside_ids = rows(name)
    stream = StreamedModel(source)
    stream.pictures = pictures
    answers, plain = stream.answers(ids, chunk=2), shrink.loaded(tmp_path / "m")
    for index, more in enumerate(beside_ids):
        expected = plain(input_ids=ids[index : index + 1], use_cache=False, **more).logits[0]
        found = answers(index)
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4, (name, index)
        blind = plain(input_ids=ids[index : index + 1], use_cache=False).logits[0]
        assert bool(more) == (float((blind - expected).abs().max() / expected.abs().max()) > 1e-2), (name, index)
    check = own_forward.demand_equal_seeing(stream, ids[:1], len(stream.block_names))
    assert check.ok and check.name == own_forward.SEEING
