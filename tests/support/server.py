"""``hark serve`` as a real process on a free loopback port, and a plain client for it.

The scripted engine unless a test says otherwise, so that a start takes a second and needs no weights.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from models.scripted import encode_words

ROOT = Path(__file__).parents[2]
START_S = 60.0
STOP_S = 30.0

Event = dict[str, Any]


class Server:
    """A running service."""

    def __init__(self, folder: Path, settings: dict[str, object], start_s: float = START_S) -> None:
        self._log = folder / "stderr"
        self._start_s = start_s
        clean = {name: value for name, value in os.environ.items() if not name.startswith("HARK_")}
        given = {f"HARK_{name.upper()}": str(value) for name, value in settings.items()}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "app", "serve"],
                cwd=ROOT,
                env={**clean, "HARK_ENGINE": "scripted", "HARK_PORT": "0", **given},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    # What it says ----------------------------------------------------------------------------------------------------

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def tracebacks(self) -> list[str]:
        """Log lines with a traceback, but for the one that uvicorn writes where a client's text is not UTF-8."""
        return [line for line in self.log.splitlines() if "Traceback" in line and "Invalid UTF-8" not in line]

    @property
    def own_tracebacks(self) -> list[str]:
        """Those that the engine process has not written."""
        return [line for line in self.tracebacks if json.loads(line)["event"] != "engine_log"]

    @property
    def port(self) -> int:
        """Waits until it listens."""
        found = wait_for(lambda: re.search(r"listens on http://\S+?:(\d+)", self.log) or self._has_ended(), START_S)
        assert isinstance(found, re.Match), f"the service ended before it listened:\n{self.log}"
        return int(found[1])

    def _has_ended(self) -> bool:
        return self.process.poll() is not None

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def stream_url(self, **parameters: object) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/stream?{urlencode(parameters)}"

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url(path), timeout=10)

    def wait_ready(self) -> None:
        def is_ready() -> bool:
            assert not self._has_ended(), f"the service ended:\n{self.log}"
            with contextlib.suppress(httpx.TransportError):
                return self.get("/readyz").status_code == 200
            return False

        wait_for(is_ready, self._start_s)

    def metric(self, name: str, **labels: str) -> float:
        """A sample's value; 0 where there is none yet."""
        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return float(sample.value)
        return 0.0

    # What it is ------------------------------------------------------------------------------------------------------

    @property
    def itself(self) -> psutil.Process:
        return psutil.Process(self.process.pid)

    @property
    def engine(self) -> psutil.Process:
        """The engine's process. Raises StopIteration where there is none."""
        return next(child for child in self.itself.children() if "models.host" in child.cmdline())

    def rss_mib(self) -> float:
        return float(self.itself.memory_info().rss) / 2**20

    # How it ends -----------------------------------------------------------------------------------------------------

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait_exit(self, within_s: float = STOP_S) -> int:
        """The exit status; fails where it, or a process that it had started, is still there after that."""
        family = [] if self._has_ended() else [self.itself, *self.itself.children(recursive=True)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(within_s)
        _, left = psutil.wait_procs(family, timeout=1.0)
        left = [process for process in left if not _has_exited(process)]
        for process in left:
            process.kill()
        status = self.process.wait()
        assert not left, f"left behind: {left}\n{self.log}"
        return status


def _has_exited(process: psutil.Process) -> bool:
    """True for one whose status nobody has asked for yet, too: an orphan waits for the system's first process."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@contextlib.contextmanager
def serving(
    *, ready: bool = True, start_s: float = START_S, engine_breaks: bool = False, **settings: object
) -> Iterator[Server]:
    """A service with these settings (``max_sessions=2``), by default once it is ready, within ``start_s``.

    At the end it must stop on SIGTERM with status 0, leave no process behind and have logged no traceback (where the
    test breaks the engine, none of the gateway's own); a service that has ended by then was the test's to judge.
    """
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), settings, start_s)
        try:
            if ready:
                server.wait_ready()
            yield server
        except BaseException:
            server.process.kill()
            server.wait_exit()
            raise
        if server.process.poll() is None:
            server.signal()
            assert server.wait_exit() == 0, server.log
        assert (server.own_tracebacks if engine_breaks else server.tracebacks) == []


def wait_for(condition: Callable[[], Any], within_s: float = 10.0) -> Any:
    """What the condition gives as soon as it is true. Raises TimeoutError where it does not become so."""
    deadline_s = time.monotonic() + within_s
    while not (found := condition()):
        if time.monotonic() > deadline_s:
            raise TimeoutError
        time.sleep(0.02)
    return found


async def eventually(condition: Callable[[], Any], within_s: float = 10.0) -> Any:
    """``wait_for`` in a thread, so that the loop's connections live on."""
    return await asyncio.to_thread(wait_for, condition, within_s)


# --- a client --------------------------------------------------------------------------------------------------------


@dataclass
class Conversation:
    """What came back over one connection."""

    events: list[Event] = field(default_factory=list)
    close_code: int | None = None
    close_reason: str | None = None

    def of_type(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["type"] == kind]

    @property
    def texts(self) -> list[str]:
        return [event["text"] for event in self.of_type("final")]

    @property
    def errors(self) -> list[str]:
        return [event["code"] for event in self.of_type("error")]


@contextlib.asynccontextmanager
async def streaming(server: Server, **parameters: object) -> AsyncIterator[ClientConnection]:
    async with connect(server.stream_url(**parameters), proxy=None, max_size=None) as connection:
        yield connection


async def listen(connection: ClientConnection) -> Conversation:
    """Read until the service closes."""
    heard = Conversation()
    with contextlib.suppress(ConnectionClosed):
        async for message in connection:
            heard.events.append(json.loads(message))
    heard.close_code, heard.close_reason = connection.close_code, connection.close_reason
    return heard


async def hear(connection: ClientConnection, kind: str) -> Event:
    """The next event of that kind; those before it are passed over."""
    while True:
        event: Event = json.loads(await connection.recv())
        if event["type"] == kind:
            return event


async def converse(
    server: Server,
    *messages: bytes | str,
    act: Callable[[ClientConnection], Awaitable[None]] | None = None,
    **parameters: object,
) -> Conversation:
    """Send the messages, then ``act``; read meanwhile and until the service closes."""
    async with streaming(server, **parameters) as connection:
        listening = asyncio.create_task(listen(connection))
        with contextlib.suppress(ConnectionClosed):
            for message in messages:
                await connection.send(message)
            if act is not None:
                await act(connection)
        return await listening


def say(*words: str | None) -> bytes:
    """16 kHz mono linear16 that the scripted engine reads as these words, 100 ms each; None is silence."""
    return encode_words(words).tobytes()


def pieces(audio: bytes, size: int = 2_560) -> Sequence[bytes]:
    return [audio[start : start + size] for start in range(0, len(audio), size)]


EOF = '{"type":"eof"}'
COMMIT = '{"type":"commit"}'
KEEPALIVE = '{"type":"keepalive"}'
PAUSE: tuple[None, ...] = (None,) * 8  # longer than the default pause
