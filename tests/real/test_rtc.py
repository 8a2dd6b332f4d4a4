"""``/v1/rtc/offer`` with a WebRTC client on loopback: how it is used, refused and left, and what then remains.

The scripted engine reads words from the audio's level, which Opus does not keep: the client speaks G.711 to it. Real
speech is Opus.
"""

import asyncio
import contextlib
import gc
import json
import re
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from aiortc import RTCConfiguration, RTCPeerConnection
from fastapi import FastAPI

from app.main import create_app
from app.settings import load_settings
from bench.corpus import read_audio
from models.scripted import encode_words
from streaming.audio import decode_samples
from streaming.config import Encoding
from tests.support.corpus import corpus_row
from tests.support.rtc import Answer, Call, EncodedTrack, calling, offer_to, on_loopback, opus_packets
from tests.support.server import EOF, PAUSE, Server, eventually, hear, serving, streaming
from tests.support.weights import require_vad, require_weights

SILENCE_S = 30
GONE_S = 12.0  # a client that has vanished: 3 s without audio, the farewell that nobody reads, and a busy machine


@pytest.fixture(scope="module", autouse=True)
def _loopback() -> Iterator[None]:
    with on_loopback():
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Short of patience, so that what is to be given up is given up soon."""
    with serving(rtc_host="127.0.0.1", rtc_connect_timeout_s=4, rtc_audio_timeout_s=3, max_sessions=2) as running:
        yield running


@pytest.fixture(autouse=True)
async def _all_slots_are_free_again(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    yield
    if "server" in request.fixturenames:
        running = request.getfixturevalue("server")
        await eventually(lambda: running.metric("hark_sessions_open") == 0, GONE_S)


def mulaw_packets(audio: np.ndarray[Any, np.dtype[np.int16]]) -> list[bytes]:
    """16 kHz → G.711 at 8 kHz, 20 ms a packet; after it, silence."""
    levels = decode_samples(bytes(range(256)), Encoding.MULAW) * 32_768
    order = np.argsort(levels)
    ranks = np.clip(np.searchsorted(levels[order], audio[::2]), 0, 255)
    coded = order[ranks].astype(np.uint8).tobytes()
    quiet = bytes([int(order[np.searchsorted(levels[order], 0)])]) * 160
    return [coded[start : start + 160].ljust(160, quiet[:1]) for start in range(0, len(coded), 160)] + [quiet] * (
        SILENCE_S * 50
    )


def saying(*words: str | None) -> EncodedTrack:
    return EncodedTrack(mulaw_packets(encode_words(words)))


def in_mulaw(answer: Answer) -> Answer:
    """The offer as from a client that knows no other codec."""

    async def answered(offer: dict[str, str]) -> dict[str, Any]:
        sdp = re.sub(r"(m=audio \d+ \S+).*", r"\1 0", offer["sdp"])
        sdp = re.sub(r"a=(rtpmap|fmtp|rtcp-fb):(?!0 ).*\r\n", "", sdp)
        return await answer({**offer, "sdp": sdp})

    return answered


def at(server: Server, query: str = "") -> Answer:
    return in_mulaw(offer_to(server.url(f"/v1/rtc/offer{query}")))


@contextlib.asynccontextmanager
async def speaking(server: Server, *words: str | None, query: str = "") -> AsyncIterator[Call]:
    async with calling(at(server, query), saying(*words)) as call:
        yield call


async def closed(call: Call, within_s: float = 5.0) -> None:
    """Returns when the service has closed the data channel and the connection."""
    await eventually(lambda: call.channel.readyState == "closed" and call.peer.connectionState == "closed", within_s)


def words_of(call: Call) -> list[set[str]]:
    """Of each final. How often a word is read depends on where in it the connection began to be heard."""
    return [set(text.split()) for text in call.texts]


# --- what it is for --------------------------------------------------------------------------------------------------


async def test_a_call_from_ready_to_done(server: Server) -> None:
    before = server.metric("hark_sessions_total", outcome="done")
    async with speaking(server, *["alpha"] * 6, *PAUSE, *["bravo"] * 6, *PAUSE) as call:
        call.send({"type": "config", "language": "en", "partial_interval_ms": 100})
        await eventually(lambda: len(call.texts) == 2)
        call.send({"type": "eof"})
        done = await call.hear("done")
        await closed(call)
    assert words_of(call) == [{"alpha"}, {"bravo"}]
    assert [event["config"]["language"] for event in call.of_type("ready")] == [None, "en"]
    assert call.of_type("partial")
    assert done == call.events[-1]
    assert done["audio_ms"] >= 2_500
    assert {event["type"] for event in call.events} <= {
        "ready", "speech_started", "partial", "speech_stopped", "final", "lag", "done",
    }  # fmt: skip
    assert server.metric("hark_sessions_total", outcome="done") == before + 1


async def test_without_a_config_the_stream_begins_after_a_second_and_misses_nothing(server: Server) -> None:
    async with speaking(server, *["alpha"] * 4, *PAUSE) as call:
        await call.hear("final")
    assert words_of(call) == [{"alpha"}]
    assert call.of_type("speech_started")[0]["at_ms"] < 150


async def test_commit_ends_the_utterance_while_the_call_goes_on(server: Server) -> None:
    async with speaking(server, *["alpha"] * 100) as call:
        call.send({"type": "config"})
        await call.hear("partial")
        call.send({"type": "commit"})
        await call.hear("final")
    assert words_of(call) == [{"alpha"}]


async def test_parameters_may_stand_in_the_query(server: Server) -> None:
    async with speaking(server, query="?language=de&words=false&__sign=x") as call:
        config = (await call.hear("ready"))["config"]
    assert (config["language"], config["words"]) == ("de", False)


async def test_two_calls_at_once_do_not_hear_each_other(server: Server) -> None:
    async with (
        speaking(server, *["alpha"] * 5, *PAUSE) as one,
        speaking(server, *["zulu"] * 5, *PAUSE) as other,
    ):
        await asyncio.gather(one.hear("final"), other.hear("final"))
    assert words_of(one) == [{"alpha"}]
    assert words_of(other) == [{"zulu"}]


async def test_candidates_may_come_after_the_offer(server: Server) -> None:
    url = server.url("/v1/rtc/offer")

    async def trickled(offer: dict[str, str]) -> dict[str, Any]:
        line = re.compile(r"a=(candidate:.*)\r\n")
        bare = {**offer, "sdp": line.sub("", offer["sdp"]).replace("a=end-of-candidates\r\n", "")}
        answer = await offer_to(url)(bare)
        async with httpx.AsyncClient(trust_env=False) as http:
            for candidate in [*line.findall(offer["sdp"]), ""]:
                given = {"candidate": candidate, "sdpMid": "0", "sdpMLineIndex": 0}
                body = {"type": "ice-candidate", "webrtc_id": offer["webrtc_id"], "candidate": given}
                assert (await http.post(url, json=body)).json() == {"status": "success"}
        return answer

    async with calling(in_mulaw(trickled), saying("alpha", *PAUSE)) as call:
        await call.hear("final")


# --- what is refused -------------------------------------------------------------------------------------------------


async def description(*kinds: str, direction: str = "sendonly") -> str:
    """An offer's SDP with these parts."""
    peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    try:
        for kind in kinds:
            if kind == "data":
                peer.createDataChannel("any")
            else:
                peer.addTransceiver(kind, direction=direction)
        await peer.setLocalDescription(await peer.createOffer())
        return peer.localDescription.sdp
    finally:
        await peer.close()


async def post(server: Server, body: object, query: str = "") -> httpx.Response:
    """In a thread, so that calls of the same loop go on sending audio."""
    return await asyncio.to_thread(httpx.post, server.url(f"/v1/rtc/offer{query}"), json=body, timeout=10)


def refusal(response: httpx.Response) -> tuple[int, str]:
    """Status and code; every refusal has a sentence to it."""
    error = response.json()["error"]
    assert error["message"]
    assert error["type"] == ("server_error" if response.status_code >= 500 else "invalid_request_error")
    return response.status_code, error["code"]


@pytest.mark.parametrize(
    ("kinds", "direction", "code"),
    [
        (["audio"], "sendonly", "no_data_channel"),
        (["data"], "sendonly", "no_audio_track"),
        (["audio", "data"], "recvonly", "no_audio_track"),
        (["audio", "data", "video"], "sendonly", "bad_offer"),
        (["audio", "audio", "data"], "sendonly", "bad_offer"),
    ],
)
async def test_an_offer_must_be_one_microphone_and_one_channel(
    server: Server, kinds: list[str], direction: str, code: str
) -> None:
    body = {"sdp": await description(*kinds, direction=direction), "type": "offer", "webrtc_id": str(uuid.uuid4())}
    response = await post(server, body)
    assert refusal(response) == (400, code)
    assert server.metric("hark_sessions_open") == 0


ID = "8c4d6d9c-32ac-4c57-a0e4-1a3f3b8d6f10"
CANDIDATE = {"candidate": "candidate:1 1 udp 1 127.0.0.1 9 typ host", "sdpMid": "0"}


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "bad_offer"),
        (b"{", 400, "bad_offer"),
        (b"[1]", 400, "bad_offer"),
        (b"\xff", 400, "bad_offer"),
        (b'{"webrtc_id":"' + ID.encode() + b'","type":"offer","sdp":"' + b"x" * 70_000 + b'"}', 400, "bad_offer"),
        ({"type": "offer", "sdp": "v=0"}, 400, "bad_offer"),
        ({"type": "offer", "sdp": "v=0", "webrtc_id": "mine"}, 400, "bad_offer"),
        ({"type": "offer", "sdp": "v=0", "webrtc_id": 7}, 400, "bad_offer"),
        ({"type": "offer", "webrtc_id": ID}, 400, "bad_offer"),
        ({"type": "answer", "sdp": "v=0", "webrtc_id": ID}, 400, "bad_offer"),
        ({"type": "offer", "sdp": "no sdp at all", "webrtc_id": ID}, 400, "no_data_channel"),
        ({"type": "offer", "sdp": "v=x\r\nm=\r\na=fmtp:", "webrtc_id": ID}, 400, "bad_offer"),
        ({"type": "ice-candidate", "webrtc_id": ID, "candidate": CANDIDATE}, 404, "unknown_connection"),
    ],
)
def test_what_is_no_offer_is_refused(server: Server, body: object, status: int, code: str) -> None:
    given = {"content": body} if isinstance(body, bytes) else {"json": body}
    response = httpx.post(server.url("/v1/rtc/offer"), **given)  # type: ignore[arg-type]
    assert refusal(response) == (status, code)


async def test_an_offer_that_parses_but_cannot_be_answered_frees_its_place(server: Server) -> None:
    sdp = re.sub(r"a=ice-(ufrag|pwd):.*\r\n", "", await description("audio", "data"))
    response = await post(server, {"sdp": sdp, "type": "offer", "webrtc_id": ID})
    assert refusal(response) == (400, "bad_offer")
    assert server.metric("hark_sessions_open") == 0


@pytest.mark.parametrize("query", ["?sample_rate=8000", "?encoding=mulaw", "?channels=2", "?language=xx", "?no=1"])
async def test_wrong_parameters_in_the_query_are_refused_with_the_offer(server: Server, query: str) -> None:
    body = {"sdp": await description("audio", "data"), "type": "offer", "webrtc_id": ID}
    status, code = refusal(await post(server, body, query))
    assert status == 400
    assert code in ("bad_parameter", "unknown_language", "unknown_parameter")


@pytest.mark.parametrize("name", ["sample_rate", "channels"])
async def test_another_audio_format_in_a_config_is_refused(server: Server, name: str) -> None:
    async with speaking(server) as call:
        call.send({"type": "config", name: 2 if name == "channels" else 8_000})
        error = await call.hear("error")
        await closed(call)
    assert (error["code"], error["fatal"]) == ("bad_parameter", True)


async def test_an_id_in_use_is_refused_and_a_bad_candidate_too(server: Server) -> None:
    ids: list[str] = []

    async def noted(offer: dict[str, str]) -> dict[str, Any]:
        ids.append(offer["webrtc_id"])
        return await at(server)(offer)

    async with calling(noted, saying()) as call:
        again = {"sdp": await description("audio", "data"), "type": "offer", "webrtc_id": ids[0].upper()}
        assert refusal(await post(server, again)) == (409, "connection_exists")
        for candidate in (None, {}, {"candidate": "candidate:1 1 udp", "sdpMid": "0"}, {"candidate": "x " * 8}):
            bad = {"type": "ice-candidate", "webrtc_id": ids[0], "candidate": candidate}
            assert refusal(await post(server, bad)) == (400, "bad_offer")
        await call.hear("ready")


async def test_places_are_shared_with_the_websocket(server: Server) -> None:
    async with speaking(server) as call, streaming(server) as connection:
        await hear(connection, "ready")
        body = {"sdp": await description("audio", "data"), "type": "offer", "webrtc_id": ID}
        response = await post(server, body)
        assert refusal(response) == (503, "overloaded")
        assert int(response.headers["Retry-After"]) > 0
        async with streaming(server) as third:
            assert (await hear(third, "error"))["code"] == "overloaded"
        await call.hear("ready")


@pytest.mark.parametrize("message", [b"\0\0", "x" * 70_000])
async def test_messages_that_mean_nothing_here_end_the_call(server: Server, message: bytes | str) -> None:
    async with speaking(server) as call:
        call.channel.send(message)
        error = await call.hear("error")
        await closed(call)
    assert (error["code"], error["fatal"]) == ("bad_message", True)


async def test_text_that_is_no_message_is_complained_of_once_audio_has_come(server: Server) -> None:
    async with speaking(server, *["alpha"] * 100) as call:
        await call.hear("speech_started")
        call.channel.send("hello")
        assert (await call.hear("error"))["fatal"] is False
        call.send({"type": "config", "language": "de"})
        await eventually(lambda: [e["code"] for e in call.of_type("error")] == ["bad_message", "late_config"])


async def test_a_second_channel_is_closed_and_the_first_goes_on(server: Server) -> None:
    async with speaking(server, *["alpha"] * 4, *PAUSE) as call:
        second = call.peer.createDataChannel("second")
        await eventually(lambda: second.readyState == "closed")
        await call.hear("final")


# --- how it ends -----------------------------------------------------------------------------------------------------


async def test_an_offer_that_leads_to_no_connection_frees_its_place(server: Server) -> None:
    before = server.metric("hark_sessions_total", outcome="not_connected")
    body = {"sdp": await description("audio", "data"), "type": "offer", "webrtc_id": ID}
    assert (await post(server, body)).status_code == 200
    assert server.metric("hark_sessions_open") == 1
    await eventually(lambda: server.metric("hark_sessions_total", outcome="not_connected") == before + 1, GONE_S)
    assert server.metric("hark_sessions_open") == 0


async def test_a_killed_client_frees_its_place_within_seconds(server: Server) -> None:
    async with speaking(server, *["alpha"] * 100) as call:
        await call.hear("speech_started")
        call.vanish()
        await eventually(lambda: server.metric("hark_sessions_open") == 0, GONE_S)


async def test_without_audio_the_call_ends_whatever_else_is_sent(server: Server) -> None:
    track = saying()
    async with calling(at(server), track) as call:
        await call.hear("ready")
        call.peer.getSenders()[0].replaceTrack(None)
        async with asyncio.timeout(GONE_S):
            while not call.of_type("error"):
                if call.channel.readyState == "open":
                    call.send({"type": "keepalive"})
                await asyncio.sleep(0.2)
        await closed(call)
    assert call.of_type("error")[0]["code"] == "idle"


async def test_a_client_that_leaves_frees_its_place_at_once(server: Server) -> None:
    async with speaking(server, *["alpha"] * 100) as call:
        await call.hear("speech_started")
    await eventually(lambda: server.metric("hark_sessions_open") == 0, 2)


async def test_a_restart_sends_the_finals_and_says_why() -> None:
    with serving(rtc_host="127.0.0.1") as running:
        half = {"sdp": await description("audio", "data"), "type": "offer", "webrtc_id": ID}
        async with speaking(running, *["alpha"] * 200) as call:
            await call.hear("partial")
            assert (await post(running, half)).status_code == 200
            running.signal()
            await call.hear("error")
            await closed(call)
        assert await asyncio.to_thread(running.wait_exit, 8.0) == 0
    assert [event["type"] for event in call.events[-3:]] == ["final", "done", "error"]
    assert call.events[-1]["code"] == "shutting_down"
    assert words_of(call) == [{"alpha"}]


@pytest.mark.slow
async def test_nothing_remains_of_200_calls(caplog: pytest.LogCaptureFixture) -> None:
    """However they end: threads, tasks, sockets and memory are what they were."""
    settings = load_settings(
        engine="scripted", rtc_host="127.0.0.1", rtc_connect_timeout_s=5, rtc_audio_timeout_s=2, max_sessions=64
    )
    app = create_app(settings)
    async with app.router.lifespan_context(app), _client(app) as http:
        await eventually(lambda: app.state.service.engine.ready, 30)
        for _ in range(3):  # the allocator's pools have grown to their size after some 200 calls
            await _calls(app, http, 25)
        before = _footprint()
        for _ in range(5):
            await _calls(app, http, 25)
        after = _footprint()
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
    assert after[:3] == before[:3]
    assert after[3] - before[3] < 24, f"{before[3]:.0f} MiB became {after[3]:.0f}"


def _footprint() -> tuple[int, int, int, float]:
    """Tasks, threads, open files and sockets, MiB."""
    gc.collect()
    me = psutil.Process()
    return len(asyncio.all_tasks()), me.num_threads(), me.num_fds(), me.memory_info().rss / 2**20


def _client(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://hark", timeout=60)


async def _calls(app: FastAPI, http: httpx.AsyncClient, count: int) -> None:
    """So many at once, of every kind; returns when the service holds none."""

    async def answer(offer: dict[str, str]) -> dict[str, Any]:
        response = await http.post("/v1/rtc/offer", json=offer)
        response.raise_for_status()
        answered: dict[str, Any] = response.json()
        return answered

    async def one(kind: str) -> None:
        if kind == "half-open":
            sdp = await description("audio", "data")
            await answer({"sdp": sdp, "type": "offer", "webrtc_id": str(uuid.uuid4())})
            return
        async with calling(in_mulaw(answer), saying(*["alpha"] * 9)) as call:
            await call.hear("ready")
            if kind == "eof":
                call.send(json.loads(EOF))
                await call.hear("done")
            elif kind == "killed":
                call.vanish()
                await _eventually(lambda: not app.state.service.live)

    kinds = ["half-open", "closed", "eof", "killed", "eof"]
    await asyncio.gather(*(one(kinds[number % len(kinds)]) for number in range(count)))
    await _eventually(lambda: not app.state.service.live and not app.state.service.sessions.open)
    await _eventually(lambda: not any("webrtc" in repr(task) for task in asyncio.all_tasks()))


async def _eventually(condition: Callable[[], bool]) -> None:
    """Here the service runs in the same loop, so a thread could look at it at the wrong time."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - of a service that tells nobody when it has tidied up
            await asyncio.sleep(0.02)


# --- real speech -----------------------------------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.corpus
async def test_real_speech_comes_out_as_its_words() -> None:
    require_weights("base")  # tiny.en is not sure of every word once Opus has been over it
    require_vad()
    row = corpus_row("read-en-jfk-jfk")
    with serving(engine="ctranslate", model="base", rtc_host="127.0.0.1") as running:
        track = EncodedTrack(opus_packets(read_audio(row.path)))
        async with calling(offer_to(running.url("/v1/rtc/offer")), track) as call:
            call.send({"type": "config", "language": "en"})
            await asyncio.wait_for(track.is_played.wait(), 30)
            call.send({"type": "eof"})
            await call.hear("done", within_s=60)
    said = re.sub(r"[^a-z ]", "", " ".join(call.texts).lower())
    assert "ask not what your country can do for you" in said, call.events
    assert "ask what you can do for your country" in said, call.events
