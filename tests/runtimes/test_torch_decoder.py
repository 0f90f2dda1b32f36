"""A checkpoint token by token in torch: what the whole sequence gives, and the text that `generate` makes."""

import numpy as np
import pytest
import torch
import zoo

from quantkit.errors import InputError
from quantkit.runtimes.generate import Sampling, stream
from quantkit.runtimes.torch.decode_graph import TorchDecoder


# a window that slides has another cache
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral", "gpt2"])
def test_steps_are_those_of_the_whole_sequence(name: str) -> None:
    model, ids = zoo.tiny(name), np.tile(zoo.ids().numpy(), 2)
    assert ids.shape[1] > 8
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(ids)).logits.numpy()
    decoder = TorchDecoder(model)
    state = decoder.state(*ids.shape)
    found = [decoder.run(state, ids[:, :3])]
    found += [decoder.run(state, ids[:, [place]]) for place in range(3, ids.shape[1])]
    assert np.allclose(np.concatenate(found, axis=1), expected, atol=1e-5)
    assert np.allclose(decoder.run(decoder.state(*ids.shape), ids, keep=1), expected[:, -1:], atol=1e-5)


def test_what_it_goes_on_with_is_what_transformers_does() -> None:
    model, ids = zoo.tiny("llama"), zoo.ids()[:1, :4]
    expected = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False, eos_token_id=-1)[0, 4:]
    found = [int(token[0]) for token in stream(TorchDecoder(model), ids.numpy(), 6, Sampling())]
    assert found == expected.tolist()


def test_more_than_its_positions_is_refused() -> None:
    decoder = TorchDecoder(zoo.tiny("llama"))
    decoder.state(1, decoder.context)
    with pytest.raises(InputError, match="prompt-too-long"):
        decoder.state(1, decoder.context + 1)
