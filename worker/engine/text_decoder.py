"""Token ids to text, one token at a time: the joined pieces equal the tokenizer's ``decode`` of all the ids.

There are two ways, chosen by the tokenizer's own decoder:

- Byte-level BPE (GPT-2 and most since): every token stands for bytes, whatever its neighbours; an incremental UTF-8
  decoder joins them. Exact for any sequence, including invalid bytes.
- Any other: the last few tokens are decoded again with each new one, and what is new is emitted once it ends with a whole
  character (the technique of Text Generation Inference and vLLM).

Slow tokenizers and ``clean_up_tokenization_spaces`` (which rewrites what was already emitted) are not supported: text is
decoded without clean-up, as transformers itself does for BPE.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol
from weakref import WeakKeyDictionary

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_UNFINISHED_TOKENS = 8  # a character has at most 4 bytes: a window that long ends with a real U+FFFD
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>\Z")


class TextDecoder(Protocol):
    """The incremental decoding of one sequence."""

    def push(self, token_id: int) -> str:
        """The text that has become certain; may be empty."""
        ...

    def flush(self) -> str:
        """The rest: an unfinished character becomes U+FFFD, as in ``decode``. Nothing may be pushed afterwards."""
        ...


class Vocabulary:
    """What decoding needs of one tokenizer; shared by all its decoders, safe in threads.

    Args:
        tokenizer: a fast tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = tokenizer.backend_tokenizer
        self._id_to_token = backend.id_to_token
        self._decode = backend.decode
        self._special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.is_byte_level = backend.decoder is not None and json.loads(backend.decoder.__getstate__())["type"] == "ByteLevel"
        self._bytes: dict[int, bytes] = {}

    def new_decoder(self) -> TextDecoder:
        """A decoder at the start of a sequence."""
        return ByteLevelDecoder(self) if self.is_byte_level else WindowDecoder(self)

    def is_skipped(self, token_id: int) -> bool:
        """Whether ``decode(skip_special_tokens=True)`` leaves it out."""
        return token_id in self._special or self._id_to_token(token_id) is None

    def is_byte(self, token_id: int) -> bool:
        """Whether it is one byte of a character that the vocabulary does not have (SentencePiece's byte fallback)."""
        return bool(_BYTE_TOKEN.match(self._id_to_token(token_id)))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token of a byte-level vocabulary; none for one that decoding skips."""
        found = self._bytes.get(token_id)
        if found is None:
            found = b"" if self.is_skipped(token_id) else self._spell(self._id_to_token(token_id))
            self._bytes[token_id] = found
        return found

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._decode(token_ids, skip_special_tokens=True)
        return text

    def _spell(self, token: str) -> bytes:
        try:
            return bytes(map(self._byte_of.__getitem__, token))
        except KeyError:  # an added token is not written in the byte alphabet
            return token.encode()

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for characters from U+0100 on."""
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class ByteLevelDecoder:
    """Decodes byte-level BPE, where a token is bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._vocabulary.token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """Decodes any vocabulary by decoding a window of the last tokens twice: without and with the new ones.

    A run of byte tokens is held until it ends: one wrong byte makes all of it U+FFFD.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._window: list[int] = []  # tokens whose text has been emitted, as context, then the others
        self._num_context = 0

    def push(self, token_id: int) -> str:
        if self._vocabulary.is_skipped(token_id):
            return ""
        self._window.append(token_id)
        return "" if self._vocabulary.is_byte(token_id) else self._take(final=False)

    def flush(self) -> str:
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        before = self._vocabulary.decode(self._window[: self._num_context])
        after = self._vocabulary.decode(self._window)
        num_new = len(self._window) - self._num_context
        if after.endswith(REPLACEMENT) and num_new < _MAX_UNFINISHED_TOKENS and not final:
            return ""
        if len(after) > len(before):
            del self._window[: self._num_context]
            self._num_context = len(self._window)
        return after[len(before) :]


_vocabularies: WeakKeyDictionary[Any, Vocabulary] = WeakKeyDictionary()


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """The tokenizer's `Vocabulary`, made once."""
    found = _vocabularies.get(tokenizer)
    if found is None:
        found = _vocabularies[tokenizer] = Vocabulary(tokenizer)
    return found
