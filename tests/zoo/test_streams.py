"""The fast part of the campaign: streams that were once wrong or died, each with the reason, against transformers.

`benchmarks/zoo.py` runs all classes, and whole compiles of them.
"""

import pytest
from thorough import beside

from zoo import judge, shrink

# class -> why it is here
RIGHT = {
    "LlamaForCausalLM": "what most others are made of",
    "AlbertForMaskedLM": "one block, called once a layer",
    "BambaForCausalLM": "blocks return pairs, which the model unpacks",
    "BertForMaskedLM": "an encoder",
    "BigBirdForCausalLM": "takes no sequence shorter than its blocks of positions",
    "CpmAntForCausalLM": "a prompt of its own before the text",
    "DebertaForMaskedLM": "blocks return pairs; attention by relative positions",
    "DebertaV2ForMaskedLM": "the same; its attention differs",
    "DiffLlamaForCausalLM": "parameters that its class does not make on the meta device",
    "EmbeddingGemma2TextModel": "embeddings of a layer's own, of each token",
    "FlaubertWithLMHeadModel": "lists of attentions and of feed-forwards, no list of blocks",
    "Gemma2ForCausalLM": "windows of every other layer, soft caps",
    "Gemma3nForCausalLM": "four hidden states a token; embeddings of a layer's own",
    "Gemma4ForCausalLM": "embeddings of a layer's own; layers that reuse the keys of others",
    "GlmMoeDsaForCausalLM": "a block hands the positions it chose to the next",
    "GPT2LMHeadModel": "weights stored [K, N]; learned positions",
    "GraniteMoeForCausalLM": "keeps a cache unless told by a keyword that its forward does not name",
    "GraniteMoeHybridForCausalLM": "the same, with states of Mamba",
    "GraniteMoeSharedForCausalLM": "the same, with shared experts",
    "GraniteMoeSWAForCausalLM": "the same, with windows",
    "Inkling2ForCausalLM": "rows of its experts are moved while loading; a block hands on a view",
    "JetMoeForCausalLM": "mixtures in attention too",
    "LlamaForQuestionAnswering": "a base that keeps a cache, below a forward that cannot be told",
    "LlamaForSequenceClassification": "a head that looks for padding",
    "MarkupLMModel": "counts positions by what is not padding, of which its tables hold few",
    "NomicBertForMaskedLM": "query, key and value are one tensor of the files",
    "OlmoHybridForCausalLM": "three convolutions become one while loading",
    "OpenAIGPTLMHeadModel": "blocks return lists",
    "ProphetNetForCausalLM": "a hidden state more for each n-gram",
    "Qwen3NextForCausalLM": "linear attention beside full attention, and experts",
    "RwkvForCausalLM": "no attention; blocks return triples",
    "SqueezeBertForMaskedLM": "blocks return dicts; hidden states lie the other way round",
    "T5EncoderModel": "the first block makes the bias by which all others attend",
    "T5ForConditionalGeneration": "an encoder and a decoder, which reads what the encoder puts out",
    "MoonshineForConditionalGeneration": "an encoder of speech: samples instead of ids",
    "Speech2TextForConditionalGeneration": "the same with features of a frame last",
    "WhisperForConditionalGeneration": "the same with features of a frame first",
    "XLMWithLMHeadModel": "lists of attentions and of feed-forwards, no list of blocks",
    "XLNetLMHeadModel": "two streams; parameters that its class does not make on the meta device",
    "ZambaForCausalLM": "blocks of two kinds, which share one attention",
    "Zamba2ForCausalLM": "the same, with adapters",
    "ZayaForCausalLM": "routers that see what the one before saw",
    "xLSTMForCausalLM": "no attention; blocks return their state",
}
# beside others of which the same is said
MORE = {
    *("MoonshineForConditionalGeneration", "Speech2TextForConditionalGeneration"),
    *("DebertaForMaskedLM", "EmbeddingGemma2TextModel", "FlaubertWithLMHeadModel", "GraniteMoeHybridForCausalLM"),
    *("GraniteMoeSharedForCausalLM", "GraniteMoeSWAForCausalLM", "ZambaForCausalLM"),
}
REFUSED = {
    "FunnelForMaskedLM": "stream-unsupported",
    "MllamaForCausalLM": "stream-unsupported",
    "PerceiverForMaskedLM": "stream-unsupported",
    "ReformerModelWithLMHead": "stream-unsupported",
    "ViTForImageClassification": "stream-unsupported",
    "T5ForSequenceClassification": "architecture-unsupported",
    "Gemma4ForConditionalGeneration": "architecture-unsupported",
}


@pytest.mark.parametrize("name", beside(RIGHT.keys() - MORE, RIGHT))
def test_a_stream_gives_what_the_model_gives(name: str) -> None:
    found = judge.float_stream(shrink.named(name))
    assert found.verdict == "right", found


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_stream_can_run_is_refused(name: str) -> None:
    found = judge.float_stream(shrink.named(name))
    assert (found.verdict, found.code) == ("refused", REFUSED[name]), found
    assert "\n" not in found.line
