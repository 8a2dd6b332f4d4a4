"""Origins, keys and limits at every door of the service."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from app.keys import KeyLimits, add_key
from tests.support.server import EOF, PAUSE, Conversation, Server, eventually, hear, listen, say, serving

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


# --- a key's limits, whatever it is used for -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[str, str]]]:
    file: Path = tmp_path_factory.mktemp("keys") / "keys.json"
    limits = {"two": KeyLimits(streams=2), "short": KeyLimits(minutes_a_day=0.02), "three": KeyLimits(per_minute=3)}
    keys = {name: add_key(file, name, of_key) for name, of_key in limits.items()}
    with serving(keys_file=file, max_files=4) as running:
        yield running, keys


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_a_keys_streams_are_counted_over_all_transports(limited: tuple[Server, dict[str, str]]) -> None:
    server, keys = limited
    headers, url = bearer(keys["two"]), f"{server.stream_url()}"
    made = await asyncio.to_thread(httpx.post, server.url("/v1/tokens"), headers=headers)
    async with connect(url, additional_headers=headers, proxy=None) as first:
        await hear(first, "ready")
        async with connect(f"{url}token={made.json()['token']}", proxy=None) as second:
            await hear(second, "ready")
            refused = await stream(server, **headers)
            assert (refused.errors, refused.close_code) == (["too_many_streams"], 4429)
            for path, wanted in (("/v1/rtc/offer", {"json": OFFER}), ("/v1/audio/transcriptions", {})):
                late = await asyncio.to_thread(httpx.post, server.url(path), headers=headers, **wanted)
                assert code_of(late) == (429, "too_many_streams")
                assert int(late.headers["Retry-After"]) == 5
        await eventually(
            lambda: httpx.post(server.url("/v1/rtc/offer"), headers=headers, json=OFFER).status_code == 400
        )
    assert (await stream(server, **headers)).close_code == 1000


async def test_a_key_begins_so_many_a_minute_over_all_transports(limited: tuple[Server, dict[str, str]]) -> None:
    server, keys = limited
    headers = bearer(keys["three"])
    assert (await stream(server, **headers)).close_code == 1000
    await asyncio.to_thread(httpx.post, server.url("/v1/rtc/offer"), headers=headers, json=OFFER)
    await asyncio.to_thread(httpx.post, server.url("/v1/audio/transcriptions"), headers=headers)
    refused = await stream(server, **headers)
    assert (refused.errors, refused.close_code) == (["too_many_requests"], 4429)
    assert (await asyncio.to_thread(httpx.get, server.url("/v1/models"), headers=headers)).status_code == 200


async def test_a_stream_ends_with_its_keys_minutes(limited: tuple[Server, dict[str, str]]) -> None:
    """1.2 s of audio: what was said until then is answered."""
    server, keys = limited
    async with connect(server.stream_url(), additional_headers=bearer(keys["short"]), proxy=None) as connection:
        await connection.send(say("alpha", *PAUSE, *PAUSE))
        heard = await listen(connection)
    assert heard.texts == ["alpha"]
    assert (heard.errors, heard.close_code) == (["audio_limit"], 4429)
    refused = await stream(server, **bearer(keys["short"]))
    assert (refused.errors, refused.close_code) == (["audio_limit"], 4429)


@pytest.mark.parametrize("offered", [["token", "{key}"], ["realtime", "openai-insecure-api-key.{key}"]])
async def test_a_browser_gives_its_key_as_a_subprotocol(
    limited: tuple[Server, dict[str, str]], offered: list[str]
) -> None:
    server, keys = limited
    subprotocols = [Subprotocol(name.format(key=keys["two"])) for name in offered]
    async with connect(server.stream_url(), subprotocols=subprotocols, proxy=None) as connection:
        assert connection.subprotocol == offered[0]
        await hear(connection, "ready")


def test_no_key_stands_in_the_log(limited: tuple[Server, dict[str, str]]) -> None:
    server, keys = limited
    assert server.log
    assert [text for text in (*keys.values(), "hark_tmp_", "alpha") if text in server.log] == []


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
