"""Structured output: which tokens keep the output within a JSON schema, a regular expression or a list of choices.

The grammars are llguidance's (extra ``grammar``). They are compiled in the thread that prepares a request, and the tokens allowed
next are computed in a separate thread while the model runs, so neither is on the step's path.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from producer.errors import InvalidRequest
from producer.validate import invalid

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions

FIELD = "response_format"
_MAX_COMPILED = 64
_LIMITS: dict[str, Any] = {"max_lexer_states": 20_000}  # per grammar: some 2 KB each; schemas seen in use need a few hundred
_MAX_ERROR_CHARS = 300
_JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \n]{0,8}",
}  # bounded: a weak model might write blanks for ever


def is_available() -> bool:
    """Whether the grammar library is installed."""
    return find_spec("llguidance") is not None


class GrammarCompiler:
    """Makes `Grammar`s for one tokenizer; safe in threads.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: number of logits per row.
        eos_token_ids: allowed wherever the output is complete.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        from llguidance import LLTokenizer

        eos_token = sorted(eos_token_ids) or None
        self._tokenizer = LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=vocab_size, eos_token=eos_token)
        self._vocab_size = vocab_size
        self._lock = Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._workers = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def compile(self, response_format: Mapping[str, Any]) -> Grammar | None:
        """The grammar of a ``response_format`` at its start; None for type ``text``.

        Raises:
            InvalidRequest: names ``response_format`` and says what is wrong with it.
        """
        source = _source(response_format)
        if source is None:
            return None
        with self._lock:
            matcher = self._compiled.get(source)
            if matcher is None:
                matcher = self._compiled[source] = self._compile(source)
                if len(self._compiled) > _MAX_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(source)
            return Grammar(matcher.deep_copy(), self._vocab_size, self._workers)

    def _compile(self, source: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=LLParserLimits(**_LIMITS))
        if not matcher.is_error():
            matcher.compute_bitmask()  # builds the lexer, the slow part, once for all copies; it may grow beyond the limits
        if matcher.is_error():
            raise InvalidRequest(f"{FIELD} is refused: {matcher.get_error()[:_MAX_ERROR_CHARS]}", field=FIELD)
        return matcher


class Grammar:
    """The position of one request's output in its grammar; kept in `Request.grammar`.

    Attributes:
        complete: only the end may follow; also true after the end.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, workers: ThreadPoolExecutor) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._workers = workers
        self._num_consumed = 0
        self.complete = False
        self._forbidden: Future[torch.Tensor] | None = None

    def catch_up(self, output_token_ids: Sequence[int]) -> None:
        """Take in the output tokens that came since the last call, and begin to compute what may follow."""
        if self._forbidden is not None:
            wait([self._forbidden])  # the matcher serves one thread at a time
        self._matcher.consume_tokens(list(output_token_ids[self._num_consumed :]))
        self._num_consumed = len(output_token_ids)
        self.complete = self._matcher.is_stopped() and not self._matcher.is_error()
        self._forbidden = None if self.complete else self._workers.submit(self._work_out)

    def forbidden(self) -> torch.Tensor:
        """[vocab] bool on the CPU: the tokens that may not follow.

        Raises:
            InvalidRequest: the grammar's state after this output exceeds its limits, or the output has left the grammar.
        """
        if self._forbidden is None:
            self._forbidden = self._workers.submit(self._work_out)
        return self._forbidden.result()

    def _work_out(self) -> torch.Tensor:
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():  # it then allows only the end, as if the output were complete
            raise InvalidRequest(f"{FIELD} cannot be kept to any further: it has grown too complex in this output", field=FIELD)
        bits = np.unpackbits(allowed, count=self._vocab_size, bitorder="little")
        return torch.from_numpy(bits == 0)


def forbid_tokens(logits: torch.Tensor, grammars: Sequence[Grammar | None]) -> None:
    """Set the logits of forbidden tokens to -inf, in place. ``logits``: [rows, vocab], row i of ``grammars[i]``."""
    for row, grammar in enumerate(grammars):
        if grammar is not None:
            logits[row].masked_fill_(grammar.forbidden().to(logits.device), -torch.inf)


def _source(response_format: Mapping[str, Any]) -> str | None:
    """The grammar in llguidance's terms; None for type ``text``. Raises `InvalidRequest`."""
    kind = response_format.get("type")
    make = _SOURCES.get(kind) if isinstance(kind, str) else None
    if make is None:
        raise invalid(f"{FIELD}.type", f"one of {', '.join(_SOURCES)}")
    return make(response_format)


def _json_schema(response_format: Mapping[str, Any]) -> str:
    wrapper = response_format.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
    if not isinstance(schema, Mapping):
        raise invalid(f"{FIELD}.json_schema.schema", "an object")
    return _of_schema(schema)


def _of_schema(schema: Mapping[str, Any]) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_OPTIONS)


def _regex(response_format: Mapping[str, Any]) -> str:
    from llguidance import LLMatcher

    pattern = response_format.get("regex")
    if not isinstance(pattern, str) or not pattern:
        raise invalid(f"{FIELD}.regex", "a non-empty string")
    return LLMatcher.grammar_from_regex(pattern)


def _choice(response_format: Mapping[str, Any]) -> str:
    from llguidance import LLMatcher

    choices = response_format.get("choices")
    if not isinstance(choices, list | tuple) or not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise invalid(f"{FIELD}.choices", "a non-empty list of non-empty strings")
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))


_SOURCES: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "json_schema": _json_schema,
    "json_object": lambda _: _of_schema({"type": "object"}),
    "regex": _regex,
    "choice": _choice,
    "text": lambda _: None,
}
