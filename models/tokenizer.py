"""Text to token ids and back: byte-level BPE as the model's own file describes it.

Encoding is the ``tokenizers`` library's. Decoding is done here, on bytes: a token is some bytes, not some
characters, and only on bytes can a stream of tokens be turned into pieces of text that add up.
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import Iterable, Sequence

import numpy as np
import tokenizers
from tokenizers import decoders, pre_tokenizers

from specjax.models.errors import ModelFileError
from specjax.models.gguf_file import GgufFile

__all__ = ["Detokenizer", "Tokenizer", "check_same_vocabulary"]

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer | None:
    """Returns how text is cut before BPE, by the name in ``tokenizer.ggml.pre``."""
    if name in ("smollm", "starcoder"):  # every digit alone, then GPT-2's words
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if name == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "llama-bpe":  # Llama 3
        words = pre_tokenizers.Split(tokenizers.Regex(_LLAMA3_WORDS), "isolated")
        return pre_tokenizers.Sequence(
            [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    return None


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """Returns GPT-2's spelling of the 256 bytes: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Tokenizer:
    """A byte-level BPE vocabulary with its special tokens.

    Attributes:
      tokens: the vocabulary as it is spelt in the file, by id.
      bos_id: the token that begins a text, if there is one.
      eos_ids: the tokens that end one; the first is the end of text.
      pad_id: filler.
      add_bos: whether :meth:`encode` begins with ``bos_id``.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None,
        eos_ids: Sequence[int],
        pad_id: int | None = None,
        add_bos: bool = False,
    ) -> None:
        self._backend = backend
        size = backend.get_vocab_size()
        self.tokens: tuple[str | None, ...] = tuple(backend.id_to_token(i) for i in range(size))
        added = backend.get_added_tokens_decoder()
        self._literal = {i: token.content.encode() for i, token in added.items()}
        self._special = {i for i, token in added.items() if token.special}
        for name, ids in (("bos", [bos_id]), ("eos", eos_ids), ("pad", [pad_id])):
            if any(i is not None and not 0 <= i < size for i in ids):
                raise ValueError(f"{name} ids {list(ids)} lie outside of the vocabulary of {size}")
        self.bos_id, self.eos_ids, self.pad_id, self.add_bos = bos_id, tuple(eos_ids), pad_id, add_bos

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Tokenizer:
        """Builds the tokenizer that a GGUF file describes.

        Raises:
          ModelFileError: there is none, it is no byte-level BPE, its way of cutting text is unknown, or the
            vocabulary contradicts itself.
        """
        entries = {key.removeprefix("tokenizer.ggml."): value for key, value in file.metadata.items()}
        model, pre = entries.get("model"), entries.get("pre")
        if model != "gpt2":
            raise ModelFileError(
                file.path, f"tokenizer {model!r} is not supported; 'gpt2' (byte-level BPE) is"
            )
        cut = _pre_tokenizer(pre) if isinstance(pre, str) else None
        if cut is None:
            raise ModelFileError(
                file.path, f"pre-tokenizer {pre!r} is unknown; known are smollm, starcoder, gpt-2, llama-bpe"
            )
        tokens, merges, kinds = (entries.get(name) for name in ("tokens", "merges", "token_type"))
        if not (isinstance(tokens, list) and isinstance(merges, list) and isinstance(kinds, np.ndarray)):
            raise ModelFileError(file.path, "the tokenizer lacks its tokens, token_type or merges")
        vocabulary = {token: i for i, token in enumerate(tokens)}
        pairs = [tuple(merge.split(" ")) for merge in merges]
        if (
            len(vocabulary) != len(tokens)
            or len(kinds) != len(tokens)
            or any(len(pair) != 2 for pair in pairs)
        ):
            raise ModelFileError(
                file.path, "the tokenizer's tokens, token_type and merges contradict each other"
            )
        try:
            bpe = tokenizers.models.BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe")
            backend = tokenizers.Tokenizer(bpe)
            backend.pre_tokenizer, backend.decoder = cut, decoders.ByteLevel()
            for kind, add in ((_CONTROL, backend.add_special_tokens), (_USER_DEFINED, backend.add_tokens)):
                ids = np.flatnonzero(kinds == kind).tolist()
                add(
                    [
                        tokenizers.AddedToken(tokens[i], normalized=False, special=kind == _CONTROL)
                        for i in ids
                    ]
                )
            ends = (entries.get(f"{name}_token_id") for name in ("eos", "eot", "eom"))
            return cls(
                backend,
                bos_id=entries.get("bos_token_id"),
                eos_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
                pad_id=entries.get("padding_token_id"),
                add_bos=bool(entries.get("add_bos_token", pre == "llama-bpe")),
            )
        except Exception as error:  # the library raises bare Exception
            raise ModelFileError(file.path, f"the tokenizer can't be built: {error}") from error

    @property
    def vocab_size(self) -> int:
        """The number of tokens; a model's V may be padded beyond it."""
        return len(self.tokens)

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Turns text into ids; special tokens spelt out in the text become their ids.

        Args:
          text: any string.
          add_bos: whether to begin with ``bos_id``; None does as the file says. A text that begins with it
            already (chat templates write it out) doesn't get a second one.

        Returns:
          The ids.

        Raises:
          ValueError: the text is no Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text has half a surrogate pair at character {error.start}: mend it"
            ) from None
        ids = self._backend.encode(text, add_special_tokens=False).ids
        begin = self.add_bos if add_bos is None else add_bos
        if begin and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def token_bytes(self, token: int, *, skip_special: bool = True) -> bytes:
        """Returns the UTF-8 bytes that one token stands for, which may end inside a character.

        Special tokens stand for nothing, or for their spelling if they are not skipped; so do ids that the
        vocabulary doesn't have, such as a model's padding.
        """
        if token in self._literal:
            return b"" if skip_special and token in self._special else self._literal[token]
        spelling = self.tokens[token] if 0 <= token < len(self.tokens) else None
        if spelling is None:
            return b""
        table = _byte_of_character()
        try:
            return bytes(table[character] for character in spelling)
        except KeyError:  # a token that byte-level BPE can't produce
            return spelling.encode()

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Turns ids into text; bytes that form no character become U+FFFD."""
        pieces = (self.token_bytes(int(i), skip_special=skip_special) for i in ids)
        return b"".join(pieces).decode("utf-8", errors="replace")


class Detokenizer:
    """Decodes a growing sequence of ids piece by piece.

    A character whose bytes straddle two calls is held back until it is whole: the pieces, with that of
    :meth:`finish`, concatenate to :meth:`Tokenizer.decode` of all ids, and none ends in half a character.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Iterable[int]) -> str:
        """Returns the text that these further ids complete."""
        pieces = (self._tokenizer.token_bytes(int(i), skip_special=self._skip) for i in ids)
        return self._decoder.decode(b"".join(pieces))

    def finish(self) -> str:
        """Returns what is still held back: U+FFFD if the ids ended inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Makes sure that an id means the same token to both models; one may have padding at its end.

    Raises:
      ValueError: names the first id on which they differ.
    """
    for i, (ours, theirs) in enumerate(zip(target.tokens, draft.tokens, strict=False)):
        if ours != theirs:
            raise ValueError(
                f"token {i} is {ours!r} in the target and {theirs!r} in the draft; "
                "speculation needs one vocabulary, take a draft of the target's family"
            )
