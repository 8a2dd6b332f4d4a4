"""``/v1/stream`` over real sockets: every way to use it wrongly, to leave it, and to overload it.

One service with the scripted engine serves most tests, so that each takes a moment; a few hear real speech.
"""

import asyncio
import contextlib
import itertools
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import uvicorn
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from app.main import create_app
from app.main import listen as listen_on
from app.settings import load_settings
from bench.corpus import read_audio
from models.scripted import encode_words
from tests.support.corpus import corpus_row
from tests.support.server import (
    COMMIT,
    EOF,
    KEEPALIVE,
    PAUSE,
    Server,
    converse,
    eventually,
    hear,
    listen,
    pieces,
    say,
    serving,
    streaming,
    wait_for,
)
from tests.support.weights import require_vad, require_weights

RATES = [4_000, 8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000, 192_000]
TWO = say("alpha", "bravo", *PAUSE, "charlie", *PAUSE)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(max_message_bytes=65_536) as running:
        yield running


@pytest.fixture(scope="module")
def strict() -> Iterator[Server]:
    """Short of patience and of room."""
    with serving(max_sessions=2, idle_timeout_s=1.0, send_timeout_s=1.0) as running:
        yield running


def no_session(server: Server) -> Callable[[], bool]:
    return lambda: server.metric("hark_sessions_open") == 0


@pytest.fixture(autouse=True)
def _all_slots_are_free_again(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test, however it left its connections."""
    yield
    for name in {"server", "strict"} & set(request.fixturenames):
        wait_for(no_session(request.getfixturevalue(name)))


# --- what it is for --------------------------------------------------------------------------------------------------


async def test_a_stream_from_ready_to_done(server: Server) -> None:
    heard = await converse(server, *pieces(TWO), EOF)
    for utterance in (0, 1):
        of_it = [event["type"] for event in heard.events if event.get("utterance") == utterance]
        assert [kind for kind in of_it if kind != "partial"] == ["speech_started", "speech_stopped", "final"]
    assert [heard.events[0]["type"], heard.events[-1]["type"]] == ["ready", "done"]
    assert heard.texts == ["alpha bravo", "charlie"]
    assert heard.events[-1] == {"type": "done", "audio_ms": 1_900}
    assert (heard.close_code, heard.close_reason) == (1000, "")
    assert heard.events[0]["model"] == "scripted"
    assert heard.of_type("final")[0]["words"][1]["start_ms"] == 100


async def test_eof_at_once_is_done_at_once(server: Server) -> None:
    heard = await converse(server, EOF)
    assert [event["type"] for event in heard.events] == ["ready", "done"]
    assert heard.close_code == 1000


async def test_commit_brings_the_final_while_the_stream_goes_on(server: Server) -> None:
    async with streaming(server) as connection:
        await connection.send(say(*["alpha"] * 8))
        await connection.send(COMMIT)
        assert (await hear(connection, "final"))["text"] == " ".join(["alpha"] * 8)
        await connection.send(say(*["bravo"] * 8))
        await connection.send(EOF)
        assert (await hear(connection, "final"))["text"] == " ".join(["bravo"] * 8)
        await hear(connection, "done")


async def test_commit_of_nothing_is_no_error(server: Server) -> None:
    heard = await converse(server, COMMIT, COMMIT, EOF)
    assert [event["type"] for event in heard.events] == ["ready", "done"]


async def test_two_channels_are_told_apart(server: Server) -> None:
    left, right = (encode_words(words) for words in (["alpha", None, None], [None, None, "bravo"]))
    stereo = np.stack((left, right), axis=1).tobytes()
    heard = await converse(server, *pieces(stereo), EOF, channels=2)
    assert {(final["channel"], final["text"]) for final in heard.of_type("final")} == {(0, "alpha"), (1, "bravo")}


async def test_config_in_messages_is_answered_and_kept(server: Server) -> None:
    config = json.dumps({"type": "config", "pause_ms": 300, "words": False, "prompt": "Grüße, 世界"})
    heard = await converse(server, config, '{"type":"config","partials":false}', *pieces(TWO), EOF, language="en")
    ready = heard.of_type("ready")
    assert [event["config"]["partials"] for event in ready] == [True, True, False]
    assert ready[2]["config"] | {"words": False, "pause_ms": 300, "prompt": "Grüße, 世界"} == ready[2]["config"]
    assert heard.of_type("partial") == []
    assert all("words" not in final and final["language"] == "en" for final in heard.of_type("final"))


# --- forms of audio --------------------------------------------------------------------------------------------------


def at_rate(rate: int) -> np.ndarray[tuple[int], np.dtype[np.int16]]:
    """TWO at another rate: a held level survives any resampling."""
    pcm = np.frombuffer(TWO, np.int16)
    return pcm[np.arange(pcm.size * rate // 16_000) * 16_000 // rate]


@pytest.mark.parametrize("rate", RATES)
async def test_every_sample_rate(server: Server, rate: int) -> None:
    heard = await converse(server, *pieces(at_rate(rate).tobytes(), 10_001), EOF, sample_rate=rate)
    assert heard.texts == ["alpha bravo", "charlie"]
    assert heard.events[-1]["audio_ms"] == pytest.approx(1_900, abs=1)


@pytest.mark.parametrize("encoding", ["mulaw", "alaw", "float32", "linear16"])
async def test_every_encoding_at_8_khz(server: Server, encoding: str) -> None:
    linear = at_rate(8_000)
    codes = np.arange(256, dtype=np.uint8)
    match encoding:
        case "mulaw" | "alaw":
            from streaming.audio import decode_samples
            from streaming.config import Encoding

            levels = decode_samples(codes.tobytes(), Encoding(encoding)) * 32_768
            data = codes[np.abs(linear[:, None] - levels[None, :]).argmin(axis=1)].tobytes()
        case "float32":
            data = (linear / 32_768).astype("<f4").tobytes()
        case _:
            data = linear.tobytes()
    heard = await converse(server, *pieces(data, 333), EOF, encoding=encoding, sample_rate=8_000)
    assert heard.texts == ["alpha bravo", "charlie"]


@pytest.mark.parametrize("size", [1, 3, 641, 6_399])
async def test_samples_may_be_cut_anywhere(server: Server, size: int) -> None:
    heard = await converse(server, *pieces(say("alpha", "bravo"), size), EOF)
    assert heard.texts == ["alpha bravo"]


async def test_an_odd_last_byte_and_empty_messages_are_harmless(server: Server) -> None:
    heard = await converse(server, b"", TWO, b"", b"\x01", EOF)
    assert heard.texts == ["alpha bravo", "charlie"]
    assert heard.errors == []


async def test_int16_declared_as_float32_is_told_so_and_ends_the_stream(server: Server) -> None:
    noise = np.random.default_rng(0).normal(0, 3_000, 8_000).astype("<i2").tobytes()
    heard = await converse(server, *pieces(noise), act=nothing_more, encoding="float32")
    assert heard.errors == ["implausible_audio"]
    assert "linear16" in heard.events[-1]["message"]
    assert heard.close_code == 1007


async def nothing_more(connection: ClientConnection) -> None:
    """Stay until the service closes."""
    await connection.wait_closed()


# --- what is wrong with a request ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "code"),
    [
        ({"encoding": "opus"}, "bad_parameter"),
        ({"sample_rate": 1}, "bad_parameter"),
        ({"sample_rate": 10**12}, "bad_parameter"),
        ({"sample_rate": "9" * 5_000}, "bad_parameter"),
        ({"channels": 7}, "bad_parameter"),
        ({"language": "xx"}, "unknown_language"),
        ({"samplerate": 16_000}, "unknown_parameter"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_bad_parameters_are_named_and_the_close_code_says_not_to_try_again(
    server: Server, parameters: dict[str, object], code: str
) -> None:
    heard = await converse(server, act=nothing_more, **parameters)
    assert heard.errors == [code]
    assert heard.events[-1]["fatal"] is True
    assert heard.close_code == 4400
    assert heard.close_reason
    assert heard.close_reason[:60] == heard.events[-1]["message"][:60]


async def test_a_bad_config_message_is_refused_as_a_bad_query_is(server: Server) -> None:
    heard = await converse(server, '{"type":"config","pause_ms":1}', act=nothing_more)
    assert heard.errors == ["bad_parameter"]
    assert heard.close_code == 4400


@pytest.mark.parametrize(
    "text", ["", "hello", "{", '{"type":"start"}', "1" * 5_000, "[" * 20_000, '{"type":"\\ud800"}'], ids=range(7)
)
async def test_text_that_is_no_message_is_complained_of_and_the_stream_goes_on(server: Server, text: str) -> None:
    heard = await converse(server, say("alpha"), text, say("bravo", *PAUSE), EOF)
    assert heard.errors == ["bad_message"]
    assert heard.of_type("error")[0]["fatal"] is False
    assert heard.texts == ["alpha bravo"]
    assert heard.close_code == 1000


async def test_text_that_is_no_message_before_the_first_audio_is_refused(server: Server) -> None:
    heard = await converse(server, "UklGRiQAAABXQVZF", act=nothing_more)  # base64 where binary was due
    assert heard.errors == ["bad_message"]
    assert "binary" in heard.events[-1]["message"]
    assert heard.close_code == 1008


async def test_half_a_surrogate_pair_is_refused_and_harms_nobody(server: Server) -> None:
    heard = await converse(server, '{"type":"config","prompt":"\\ud83d"}', act=nothing_more)
    assert heard.errors == ["bad_parameter"]


async def test_config_after_audio_is_complained_of_and_changes_nothing(server: Server) -> None:
    heard = await converse(server, say("alpha"), '{"type":"config","sample_rate":8000}', say("bravo", *PAUSE), EOF)
    assert heard.errors == ["late_config"]
    assert heard.texts == ["alpha bravo"]


async def test_audio_and_commands_after_eof_are_complained_of(server: Server) -> None:
    # Together in one packet, so that the service has not closed before it sees the last of them.
    heard = await converse(server, say(*["alpha"] * 20), EOF, say("bravo"), COMMIT)
    assert set(heard.errors) <= {"after_eof"}
    assert "bravo" not in " ".join(heard.texts)
    assert heard.close_code == 1000


async def test_twenty_wrong_messages_are_forgiven_and_one_more_is_not(server: Server) -> None:
    heard = await converse(server, say("alpha"), *["?"] * 20, say("bravo", *PAUSE), EOF)
    assert heard.texts == ["alpha bravo"]
    heard = await converse(server, say("alpha"), *["?"] * 21, act=nothing_more)
    assert heard.errors == ["bad_message"] * 21
    assert heard.close_code == 1008


@pytest.mark.parametrize("size", [65_537, 10 * 2**20])
async def test_a_message_beyond_the_limit_closes_with_1009_even_while_it_is_being_sent(
    server: Server, size: int
) -> None:
    connection = await connect(server.stream_url(), proxy=None)
    await connection.send(bytes(65_536))
    sending = asyncio.create_task(connection.send(bytes(size)))
    heard = await listen(connection)
    await asyncio.gather(sending, return_exceptions=True)
    assert heard.errors == []
    assert heard.close_code == 1009


async def test_text_that_is_not_utf_8_closes_with_1007(server: Server) -> None:
    async with streaming(server) as connection:
        await hear(connection, "ready")
        connection.transport.write(b"\x81\x82\0\0\0\0\xff\xfe")  # a masked text frame with a mask of zeros
        heard = await listen(connection)
    assert heard.close_code == 1007


async def test_a_frame_that_is_none_closes_with_1002(server: Server) -> None:
    async with streaming(server) as connection:
        await hear(connection, "ready")
        connection.transport.write(b"\x83\x80\0\0\0\0")  # opcode 3 is reserved
        heard = await listen(connection)
    assert heard.close_code == 1002


async def test_nothing_is_compressed_though_the_client_offers_it(server: Server) -> None:
    async with streaming(server) as connection:
        assert connection.request is not None
        assert "permessage-deflate" in connection.request.headers["Sec-WebSocket-Extensions"]
        assert connection.protocol.extensions == []
        assert connection.response is not None
        assert "Sec-WebSocket-Extensions" not in connection.response.headers


# --- patience --------------------------------------------------------------------------------------------------------


async def test_a_silent_client_is_closed_with_a_hint_and_a_muted_one_is_not(strict: Server) -> None:
    async def mute(connection: ClientConnection) -> None:
        for _ in range(8):
            await asyncio.sleep(0.25)
            await connection.send(KEEPALIVE)
        await connection.send(say("bravo", *PAUSE))
        await connection.send(EOF)

    silent, muted = await asyncio.gather(
        converse(strict, say("alpha"), act=nothing_more), converse(strict, say("alpha"), act=mute)
    )
    assert silent.errors == ["idle"]
    assert "keepalive" in silent.events[-1]["message"]
    assert silent.close_code == 1008
    assert muted.errors == []
    assert " ".join(muted.texts) == "alpha bravo"


async def test_a_client_that_never_says_anything_is_closed_too(strict: Server) -> None:
    heard = await converse(strict, act=nothing_more)
    assert heard.errors == ["idle"]


async def test_after_eof_a_client_may_be_silent_for_as_long_as_the_last_final_takes() -> None:
    """The engine is held for three times the idle limit."""
    with serving(idle_timeout_s=0.5) as slow:
        async with streaming(slow) as connection:
            await hear(connection, "ready")
            engine = slow.engine
            engine.suspend()
            await connection.send(say(*["alpha"] * 8))
            await connection.send(EOF)
            await asyncio.sleep(1.5)
            engine.resume()
            heard = await listen(connection)
    assert heard.errors == []
    assert heard.texts == [" ".join(["alpha"] * 8)]
    assert heard.close_code == 1000


# --- leaving without a word ------------------------------------------------------------------------------------------


def raw(connection: ClientConnection) -> socket.socket:
    found: socket.socket = connection.transport.get_extra_info("socket")
    return found


def reset(connection: ClientConnection) -> None:
    """Leave with RST."""
    raw(connection).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.transport.abort()


def stop_sending(connection: ClientConnection) -> None:
    """Leave with FIN and no close frame, ready to read for ever."""
    connection.transport.write_eof()


def lose_power(connection: ClientConnection) -> None:
    """Leave with nothing at all: a socket under repair closes in silence."""
    try:
        raw(connection).setsockopt(socket.IPPROTO_TCP, 19, 1)  # TCP_REPAIR
    except OSError as error:
        pytest.skip(f"TCP_REPAIR: {error.strerror}")
    connection.transport.abort()


def half_a_message(connection: ClientConnection) -> None:
    connection.transport.write(b"\x82\xfe\x10\x00" + bytes(4 + 1_000))


@pytest.mark.parametrize(
    ("way", "when"),
    [
        (reset, "before_audio"),
        (reset, "in_a_message"),
        (reset, "in_an_utterance"),
        (stop_sending, "before_audio"),
        (stop_sending, "in_a_message"),
        (stop_sending, "in_an_utterance"),
        (lose_power, "in_a_message"),  # before the audio nothing is sent that could show it: the idle limit ends it
        (lose_power, "in_an_utterance"),
    ],
)
async def test_a_client_that_vanishes_frees_its_slot(
    server: Server, way: Callable[[ClientConnection], None], when: str
) -> None:
    gone = server.metric("hark_sessions_total", outcome="gone")
    connection = await connect(server.stream_url(), proxy=None)
    await hear(connection, "ready")
    if when != "before_audio":
        await connection.send(say("alpha", "bravo"))
        await hear(connection, "speech_started")
    if when == "in_a_message":
        half_a_message(connection)
    assert server.metric("hark_sessions_open") == 1
    way(connection)
    await eventually(no_session(server))
    assert server.metric("hark_sessions_total", outcome="gone") == gone + 1
    connection.transport.abort()


@pytest.mark.parametrize("opening", [b"", b"GET /v1/stream HTTP/1.1\r\n", b"\x16\x03\x01\x00", b"\0" * 5_000])
async def test_what_is_no_handshake_harms_nobody(server: Server, opening: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(opening)
    with contextlib.suppress(ConnectionError):
        await writer.drain()
    writer.transport.abort()
    del reader
    assert (await converse(server, EOF)).close_code == 1000


# --- not reading -----------------------------------------------------------------------------------------------------


async def deaf(server: Server, **parameters: object) -> ClientConnection:
    """A client that will read only what the connection's small buffers take."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    sock.connect(("127.0.0.1", server.port))
    connection = await connect(server.stream_url(**parameters), sock=sock, proxy=None, max_queue=1)
    await hear(connection, "ready")
    connection.transport.pause_reading()
    return connection


async def speak_until_closed(connection: ClientConnection, limit_s: float) -> None:
    """One long utterance after another, each 40 ms worth a partial."""
    audio = pieces(say(*["alpha"] * 250, *PAUSE), 1_280)
    deadline = time.monotonic() + limit_s
    with contextlib.suppress(ConnectionClosed, ConnectionError):
        while time.monotonic() < deadline:
            for piece in audio:
                await connection.send(piece)


async def test_a_client_that_never_reads_is_dropped_and_costs_little(strict: Server) -> None:
    connection = await deaf(strict, partial_interval_ms=32)
    before_mib = strict.rss_mib()
    speaking = asyncio.create_task(speak_until_closed(connection, 60))
    await eventually(lambda: strict.metric("hark_sessions_total", outcome="slow_client") == 1, 60)
    assert strict.rss_mib() - before_mib < 20
    speaking.cancel()
    connection.transport.abort()


async def test_a_client_that_configures_and_never_reads_is_dropped_too(strict: Server) -> None:
    before = strict.metric("hark_sessions_total", outcome="slow_client")
    connection = await deaf(strict)
    config = json.dumps({"type": "config", "hotwords": ["x" * 100] * 200})

    async def configure() -> None:
        with contextlib.suppress(ConnectionClosed, ConnectionError):
            while True:
                await connection.send(config)

    configuring = asyncio.create_task(configure())
    await eventually(lambda: strict.metric("hark_sessions_total", outcome="slow_client") == before + 1, 30)
    configuring.cancel()
    connection.transport.abort()


async def test_a_client_that_reads_late_gets_every_final(server: Server) -> None:
    """Nothing is missing but partials that newer ones had replaced before they could be sent."""

    words = ("alpha", "bravo", "charlie", "delta")

    def said() -> tuple[float, float]:
        finals = server.metric("hark_utterances_total", outcome="text")
        return finals, server.metric("hark_partial_latency_seconds_count")

    finals_before, partials_before = said()
    connection = await deaf(server, partial_interval_ms=32)
    for word in words:
        for piece in pieces(say(*[word] * 190, *PAUSE), 1_280):
            await connection.send(piece)
    await eventually(lambda: said()[0] - finals_before == len(words))
    connection.transport.resume_reading()
    await connection.send(EOF)
    heard = await listen(connection)
    assert heard.texts == [" ".join([word] * 190) for word in words]
    assert heard.close_code == 1000
    assert 0 < len(heard.of_type("partial")) < said()[1] - partials_before


# --- too many, too early ---------------------------------------------------------------------------------------------


async def test_one_stream_too_many_is_asked_to_come_back_and_may(strict: Server) -> None:
    async with streaming(strict) as first, streaming(strict) as second:
        await hear(first, "ready")
        await hear(second, "ready")
        refused = await converse(strict, act=nothing_more)
        assert refused.errors == ["overloaded"]
        assert refused.close_code == 1013
        await first.send(EOF)
        await listen(first)
        accepted = await converse(strict, EOF)
        assert accepted.close_code == 1000


async def test_while_the_engine_starts_streams_are_asked_to_come_back(tmp_path: Path) -> None:
    sleeper = tmp_path / "python"
    sleeper.write_text("#!/bin/sh\nexec sleep 600\n")
    sleeper.chmod(0o755)
    with serving(ready=False, engine_python=sleeper) as starting:
        heard = await converse(starting, act=nothing_more)
        assert heard.errors == ["starting"]
        assert heard.close_code == 1013
        assert starting.get("/healthz").status_code == 200
        ready = starting.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (503, "starting")


async def test_a_thousand_streams_leave_nothing_behind(server: Server) -> None:
    """Of several ways to end; the first two hundred fill caches and pools."""

    async def one(number: int) -> None:
        async with streaming(server, partial_interval_ms=100) as connection:
            await connection.send(say("alpha", "bravo"))
            match number % 4:
                case 0:
                    await connection.send(EOF)
                    heard = await listen(connection)
                    assert heard.texts == ["alpha bravo"]
                case 1:
                    reset(connection)
                case 2:
                    await connection.send("?")
                    await hear(connection, "speech_started")
                case _:
                    await connection.close()

    async def many(count: int) -> tuple[int, int, float]:
        for start in range(0, count, 20):
            await asyncio.gather(*(one(number) for number in range(start, start + 20)))
        await eventually(no_session(server))
        await eventually(lambda: len(server.itself.net_connections()) <= 2)
        return server.itself.num_fds(), server.itself.num_threads(), server.rss_mib()

    fds, threads, rss_mib = await many(200)
    fds_after, threads_after, rss_mib_after = await many(800)
    assert abs(fds_after - fds) <= 2
    assert threads_after == threads
    assert rss_mib_after - rss_mib < 6
    assert server.metric("hark_decodes_running") == server.metric("hark_decode_queue_depth") == 0
    assert server.tracebacks == []


async def test_no_task_outlives_its_stream() -> None:
    """The same application in this process, where its tasks can be counted."""
    app = create_app(load_settings(engine="scripted"))
    config = uvicorn.Config(app, ws="websockets-sansio", log_config=None, log_level="warning", lifespan="on")
    service, sock = uvicorn.Server(config), listen_on("127.0.0.1", 0)
    url = f"ws://127.0.0.1:{sock.getsockname()[1]}/v1/stream"
    serving_here = asyncio.create_task(service.serve([sock]))
    await eventually(lambda: app.state.service.engine.ready, 30)

    async def one(number: int) -> None:
        async with connect(url, proxy=None) as connection:
            await connection.send(say("alpha", "bravo"))
            await hear(connection, "speech_started")
            match number % 3:
                case 0:
                    await connection.send(EOF)
                    await hear(connection, "done")
                case 1:
                    reset(connection)
                case _:
                    await connection.close()

    async def tasks_after(count: int) -> int:
        await asyncio.wait_for(asyncio.gather(*(one(number) for number in range(count))), 30)
        await eventually(lambda: not service.server_state.connections and not service.server_state.tasks)
        return len(asyncio.all_tasks())

    assert await tasks_after(3) == await tasks_after(30)
    service.should_exit = True
    await asyncio.wait_for(serving_here, 30)


# --- real speech -----------------------------------------------------------------------------------------------------

JFK = "ask not what your country can do for you ask what you can do for your country"


@pytest.fixture(scope="module")
def real_server() -> Iterator[Server]:
    require_vad()
    require_weights("tiny.en")
    with serving(engine="ctranslate", model="tiny.en") as running:
        yield running


def plain(texts: list[str]) -> str:
    return "".join(c for c in " ".join(texts).lower() if c.isalpha() or c == " ")


@pytest.mark.real
@pytest.mark.corpus
@pytest.mark.parametrize("seed", [0, 1])
async def test_real_speech_in_any_cut_gives_the_same_text(real_server: Server, seed: int) -> None:
    pcm = read_audio(jfk()).tobytes()
    sizes = np.random.default_rng(seed).integers(1, 9_000, 2_000)
    cuts = [pcm[start:end] for start, end in zip(np.cumsum(sizes) - sizes, np.cumsum(sizes), strict=True)]
    heard = await converse(real_server, *[piece for piece in cuts if piece], EOF)
    assert JFK in plain(heard.texts)
    whole = await converse(real_server, pcm, EOF)
    assert heard.texts == whole.texts
    for final in heard.of_type("final"):
        committed = [p["committed"] for p in heard.of_type("partial") if p["utterance"] == final["utterance"]]
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(committed))


def jfk() -> Path:
    return corpus_row("read-en-jfk-jfk").path
