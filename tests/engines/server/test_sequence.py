"""Text of a sequence as its tokens come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import pytest
from serving import tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deltawire.engines.server.sequence import Sampling, TextStream


def bytewise() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_half_a_character_is_held_back() -> None:
    codec = bytewise()
    text = "naïve → 🙂 fin"
    stream, parts = TextStream(codec, Sampling(1)), []
    for token in codec.encode(text):
        stream.push(token)
        parts.append(stream.take())
    stream.finish()
    assert "".join([*parts, stream.take()]) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in part for part in parts)


@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_string_over_several_tokens_never_leaks(keep: bool) -> None:
    codec = tokenizer()
    stream = TextStream(codec, Sampling(1, stop=("stop", "halt"), include_stop_str_in_output=keep))
    out = ""
    for token in codec.encode("ab st hal sto stop it"):
        ended = stream.push(token)
        out += stream.take()
        if ended:
            break
    assert out == "ab st hal sto " + ("stop" if keep else "")
    assert stream.stopped_by == "stop"
