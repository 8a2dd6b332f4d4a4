"""The Recognizer port over an engine process that is started, watched, replaced and asked again.

    decode ──→ Ledger.waiting ──→ in flight (at most ``capacity``, so all of it is being worked on) ──→ answered
                    ↑                     │ the process dies, or breaks on this request
                    └── not to blame ─────┼──→ Ledger.suspects: asked alone, one after another
                                          └──→ to blame ``max_attempts`` times: RecognizerFailed

One request that kills the engine therefore costs its own answer and some restarts, and nobody else's answer. The two
processes share a Unix socket pair and nothing in the file system. Everything here is driven by events of one asyncio
loop; the only timers are deadlines, the heartbeat and the pause before a restart.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

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
from streaming.errors import Overloaded, RecognizerFailed, SttError
from streaming.types import DecodeRequest, Hypothesis, RecognizerInfo

_LOG_LINES_KEPT = 20
_LONGEST_LOG_LINE = 8_192
_FAULTS_IN_A_ROW = 2  # a broken GPU context stays broken, so the next try needs a fresh process
_REAP_TIMEOUT_S = 10.0  # SIGKILL acts at once; unless the kernel holds the process, or somebody else has reaped it
_EXIT_GRACE_S = 2.0  # a process whose socket has closed leaves by itself well within this

Setting = str | int | float | bool | None | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """How to run an engine process.

    ``engine``: its "kind" (those that models.host loads) and the fields of that kind's config, all JSON values.
    ``interpreter``: the Python that has the engine's libraries. ``working_dir``: where it runs and finds the
    package ``models``, so paths in ``engine`` should be absolute.
    ``start_timeout_s``: from launch to ready, which includes reading the weights. ``request_timeout_s``: the longest
    that one decode may take before the process counts as stuck. ``max_pending``: requests held, waiting or in flight.
    One that its caller has given up counts until the engine lets go of it, so twice the engine's capacity is the least.
    ``max_attempts``: how often a request may take the engine down before it is given up, and how often in a row the
    process may fail to start before the held requests are. A process that does not reply to a ping within
    ``heartbeat_timeout_s`` is replaced, too. The pause before restart n in a row is ``backoff_s`` * 2**n.
    """

    engine: Mapping[str, Setting]
    interpreter: str = sys.executable
    working_dir: Path = Path(__file__).resolve().parents[1]
    start_timeout_s: float = 120.0
    request_timeout_s: float = 60.0
    max_attempts: int = 3
    max_pending: int = 256
    heartbeat_interval_s: float = 5.0
    heartbeat_timeout_s: float = 15.0
    backoff_s: float = 0.25
    backoff_max_s: float = 15.0

    def __post_init__(self) -> None:
        if "kind" not in self.engine:
            raise ValueError("engine must name its kind")
        if self.max_attempts < 1 or self.max_pending < 1:
            raise ValueError("max_attempts and max_pending must be at least 1")
        durations = (self.start_timeout_s, self.request_timeout_s, self.heartbeat_interval_s, self.heartbeat_timeout_s)
        if min(durations) <= 0 or not 0 < self.backoff_s <= self.backoff_max_s:
            raise ValueError("time-outs and pauses must be above 0")


def _ignore(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class RemoteObserver:
    """Told what happens to the process, in the event loop; must return at once and not raise.

    ``started(info, start_s)``: ready for work. ``stopped(reason)``: the process died, was killed or did not start.
    ``gave_up()``: one request was answered RecognizerFailed. ``log_line(line)``: a line from its stderr.
    """

    started: Callable[[RecognizerInfo, float], None] = _ignore
    stopped: Callable[[str], None] = _ignore
    gave_up: Callable[[], None] = _ignore
    log_line: Callable[[str], None] = _ignore


# --- who is asked next, and who is to blame: pure --------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way. ``blamed``: how often the engine broke on it. ``abandoned``: its caller has gone."""

    key: int
    blamed: int = 0
    abandoned: bool = False


J = TypeVar("J", bound=Job)
T = TypeVar("T")


class Ledger(Generic[J]):
    """Every job is in one place: waiting, suspect, in flight, or handed back by a method and forgotten."""

    def __init__(self, *, max_pending: int, max_attempts: int) -> None:
        self._max_pending = max_pending
        self._max_attempts = max_attempts
        self.waiting: deque[J] = deque()
        self.suspects: deque[J] = deque()
        self.in_flight: dict[int, J] = {}

    def __len__(self) -> int:
        return len(self.waiting) + len(self.suspects) + len(self.in_flight)

    def add(self, job: J) -> None:
        """Raises Overloaded when ``max_pending`` jobs are held."""
        if len(self) >= self._max_pending:
            raise Overloaded(f"{len(self)} requests are waiting for the engine")
        self.waiting.append(job)

    def next(self, capacity: int) -> J | None:
        """The job to send now, which is then in flight; None where the engine has enough.

        A suspect goes alone: if the engine dies then, it is clear on what.
        """
        if self.suspects:
            job = None if self.in_flight else self.suspects.popleft()
        elif len(self.in_flight) >= capacity or any(job.blamed for job in self.in_flight.values()):
            job = None
        else:
            job = self.waiting.popleft() if self.waiting else None
        if job is not None:
            self.in_flight[job.key] = job
        return job

    def finish(self, key: int) -> J | None:
        """The job has its reply. None where no such job is in flight."""
        return self.in_flight.pop(key, None)

    def abandon(self, job: J) -> bool:
        """The caller has gone. True where the engine has the job: it keeps its place until the engine's reply."""
        if job.key in self.in_flight:
            job.abandoned = True
            return True
        for queue in (self.waiting, self.suspects):
            if job in queue:
                queue.remove(job)
        return False

    def fault(self, key: int) -> J | None:
        """The engine broke on this job but lives. Returns the job if it is now given up."""
        job = self.in_flight.pop(key, None)
        return None if job is None else self._blame(job)

    def crash(self, guilty: Iterable[int] | None = None) -> list[J]:
        """The engine died on the guilty ones (None: any in flight). Returns the jobs that are given up."""
        flying, self.in_flight = list(self.in_flight.values()), {}
        keys = {job.key for job in flying} if guilty is None else set(guilty)
        innocent = [job for job in flying if job.key not in keys and not job.abandoned]
        self.suspects.extendleft(job for job in reversed(innocent) if job.blamed)
        self.waiting.extendleft(job for job in reversed(innocent) if not job.blamed)
        given_up = [self._blame(job) for job in flying if job.key in keys]
        return [job for job in given_up if job is not None]

    def clear(self) -> list[J]:
        """Forget all jobs; returns them."""
        jobs = [*self.in_flight.values(), *self.suspects, *self.waiting]
        self.in_flight, self.suspects, self.waiting = {}, deque(), deque()
        return jobs

    def _blame(self, job: J) -> J | None:
        job.blamed += 1
        if job.abandoned or job.blamed >= self._max_attempts:
            return job
        self.suspects.append(job)
        return None


# --- the process -----------------------------------------------------------------------------------------------------


class _Link(asyncio.Protocol):
    """The parent's end of the socket."""

    def __init__(self, receive: Callable[[Message], None]) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # → why
        self._receive = receive
        self._parser = Parser()
        self._closed = asyncio.Event()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's transports are so in all but name

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._parser.feed(data):
                self._receive(message)
        except FramingError as error:
            self._end(f"protocol error: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed.set()
        self._end("the process ended" if exc is None else f"the connection broke: {exc}")

    def send(self, frame: bytes) -> None:
        # Nothing waits for the socket to take it: at most ``capacity`` requests are out, of under 1 MB each.
        assert self._transport is not None
        self._transport.write(frame)

    async def close(self) -> None:
        """Drop what is unsent and wait until the socket is closed. Without effect on a closed or unused link."""
        if self._transport is not None:
            self._transport.abort()
            await self._closed.wait()

    def _end(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)


async def _whole(step: Coroutine[Any, Any, T]) -> T:
    """Await a step of a few milliseconds that cannot be undone by halves; a cancellation takes effect at its end."""
    task = asyncio.create_task(step)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise


class EngineProcess:
    """One engine process from launch to its last trace. ``receive`` gets what it sends after Ready."""

    def __init__(self, config: RemoteConfig, receive: Callable[[Message], None], log_line: Callable[[str], None]):
        loop = asyncio.get_running_loop()
        self._config = config
        self._receive_reply = receive
        self._log_line = log_line
        self._ready: asyncio.Future[RecognizerInfo] = loop.create_future()
        self._condemned: asyncio.Future[str] = loop.create_future()  # → why
        self._pong = asyncio.Event()
        self._link = _Link(self._receive)
        self._last_lines: deque[str] = deque(maxlen=_LOG_LINES_KEPT)
        self._process: Process | None = None
        self._exited: asyncio.Task[int] | None = None
        self._log: asyncio.Task[None] | None = None
        self._heart: asyncio.Task[None] | None = None
        self._group_killed = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def exit_status(self) -> int | None:
        """Once it is dead: as in ``subprocess``, negative for a signal."""
        return self._process.returncode if self._process else None

    async def start(self) -> RecognizerInfo:
        """Launch and wait until ready. Raises RecognizerFailed, with the process's last lines; nothing is left then."""
        grace_s = 0.0
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                exited = await _whole(self._launch())
                news: list[asyncio.Future[Any]] = [self._ready, self._link.lost, exited]
                await asyncio.wait(news, return_when=asyncio.FIRST_COMPLETED)
            failure = "" if self._ready.done() else await self._why()
            grace_s = _EXIT_GRACE_S  # it is leaving by itself; let it finish saying why
        except TimeoutError:
            failure = f"not ready after {self._config.start_timeout_s:g} s"
        except OSError as error:
            failure = str(error)
        except asyncio.CancelledError:
            await self.stop()
            raise
        if failure:
            await self.stop(grace_s)
            raise RecognizerFailed("\n".join([f"the engine did not start: {failure}", *self._last_lines]))
        self._heart = asyncio.create_task(self._heartbeat())
        return self._ready.result()

    async def ended(self) -> str:
        """Wait until the process is dead or has to be; the caller then calls ``stop``. Returns why."""
        assert self._exited is not None
        ends: list[asyncio.Future[Any]] = [self._link.lost, self._condemned, self._exited]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return await self._why()

    async def _why(self) -> str:
        if self._condemned.done():
            return self._condemned.result()
        # Where the exit was seen first, answers may still be in the socket. A process of its own that outlives it and
        # holds the socket does not get to delay us.
        await asyncio.wait([self._link.lost], timeout=_EXIT_GRACE_S)
        return self._link.lost.result() if self._link.lost.done() else "the process ended"

    @property
    def usable(self) -> bool:
        """Ready, and as far as is known neither dead nor about to be."""
        return self._ready.done() and not self._link.lost.done() and not self._condemned.done()

    def send(self, frame: bytes) -> None:
        self._link.send(frame)

    def condemn(self, reason: str) -> None:
        """Let ``ended`` return: the process is of no further use."""
        if not self._condemned.done():
            self._condemned.set_result(reason)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Close the socket, give the process ``grace_s`` to leave, kill its group, and wait until it is reaped.

        May be called again, also after a call that was cancelled.
        """
        await self._link.close()
        if self._heart is not None:
            self._heart.cancel()
        if self._process is None or self._exited is None or self._log is None:
            return
        if grace_s > 0:
            await asyncio.wait([self._exited], timeout=grace_s)
        if not self._group_killed:
            self._group_killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # with whatever it has started itself
        _, lingering = await asyncio.wait([self._exited, self._log], timeout=_REAP_TIMEOUT_S)
        for task in lingering:
            task.cancel()

    async def _launch(self) -> asyncio.Task[int]:
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            await asyncio.get_running_loop().create_unix_connection(lambda: self._link, sock=ours)
            process = await asyncio.create_subprocess_exec(
                self._config.interpreter,
                *("-m", "models.host", "--fd", str(theirs.fileno())),
                cwd=self._config.working_dir,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a Ctrl-C at the terminal is for the gateway, which drains first
            )
        assert process.stdin is not None
        assert process.stderr is not None
        self._process = process
        self._exited = asyncio.create_task(process.wait())
        self._log = asyncio.create_task(self._read_log(process.stderr))
        # uvloop refuses to write to a process that it knows to be dead; what is then of interest is that it ended.
        with contextlib.suppress(RuntimeError):
            process.stdin.write(json.dumps(dict(self._config.engine)).encode())
        process.stdin.close()
        return self._exited

    async def _read_log(self, stderr: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await stderr.read(1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _LONGEST_LOG_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                text = line[:_LONGEST_LOG_LINE].decode(errors="replace")
                self._last_lines.append(text)
                self._log_line(text)

    async def _heartbeat(self) -> None:
        ping = encode(Ping())
        while True:
            await asyncio.sleep(self._config.heartbeat_interval_s)
            self._pong.clear()
            self._link.send(ping)
            try:
                async with asyncio.timeout(self._config.heartbeat_timeout_s):
                    await self._pong.wait()
            except TimeoutError:
                self.condemn(f"no reply to a ping within {self._config.heartbeat_timeout_s:g} s")
                return

    def _receive(self, message: Message) -> None:
        match message:
            case Ready(info) if not self._ready.done():
                self._ready.set_result(info)
            case Pong():
                self._pong.set()
            case _ if self._ready.done():
                self._receive_reply(message)
            case _:
                raise FramingError(f"unexpected {type(message).__name__}")


# --- the port --------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Call(Job):
    frame: bytes = b""
    reply: asyncio.Future[Hypothesis] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    deadline: asyncio.TimerHandle | None = None

    def stop_clock(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()

    def fail(self, error: SttError) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)


class RemoteRecognizer:
    """A Recognizer in a process of its own. Await ``start`` before the first ``decode`` and ``close`` at the end."""

    def __init__(self, config: RemoteConfig, observer: RemoteObserver | None = None) -> None:
        self._config = config
        self._observer = observer or RemoteObserver()
        self._ledger: Ledger[_Call] = Ledger(max_pending=config.max_pending, max_attempts=config.max_attempts)
        self._keys = itertools.count()
        self._guilty: set[int] | None = None  # on whom the process is being ended; None where it ends by itself
        self._faults_in_a_row = 0
        self._process: EngineProcess | None = None  # the newest, in whatever state
        self._info: RecognizerInfo | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._refusal = "the engine has not been started"  # why decode refuses; "" while it accepts
        self._ends_in_a_row = 0
        self._restarts = 0

    @property
    def ready(self) -> bool:
        """True while a process is there that has proved itself. Requests are held meanwhile, not refused."""
        return self._usable is not None

    @property
    def info(self) -> RecognizerInfo:
        """Raises RuntimeError before the first start."""
        if self._info is None:
            raise RuntimeError("the engine has not been started")
        return self._info

    @property
    def restarts(self) -> int:
        """How many processes have been launched after the first."""
        return self._restarts

    @property
    def pid(self) -> int | None:
        """The process id of the engine, where one is ready."""
        return self._usable.pid if self._usable else None

    @property
    def _usable(self) -> EngineProcess | None:
        return self._process if self._process is not None and self._process.usable else None

    async def start(self) -> None:
        """Launch the process and wait until it is ready.

        Raises RecognizerFailed, with the process's last log lines, where it does not become so.
        """
        if self._supervisor is not None:
            raise RuntimeError("start may be called once")
        process = await self._launch()
        self._refusal = ""
        self._supervisor = asyncio.create_task(self._supervise(process))

    async def close(self) -> None:
        """Stop the process; every request still held raises RecognizerFailed. May be called at any time, and again."""
        self._refuse("the engine is closed")
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        if self._process is not None:
            await self._process.stop(_EXIT_GRACE_S)
            self._process = None

    async def decode(self, request: DecodeRequest) -> Hypothesis:
        """Ask the engine; ask it again where its process dies. Cancelling gives the request up.

        Raises BadAudio (audio that is not int16, 1 sample to 30 s), Overloaded when ``max_pending`` requests are held,
        RecognizerFailed where the engine fails on this request, is closed, or cannot be started any more.
        """
        if self._refusal:
            raise RecognizerFailed(self._refusal)
        key = next(self._keys)
        call = _Call(key, frame=encode(Ask(key, request)))
        self._ledger.add(call)
        self._pump()
        try:
            return await call.reply
        except asyncio.CancelledError:
            if self._ledger.abandon(call) and self._usable is not None:
                self._usable.send(encode(Cancel(key)))
            self._pump()
            raise

    # --- towards the engine ---

    def _pump(self) -> None:
        process = self._usable
        while process is not None and (call := self._ledger.next(self.info.capacity)) is not None:
            process.send(call.frame)
            call.deadline = asyncio.get_running_loop().call_later(
                self._config.request_timeout_s, self._expire, call.key
            )

    def _expire(self, key: int) -> None:
        self._condemn(f"no answer within {self._config.request_timeout_s:g} s", {key})

    def _condemn(self, reason: str, guilty: set[int]) -> None:
        self._guilty = (self._guilty or set()) | guilty
        if self._process is not None:
            self._process.condemn(reason)

    # --- from the engine ---

    def _receive(self, message: Message) -> None:
        match message:
            case Answer(key, hypothesis):
                call = self._finish(key)
                self._ends_in_a_row = self._faults_in_a_row = 0
                if not call.reply.done():
                    call.reply.set_result(hypothesis)
            case Failure(key, error):
                self._finish(key).fail(error)
            case Dropped(key):
                self._finish(key)
            case Fault(key, reason):
                self._fault(key, reason)
            case _:
                raise FramingError(f"unexpected {type(message).__name__}")
        self._pump()

    def _fault(self, key: int, reason: str) -> None:
        self._find(key).stop_clock()
        self._give_up(self._ledger.fault(key), f"the engine failed on this request: {reason}")
        self._faults_in_a_row += 1
        if self._faults_in_a_row >= _FAULTS_IN_A_ROW:
            self._condemn(f"{self._faults_in_a_row} faults in a row, the last was {reason}", set())

    def _find(self, key: int) -> _Call:
        if key not in self._ledger.in_flight:
            raise FramingError(f"a reply to {key}, which is not in flight")
        return self._ledger.in_flight[key]

    def _finish(self, key: int) -> _Call:
        call = self._find(key)
        call.stop_clock()
        self._ledger.finish(key)
        return call

    def _give_up(self, call: _Call | None, reason: str) -> None:
        if call is not None and not call.abandoned:
            self._observer.gave_up()
            call.fail(RecognizerFailed(reason))

    # --- over the engine ---

    async def _supervise(self, process: EngineProcess) -> None:
        try:
            while True:
                reason = await process.ended()
                await self._bury(process, reason)
                process = await self._replace()
        except Exception as error:
            # Nobody is left to restart the engine: say so to everyone rather than hang.
            self._refuse(f"the engine cannot be supervised: {error!r}")
            self._observer.stopped(repr(error))
            raise

    async def _bury(self, process: EngineProcess, reason: str) -> None:
        self._ends_in_a_row += 1
        await process.stop()
        for call in self._ledger.in_flight.values():
            call.stop_clock()
        guilty, self._guilty, self._faults_in_a_row = self._guilty, None, 0
        for given_up in self._ledger.crash(guilty):
            self._give_up(given_up, f"the engine ended {given_up.blamed} times on this request: {reason}")
        self._observer.stopped(f"{reason} (exit status {process.exit_status})")

    async def _replace(self) -> EngineProcess:
        """A ready process, however many launches it takes; after ``max_attempts`` nobody is kept waiting for it."""
        failures = 0
        while True:
            await asyncio.sleep(self._pause_s())
            self._restarts += 1
            try:
                process = await self._launch()
            except RecognizerFailed as error:
                failures += 1
                self._ends_in_a_row += 1
                self._observer.stopped(error.message)
                if failures >= self._config.max_attempts:
                    self._refuse("the engine cannot be started")
            else:
                self._refusal = ""
                self._pump()
                return process

    def _pause_s(self) -> float:
        doublings = min(self._ends_in_a_row - 1, 20)
        return min(self._config.backoff_max_s, self._config.backoff_s * 2.0**doublings)

    async def _launch(self) -> EngineProcess:
        begun = asyncio.get_running_loop().time()
        self._process = process = EngineProcess(self._config, self._receive, self._observer.log_line)
        self._info = await process.start()
        self._observer.started(self._info, asyncio.get_running_loop().time() - begun)
        return process

    def _refuse(self, reason: str) -> None:
        self._refusal = reason
        for call in self._ledger.clear():
            call.stop_clock()
            call.fail(RecognizerFailed(reason))
