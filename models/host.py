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
import functools
import gc
import json
import os
import re
import signal
import socket
import sys
import time
import traceback
import wave
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
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
_CLOSE_TIMEOUT_S = 1.5  # the parent waits 2 s before it kills
_PR_SET_PDEATHSIG = 1  # prctl(2)


# --- engines ---------------------------------------------------------------------------------------------------------


class SyncEngine(Protocol):
    """An engine that blocks. ``decode`` is called from ``info.capacity`` threads at once."""

    @property
    def info(self) -> RecognizerInfo: ...

    def decode(self, request: DecodeRequest) -> Hypothesis:
        """Raises SttError for what it foresees; any other error counts as a fault of the engine."""
        ...


class Engine(Protocol):
    """What the process serves: ``info.capacity`` calls of ``decode`` run at once, in the loop that answers pings."""

    @property
    def info(self) -> RecognizerInfo:
        """Valid once it has been started."""
        ...

    async def start(self) -> None:
        """Load, and warm up what one decode does not. Raises SttError where it cannot."""
        ...

    async def decode(self, request: DecodeRequest) -> Hypothesis:
        """Cancelling the call gives the work up; what cannot be given up any more goes on and is answered.

        Raises SttError for what it foresees; any other error counts as a fault of the engine.
        """
        ...

    async def close(self) -> None:
        """Let go of what outlives the process. Nothing is decoded afterwards."""
        ...


class Threaded:
    """A synchronous engine as an Engine: a thread for each decode that runs at once."""

    def __init__(self, engine: SyncEngine) -> None:
        self._engine = engine
        self._pool = ThreadPoolExecutor(engine.info.capacity, thread_name_prefix="decode")

    @property
    def info(self) -> RecognizerInfo:
        return self._engine.info

    async def start(self) -> None:
        """Nothing: it is loaded."""

    async def decode(self, request: DecodeRequest) -> Hypothesis:
        """A call that is cancelled after a worker has begun returns its answer: it keeps the worker busy until then."""
        work = self._pool.submit(self._engine.decode, request)
        answer = asyncio.wrap_future(work)
        while True:
            try:
                return await asyncio.shield(answer)
            except asyncio.CancelledError:
                if work.cancel() or answer.done():
                    raise

    async def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine, and what it must get right, so many times at once, before it serves.

    ``audio``: int16, shape (n,), 16 kHz.
    """

    engine: Engine
    audio: Pcm16
    expected: str
    at_once: int = 1


# --- loading ---------------------------------------------------------------------------------------------------------


def load(settings: Mapping[str, Any]) -> Loaded:
    """The engine that the settings name: "kind" and the fields of its config. Raises RecognizerFailed."""
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()
    }
    kind = fields.pop("kind", None)
    try:
        if kind == "scripted":
            return in_threads(scripted.ScriptedEngine(scripted.ScriptedConfig(**fields)), *_scripted_clip())
        if kind == "scripted_async":
            return Loaded(scripted.ScriptedAsyncEngine(scripted.ScriptedConfig(**fields)), *_scripted_clip())
        if kind == "ctranslate":
            engine = _ctranslate(fields)
            return Loaded(engine, *warm_up_clip(), at_once=engine.info.capacity)
        if kind == "vllm":
            return Loaded(_vllm(fields), *warm_up_clip())
    except ImportError as error:
        which = f"{sys.executable} lacks it; HARK_ENGINE_PYTHON names the engine's interpreter"
        raise RecognizerFailed(f"the {kind} engine cannot be set up: {error} ({which})") from error
    except (TypeError, ValueError) as error:
        raise RecognizerFailed(f"the {kind} engine cannot be set up: {error}") from error
    raise RecognizerFailed(f"there is no engine of kind {kind!r}")


def in_threads(engine: SyncEngine, audio: Pcm16, expected: str) -> Loaded:
    """The first decode of every thread costs more than the later ones, so each of them gets one."""
    return Loaded(Threaded(engine), audio, expected, at_once=engine.info.capacity)


def _scripted_clip() -> tuple[Pcm16, str]:
    words = ["alpha", "bravo", "charlie", "copper"]
    return scripted.encode_words(words), " ".join(words)


def _ctranslate(fields: Mapping[str, Any]) -> Engine:
    from models.ctranslate import CtranslateConfig, CtranslateEngine  # heavy, and not there in every environment

    return CtranslateEngine(CtranslateConfig(**{**fields, "model_dir": Path(fields["model_dir"])}))


def _vllm(fields: Mapping[str, Any]) -> Engine:
    from models.vllm_engine import VllmConfig, VllmWhisper  # likewise

    return VllmWhisper(VllmConfig(**{**fields, "model_dir": Path(fields["model_dir"])}), log)


def warm_up_clip() -> tuple[Pcm16, str]:
    """A spoken sentence, int16, shape (42240,), 16 kHz, and its text."""
    with wave.open(str(_CLIP)) as clip:
        return np.frombuffer(clip.readframes(clip.getnframes()), dtype="<i2").astype(np.int16, copy=False), _CLIP_TEXT


async def prove(loaded: Loaded) -> None:
    """Have the known sentence decoded. Raises RecognizerFailed where the words are wrong."""
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
    requests = [replace(request, request_id=n) for n in range(loaded.at_once)]
    for hypothesis in await asyncio.gather(*map(loaded.engine.decode, requests)):
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
    """One connection's Asks, each handed to the engine and replied to exactly once."""

    def __init__(self) -> None:
        self.closed = asyncio.get_running_loop().create_future()  # → why the process should leave; "" for EOF
        self._loop = asyncio.get_running_loop()
        self._parser = Parser()
        self._work: dict[int, asyncio.Task[Hypothesis]] = {}
        self._given_up: set[int] = set()
        self._engine: Engine
        self._transport: asyncio.WriteTransport

    def serve(self, engine: Engine) -> None:
        """Say that the engine is ready, after which Asks come."""
        self._engine = engine
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
                self._work[key] = self._loop.create_task(self._engine.decode(request))
                self._work[key].add_done_callback(functools.partial(self._reply, key))
            case Cancel(key):
                if key in self._work:
                    self._given_up.add(key)
                    self._work[key].cancel()
            case Ping():
                self._send(Pong())
            case _:
                raise FramingError(f"unexpected {type(message).__name__}")

    def _reply(self, key: int, work: asyncio.Task[Hypothesis]) -> None:
        del self._work[key]
        was_given_up = key in self._given_up
        self._given_up.discard(key)
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        if error is None:
            self._send(Answer(key, work.result()))
        elif isinstance(error, SttError):
            self._send(Failure(key, error))
        elif work.cancelled() and was_given_up:
            self._send(Dropped(key))
        else:  # also where the engine itself has cancelled: somebody still waits for an answer
            log("fault", error=repr(error)[:500])
            self._send(Fault(key, type(error).__name__))

    def _send(self, message: Message) -> None:
        self._transport.write(encode(message))

    def _leave(self, reason: str) -> None:
        if not self.closed.done():
            self.closed.set_result(reason)


async def run(connection: socket.socket, load_engine: Callable[[], Loaded]) -> str:
    """Load, warm up, serve until the connection ends; returns why it ended. Raises SttError where it cannot start."""
    _, server = await asyncio.get_running_loop().create_unix_connection(Server, sock=connection)
    begun = time.monotonic()
    starting = asyncio.create_task(start_engine(load_engine))
    await asyncio.wait([starting, server.closed], return_when=asyncio.FIRST_COMPLETED)
    if not server.closed.done():
        engine = starting.result()
        log("ready", model=engine.info.model, capacity=engine.info.capacity, start_s=round(time.monotonic() - begun, 3))
        server.serve(engine)
        await server.closed
        await _close(engine)
    return str(server.closed.result())


async def start_engine(load_engine: Callable[[], Loaded]) -> Engine:
    """The loaded, warm and right engine. Raises SttError."""
    loaded = await asyncio.get_running_loop().run_in_executor(None, load_engine)
    await loaded.engine.start()
    await prove(loaded)
    gc.collect()
    gc.freeze()  # what is loaded now lives for ever: full collections need not walk it
    return loaded.engine


async def _close(engine: Engine) -> None:
    try:
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await engine.close()
    except Exception as error:  # noqa: BLE001 - the process leaves, whatever it was
        log("fault", error=repr(error)[:500])


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
        reason = await run(connection, functools.partial(load, settings))
    except SttError as error:
        reason = error.message
    except Exception as error:  # noqa: BLE001 - the process's edge: leave now, not when threads and children have ended
        traceback.print_exc()
        reason = repr(error)[:500]
    log("stopped", reason=reason)
    os._exit(1 if reason else 0)  # sys.exit would wait for workers that are deep in native code


if __name__ == "__main__":
    main()
