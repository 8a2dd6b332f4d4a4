"""What the service survives and how it goes down: an engine killed, stuck or unable to start, signals, a taken port."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from websockets.asyncio.client import ClientConnection, connect

from bench.corpus import read_audio
from tests.support.corpus import corpus_row
from tests.support.server import (
    EOF,
    PAUSE,
    ROOT,
    Conversation,
    Server,
    converse,
    eventually,
    hear,
    listen,
    pieces,
    say,
    serving,
    streaming,
)
from tests.support.weights import require_vad, require_weights

SENTENCES = [("alpha", "bravo"), ("charlie",), ("delta", "echo", "foxtrot"), ("golf", "hotel")]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """For tests after which it still runs."""
    with serving() as running:
        yield running


def speech(sentences: list[tuple[str, ...]]) -> bytes:
    return b"".join(say(*words, *PAUSE) for words in sentences)


async def speak_live(connection: ClientConnection, audio: bytes, times_real_time: float = 2.0) -> None:
    """At a microphone's pace, or a few times that."""
    for piece in pieces(audio):
        await connection.send(piece)
        await asyncio.sleep(len(piece) / 32_000 / times_real_time)


async def wait_engine(server: Server) -> psutil.Process:
    def ready() -> bool:
        return server.get("/readyz").status_code == 200

    await eventually(ready, 30)
    return server.engine


def assert_whole(heard: Conversation, sentences: list[tuple[str, ...]]) -> None:
    assert heard.texts == [" ".join(words) for words in sentences]
    assert [final["utterance"] for final in heard.of_type("final")] == list(range(len(sentences)))
    assert heard.of_type("failed") == []
    assert heard.errors == []
    assert heard.close_code == 1000


# --- the engine dies -------------------------------------------------------------------------------------------------


async def test_killing_the_engine_again_and_again_loses_no_word_of_any_stream(server: Server) -> None:
    starts = server.metric("hark_engine_starts_total")

    async def one(number: int) -> Conversation:
        async def act(connection: ClientConnection) -> None:
            await asyncio.sleep(number * 0.05)
            await speak_live(connection, speech(SENTENCES))
            await connection.send(EOF)

        return await converse(server, act=act, partial_interval_ms=100)

    async def kill() -> None:
        for _ in range(2):
            await asyncio.sleep(0.4)
            (await wait_engine(server)).kill()

    *heard, _ = await asyncio.gather(*(one(number) for number in range(8)), kill())
    for conversation in heard:
        assert conversation is not None
        assert_whole(conversation, SENTENCES)
    assert server.metric("hark_engine_starts_total") == starts + 2
    assert server.metric("hark_sessions_open") == 0


async def test_readiness_goes_while_the_engine_is_gone_and_comes_back_and_streams_are_let_in_meanwhile(
    server: Server,
) -> None:
    engine = await wait_engine(server)
    engine.kill()
    await eventually(lambda: server.get("/readyz").status_code == 503)
    assert server.get("/healthz").status_code == 200
    heard = await converse(server, speech(SENTENCES), EOF)
    assert_whole(heard, SENTENCES)
    assert server.get("/readyz").status_code == 200


async def test_an_engine_that_stops_answering_is_replaced_and_its_work_done_again() -> None:
    with serving(request_timeout_s=1.0) as server:
        async with streaming(server) as connection:
            await hear(connection, "ready")
            stuck = server.engine
            stuck.suspend()
            await connection.send(say(*["alpha"] * 8))
            await connection.send(EOF)
            heard = await listen(connection)
        assert heard.texts == [" ".join(["alpha"] * 8)]
        assert server.engine.pid != stuck.pid


# --- the service is told to stop -------------------------------------------------------------------------------------


async def open_streams(server: Server, count: int) -> list[ClientConnection]:
    """Streams in the middle of an utterance."""
    connections = [await connect(server.stream_url(), proxy=None) for _ in range(count)]
    for connection in connections:
        await connection.send(say(*["alpha"] * 8))
        await hear(connection, "speech_started")
    return connections


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_on_a_signal_every_stream_gets_its_finals_and_is_told_to_go_elsewhere(number: signal.Signals) -> None:
    with serving(drain_timeout_s=10) as server:
        connections = await open_streams(server, 5)
        async with streaming(server) as silent:
            await hear(silent, "ready")
            begun = time.monotonic()
            server.signal(number)
            *heard, unspoken = await asyncio.gather(*(listen(c) for c in (*connections, silent)))
        status = await asyncio.to_thread(server.wait_exit)
        took_s = time.monotonic() - begun
        for conversation in heard:
            assert conversation.texts == [" ".join(["alpha"] * 8)]
            assert [event["type"] for event in conversation.events[-3:]] == ["final", "done", "error"]
        for conversation in (*heard, unspoken):
            assert conversation.errors == ["shutting_down"]
            assert conversation.close_code == 1012
        assert status == 0
        assert took_s < 5, "nobody was left to wait for"
        assert server.tracebacks == []


async def test_a_drain_lets_nobody_in_and_says_so_while_it_waits() -> None:
    with serving(drain_timeout_s=20) as server:
        (connection,) = await open_streams(server, 1)
        engine = server.engine
        engine.suspend()  # so that the final takes until we let it
        server.signal()
        await eventually(lambda: server.get("/readyz").json()["status"] == "draining")
        assert server.get("/healthz").status_code == 200
        refused = await converse(server)
        assert (refused.errors, refused.close_code) == (["shutting_down"], 1013)
        engine.resume()
        heard = await listen(connection)
        assert heard.texts == [" ".join(["alpha"] * 8)]
        assert await asyncio.to_thread(server.wait_exit) == 0


async def test_a_drain_that_takes_too_long_ends_all_the_same() -> None:
    with serving(drain_timeout_s=1) as server:
        (connection,) = await open_streams(server, 1)
        server.engine.suspend()
        begun = time.monotonic()
        server.signal()
        heard = await listen(connection)
        assert await asyncio.to_thread(server.wait_exit) == 0
        assert 1 <= time.monotonic() - begun < 10
        assert heard.close_code == 1012
        assert "drain_timeout" in server.log


async def test_a_second_signal_does_not_wait() -> None:
    with serving(drain_timeout_s=60) as server:
        (connection,) = await open_streams(server, 1)
        server.engine.suspend()
        server.signal()
        await eventually(lambda: "draining" in server.log)
        begun = time.monotonic()
        server.signal()
        heard = await listen(connection)
        status = await asyncio.to_thread(server.wait_exit)
        assert time.monotonic() - begun < 8
        assert heard.close_code == 1012
        assert status in (0, -signal.SIGTERM)


async def test_a_signal_while_the_engine_starts_ends_it_too(tmp_path: Path) -> None:
    with serving(ready=False, engine_python=script(tmp_path, "exec sleep 600")) as server:
        await eventually(lambda: len(server.itself.children()) == 1 and server.get("/healthz"))
        begun = time.monotonic()
        server.signal()
        assert await asyncio.to_thread(server.wait_exit) == 0
        assert time.monotonic() - begun < 8


async def test_killing_the_service_leaves_no_engine_behind() -> None:
    with serving() as server:
        engine = server.engine
        server.process.kill()
        server.process.wait()
        await eventually(lambda: not engine.is_running())


# --- it cannot start -------------------------------------------------------------------------------------------------


def script(folder: Path, body: str) -> Path:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def run_serve(**settings: object) -> subprocess.CompletedProcess[str]:
    """``hark serve`` until it ends by itself."""
    given = {f"HARK_{name.upper()}": str(value) for name, value in settings.items()}
    env = {**os.environ, "HARK_ENGINE": "scripted", "HARK_PORT": "0", **given}
    command = [sys.executable, "-m", "app", "serve"]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_a_port_that_is_taken_is_said_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run_serve(port=port)
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [f"hark: cannot listen on 127.0.0.1:{port}: Address already in use"]


def test_settings_that_are_wrong_are_said_by_name() -> None:
    ended = run_serve(pause_ms=1, port="http")
    assert ended.returncode == 1
    assert "HARK_PAUSE_MS" in ended.stderr
    assert "HARK_PORT" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_model_that_is_not_to_be_found_is_said_before_anything_starts(tmp_path: Path) -> None:
    ended = run_serve(engine="ctranslate", model="no-such/model", offline=1, cache_dir=tmp_path)
    assert ended.returncode == 1
    assert "cannot be had" in ended.stderr
    assert "listens" not in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("body", "said"),
    [("echo 'no module named models' >&2; exit 3", "no module named models"), ("exec /no/such/python", "engine")],
)
def test_an_engine_that_cannot_start_ends_the_service_with_the_reason(tmp_path: Path, body: str, said: str) -> None:
    """A service that stayed up could only refuse, and "try again later" would be a lie."""
    begun = time.monotonic()
    ended = run_serve(engine_python=script(tmp_path, body))
    assert ended.returncode == 1
    assert said in ended.stderr
    assert "engine_failed_to_start" in ended.stderr
    assert time.monotonic() - begun < 30


# --- with a real model -----------------------------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.corpus
@pytest.mark.slow
async def test_a_real_engine_killed_in_the_middle_of_speech_loses_no_word() -> None:
    require_vad()
    require_weights("tiny.en")
    pcm = read_audio(corpus_row("read-en-jfk-jfk").path).tobytes()
    with serving(engine="ctranslate", model="tiny.en") as server:
        undisturbed = await converse(server, pcm, EOF)

        async def act(connection: ClientConnection) -> None:
            await speak_live(connection, pcm)
            await connection.send(EOF)

        async def kill() -> None:
            for _ in range(2):
                await asyncio.sleep(1.5)
                (await wait_engine(server)).kill()

        *heard, _ = await asyncio.gather(*(converse(server, act=act) for _ in range(3)), kill())
        assert len(undisturbed.texts) >= 1
        for conversation in heard:
            assert conversation is not None
            assert conversation.texts == undisturbed.texts
            assert conversation.of_type("failed") == []
            assert conversation.close_code == 1000
