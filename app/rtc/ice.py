"""Which STUN and TURN servers a connection may use: none by default, fixed ones, or a provider's for a while.

A TURN server relays what cannot go directly. Providers give user names and passwords that expire, so they are fetched
for the page and for the service alike, kept, and renewed before they run out. FastRTC has helpers for the same
providers; they read the environment themselves, fall back to a Hugging Face token that was not meant for them, raise
bare Exceptions, and need a package for Twilio.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx
import structlog

from streaming.errors import ServerError

_SCHEMES = ("stun:", "stuns:", "turn:", "turns:")
_MAX_SERVERS = 20
_CLOUDFLARE = "https://rtc.live.cloudflare.com"
_HUGGING_FACE = "https://turn.fastrtc.org"  # Cloudflare's, for whoever has a token of the hub; run by FastRTC
_TWILIO = "https://api.twilio.com"


@dataclass(frozen=True, slots=True)
class IceServer:
    """One server by its URLs, with a name and a password where it wants them."""

    urls: tuple[str, ...]
    username: str | None = None
    credential: str | None = None

    def as_json(self) -> dict[str, object]:
        """A browser's RTCIceServer."""
        secret = {"username": self.username, "credential": self.credential} if self.username is not None else {}
        return {"urls": list(self.urls), **secret}


@dataclass(frozen=True, slots=True)
class IceServers:
    """What may be used for the next ``ttl_s`` seconds."""

    servers: tuple[IceServer, ...] = ()
    ttl_s: float = 86_400.0

    def as_json(self) -> dict[str, object]:
        return {"iceServers": [server.as_json() for server in self.servers], "ttl_s": int(self.ttl_s)}


class IceSource(Protocol):
    """Where the servers come from."""

    async def get(self) -> IceServers:
        """Never raises: without a provider there is a connection still, if a direct one is possible."""
        ...


@dataclass(frozen=True, slots=True)
class FixedIce:
    """The same servers for ever."""

    servers: IceServers = field(default_factory=IceServers)

    async def get(self) -> IceServers:
        return self.servers


# --- providers -------------------------------------------------------------------------------------------------------


class TurnUnavailable(ServerError):
    """The provider gave no credentials."""

    code = "turn_unavailable"


@dataclass(frozen=True, slots=True)
class Provider:
    """Asks for credentials that hold for ``ttl_s`` seconds. ``request`` makes the HTTP request anew each time."""

    request: Callable[[float], httpx.Request]
    ttl_s: float = 7_200.0
    timeout_s: float = 3.0

    async def fetch(self) -> IceServers:
        """Raises TurnUnavailable."""
        try:
            async with httpx.AsyncClient(timeout=self.timeout_s) as client:
                response = await client.send(self.request(self.ttl_s))
            response.raise_for_status()
            return IceServers(parse_servers(response.json()), self.ttl_s)
        except httpx.HTTPStatusError as error:  # its text has the URL, and so an account's name
            raise TurnUnavailable(f"the TURN provider answered with status {error.response.status_code}") from None
        except (httpx.HTTPError, ValueError) as error:
            raise TurnUnavailable(f"the TURN provider gave no credentials: {error!r}") from error


def cloudflare(key_id: str, token: str, base: str = _CLOUDFLARE) -> Callable[[float], httpx.Request]:
    """https://developers.cloudflare.com/realtime/turn/generate-credentials/"""
    url = f"{base}/v1/turn/keys/{key_id}/credentials/generate-ice-servers"
    return lambda ttl_s: httpx.Request("POST", url, headers=_bearer(token), json={"ttl": int(ttl_s)})


def hugging_face(token: str, base: str = _HUGGING_FACE) -> Callable[[float], httpx.Request]:
    """Cloudflare's servers for a hub token; https://fastrtc.org/deployment/."""
    url = f"{base}/credentials"
    return lambda ttl_s: httpx.Request("GET", url, headers=_bearer(token), params={"ttl": int(ttl_s)})


def twilio(account_sid: str, token: str, base: str = _TWILIO) -> Callable[[float], httpx.Request]:
    """https://www.twilio.com/docs/stun-turn/api"""
    url = f"{base}/2010-04-01/Accounts/{account_sid}/Tokens.json"
    authorization = httpx.BasicAuth(account_sid, token)

    def request(ttl_s: float) -> httpx.Request:
        return next(authorization.auth_flow(httpx.Request("POST", url, data={"Ttl": str(int(ttl_s))})))

    return request


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def parse_servers(body: Any) -> tuple[IceServer, ...]:
    """``iceServers`` of Cloudflare's answer, or ``ice_servers`` of Twilio's. Raises ValueError where there are none."""
    given = (body.get("iceServers") or body.get("ice_servers")) if isinstance(body, dict) else None
    entries = given if isinstance(given, list) else [given]
    servers = tuple(_parse_server(entry) for entry in entries[:_MAX_SERVERS])
    if not any(url.startswith("turn") for server in servers for url in server.urls):
        raise ValueError("there is no TURN server in the answer")
    return servers


def _parse_server(entry: Any) -> IceServer:
    if not isinstance(entry, dict):
        raise ValueError("a server is no object")
    urls = entry.get("urls")
    username, credential = entry.get("username"), entry.get("credential")
    return IceServer(
        parse_urls([urls] if isinstance(urls, str) else urls),
        username if isinstance(username, str) else None,
        credential if isinstance(credential, str) else None,
    )


def parse_urls(urls: Any) -> tuple[str, ...]:
    """Raises ValueError unless it is a list of STUN and TURN URLs."""
    if not isinstance(urls, list) or not urls or not all(isinstance(u, str) and u.startswith(_SCHEMES) for u in urls):
        raise ValueError("urls must be URLs that begin with stun:, stuns:, turn: or turns:")
    return tuple(urls)


# --- kept for a while ------------------------------------------------------------------------------------------------


class KeptIce:
    """A provider's servers, renewed when half of their time is over, so that whoever gets them has the other half.

    A provider that cannot be reached is asked again after ``retry_s``; until then what is left holds, or nothing.
    """

    def __init__(
        self,
        provider: Provider,
        logger: structlog.stdlib.BoundLogger,
        *,
        retry_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._provider = provider
        self._logger = logger
        self._retry_s = retry_s
        self._clock = clock
        self._kept = IceServers((), 0.0)
        self._expires_s = 0.0  # on the clock, as is the next
        self._renew_s: float | None = None  # None: now
        self._renewal = asyncio.Lock()
        self._is_failing = False

    async def get(self) -> IceServers:
        async with self._renewal:
            if self._renew_s is None or self._clock() >= self._renew_s:
                await self._renew()
        return self._current()

    def _current(self) -> IceServers:
        now_s = self._clock()
        if self._kept.servers and now_s < self._expires_s:
            return IceServers(self._kept.servers, self._expires_s - now_s)
        return IceServers((), max(0.0, (self._renew_s or now_s) - now_s))

    async def _renew(self) -> None:
        try:
            self._kept = await self._provider.fetch()
        except TurnUnavailable as error:
            if not self._is_failing:
                self._logger.warning("turn_unavailable", reason=error.message)
            self._is_failing = True
            self._renew_s = self._clock() + self._retry_s
        else:
            self._is_failing = False
            now_s = self._clock()
            self._expires_s, self._renew_s = now_s + self._kept.ttl_s, now_s + self._kept.ttl_s / 2
