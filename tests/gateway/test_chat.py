"""The texts of the tokens of a completion."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from magrpo.gateway.chat import decode_pieces
from tests.tiny import tiny_tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "a", "b", "▁a", "▁ab"]


def build_spaced(decoder: decoders.Decoder) -> PreTrainedTokenizerBase:
    """A tokenizer that writes spaces as Llama 2's does, with a token for each byte of what is not in WORDS."""
    vocab = {token: index for index, token in enumerate([*BYTES, *WORDS])}
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "a"), ("▁a", "b")], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


METASPACE = build_spaced(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))
LLAMA = build_spaced(
    decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
)
TOKENIZERS = [tiny_tokenizer(), METASPACE, LLAMA]


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["byte level", "metaspace", "llama"])
@given(text=st.text(st.sampled_from("ab é好🙂\n"), max_size=20))
def test_the_texts_of_tokens_make_up_the_text(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = decode_pieces(tokenizer, token_ids)
    assert len(pieces) == len(token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids)


@pytest.mark.parametrize(
    ("tokenizer", "text", "pieces"),
    [
        (TOKENIZERS[0], "né", ["n", "", "é"]),
        (METASPACE, "ab ab", ["ab", " ab"]),
        (LLAMA, "a 好", ["a", " ", "", "", "好"]),
    ],
)
def test_a_character_belongs_to_its_last_token(
    tokenizer: PreTrainedTokenizerBase, text: str, pieces: list[str]
) -> None:
    assert decode_pieces(tokenizer, tokenizer.encode(text, add_special_tokens=False)) == pieces


def test_the_first_token_keeps_its_space_behind_a_prompt() -> None:
    prompt, completion = LLAMA.encode("é", add_special_tokens=False), LLAMA.encode("a好", add_special_tokens=False)
    assert decode_pieces(LLAMA, completion, behind=prompt) == [" a", "", "", "好"]


@given(st.lists(st.integers(3, 258), max_size=16))
def test_bytes_that_are_no_text(token_ids: list[int]) -> None:
    pieces = decode_pieces(TOKENIZERS[0], token_ids)
    assert len(pieces) == len(token_ids)
    assert "".join(pieces) == TOKENIZERS[0].decode(token_ids)


def test_many_bytes_that_are_no_text_are_decoded_a_few_at_a_time() -> None:
    tokenizer = build_spaced(decoders.ByteFallback())
    with patch.object(tokenizer, "decode", wraps=tokenizer.decode) as decode:
        pieces = decode_pieces(tokenizer, [0xFF] * 1000)
    assert "".join(pieces) == "\ufffd" * 1000
    assert max(len(call.args[0]) for call in decode.call_args_list) <= 32
