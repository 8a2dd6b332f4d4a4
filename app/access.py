"""Who may come in: from which pages, with which key, how often and for how long.

By default there are no keys and no limit, and a page may connect to the service that it came from. What is not a
browser sends no Origin header and is not concerned by that: the check keeps other people's pages from using a visitor's
browser, and is no protection from anybody else.
"""

import ipaddress
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import HTTPConnection

from app import tokens
from app.keys import Key, KeyLimits, KeyRing, plain_keys
from streaming.errors import ClientError

QUERY_NAMES = ("key", "token", "api_key")
_HEADERS = ("api-key", "x-api-key")
_SCHEMES = ("bearer", "token")  # "token" is Deepgram's
_OPENAI_SUBPROTOCOL = "realtime"
_OPENAI_KEY_PREFIX = "openai-insecure-api-key."
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_MAX_ADDRESSES = 10_000
_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class AccessConfig:
    """``origins``: pages besides the service's own, "*" for all. Without ``keys`` and ``keys_file`` none is asked for.
    ``streams_per_minute``: that an address may open; 0 for any number. ``token_secret``: what tokens are signed with;
    "" for one that this process makes up."""

    origins: frozenset[str] = frozenset()
    keys: tuple[str, ...] = field(default=(), repr=False)
    streams_per_minute: int = 0
    keys_file: Path | None = None
    token_secret: str = field(default="", repr=False)


class ForbiddenOrigin(ClientError):
    """A page that may not use this service."""

    code = "forbidden_origin"


class Unauthorized(ClientError):
    """No key, or a wrong one."""

    code = "unauthorized"


class KeyRequired(ClientError):
    """A token was given where only the key itself will do."""

    code = "key_required"


class TooManyRequests(ClientError):
    """``retry_after_s`` (seconds) says when another try may succeed.

    ``code``: "too_many_requests" in a minute, "too_many_streams" at once, "audio_limit" where the day's audio is used.
    """

    code = "too_many_requests"

    def __init__(self, message: str, *, retry_after_s: float, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Visitor:
    """Who knocks, whatever the transport: an address, and whatever may be a key or a token. A right one is enough."""

    address: str
    credentials: tuple[str, ...] = field(default=(), repr=False)


def visitor(connection: HTTPConnection, *credentials: str) -> Visitor:
    """``credentials``: such as came in a message, besides those of the request."""
    address = connection.client.host if connection.client else ""
    return Visitor(address, (*credentials_in(connection), *credentials))


def credentials_in(connection: HTTPConnection) -> tuple[str, ...]:
    """Every place where a client's library puts its key: headers, WebSocket subprotocols, the query."""
    headers = connection.headers
    scheme, _, token = headers.get("authorization", "").partition(" ")
    found = [token.strip()] if scheme.lower() in _SCHEMES else []
    found += [headers.get(name, "").strip() for name in _HEADERS]
    offered = _subprotocols(connection)
    found += [name.removeprefix(_OPENAI_KEY_PREFIX) for name in offered if name.startswith(_OPENAI_KEY_PREFIX)]
    if len(offered) > 1 and offered[0].lower() in _SCHEMES:
        found.append(offered[1])
    found += [connection.query_params.get(name, "") for name in QUERY_NAMES]
    return tuple(given for given in found if given)


def accepted_subprotocol(connection: HTTPConnection) -> str | None:
    """What the handshake must answer where the key came as a subprotocol; never the key itself.

    A browser gives up where none of those that it offered is chosen.
    """
    offered = _subprotocols(connection)
    if _OPENAI_SUBPROTOCOL in offered:
        return _OPENAI_SUBPROTOCOL
    return offered[0] if offered and offered[0].lower() in _SCHEMES else None


def parameters_in(connection: HTTPConnection) -> list[tuple[str, str]]:
    """The query without keys."""
    return [(name, value) for name, value in connection.query_params.multi_items() if name not in QUERY_NAMES]


def _subprotocols(connection: HTTPConnection) -> list[str]:
    offered = ",".join(connection.headers.getlist("sec-websocket-protocol"))
    return [name.strip() for name in offered.split(",") if name.strip()]


class _Usage:
    """What a key has used: places now, audio today (UTC). Kept in memory: a restart forgets it."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        self._day = 0
        self._audio_s = 0.0
        self.open = 0

    def check_audio(self, limits: KeyLimits) -> None:
        """Raises TooManyRequests."""
        self.spend(0.0, limits)

    def spend(self, audio_s: float, limits: KeyLimits) -> None:
        """Raises TooManyRequests where the day's minutes are used with that."""
        now_s = self._wall_clock()
        if (day := int(now_s // _DAY_S)) != self._day:
            self._day, self._audio_s = day, 0.0
        self._audio_s += audio_s
        if limits.minutes_a_day and self._audio_s >= limits.minutes_a_day * 60:
            raise TooManyRequests(
                f"this key's {limits.minutes_a_day:g} minutes of audio a day are used; they begin anew at 0:00 UTC",
                retry_after_s=(day + 1) * _DAY_S - now_s,
                code="audio_limit",
            )


class Grant:
    """What somebody was let in with. ``key_id``: "" where no key is asked for; ``note``: its token's, "" without."""

    def __init__(
        self, key_id: str, limits: KeyLimits, usage: _Usage, *, note: str = "", is_token: bool = False
    ) -> None:
        self.key_id = key_id
        self.limits = limits
        self.note = note
        self.is_token = is_token
        self._usage = usage

    def spend(self, audio_s: float) -> None:
        """So many more seconds of audio were taken. Raises TooManyRequests: no more may be."""
        self._usage.spend(audio_s, self.limits)

    @contextmanager
    def place(self) -> Iterator[None]:
        """One of those that the key may hold at once. Raises TooManyRequests."""
        limit = self.limits.streams
        self._usage.check_audio(self.limits)
        if limit and self._usage.open >= limit:
            raise TooManyRequests(
                f"this key has {limit} streams open, which is all it may have at once",
                retry_after_s=5.0,  # nobody knows when one of them ends
                code="too_many_streams",
            )
        self._usage.open += 1
        try:
            yield
        finally:
            self._usage.open -= 1


class Access:
    """Checks requests and WebSocket handshakes alike; the one place where keys, tokens and limits are known."""

    def __init__(
        self,
        config: AccessConfig,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        complain: Callable[[str], None] = lambda message: None,
    ) -> None:
        """``complain`` is told of a key file that was changed into nonsense. Raises BadKeyFile where it is now."""
        self._origins = frozenset(_plain(origin) for origin in config.origins)
        self._ring = KeyRing(plain_keys(config.keys), config.keys_file, clock, complain)
        self._secret = config.token_secret.encode() or secrets.token_bytes(32)
        self._wall_clock = wall_clock
        self._openings = _Limiter(clock)
        self._requests = _Limiter(clock)
        self._per_address = config.streams_per_minute
        self._usages: dict[str, _Usage] = {}  # one a key

    # Coming in -----------------------------------------------------------------------------------------------------

    @contextmanager
    def stream(self, connection: HTTPConnection, *credentials: str) -> Iterator[Grant]:
        """A live stream from its opening to its end. ``credentials``: such as came in a message.

        Raises ForbiddenOrigin, Unauthorized or TooManyRequests.
        """
        self.check_origin(connection)
        with self.stream_of(visitor(connection, *credentials)) as grant:
            yield grant

    @contextmanager
    def stream_of(self, visitor: Visitor, *, is_vouched_for: bool = False) -> Iterator[Grant]:
        """A live stream of what sends no HTTP. ``is_vouched_for``: a signature has shown who it is, so that no key is
        asked for and only its address counts. Raises Unauthorized or TooManyRequests."""
        grant = self._everybody() if is_vouched_for else self.grant(visitor)
        self._count_address(visitor.address)
        with self._placed(grant):
            yield grant

    @contextmanager
    def recording(self, connection: HTTPConnection, *credentials: str) -> Iterator[Grant]:
        """A recording that is to be transcribed. Raises Unauthorized or TooManyRequests."""
        grant = self.grant(visitor(connection, *credentials))
        with self._placed(grant):
            yield grant

    @contextmanager
    def _placed(self, grant: Grant) -> Iterator[None]:
        self._requests.take(grant.key_id, grant.limits.per_minute)
        with grant.place():
            yield

    def _count_address(self, address: str) -> None:
        self._openings.take(_network(address), self._per_address)

    # Single checks -------------------------------------------------------------------------------------------------

    def check(self, connection: HTTPConnection) -> Grant:
        """Raises ForbiddenOrigin or Unauthorized."""
        self.check_origin(connection)
        return self.check_key(connection)

    def check_origin(self, connection: HTTPConnection) -> None:
        """A proxy may have put the name that the browser knows into X-Forwarded-Host; a page cannot."""
        headers = connection.headers
        origin = headers.get("origin")
        if origin is None or "*" in self._origins or _plain(origin) in self._origins:
            return
        if not any(_is_own(origin, headers.get(name, "")) for name in ("host", "x-forwarded-host")):
            raise ForbiddenOrigin(f"pages of {origin[:100]} may not use this service")

    def check_key(self, connection: HTTPConnection) -> Grant:
        """Raises Unauthorized."""
        return self.grant(visitor(connection))

    def count(self, connection: HTTPConnection) -> None:
        """One more stream is about to be opened. Raises TooManyRequests. ``stream`` does this and more."""
        self._count_address(connection.client.host if connection.client else "")

    def grant(self, visitor: Visitor) -> Grant:
        """By the first of its credentials that is right. Raises Unauthorized."""
        refusal = Unauthorized("this key is not known" if visitor.credentials else "this service asks for a key")
        is_refused = self._ring.is_asked_for
        for credential in visitor.credentials:
            if (claims := tokens.read_token(credential, self._secret)) is not None:
                try:
                    return self._by_token(claims)
                except Unauthorized as error:
                    refusal, is_refused = error, True
        key = self._ring.find(visitor.credentials)
        if key is not None:
            return self._by_key(key)
        if is_refused:
            raise refusal
        return self._everybody()

    def _by_token(self, claims: tokens.Claims) -> Grant:
        if claims.expires_at <= self._wall_clock():
            raise Unauthorized("this token has expired")
        if not claims.key_id and not self._ring.is_asked_for:
            return Grant("", KeyLimits(), self._usage(""), note=claims.note, is_token=True)
        key = self._ring.get(claims.key_id)
        if key is None:
            raise Unauthorized("the key of this token is not known any more")
        return self._by_key(key, note=claims.note, is_token=True)

    def _by_key(self, key: Key, *, note: str = "", is_token: bool = False) -> Grant:
        return Grant(key.key_id, key.limits, self._usage(key.key_id), note=note, is_token=is_token)

    def _everybody(self) -> Grant:
        return Grant("", KeyLimits(), self._usage(""))

    def _usage(self, key_id: str) -> _Usage:
        return self._usages.setdefault(key_id, _Usage(self._wall_clock))

    # Tokens --------------------------------------------------------------------------------------------------------

    def issue(self, grant: Grant, ttl_s: int, *, note: str = "", prefix: str = tokens.PREFIX) -> tuple[str, int]:
        """A token that is as good as the grant's key for ``ttl_s`` seconds, and when it expires (Unix time, seconds).

        Its limits are the key's, and what it uses counts as the key's. ``note`` comes back as ``Grant.note``; whoever
        has the token can read it, and cannot change it. Raises KeyRequired where the grant is by a token itself, which
        could renew itself for ever, and ValueError where ``ttl_s`` or ``note`` is out of range: to be checked before.
        """
        if grant.is_token:
            raise KeyRequired("a token cannot make tokens; this needs the key itself")
        if not tokens.MIN_TTL_S <= ttl_s <= tokens.MAX_TTL_S or len(note) > tokens.MAX_NOTE_CHARS:
            raise ValueError("ttl_s or note is out of range")
        expires_at = math.ceil(self._wall_clock()) + ttl_s
        return tokens.write_token(
            tokens.Claims(grant.key_id, expires_at, note), self._secret, prefix=prefix
        ), expires_at


def is_public(host: str) -> bool:
    """Whether an address to listen on can be reached from other machines. A name may be anything but "localhost"."""
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


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
    """A bucket of ``per_minute`` tokens for each address or key, which fills up within a minute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, when; longest unused first

    def take(self, who: str, per_minute: int) -> None:
        """0: any number. Raises TooManyRequests."""
        if not per_minute:
            return
        now_s = self._clock()
        left, then_s = self._buckets.pop(who, (float(per_minute), now_s))
        left = min(per_minute, left + (now_s - then_s) * per_minute / 60)
        allowed = left >= 1
        self._buckets[who] = (left - 1 if allowed else left, now_s)
        if len(self._buckets) > _MAX_ADDRESSES:
            self._buckets.popitem(last=False)
        if not allowed:
            wait_s = (1 - left) * 60 / per_minute
            raise TooManyRequests(
                f"more than {per_minute} streams a minute; try again in {math.ceil(wait_s)} s",
                retry_after_s=wait_s,
            )
