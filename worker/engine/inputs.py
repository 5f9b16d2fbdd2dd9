"""Turns wire requests into engine requests: tokenising, chat templates, and every check that needs the model.

Called by the thread that fetches requests, so nothing here holds the interpreter's lock for long.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2.exceptions import TemplateError

from producer.errors import ContextLengthExceeded, InvalidRequest, ModelUnavailable
from producer.sampling import SamplingParams
from producer.validate import invalid
from producer.wire import GenerateRequest
from worker.engine.request import Request, check_fits
from worker.engine.structured import Grammar, GrammarCompiler
from worker.engine.text_decoder import vocabulary_of

DEFAULT_MAX_TOKENS = 256
CHILD_SEPARATOR = "#"  # not allowed in a wire id, so a child's id cannot be another request's


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What a model allows.

    Attributes:
        max_model_len: most tokens of prompt and output together.
        vocab_size: token ids run from 0 to this, exclusive.
        eos_token_ids: the model's stop tokens.
        seed: of the engine, mixed into the noise of requests without a seed of their own.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    seed: int = 0


class InputProcessor:
    """Turns wire requests into engine requests. Safe in threads: the tokenizer is only read.

    Args:
        tokenizer: a fast tokenizer of transformers; its truncation and padding are turned off.
        limits: what the model allows.
        grammars: compiles a request's ``response_format``; None if structured output is not installed.

    Attributes:
        vocabulary: identifies the tokenizer's vocabulary; equal if the same token ids stand for the same tokens.
    """

    def __init__(self, tokenizer: Any, limits: ModelLimits, grammars: GrammarCompiler | None = None) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._limits = limits
        self._grammars = grammars
        self._max_bytes_per_token = _max_bytes_per_token(tokenizer)
        self.vocabulary = _fingerprint(self._backend.get_vocab())

    def prepare_all(self, wire_request: GenerateRequest) -> list[Request]:
        """All engine requests that a wire request becomes: one per output of ``n``, one per continuation, else one.

        A single one has the wire request's id, several have ``<id>#0``, ``<id>#1`` and so on, in the order of the reply.
        `output_collector.OutputCollector` combines them into one reply.

        Raises:
            InvalidRequest: names the field. `ContextLengthExceeded` if prompt and output do not fit the context.
        """
        try:
            return self._prepare_all(wire_request)
        except InvalidRequest as error:
            error.request_id = wire_request.id
            raise

    def check_vocabulary(self, field: str, token_ids: Collection[int]) -> None:
        """Check ids used as indexes into the embedding or a row of logits; nothing checks them again later.

        Raises:
            InvalidRequest: one of them is not in the model's vocabulary.
        """
        vocab_size = self._limits.vocab_size
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise invalid(field, f"made of token ids below {vocab_size}, the model's vocabulary")

    def check_resumable(self, token_ids: Sequence[int], vocabulary: str | None) -> None:
        """Check what an earlier attempt generated, possibly with another model.

        Args:
            vocabulary: that of the ids; None if it is not known.

        Raises:
            ModelUnavailable: the ids are of another vocabulary, or beyond this model's.
        """
        if token_ids and vocabulary not in (None, self.vocabulary):
            raise ModelUnavailable("another model began it: the token ids of its output are of another vocabulary")
        if not all(0 <= token_id < self._limits.vocab_size for token_id in token_ids):
            raise ModelUnavailable(f"another model began it: its output has token ids beyond the {self._limits.vocab_size} of this one")

    def _prepare_all(self, wire_request: GenerateRequest) -> list[Request]:
        self._check_token_ids(wire_request)
        prompt = self._prompt_token_ids(wire_request)
        if wire_request.kind == "score":
            return self._score_requests(wire_request, prompt)
        if wire_request.kind == "embed":
            return [self._request(wire_request, wire_request.id, prompt, 0)]
        max_tokens = self._max_tokens(wire_request.params, len(prompt))
        seed = self._seed(wire_request)
        ids = _child_ids(wire_request.id, wire_request.params.n)
        return [self._generate_request(wire_request, ids[i], prompt, max_tokens, child_seed(seed, i)) for i in range(len(ids))]

    def _generate_request(self, wire_request: GenerateRequest, request_id: str, prompt: list[int], max_tokens: int, seed: int) -> Request:
        request = self._request(wire_request, request_id, prompt, max_tokens)
        request.seed = seed
        if not wire_request.params.ignore_eos:
            request.eos_token_ids = self._limits.eos_token_ids
        if wire_request.params.response_format is not None:
            request.grammar = self._grammar(wire_request.params.response_format)
        return request

    def _request(self, wire_request: GenerateRequest, request_id: str, prompt: list[int], max_tokens: int) -> Request:
        params = replace(wire_request.params, n=1) if wire_request.params.n != 1 else wire_request.params
        request = Request(
            id=request_id,
            prompt_token_ids=prompt,
            params=params,
            max_tokens=max_tokens,
            tier=wire_request.tier,
            kind=wire_request.kind,
            source=wire_request.source,
        )
        check_fits(request, self._limits.max_model_len)
        return request

    def _grammar(self, response_format: Mapping[str, Any]) -> Grammar | None:
        if self._grammars is None:
            raise InvalidRequest("structured output is not installed on this worker (headrace[grammar])", field="response_format")
        return self._grammars.compile(response_format)

    # Tokens

    def _prompt_token_ids(self, wire_request: GenerateRequest) -> list[int]:
        if wire_request.prompt_token_ids is not None:
            return list(wire_request.prompt_token_ids)
        text, field = self._prompt_text(wire_request)
        token_ids = self._encode(text, add_special_tokens=wire_request.prompt is not None)
        if not token_ids:
            raise invalid(field, "something that the tokenizer makes tokens of")
        return token_ids

    def _prompt_text(self, wire_request: GenerateRequest) -> tuple[str, str]:
        """The prompt as text, and the field that it came from."""
        if wire_request.prompt is not None:
            return wire_request.prompt, "prompt"
        assert wire_request.messages is not None, "a request has exactly one kind of prompt"
        return self._render(wire_request.messages), "messages"

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        if not self._tokenizer.chat_template:
            raise InvalidRequest("messages cannot be used with this model: it has no chat template", field="messages")
        try:
            text = self._tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise InvalidRequest(f"messages are refused by the model's chat template: {str(error)[:200]}", field="messages") from error
        except Exception as error:  # a template is a program, which may raise anything on these messages
            message = f"messages cannot be rendered by the model's chat template ({type(error).__name__})"
            raise InvalidRequest(message, field="messages") from error
        assert isinstance(text, str)
        return text

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        at_least = math.ceil(len(text.encode()) / self._max_bytes_per_token)
        if at_least > self._limits.max_model_len:
            message = f"prompt (at least {at_least} tokens) exceeds the context of {self._limits.max_model_len} tokens"
            raise ContextLengthExceeded(message, field="prompt")
        # Unlike `encode` and the transformers call, this releases the interpreter's lock while it works.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    # Scores

    def _score_requests(self, wire_request: GenerateRequest, prompt: list[int]) -> list[Request]:
        assert wire_request.continuations is not None, "kind score has continuations"
        ids = _child_ids(wire_request.id, len(wire_request.continuations))
        return [self._score_request(wire_request, ids[i], prompt, i) for i in range(len(ids))]

    def _score_request(self, wire_request: GenerateRequest, request_id: str, prompt: list[int], index: int) -> Request:
        assert wire_request.continuations is not None, "kind score has continuations"
        tokens, start = self._with_continuation(wire_request, prompt, wire_request.continuations[index])
        if start == len(tokens):
            raise invalid(f"continuations[{index}]", "something that the tokenizer makes tokens of")
        request = self._request(wire_request, request_id, tokens, 0)
        request.score_start = start
        return request

    def _with_continuation(self, wire_request: GenerateRequest, prompt: list[int], continuation: str) -> tuple[list[int], int]:
        """Prompt and continuation as tokens, and where the scored ones start.

        Text is tokenised as a whole, and the scored part starts where its tokens differ from those of the prompt alone: a token that
        spans the border counts (as in lm-evaluation-harness, but without cutting a token in two). A prompt of token ids is followed
        by the continuation's own tokens.
        """
        if wire_request.prompt_token_ids is None:
            text, _ = self._prompt_text(wire_request)
            whole = self._encode(text + continuation, add_special_tokens=wire_request.prompt is not None)
            common = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), min(len(prompt), len(whole)))
            if common > 0:
                return whole, common
        return prompt + self._encode(continuation, add_special_tokens=False), len(prompt)

    # Checks

    def _check_token_ids(self, wire_request: GenerateRequest) -> None:
        self.check_vocabulary("prompt_token_ids", wire_request.prompt_token_ids or ())
        self.check_vocabulary("logit_bias", wire_request.params.logit_bias)
        self.check_vocabulary("stop_token_ids", wire_request.params.stop_token_ids)

    def _max_tokens(self, params: SamplingParams, prompt_tokens: int) -> int:
        left = self._limits.max_model_len - prompt_tokens
        return params.max_tokens or max(1, params.min_tokens, min(DEFAULT_MAX_TOKENS, left))

    def _seed(self, wire_request: GenerateRequest) -> int:
        if wire_request.params.seed is not None:
            return wire_request.params.seed
        return _hash(f"{self._limits.seed}:{wire_request.id}")


def child_seed(seed: int, index: int) -> int:
    """The seed of one of ``n`` outputs; the first has the request's own."""
    return seed if index == 0 else _hash(f"{seed}#{index}")


def _child_ids(request_id: str, count: int) -> list[str]:
    return [request_id] if count == 1 else [f"{request_id}{CHILD_SEPARATOR}{i}" for i in range(count)]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


def _fingerprint(ids: Mapping[str, int]) -> str:
    """128 bits of a hash of the tokens in the order of their ids, of which several may have one."""
    ordered = sorted((token_id, token) for token, token_id in ids.items())
    return hashlib.sha256(json.dumps(ordered).encode()).hexdigest()[:32]


def _max_bytes_per_token(tokenizer: Any) -> float:
    """The most bytes of text that one token can stand for; infinite if no bound can be proved."""
    backend = tokenizer.backend_tokenizer
    vocabulary = vocabulary_of(tokenizer)
    added = list(backend.get_added_tokens_decoder().values())
    strips = any(token.lstrip or token.rstrip for token in added)  # such a token absorbs any run of blanks
    if backend.normalizer is not None or strips or not vocabulary.is_byte_level:
        return math.inf
    spelled = (len(token) for token in backend.get_vocab(with_added_tokens=False))  # a character stands for a byte
    return max(*spelled, *(len(token.content.encode()) for token in added))
