"""STUN and TURN servers: fixed, or from a provider, played by a server on loopback."""

import asyncio
import base64
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import httpx
import pytest
import structlog
from aiortc.rtcicetransport import connection_kwargs

from app.rtc.connection import configuration
from app.rtc.ice import (
    FixedIce,
    IceServer,
    IceServers,
    KeptIce,
    Provider,
    TurnUnavailable,
    cloudflare,
    hugging_face,
    parse_servers,
    twilio,
)
from app.settings import load_settings

CLOUDFLARE = {
    "iceServers": [
        {"urls": ["stun:stun.cloudflare.com:3478"]},
        {"urls": ["turn:a:3478?transport=udp", "turns:a:443?transport=tcp"], "username": "u", "credential": "c"},
    ]
}
OLD_CLOUDFLARE = {"iceServers": {"urls": "turn:turn.cloudflare.com:3478", "username": "u", "credential": "c"}}
TWILIO = {
    "ttl": "7200",
    "ice_servers": [
        {"url": "stun:global.stun.twilio.com:3478", "urls": "stun:global.stun.twilio.com:3478"},
        {"url": "turn:x", "urls": "turn:global.turn.twilio.com:3478?transport=udp", "username": "u", "credential": "c"},
    ],
}


# --- what the servers are --------------------------------------------------------------------------------------------


async def test_by_default_there_is_no_server_of_anybody() -> None:
    servers = await FixedIce().get()
    assert servers.as_json() == {"iceServers": [], "ttl_s": 86_400}
    assert configuration(servers).iceServers == []


@pytest.mark.parametrize("answer", [CLOUDFLARE, OLD_CLOUDFLARE, TWILIO])
def test_every_providers_answer_is_understood_by_browser_and_aiortc(answer: dict[str, object]) -> None:
    servers = IceServers(parse_servers(answer), 60)
    shown = servers.as_json()["iceServers"]
    assert isinstance(shown, list)
    assert shown[-1]["username"] == "u"
    assert all(isinstance(server["urls"], list) for server in shown)
    understood = configuration(servers).iceServers
    assert understood is not None
    assert connection_kwargs(understood)["turn_password"] == "c"


def test_a_server_without_a_name_shows_none() -> None:
    assert IceServer(("stun:a",)).as_json() == {"urls": ["stun:a"]}


def test_urls_that_aiortc_cannot_read_are_for_browsers_alone() -> None:
    servers = IceServers((IceServer(("turn:[2001:db8::1]:3478", "turn:a:1")), IceServer(("stun:a:b:c",))))
    assert len(servers.as_json()["iceServers"]) == 2  # type: ignore[arg-type]
    assert [server.urls for server in configuration(servers).iceServers or []] == [["turn:a:1"]]


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {},
        {"iceServers": []},
        {"iceServers": "turn:a"},
        {"iceServers": [{"urls": []}]},
        {"iceServers": [{"urls": [7]}]},
        {"iceServers": [{"urls": "http://a"}]},
        {"iceServers": [{"urls": "stun:a"}]},
        {"iceServers": [None]},
    ],
)
def test_an_answer_without_a_turn_server_is_none(answer: object) -> None:
    with pytest.raises(ValueError, match=r"urls|server"):
        parse_servers(answer)


# --- asking a provider -----------------------------------------------------------------------------------------------


@dataclass
class FakeProvider:
    """One connection a request, and what was asked."""

    url: str = ""
    answer: bytes = b""
    status: int = 200
    hold: asyncio.Event | None = None
    asked: list[bytes] = field(default_factory=list)
    is_asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        found = re.search(rb"content-length: (\d+)", head.lower())
        length = int(found[1]) if found else 0
        self.asked.append(head + await reader.readexactly(length))
        self.is_asked.set()
        if self.hold is not None:
            await self.hold.wait()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (self.status, len(self.answer)) + self.answer)
        writer.close()


@pytest.fixture
async def fake(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeProvider]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    provider = FakeProvider(answer=json.dumps(CLOUDFLARE).encode())
    server = await asyncio.start_server(provider.serve, "127.0.0.1", 0)
    provider.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield provider
    if provider.hold is not None:
        provider.hold.set()
    server.close()


Ask = Callable[[float], httpx.Request]


@pytest.mark.parametrize(
    ("ask", "first_line", "authorization", "body"),
    [
        (
            lambda base: cloudflare("id", "token", base),
            b"POST /v1/turn/keys/id/credentials/generate-ice-servers",
            b"bearer token",
            b'{"ttl":90}',
        ),
        (lambda base: hugging_face("token", base), b"GET /credentials?ttl=90", b"bearer token", b""),
        (
            lambda base: twilio("AC1", "token", base),
            b"POST /2010-04-01/Accounts/AC1/Tokens.json",
            b"basic " + base64.b64encode(b"AC1:token").lower(),
            b"Ttl=90",
        ),
    ],
)
async def test_each_provider_is_asked_as_it_wants_to_be(
    fake: FakeProvider, ask: Callable[[str], Ask], first_line: bytes, authorization: bytes, body: bytes
) -> None:
    servers = await Provider(ask(fake.url), ttl_s=90).fetch()
    [asked] = fake.asked
    assert asked.startswith(first_line + b" HTTP/1.1\r\n")
    assert b"authorization: " + authorization + b"\r\n" in asked.lower()
    assert asked.endswith(b"\r\n\r\n" + body)
    assert servers == IceServers(parse_servers(CLOUDFLARE), 90)


@pytest.mark.parametrize(
    ("status", "answer"), [(401, b"{}"), (500, b""), (200, b"<html>"), (200, b"{}"), (200, b"\xff")]
)
async def test_a_useless_answer_is_said_to_be_one(fake: FakeProvider, status: int, answer: bytes) -> None:
    fake.status, fake.answer = status, answer
    with pytest.raises(TurnUnavailable) as caught:
        await Provider(hugging_face("secret", fake.url)).fetch()
    assert "secret" not in caught.value.message


async def test_a_provider_that_hangs_is_not_waited_for(fake: FakeProvider) -> None:
    fake.hold = asyncio.Event()
    async with asyncio.timeout(5):
        with pytest.raises(TurnUnavailable):
            await Provider(hugging_face("token", fake.url), timeout_s=0.2).fetch()


# --- kept for a while ------------------------------------------------------------------------------------------------


class Kept:
    """What keeps the fake provider's servers, with a clock of its own."""

    def __init__(self, fake: FakeProvider) -> None:
        self.now_s = 50.0
        self.warnings: list[str] = []
        logger = structlog.wrap_logger(None, processors=[self._note], wrapper_class=structlog.stdlib.BoundLogger)
        provider = Provider(hugging_face("token", fake.url), ttl_s=100, timeout_s=2)
        self.source = KeptIce(provider, logger, retry_s=30, clock=lambda: self.now_s)

    def _note(self, logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        self.warnings.append(event["event"])
        raise structlog.DropEvent

    async def ttl_s(self) -> tuple[int, float]:
        servers = await self.source.get()
        return len(servers.servers), servers.ttl_s


async def test_half_of_their_time_they_are_kept(fake: FakeProvider) -> None:
    kept = Kept(fake)
    assert await kept.ttl_s() == (2, 100)
    kept.now_s += 49
    assert await kept.ttl_s() == (2, 51)
    assert len(fake.asked) == 1
    kept.now_s += 1
    assert await kept.ttl_s() == (2, 100)
    assert len(fake.asked) == 2


async def test_many_at_once_ask_once(fake: FakeProvider) -> None:
    kept = Kept(fake)
    fake.hold = asyncio.Event()
    waiting = [asyncio.create_task(kept.source.get()) for _ in range(20)]
    await fake.is_asked.wait()
    fake.hold.set()
    assert {len((await one).servers) for one in waiting} == {2}
    assert len(fake.asked) == 1


async def test_who_gives_up_waiting_leaves_the_others_theirs(fake: FakeProvider) -> None:
    kept = Kept(fake)
    fake.hold = asyncio.Event()
    first, second = (asyncio.create_task(kept.source.get()) for _ in range(2))
    await fake.is_asked.wait()
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first
    fake.hold.set()
    assert len((await second).servers) == 2


async def test_a_failure_leaves_what_is_left_is_said_once_and_tried_again(fake: FakeProvider) -> None:
    kept = Kept(fake)
    await kept.source.get()
    fake.status = 503
    kept.now_s += 60
    assert await kept.ttl_s() == (2, 40)
    kept.now_s += 10
    assert await kept.ttl_s() == (2, 30)
    assert len(fake.asked) == 2
    kept.now_s += 31
    assert await kept.ttl_s() == (0, 30)
    assert kept.warnings == ["turn_unavailable"]
    fake.status = 200
    kept.now_s += 31
    assert await kept.ttl_s() == (2, 100)
    fake.status = 503
    kept.now_s += 51
    await kept.ttl_s()
    assert kept.warnings == ["turn_unavailable"] * 2


async def test_a_provider_that_never_answers_leaves_connections_without_turn(fake: FakeProvider) -> None:
    fake.status = 500
    kept = Kept(fake)
    for _ in range(5):
        assert await kept.ttl_s() == (0, 30)
    assert len(fake.asked) == 1


# --- the settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"turn": "static"},
        {"turn": "static", "turn_urls": "turn:a, http://b"},
        {"turn": "cloudflare", "turn_username": "id"},
        {"turn": "twilio", "turn_credential": "token"},
        {"turn": "somebody"},
    ],
)
def test_incomplete_settings_are_refused_at_the_start(given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="HARK_TURN"):
        load_settings(**given)


def test_settings_that_hold_together() -> None:
    load_settings(turn="static", turn_urls="turn:a:3478, stun:b")
    load_settings(turn="hugging_face")
    shown = load_settings(
        turn="twilio", turn_username="AC1", turn_credential="s3cret", api_keys="k3y"
    ).model_dump_json()
    assert "s3cret" not in shown
    assert "k3y" not in shown
    assert '"key"' not in shown
