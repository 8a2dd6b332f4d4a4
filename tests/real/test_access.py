"""Origins, keys and limits at every door of the service."""

import asyncio
import contextlib
from collections.abc import Iterator

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from tests.support.server import EOF, Conversation, Server, listen, serving

PAGE = "https://app.example"
GOOD = {"Authorization": "Bearer second"}
OFFER = {"type": "offer", "sdp": "v=0", "webrtc_id": "8c4d6d9c-32ac-4c57-a0e4-1a3f3b8d6f10"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    turn = {"turn": "static", "turn_urls": "turn:turn.example:3478", "turn_username": "u", "turn_credential": "c"}
    with serving(api_keys="first, second", allowed_origins=PAGE, **turn) as running:
        yield running


async def stream(server: Server, query: str = "", **headers: str) -> Conversation:
    async with connect(f"{server.stream_url()}{query}", additional_headers=headers, proxy=None) as connection:
        with contextlib.suppress(ConnectionClosed):  # where it was refused meanwhile
            await connection.send(EOF)
        return await listen(connection)


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


async def test_a_stream_needs_a_key_and_a_page_that_may(server: Server) -> None:
    for good in (await stream(server, **GOOD), await stream(server, "key=first&language=en")):
        assert [event["type"] for event in good.events] == ["ready", "done"]
    assert good.events[0]["config"]["language"] == "en"
    keyless = await stream(server)
    assert (keyless.errors, keyless.close_code) == (["unauthorized"], 4401)
    foreign = await stream(server, **GOOD, Origin="https://evil.example")
    assert (foreign.errors, foreign.close_code) == (["forbidden_origin"], 4403)
    assert (await stream(server, **GOOD, Origin=PAGE)).close_code == 1000
    assert (await stream(server, **GOOD, Origin=server.url(""))).close_code == 1000


def test_an_offer_needs_a_key_and_a_page_that_may(server: Server) -> None:
    url = server.url("/v1/rtc/offer")
    assert code_of(httpx.post(url, json=OFFER)) == (401, "unauthorized")
    assert httpx.post(url, json=OFFER).headers["WWW-Authenticate"] == "Bearer"
    foreign = httpx.post(url, json=OFFER, headers=GOOD | {"Origin": "https://evil.example"})
    assert code_of(foreign) == (403, "forbidden_origin")
    assert code_of(httpx.post(url, json=OFFER, headers=GOOD | {"Origin": PAGE})) == (400, "no_data_channel")
    assert code_of(httpx.post(f"{url}?key=first", json=OFFER)) == (400, "no_data_channel")


def test_the_servers_are_told_to_those_who_may_connect(server: Server) -> None:
    url = server.url("/v1/rtc-config")
    assert code_of(httpx.get(url)) == (401, "unauthorized")
    assert code_of(httpx.get(url, headers=GOOD | {"Origin": "null"})) == (403, "forbidden_origin")
    told = httpx.get(url, headers=GOOD)
    server_ = {"urls": ["turn:turn.example:3478"], "username": "u", "credential": "c"}
    assert told.json() == {"iceServers": [server_], "ttl_s": 86_400}
    assert told.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/audio/transcriptions"), ("POST", "/api/v1/audio/translations"), ("GET", "/v1/models")],
)
def test_files_need_a_key(server: Server, method: str, path: str) -> None:
    assert code_of(httpx.request(method, server.url(path))) == (401, "unauthorized")
    assert httpx.request(method, server.url(path), headers=GOOD).status_code != 401


@pytest.mark.parametrize("path", ["/", "/healthz", "/readyz", "/metrics"])
def test_the_page_and_the_probes_need_none(server: Server, path: str) -> None:
    assert server.get(path).status_code == 200


def test_a_page_that_may_is_told_so_by_its_browser(server: Server) -> None:
    asks = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = httpx.options(server.url("/v1/rtc/offer"), headers=asks)
    assert allowed.headers["Access-Control-Allow-Origin"] == PAGE
    refused = httpx.options(server.url("/v1/rtc/offer"), headers=asks | {"Origin": "https://evil.example"})
    assert "Access-Control-Allow-Origin" not in refused.headers


def test_settings_show_no_secret(server: Server) -> None:
    assert "second" not in server.log


async def test_an_address_may_open_so_many_streams_a_minute_of_any_kind() -> None:
    with serving(streams_per_minute=3) as running:
        offers = [await asyncio.to_thread(httpx.post, running.url("/v1/rtc/offer"), json=OFFER) for _ in range(2)]
        assert [code_of(offer) for offer in offers] == [(400, "no_data_channel")] * 2
        assert (await stream(running)).close_code == 1000
        refused = await stream(running)
        assert (refused.errors, refused.close_code) == (["too_many_requests"], 4429)
        late = await asyncio.to_thread(httpx.post, running.url("/v1/rtc/offer"), json=OFFER)
        assert code_of(late) == (429, "too_many_requests")
        assert 0 < int(late.headers["Retry-After"]) <= 20
        candidate = {"type": "ice-candidate", "webrtc_id": OFFER["webrtc_id"], "candidate": {}}
        trickle = await asyncio.to_thread(httpx.post, running.url("/v1/rtc/offer"), json=candidate)
        assert code_of(trickle) == (404, "unknown_connection")
