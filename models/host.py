"""The engine process: `python -m models.host --fd N`, one engine behind a connected Unix stream socket.

The parent gives its end of a socket pair as file descriptor N and the engine's settings as JSON on stdin; models.remote
is that parent and models.framing the language. The process loads the engine, has it transcribe a known sentence, and
says Ready only if the words are right. It leaves when the socket closes or the parent dies. It logs one JSON object a
line to stderr, and never what was said.
"""

import argparse
import asyncio
import contextlib
import ctypes
import difflib
import gc
import json
import os
import re
import signal
import socket
import sys
import time
import wave
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

import numpy as np

from models import scripted
from models.framing import (
    Answer,
    Ask,
    Cancel,
    Dropped,
    Failure,
    Fault,
    FramingError,
    Message,
    Parser,
    Ping,
    Pong,
    Ready,
    encode,
)
from streaming.errors import RecognizerFailed, SttError
from streaming.types import DecodeOptions, DecodeRequest, Hypothesis, Pcm16, Priority, RecognizerInfo

_CLIP = Path(__file__).parent / "data" / "warmup.wav"
_CLIP_TEXT = "We are going to the park because the weather is good."
_LEAST_RIGHT_WORDS = 0.8
_PR_SET_PDEATHSIG = 1  # prctl(2)


class Engine(Protocol):
    """What the process serves. ``decode`` is called from ``info.capacity`` threads at once."""

    @property
    def info(self) -> RecognizerInfo: ...

    def decode(self, request: DecodeRequest) -> Hypothesis:
        """Raises SttError for what it foresees; any other error counts as a fault of the engine."""
        ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine, and what it must get right before it serves. ``audio``: int16, shape (n,), 16 kHz."""

    engine: Engine
    audio: Pcm16
    expected: str


# --- loading ---------------------------------------------------------------------------------------------------------


def load(settings: Mapping[str, Any]) -> Loaded:
    """The engine that the settings name: "kind" and the fields of its config. Raises RecognizerFailed."""
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()
    }
    kind = fields.pop("kind", None)
    try:
        if kind == "scripted":
            words = ["alpha", "bravo", "charlie", "copper"]
            engine = scripted.ScriptedEngine(scripted.ScriptedConfig(**fields))
            return Loaded(engine, scripted.encode_words(words), " ".join(words))
        if kind == "ctranslate":
            return Loaded(_ctranslate(fields), *warm_up_clip())
    except (TypeError, ValueError, ImportError) as error:
        raise RecognizerFailed(f"the {kind} engine cannot be set up: {error}") from error
    raise RecognizerFailed(f"there is no engine of kind {kind!r}")


def _ctranslate(fields: Mapping[str, Any]) -> Engine:
    from models.ctranslate import CtranslateConfig, CtranslateWhisper  # heavy, and not there in every environment

    return CtranslateWhisper(CtranslateConfig(**{**fields, "model_dir": Path(fields["model_dir"])}))


def warm_up_clip() -> tuple[Pcm16, str]:
    """A spoken sentence, int16, shape (42240,), 16 kHz, and its text."""
    with wave.open(str(_CLIP)) as clip:
        return np.frombuffer(clip.readframes(clip.getnframes()), dtype="<i2").astype(np.int16, copy=False), _CLIP_TEXT


def warm_up(loaded: Loaded, pool: ThreadPoolExecutor) -> None:
    """Decode the known sentence in every worker at once. Raises RecognizerFailed where the words are wrong."""
    request = DecodeRequest(
        request_id=0,
        utterance_id=0,
        channel=0,
        priority=Priority.LIVE_FINAL,
        audio=loaded.audio,
        start_sample=0,
        speech_samples=len(loaded.audio),
        options=DecodeOptions(language="en"),
    )
    requests = [replace(request, request_id=n) for n in range(loaded.engine.info.capacity)]
    for hypothesis in pool.map(loaded.engine.decode, requests):
        right = share_of_words(loaded.expected, hypothesis.text)
        if right < _LEAST_RIGHT_WORDS:
            raise RecognizerFailed(
                f"the engine got {right:.0%} of the warm-up sentence right, {_LEAST_RIGHT_WORDS:.0%} are needed: "
                f"{hypothesis.text!r} instead of {loaded.expected!r}"
            )


def share_of_words(expected: str, text: str) -> float:
    """How many of the expected words stand in the text, in order: 0 to 1."""
    wanted, got = (re.findall(r"\w+", side.lower()) for side in (expected, text))
    blocks = difflib.SequenceMatcher(None, wanted, got, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks) / len(wanted)


# --- serving ---------------------------------------------------------------------------------------------------------


class Server(asyncio.Protocol):
    """One connection's Asks, each handed to a worker thread and replied to exactly once."""

    def __init__(self) -> None:
        self.closed = asyncio.get_running_loop().create_future()  # → why the process should leave; "" for EOF
        self._loop = asyncio.get_running_loop()
        self._parser = Parser()
        self._work: dict[int, Future[Hypothesis]] = {}
        self._engine: Engine
        self._pool: ThreadPoolExecutor
        self._transport: asyncio.WriteTransport

    def serve(self, engine: Engine, pool: ThreadPoolExecutor) -> None:
        """Say that the engine is ready, after which Asks come."""
        self._engine, self._pool = engine, pool
        self._send(Ready(engine.info))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's transports are so in all but name

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._parser.feed(data):
                self._receive(message)
        except FramingError as error:
            self._leave(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave("")

    def _receive(self, message: Message) -> None:
        match message:
            case Ask(key, request):
                work = self._pool.submit(self._engine.decode, request)
                self._work[key] = work
                work.add_done_callback(lambda done: self._loop.call_soon_threadsafe(self._reply, key, done))
            case Cancel(key):
                if key in self._work:
                    self._work[key].cancel()  # does nothing once a worker has begun: that answer comes
            case Ping():
                self._send(Pong())
            case _:
                raise FramingError(f"unexpected {type(message).__name__}")

    def _reply(self, key: int, work: Future[Hypothesis]) -> None:
        del self._work[key]
        if work.cancelled():
            self._send(Dropped(key))
            return
        error = work.exception()
        if error is None:
            self._send(Answer(key, work.result()))
        elif isinstance(error, SttError):
            self._send(Failure(key, error))
        else:
            log("fault", error=repr(error)[:500])
            self._send(Fault(key, type(error).__name__))

    def _send(self, message: Message) -> None:
        self._transport.write(encode(message))

    def _leave(self, reason: str) -> None:
        if not self.closed.done():
            self.closed.set_result(reason)


async def run(connection: socket.socket, settings: Mapping[str, Any]) -> str:
    """Load, warm up, serve until the connection ends; returns why it ended. Raises SttError where it cannot start."""
    loop = asyncio.get_running_loop()
    _, server = await loop.create_unix_connection(Server, sock=connection)
    begun = time.monotonic()
    starting = loop.run_in_executor(None, start_engine, settings)
    await asyncio.wait([starting, server.closed], return_when=asyncio.FIRST_COMPLETED)
    if not server.closed.done():
        engine, pool = starting.result()
        log("ready", model=engine.info.model, capacity=engine.info.capacity, start_s=round(time.monotonic() - begun, 3))
        server.serve(engine, pool)
    return str(await server.closed)


def start_engine(settings: Mapping[str, Any]) -> tuple[Engine, ThreadPoolExecutor]:
    """The loaded, warm and right engine, and its worker threads. Raises SttError."""
    loaded = load(settings)
    pool = ThreadPoolExecutor(loaded.engine.info.capacity, thread_name_prefix="decode")
    warm_up(loaded, pool)
    gc.collect()
    gc.freeze()  # what is loaded now lives for ever: full collections need not walk it
    return loaded.engine, pool


# --- the process -----------------------------------------------------------------------------------------------------


def log(event: str, **fields: Any) -> None:
    """One JSON object on one line of stderr."""
    record = {"time": round(time.time(), 3), "component": "engine", "event": event, **fields}
    with contextlib.suppress(BrokenPipeError):  # the parent is gone, and so will be this process
        sys.stderr.write(json.dumps(record) + "\n")
        sys.stderr.flush()


def _die_with_parent() -> None:
    """Where Linux is: SIGKILL when the parent is gone, even while native code holds the interpreter and sees no EOF."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Serve until the parent is gone. Exit status 0 for that, 1 for an engine that cannot start or go on."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--fd", type=int, required=True, help="connected Unix stream socket to the parent")
    fd = arguments.parse_args().fd
    _die_with_parent()
    os.set_inheritable(fd, False)
    os.dup2(2, 1)  # libraries that print do so into the log
    settings = json.load(sys.stdin)
    asyncio.run(_live(socket.socket(fileno=fd), settings))


async def _live(connection: socket.socket, settings: Mapping[str, Any]) -> NoReturn:
    try:
        reason = await run(connection, settings)
    except SttError as error:
        reason = error.message
    log("stopped", reason=reason)
    os._exit(1 if reason else 0)  # sys.exit would wait for workers that are deep in native code


if __name__ == "__main__":
    main()
