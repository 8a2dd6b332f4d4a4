"""Who may open a stream: from which pages, with which key, and how often.

By default there are no keys and no limit, and a page may connect to the service that it came from. What is not a
browser sends no Origin header and is not concerned by that: the check keeps other people's pages from using a visitor's
browser, and is no protection from anybody else.
"""

import hmac
import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import HTTPConnection

from streaming.errors import ClientError

KEY = "key"  # the query's parameter
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_MAX_ADDRESSES = 10_000


@dataclass(frozen=True, slots=True)
class AccessConfig:
    """``origins``: pages besides the service's own, "*" for all. ``keys``: none means that none is asked for.
    ``streams_per_minute``: that an address may open; 0 for any number."""

    origins: frozenset[str] = frozenset()
    keys: tuple[str, ...] = ()
    streams_per_minute: int = 0


class ForbiddenOrigin(ClientError):
    """A page that may not use this service."""

    code = "forbidden_origin"


class Unauthorized(ClientError):
    """No key, or a wrong one."""

    code = "unauthorized"


class TooManyRequests(ClientError):
    """``retry_after_s`` (seconds) says when another try may succeed."""

    code = "too_many_requests"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Access:
    """Checks requests and WebSocket handshakes alike."""

    def __init__(self, config: AccessConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._keys = tuple(key.encode() for key in config.keys)
        self._origins = frozenset(_plain(origin) for origin in config.origins)
        self._openings = _Limiter(config.streams_per_minute, clock)

    def check(self, connection: HTTPConnection) -> None:
        """Raises ForbiddenOrigin or Unauthorized."""
        self.check_origin(connection)
        self.check_key(connection)

    def check_origin(self, connection: HTTPConnection) -> None:
        """A proxy may have put the name that the browser knows into X-Forwarded-Host; a page cannot."""
        headers = connection.headers
        origin = headers.get("origin")
        if origin is None or "*" in self._origins or _plain(origin) in self._origins:
            return
        if not any(_is_own(origin, headers.get(name, "")) for name in ("host", "x-forwarded-host")):
            raise ForbiddenOrigin(f"pages of {origin[:100]} may not use this service")

    def check_key(self, connection: HTTPConnection) -> None:
        """``Authorization: Bearer KEY``; or ``key`` in the query, since a browser's WebSocket can send no header."""
        if not self._keys:
            return
        scheme, _, token = connection.headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else connection.query_params.get(KEY, "")
        # All keys are compared, each in constant time: how long it takes says nothing about any of them.
        if not sum(hmac.compare_digest(key, given.encode()) for key in self._keys):
            raise Unauthorized("this service asks for a key" if not given else "this key is not known")

    def count(self, connection: HTTPConnection) -> None:
        """One more stream is about to be opened. Raises TooManyRequests."""
        self._openings.take(_network(connection.client.host if connection.client else ""))


def parameters_in(connection: HTTPConnection) -> list[tuple[str, str]]:
    """The query without the key."""
    return [(name, value) for name, value in connection.query_params.multi_items() if name != KEY]


def _plain(origin: str) -> str:
    return origin.strip().lower().rstrip("/")


def _is_own(origin: str, host: str) -> bool:
    """Whether the origin is at this host; a scheme's own port may be left out of either."""
    scheme, _, place = _plain(origin).partition("://")
    port = _DEFAULT_PORTS.get(scheme, "")
    return bool(place) and place.removesuffix(port) == host.strip().lower().removesuffix(port)


def _network(address: str) -> str:
    """An IPv6 client has 2^64 addresses to choose from."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(ipaddress.ip_network((parsed, 64), strict=False)) if parsed.version == 6 else address


class _Limiter:
    """A bucket of ``per_minute`` tokens for each address, which fills up within a minute."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, when; longest unused first

    def take(self, address: str) -> None:
        """Raises TooManyRequests."""
        if not self._per_minute:
            return
        now_s = self._clock()
        tokens, then_s = self._buckets.pop(address, (float(self._per_minute), now_s))
        tokens = min(self._per_minute, tokens + (now_s - then_s) * self._per_minute / 60)
        allowed = tokens >= 1
        self._buckets[address] = (tokens - 1 if allowed else tokens, now_s)
        if len(self._buckets) > _MAX_ADDRESSES:
            self._buckets.popitem(last=False)
        if not allowed:
            wait_s = (1 - tokens) * 60 / self._per_minute
            raise TooManyRequests(
                f"more than {self._per_minute} streams a minute; try again in {math.ceil(wait_s)} s",
                retry_after_s=wait_s,
            )
