"""Settings of one worker's Redis side, validated when made."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass, field

from producer.keys import check_name
from worker.routing import Route

MAX_FETCH_AHEAD = 100_000


def default_name() -> str:
    """A consumer name that no other process has: host, process id and chance."""
    host = "".join(char if char.isascii() and (char.isalnum() or char in "-_") else "-" for char in socket.gethostname().split(".")[0])
    return f"{host[:64] or 'worker'}-{os.getpid()}-{secrets.token_hex(2)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Settings of one worker's Redis side.

    Attributes:
        redis_url: ``redis://``, ``rediss://``, ``unix://``, ``redis+sentinel://`` or ``redis+cluster://``.
        queue: the queue it serves.
        name: its consumer name; two live workers must not share one.
        lease_s: another worker takes over a request whose lease was not renewed for this long; the same for all workers of a queue.
        drain_s: how long the first SIGTERM lets running requests continue before the rest is handed back.
        checkpoint_tokens, checkpoint_s: how many tokens, and how much time, a crash may cost a request that is not streamed.
        fetch_ahead: requests of a tier that may wait here beyond what the engine has room for, so that fairness and deadlines order them.
        max_attempts: attempts after which a request that kills its workers is given up; an attempt begins when the engine gets it,
            and one that publishes tokens clears those before it.
        reply_ttl_s: how long a final reply can be read.
        state_ttl_s: how long a finished request is known.
        routes: rules that choose a request's tier by its labels; the first that matches wins.
        log_prompts: whether each request's last log line has its prompt and output.
        socket_timeout_s: Redis is considered dead after this long a silence, and after a third of the lease at the latest.
    """

    redis_url: str = "redis://127.0.0.1:6379/0"
    queue: str = "default"
    name: str = field(default_factory=default_name)
    lease_s: float = 30.0
    drain_s: float = 30.0
    checkpoint_tokens: int = 64
    checkpoint_s: float = 2.0
    fetch_ahead: int = 0
    max_attempts: int = 3
    reply_ttl_s: float = 3600.0
    state_ttl_s: float = 86400.0
    routes: tuple[Route, ...] = ()
    log_prompts: bool = False
    socket_timeout_s: float = 5.0

    @property
    def redis_timeout_s(self) -> float:
        """How long to wait for a reply from Redis: a lease has to outlive a lost connection."""
        return max(1.0, min(self.socket_timeout_s, self.lease_s / 3))

    def __post_init__(self) -> None:
        check_name("queue", self.queue)
        check_name("name", self.name)
        for name, low in (("lease_s", 0.2), ("drain_s", 0.0), ("checkpoint_s", 0.01), ("reply_ttl_s", 1.0), ("socket_timeout_s", 1.0)):
            if not getattr(self, name) >= low:
                raise ValueError(f"{name} must be at least {low:g}")
        for name in ("checkpoint_tokens", "max_attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if not 0 <= self.fetch_ahead <= MAX_FETCH_AHEAD:
            raise ValueError(f"fetch_ahead must be 0 to {MAX_FETCH_AHEAD:,}")
        if self.state_ttl_s < self.reply_ttl_s:
            raise ValueError("state_ttl_s must be at least reply_ttl_s, or an expired reply could not be told from an unknown request")
