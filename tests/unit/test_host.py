"""The engine process's loop, in this process: what is asked, cancelled and answered over its socket. No model."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from models import host
from models.framing import Answer, Ask, Cancel, Dropped, Failure, Fault, Message, Parser, Ready, encode
from models.scripted import ScriptedConfig, encode_words
from streaming.errors import RecognizerFailed
from streaming.types import DecodeRequest, Hypothesis, Priority, RecognizerInfo

CLIP = encode_words(["alpha", "bravo"])
ANSWERS = ScriptedConfig()
INFO = RecognizerInfo("awaited", frozenset({"en"}), capacity=4)


@pytest.fixture(autouse=True)
def _nothing_of_the_tests_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.gc, "freeze", lambda: None)


def saying(word: str, priority: Priority = Priority.LIVE_FINAL) -> DecodeRequest:
    audio = encode_words([word])
    return DecodeRequest(1, 1, 0, priority, audio, 0, len(audio))


class Parent:
    """The other end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._parser = Parser()
        self._received: list[Message] = []

    async def send(self, *messages: Message) -> None:
        await asyncio.get_running_loop().sock_sendall(self._connection, b"".join(map(encode, messages)))

    async def receive(self) -> Message:
        while not self._received:
            data = await asyncio.get_running_loop().sock_recv(self._connection, 1 << 16)
            assert data, "the host has closed the connection"
            self._received += self._parser.feed(data)
        return self._received.pop(0)

    def leave(self) -> None:
        self._connection.close()


@asynccontextmanager
async def hosting(load: Callable[[], host.Loaded]) -> AsyncIterator[tuple[Parent, "asyncio.Task[str]"]]:
    """A ready host and its parent."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
    with ours:
        serving = asyncio.create_task(host.run(theirs, load))
        parent = Parent(ours)
        async with asyncio.timeout(30):
            assert isinstance(await parent.receive(), Ready)
            yield parent, serving
            parent.leave()
            assert await serving == ""


# --- engines that are awaited ----------------------------------------------------------------------------------------


@dataclass
class Awaited:
    """An engine that hangs on "zulu", cancels itself on "yankee" and keeps what happened to it."""

    events: list[str] = field(default_factory=list)
    priorities: list[Priority] = field(default_factory=list)
    info: RecognizerInfo = INFO
    close_error: Exception | None = None
    close_hangs: bool = False

    async def start(self) -> None:
        await asyncio.sleep(0)
        self.events.append("started")

    async def decode(self, request: DecodeRequest) -> Hypothesis:
        self.priorities.append(request.priority)
        answer = ANSWERS.answer(request)
        self.events.append(answer.text)
        if answer.text == "yankee":
            raise asyncio.CancelledError
        if answer.text == "xray":
            raise RecognizerFailed("no xray")
        if answer.text == "zulu":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.events.append("cancelled")
                raise
        return answer

    async def close(self) -> None:
        self.events.append("closed")
        if self.close_hangs:
            await asyncio.Event().wait()
        if self.close_error is not None:
            raise self.close_error

    def load(self) -> host.Loaded:
        return host.Loaded(self, CLIP, "alpha bravo")


async def test_an_awaited_engine_is_started_then_proved_once_and_closed_at_the_end() -> None:
    engine = Awaited()
    async with hosting(engine.load) as (parent, _):
        assert engine.events == ["started", "alpha bravo"]
        await parent.send(Ask(5, saying("alpha")))
        reply = await parent.receive()
        assert isinstance(reply, Answer)
        assert (reply.key, reply.hypothesis.text) == (5, "alpha")
    assert engine.events == ["started", "alpha bravo", "alpha", "closed"]


async def test_an_awaited_decode_that_is_cancelled_ends_and_its_place_is_free() -> None:
    engine = Awaited()
    async with hosting(engine.load) as (parent, _):
        await parent.send(Ask(1, saying("zulu")), Ask(2, saying("alpha")))
        reply = await parent.receive()
        assert isinstance(reply, Answer)
        assert reply.key == 2
        await parent.send(Cancel(1), Cancel(1), Cancel(99))
        assert await parent.receive() == Dropped(1)
        assert engine.events[-1] == "cancelled"
        await parent.send(Ask(3, saying("bravo")))
        assert isinstance(await parent.receive(), Answer)


async def test_what_is_cancelled_before_it_begins_never_reaches_the_engine() -> None:
    engine = Awaited()
    async with hosting(engine.load) as (parent, _):
        await parent.send(Ask(1, saying("alpha")), Cancel(1))  # one write, so one read
        assert await parent.receive() == Dropped(1)
        assert engine.events == ["started", "alpha bravo"]


async def test_a_request_that_nobody_cancelled_is_never_called_dropped() -> None:
    """Its caller would wait for ever."""
    async with hosting(Awaited().load) as (parent, _):
        await parent.send(Ask(1, saying("yankee")))
        assert await parent.receive() == Fault(1, "CancelledError")


async def test_a_typed_failure_and_the_priority_go_through() -> None:
    engine = Awaited()
    async with hosting(engine.load) as (parent, _):
        await parent.send(Ask(1, saying("xray", Priority.FILE)))
        reply = await parent.receive()
        assert isinstance(reply, Failure)
        assert reply.error.message == "no xray"
        assert engine.priorities[-1] is Priority.FILE


@pytest.mark.parametrize("engine", [Awaited(close_error=OSError("stuck")), Awaited(close_hangs=True)])
async def test_an_engine_that_does_not_close_keeps_nobody(engine: Awaited, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_CLOSE_TIMEOUT_S", 0.01)
    async with hosting(engine.load):
        pass
    assert engine.events[-1] == "closed"


async def test_an_awaited_engine_that_is_wrong_or_does_not_start_never_serves() -> None:
    async def outcome(load: Callable[[], host.Loaded]) -> str:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        with ours, pytest.raises(RecognizerFailed) as failure:
            await host.run(theirs, load)
        return failure.value.message

    assert "0% of the warm-up sentence" in await outcome(lambda: host.Loaded(Awaited(), CLIP, "charlie delta"))
    settings = {"kind": "scripted_async", "fail_load": "no weights here"}
    assert await outcome(lambda: host.load(settings)) == "no weights here"


# --- engines that block ----------------------------------------------------------------------------------------------


class Blocking:
    """An engine of two threads, which answers when it is let."""

    def __init__(self) -> None:
        self.info = RecognizerInfo("blocking", frozenset({"en"}), capacity=2)
        self.together = threading.Barrier(2, timeout=20)
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Event()
        self.heard: list[str] = []

    def decode(self, request: DecodeRequest) -> Hypothesis:
        answer = ANSWERS.answer(request)
        self.heard.append(answer.text)
        if answer.text == "alpha bravo":
            self.together.wait()  # breaks unless both threads are proved at once
        self.begun.release()
        if answer.text == "zulu":
            self.may_end.wait(20)
        return answer

    def load(self) -> host.Loaded:
        return host.in_threads(self, CLIP, "alpha bravo")


async def test_each_thread_of_a_blocking_engine_is_proved_at_once() -> None:
    engine = Blocking()
    async with hosting(engine.load):
        assert engine.heard == ["alpha bravo"] * 2


async def test_a_blocking_decode_that_has_begun_keeps_its_place_and_is_answered() -> None:
    engine = Blocking()
    async with hosting(engine.load) as (parent, _):
        for _ in range(2):
            engine.begun.acquire()
        await parent.send(*(Ask(key, saying("zulu")) for key in (1, 2)), Ask(3, saying("alpha")))
        for _ in range(2):
            await asyncio.to_thread(engine.begun.acquire)
        await parent.send(Cancel(1), Cancel(3), Cancel(1))
        assert await parent.receive() == Dropped(3)
        engine.may_end.set()
        replies = [await parent.receive() for _ in range(2)]
        assert sorted(reply.key for reply in replies if isinstance(reply, Answer)) == [1, 2]
    assert "alpha" not in engine.heard


async def test_a_cancelled_decode_that_fails_is_a_failure() -> None:
    class Fails(Blocking):
        def decode(self, request: DecodeRequest) -> Hypothesis:
            answer = super().decode(request)
            if answer.text == "zulu":
                raise RecognizerFailed("no zulu")
            return answer

    engine = Fails()
    async with hosting(engine.load) as (parent, _):
        for _ in range(2):
            engine.begun.acquire()
        await parent.send(Ask(1, saying("zulu")))
        await asyncio.to_thread(engine.begun.acquire)
        await parent.send(Cancel(1), Ask(2, saying("alpha")))
        assert isinstance(await parent.receive(), Answer)  # so the Cancel has been read, too
        engine.may_end.set()
        assert isinstance(await parent.receive(), Failure)


async def test_a_blocking_engine_that_cancels_itself_is_a_fault() -> None:
    class Cancels(Blocking):
        def decode(self, request: DecodeRequest) -> Hypothesis:
            answer = super().decode(request)
            if answer.text == "yankee":
                raise asyncio.CancelledError
            return answer

    async with hosting(Cancels().load) as (parent, _):
        await parent.send(Ask(1, saying("yankee")))
        assert await parent.receive() == Fault(1, "CancelledError")
