"""What a server is run with. One frozen object, passed down."""

from __future__ import annotations

import dataclasses
import ipaddress
import secrets
from dataclasses import dataclass, field
from typing import Any

from phloem.runtime.errors import InvalidRequest

MIN_KEY_CHARACTERS = 8
MIN_SECRET_BYTES = 16

_WHOLE = (
    "max_requests", "retry_after_s", "max_body_bytes", "max_depth", "max_messages", "max_n", "max_logprobs", "max_grammar_bytes",
    "answer_memory_bytes", "stored_responses_bytes", "max_branches", "max_branches_per_key",
    "max_pinned_tokens_per_key",
)  # fmt: skip
_SECONDS = (
    "request_timeout_s",
    "body_timeout_s",
    "send_timeout_s",
    "drain_s",
    "log_interval_s",
    "branch_idle_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The settings of a server; every one but the model's name has a default that is safe.

    Raises:
        InvalidRequest: A setting is out of range, or would serve other machines without a key.
    """

    served_names: tuple[str, ...]
    """Names that requests may use for the model; the first is the one that answers carry."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: one that is free."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Who may use it; each key has a cache of its own. None: anybody who reaches it, which `host` then restricts to this machine."""

    admin_key: str | None = field(default=None, repr=False)
    """Opens what concerns all users: metrics, flushing the cache. None: closed when there are API keys, else open."""

    allow_anonymous: bool = False
    """Serve other machines without a key."""

    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    """Makes the namespaces of keys and salts unguessable; see `phloem.runtime.server.secret`, which keeps one between runs."""

    max_requests: int = 256
    """Generations under way or waiting, over all requests; more are refused with 429."""

    request_timeout_s: float = 600.0
    body_timeout_s: float = 30.0
    """How long a client may take to send a request."""

    send_timeout_s: float = 60.0
    """How long a client may take nothing of a stream, before it is taken for gone."""

    drain_s: float = 30.0
    """How long running requests may go on after SIGTERM."""

    log_interval_s: float = 10.0
    """Between two lines of log; none is written while nothing happens."""

    retry_after_s: int = 1
    """What a client that is refused for now is told to wait."""

    max_body_bytes: int = 8 << 20
    max_depth: int = 64
    """Of nested lists and objects in a request."""

    max_n: int = 128
    """Completions of one prompt."""

    max_messages: int = 10_000
    """Of a conversation."""

    max_logprobs: int = 100
    """Likeliest tokens that are reported beside each one."""

    answer_memory_bytes: int = 64 << 20
    """For the tokens of answers, so that conversations which come back as text hit them."""

    stored_responses_bytes: int = 64 << 20
    """For responses that can be read again, or gone on from."""

    max_grammar_bytes: int = 64 << 10
    """Of a JSON schema, and of all tools' schemas together."""

    branch_idle_s: float = 600.0
    """How long a branch may lie unused before it is released."""

    max_branches: int = 4096
    """Branches that are held for all keys together; more are refused with 429."""

    max_branches_per_key: int = 1024
    """And for one key."""

    max_pinned_tokens_per_key: int = 32_768
    """Tokens that one key may keep from eviction, by pins and by `cache_control` breakpoints together."""

    max_pin_ttl_s: float = 3600.0
    """How long after its last use a pin may live."""

    def __post_init__(self) -> None:
        _require(bool(self.served_names), "served_names needs at least one name", "served_names")
        for name in _WHOLE:
            value = getattr(self, name)
            good = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            _require(good, f"{name} must be a whole number of at least 1, not {value!r}", name)
        for name in _SECONDS:
            value = getattr(self, name)
            good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e9
            _require(good, f"{name} must be a number of seconds above 0, not {value!r}", name)
        _require(
            type(self.port) is int and 0 <= self.port <= 65535,
            f"port must be from 0 to 65535, not {self.port!r}",
            "port",
        )
        good = isinstance(self.secret, bytes) and len(self.secret) >= MIN_SECRET_BYTES
        _require(good, f"the secret must be at least {MIN_SECRET_BYTES} bytes", "secret")
        for key in (*self.api_keys, *(() if self.admin_key is None else (self.admin_key,))):
            good = isinstance(key, str) and len(key) >= MIN_KEY_CHARACTERS and key.isascii()
            _require(good, f"a key must be at least {MIN_KEY_CHARACTERS} ASCII characters", "api_keys")
        _require(self.admin_key not in self.api_keys, "the admin key must not be an API key too", "admin_key")
        _require(
            is_loopback(self.host) or bool(self.api_keys) or self.allow_anonymous,
            f"{self.host} can be reached from other machines: set an API key, or allow_anonymous to serve anybody",
            "host",
        )

    @property
    def serves_this_machine_only(self) -> bool:
        """Whether nothing but the address keeps others out."""
        return is_loopback(self.host) and not self.api_keys and not self.allow_anonymous

    def replace(self, **changes: Any) -> ServerSettings:
        """Return a copy with some settings changed.

        Raises:
            InvalidRequest: A value is out of range.
        """
        return dataclasses.replace(self, **changes)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _require(condition: bool, message: str, name: str) -> None:
    if not condition:
        raise InvalidRequest(message, field=name)
