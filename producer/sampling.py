"""How a request's tokens are chosen. Names and meanings are OpenAI's and vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from producer import validate
from producer.errors import InvalidRequest

MAX_TOKENS = 1_000_000
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_TOP_K = 2**31 - 1
MAX_N = 16
MAX_SCHEMA_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request; checked when made, so an instance is always valid.

    Attributes:
        max_tokens: most tokens to generate; None means 256, or what the context leaves if less.
        min_tokens: no stop (EOS, stop string or stop token) before this many tokens.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: nucleus: the smallest set of tokens whose probability reaches this.
        top_k: only the k likeliest tokens; 0 or -1 turns it off.
        min_p: only tokens with at least this share of the likeliest token's probability.
        repetition_penalty: divides (multiplies negative) logits of tokens in prompt or output (CTRL).
        presence_penalty: subtracted once from logits of tokens in the output.
        frequency_penalty: subtracted per occurrence in the output.
        logit_bias: token id -> value added to its logit, -100..100.
        seed: makes the noise a function of (seed, position) alone; None derives it from the request's id.
        stop: strings that end the output; the string itself is not returned.
        stop_token_ids: token ids that end the output, besides the model's EOS.
        logprobs: return this many top log-probabilities per token, besides the chosen one's.
        ignore_eos: continue after the model's EOS.
        n: how many independent outputs of one prompt, in `Result.choices`; each has a seed of its own, derived from ``seed``.
        response_format: OpenAI's ``{"type": "json_schema", "json_schema": {"schema": {...}}}`` or ``{"type": "json_object"}``,
            and ``{"type": "regex", "regex": "..."}``, ``{"type": "choice", "choices": [...]}``.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False
    n: int = 1
    response_format: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        if self.max_tokens is not None:
            validate.integer("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        validate.integer("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise validate.invalid("min_tokens", "at most max_tokens")
        put(self, "temperature", validate.number("temperature", self.temperature, 0.0, 100.0))
        put(self, "top_p", validate.number("top_p", self.top_p, 0.0, 1.0))
        if self.top_p == 0.0:
            raise validate.invalid("top_p", "greater than 0")
        validate.integer("top_k", self.top_k, -1, MAX_TOP_K)
        put(self, "min_p", validate.number("min_p", self.min_p, 0.0, 1.0))
        put(self, "repetition_penalty", validate.number("repetition_penalty", self.repetition_penalty, 0.01, 100.0))
        put(self, "presence_penalty", validate.number("presence_penalty", self.presence_penalty, -2.0, 2.0))
        put(self, "frequency_penalty", validate.number("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        put(self, "logit_bias", _logit_bias(self.logit_bias))
        if self.seed is not None:
            validate.integer("seed", self.seed)
        put(self, "stop", _stop(self.stop))
        put(self, "stop_token_ids", tuple(validate.token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)))
        if self.logprobs is not None:
            validate.integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        validate.boolean("ignore_eos", self.ignore_eos)
        validate.integer("n", self.n, 1, MAX_N)
        if self.response_format is not None:
            if not isinstance(self.response_format, Mapping):
                raise validate.invalid("response_format", f"an object, not {type(self.response_format).__name__}")
            validate.tree("response_format", self.response_format, MAX_SCHEMA_BYTES)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0

    def to_wire(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as plain maps, lists and scalars."""
        values = {name: getattr(self, name) for name in FIELD_NAMES}
        wire = {name: value for name, value in values.items() if value != getattr(_DEFAULTS, name)}
        if "logit_bias" in wire:  # JSON has string keys only, so every encoding does
            wire["logit_bias"] = {str(token): bias for token, bias in wire["logit_bias"].items()}
        for name in ("stop", "stop_token_ids"):
            if name in wire:
                wire[name] = list(wire[name])
        return wire

    @classmethod
    def from_wire(cls, body: Mapping[str, Any]) -> SamplingParams:
        """Build from the sampling fields of a request body; other fields and nulls are ignored."""
        return cls(**{name: body[name] for name in FIELD_NAMES if body.get(name) is not None})

    @classmethod
    def from_keywords(cls, keywords: Mapping[str, Any]) -> SamplingParams:
        """Build from a caller's keywords; an unknown one is refused by name."""
        unknown = sorted(set(keywords) - set(FIELD_NAMES))
        if unknown:
            raise InvalidRequest(f"unknown parameter: {', '.join(unknown)}", field=unknown[0])
        return cls(**keywords)


def _stop(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    items = validate.sequence("stop", value, MAX_STOP_STRINGS)
    return tuple(validate.text(f"stop[{i}]", item, MAX_STOP_BYTES) for i, item in enumerate(items))


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise validate.invalid("logit_bias", f"a map of token id to number, not {type(value).__name__}")
    if len(value) > MAX_LOGIT_BIAS:
        raise validate.invalid("logit_bias", f"a map of at most {MAX_LOGIT_BIAS} items (got {len(value)})")
    bias = {}
    for key, item in value.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10 else key
        validate.integer("logit_bias key", token, 0, 2**31 - 1)
        bias[token] = validate.number(f"logit_bias[{token}]", item, -100.0, 100.0)
    return bias


_DEFAULTS = SamplingParams()
FIELD_NAMES: tuple[str, ...] = tuple(f.name for f in fields(SamplingParams))
