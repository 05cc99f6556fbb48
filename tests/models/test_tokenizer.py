"""The tokenizer against llama.cpp's ids, and text that comes out in pieces."""

import json
from pathlib import Path

import numpy as np
import pytest

from specjax.models.errors import ModelFileError
from specjax.models.gguf_file import open_gguf
from specjax.models.tokenizer import Detokenizer, Tokenizer, check_same_vocabulary

GOLDEN = json.loads((Path(__file__).parent / "data" / "smollm2_tokens.json").read_text(encoding="utf-8"))
BOS, EOS = 0, 1  # of the tiny vocabulary


@pytest.fixture
def tiny(write_gguf):
    return Tokenizer.from_gguf(open_gguf(write_gguf()))


@pytest.mark.parametrize("item", GOLDEN, ids=lambda item: ascii(item["text"][:20]))
def test_ids_are_those_of_llama_cpp_and_decode_to_the_text(smollm2, item):
    assert smollm2.tokenizer.encode(item["text"]) == item["ids"]
    assert smollm2.tokenizer.decode(item["ids"], skip_special=False) == item["text"]


def test_special_tokens_are_skipped_unless_asked_for(smollm2):
    tokenizer = smollm2.tokenizer
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos, tokenizer.vocab_size) == (
        1,
        (2,),
        False,
        49152,
    )
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert tokenizer.decode(ids) == "user\nhi"


@pytest.mark.parametrize("seed", range(20))
def test_pieces_concatenate_to_the_whole_whatever_the_cuts(smollm2, seed):
    tokenizer, rng = smollm2.tokenizer, np.random.default_rng(seed)
    alphabet = ["é", "日本", "😀", "👩‍👩‍👧", "a b", "\n", " ", "हि", "7", "ß", "한", "\u00a0", "\U0001d518"]
    text = "".join(rng.choice(alphabet, 60))
    ids = tokenizer.encode(text)
    assert any(
        b"\x80" <= tokenizer.token_bytes(i)[:1] < b"\xc0" for i in ids
    )  # some tokens begin inside a character
    detokenizer, pieces, start = Detokenizer(tokenizer), [], 0
    while start < len(ids):
        size = int(rng.integers(1, 4))
        pieces.append(detokenizer.feed(ids[start : start + size]))
        start += size
    assert not any("\ufffd" in piece for piece in pieces)
    assert detokenizer.finish() == ""
    assert "".join(pieces) == text


@pytest.mark.parametrize("seed", range(10))
def test_pieces_of_random_ids_concatenate_to_their_decoding(smollm2, seed):
    tokenizer, rng = smollm2.tokenizer, np.random.default_rng(seed)
    ids = rng.integers(0, 400, 200).tolist()  # many lone bytes: mostly no valid text
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.feed([i]) for i in ids] + [detokenizer.finish()]
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "\ufffd" in pieces[-1] or tokenizer.token_bytes(ids[-1]) != b"\xe6"


def test_a_character_that_stays_half_is_given_out_at_the_end_only(tiny):
    half = tiny.encode("é", add_bos=False)[:1]
    detokenizer = Detokenizer(tiny)
    assert detokenizer.feed(tiny.encode("he", add_bos=False)) == "he"
    assert detokenizer.feed(half) == ""
    assert detokenizer.finish() == "\ufffd"


def test_bos_is_added_as_the_file_says_and_never_twice(tiny, write_gguf):
    he = tiny.tokens.index("he")
    assert tiny.encode("he") == [BOS, he]
    assert tiny.encode("<s>he") == [BOS, he]
    assert tiny.encode("he", add_bos=False) == [he]
    silent = Tokenizer.from_gguf(open_gguf(write_gguf(metadata={"tokenizer.ggml.add_bos_token": False})))
    assert silent.encode("he") == [he]
    assert silent.encode("he", add_bos=True) == [BOS, he]


def test_digits_are_cut_one_by_one_and_take_no_space_along(write_gguf):
    # With merges for "12" and " 1" in the vocabulary only the pre-tokenizer keeps these apart.
    def spelling(pre, text):
        merges = ["Ġ 1", "1 2", "h e", "Ġ he"]
        words = Tokenizer.from_gguf(open_gguf(write_gguf())).tokens[:-2]
        metadata = {
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": [*words, "12", "Ġ1"],
            "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.add_bos_token": False,
        }
        tokenizer = Tokenizer.from_gguf(open_gguf(write_gguf(metadata=metadata)))
        return [tokenizer.tokens[i] for i in tokenizer.encode(text)]

    assert spelling("smollm", "he 12") == ["he", "Ġ", "1", "2"]
    assert spelling("gpt-2", "he 12") == ["he", "Ġ1", "2"]
    assert spelling("llama-bpe", "he 12") == ["he", "Ġ", "12"]


def test_ids_beyond_the_vocabulary_decode_to_nothing(tiny):
    assert tiny.decode([10**6, -1, tiny.tokens.index("he")]) == "he"


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"tokenizer.ggml.pre": "qwen35-vl"}, "'qwen35-vl' is unknown; known are smollm"),
        ({"tokenizer.ggml.pre": None}, "pre-tokenizer None"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer 'llama' is not supported"),
        ({"tokenizer.ggml.model": None}, "tokenizer None"),
        ({"tokenizer.ggml.merges": None}, "merges"),
        ({"tokenizer.ggml.merges": ["h e", "broken"]}, "contradict"),
        ({"tokenizer.ggml.merges": ["h zz"]}, "can't be built"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "contradict"),
        ({"tokenizer.ggml.token_type": [1]}, "contradict"),
        ({"tokenizer.ggml.eos_token_id": 300}, "eos"),
        ({"tokenizer.ggml.bos_token_id": "one"}, "can't be built"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(write_gguf, metadata, match):
    path = write_gguf(metadata=metadata)
    with pytest.raises(ModelFileError, match=match) as error:
        Tokenizer.from_gguf(open_gguf(path))
    assert str(path) in str(error.value)


def test_vocabularies_that_differ_in_one_token_are_refused_and_padding_is_not(tiny, write_gguf):
    words = list(tiny.tokens)
    longer = {
        "tokenizer.ggml.tokens": [*words, "<pad>"],
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(words) - 1),
    }
    check_same_vocabulary(tiny, Tokenizer.from_gguf(open_gguf(write_gguf(metadata=longer))))
    words[-1], words[-2] = words[-2], words[-1]
    swapped = Tokenizer.from_gguf(open_gguf(write_gguf(metadata={"tokenizer.ggml.tokens": words})))
    with pytest.raises(ValueError, match=f"token {len(words) - 2} is"):
        check_same_vocabulary(tiny, swapped)
