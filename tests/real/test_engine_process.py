"""The engine process for real: killed, stuck, poisoned, orphaned, refused. Only the model is scripted."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from models.remote import RemoteConfig, RemoteObserver, RemoteRecognizer
from models.scripted import VOCABULARY, encode_words
from streaming.errors import BadAudio, Overloaded, RecognizerFailed
from streaming.types import DecodeRequest, Hypothesis, Priority, RecognizerInfo

ROOT = Path(__file__).parents[2]
HARMLESS = VOCABULARY[:24]
both_kinds = pytest.mark.parametrize("kind", ["scripted", "scripted_async"])


@dataclass
class Witness:
    """What the observer was told."""

    started: list[RecognizerInfo] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    gave_up: int = 0
    lines: list[str] = field(default_factory=list)
    started_again: asyncio.Event = field(default_factory=asyncio.Event)

    def observer(self) -> RemoteObserver:
        return RemoteObserver(
            started=self.start,
            stopped=self.stopped.append,
            gave_up=self.count,
            log_line=self.lines.append,
        )

    def start(self, info: RecognizerInfo, _start_s: float) -> None:
        if self.started:
            self.started_again.set()
        self.started.append(info)

    def count(self) -> None:
        self.gave_up += 1


@asynccontextmanager
async def engine(witness: Witness | None = None, **settings: Any) -> AsyncIterator[RemoteRecognizer]:
    """A running scripted engine; ``settings`` go to RemoteConfig or, where it has no such field, to the engine."""
    remote = {name: settings.pop(name) for name in list(settings) if name in RemoteConfig.__dataclass_fields__}
    config = RemoteConfig(engine={"kind": "scripted"} | settings, **({"backoff_s": 0.01} | remote))
    recognizer = RemoteRecognizer(config, (witness or Witness()).observer())
    await recognizer.start()
    try:
        yield recognizer
    finally:
        await recognizer.close()


def saying(*words: str, request_id: int = 1) -> DecodeRequest:
    audio = encode_words(words)
    return DecodeRequest(request_id, 1, 0, Priority.LIVE_FINAL, audio, 0, len(audio))


def kill(recognizer: RemoteRecognizer, signal_number: int = signal.SIGKILL) -> None:
    assert recognizer.pid is not None
    os.kill(recognizer.pid, signal_number)


async def gone(pid: int, within_s: float = 10.0) -> bool:
    """For other processes' children only: psutil's wait would reap our own behind the event loop's back."""
    try:
        process = psutil.Process(pid)
        await asyncio.to_thread(process.wait, within_s)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


# --- death -----------------------------------------------------------------------------------------------------------


@both_kinds
@pytest.mark.parametrize("seed", range(3))
async def test_killed_at_any_moment_each_request_is_answered_once_and_rightly(seed: int, kind: str) -> None:
    chance = random.Random(seed)
    async with engine(kind=kind, capacity=3, delay_s=0.01, max_attempts=50) as recognizer:
        tasks = [asyncio.create_task(recognizer.decode(saying(HARMLESS[n % 24], request_id=n))) for n in range(60)]
        for _ in range(3):
            # Wait for some answers, then for a moment inside the decodes that follow.
            pending = [task for task in tasks if not task.done()]
            await asyncio.wait(pending[:10])
            await asyncio.sleep(chance.uniform(0, 0.015))
            if recognizer.pid is not None:
                kill(recognizer)
        answers = await asyncio.gather(*tasks)
        assert [(a.request_id, a.text) for a in answers] == [(n, HARMLESS[n % 24]) for n in range(60)]
        assert recognizer.restarts >= 1


async def test_requests_made_while_it_restarts_are_held_and_answered() -> None:
    witness = Witness()
    async with engine(witness) as recognizer:
        first = recognizer.pid
        kill(recognizer)
        await asyncio.sleep(0.05)
        assert not recognizer.ready
        assert (await recognizer.decode(saying("alpha"))).text == "alpha"
        assert recognizer.ready
        assert recognizer.restarts == 1
        assert recognizer.pid != first
        assert witness.stopped == ["the process ended (exit status -9)"]
        assert len(witness.started) == 2


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_restart_whose_process_dies_before_it_is_told_what_to_load_is_tried_again(
    new_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = asyncio.create_subprocess_exec
    interpreters: list[str] = []

    async def stillborn_at_second(interpreter: str, *arguments: str, **options: Any) -> asyncio.subprocess.Process:
        interpreters.append(interpreter)
        if len(interpreters) != 2:
            return await launch(interpreter, *arguments, **options)
        process = await launch("false", **options)
        await process.wait()
        return process

    async def main() -> None:
        witness = Witness()
        async with engine(witness) as recognizer:
            kill(recognizer)
            await asyncio.wait_for(witness.started_again.wait(), 30)
            assert (await recognizer.decode(saying("alpha"))).text == "alpha"
        assert witness.stopped == ["the process ended (exit status -9)", "the engine did not start: the process ended"]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", stillborn_at_second)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    assert len(interpreters) == 3


@both_kinds
async def test_a_poisonous_request_is_given_up_and_takes_no_other_with_it(kind: str) -> None:
    witness = Witness()
    async with engine(witness, kind=kind, capacity=4, delay_s=0.02, crash_on="zulu") as recognizer:
        words = [*HARMLESS[:10], "zulu", *HARMLESS[10:20]]
        results = await asyncio.gather(*(recognizer.decode(saying(word)) for word in words), return_exceptions=True)
        failed = results.pop(10)
        assert isinstance(failed, RecognizerFailed)
        assert [r.text for r in results if isinstance(r, Hypothesis)] == list(HARMLESS[:20])
        assert recognizer.restarts == 3
        assert witness.gave_up == 1


@both_kinds
async def test_a_stuck_engine_is_noticed_killed_and_the_others_asked_again(kind: str) -> None:
    witness = Witness()
    async with engine(
        witness, kind=kind, capacity=2, hang_on="zulu", request_timeout_s=0.5, max_attempts=2, delay_s=0.01
    ) as recognizer:
        words = ["zulu", *HARMLESS[:10]]
        results = await asyncio.gather(*(recognizer.decode(saying(word)) for word in words), return_exceptions=True)
        assert isinstance(results[0], RecognizerFailed)
        assert [r.text for r in results[1:] if isinstance(r, Hypothesis)] == list(HARMLESS[:10])
        assert [reason.partition(" (")[0] for reason in witness.stopped] == ["no answer within 0.5 s"] * 2


async def test_a_process_that_does_not_run_is_noticed_while_idle() -> None:
    witness = Witness()
    async with engine(witness, heartbeat_interval_s=0.05, heartbeat_timeout_s=0.3) as recognizer:
        kill(recognizer, signal.SIGSTOP)
        async with asyncio.timeout(30):
            await witness.started_again.wait()
        assert (await recognizer.decode(saying("alpha"))).text == "alpha"
        assert recognizer.restarts == 1
        assert "ping" in witness.stopped[0]


async def test_a_healthy_idle_process_is_left_alone() -> None:
    async with engine(heartbeat_interval_s=0.01, heartbeat_timeout_s=5) as recognizer:
        await asyncio.sleep(0.3)  # some 30 heartbeats
        assert recognizer.ready
        assert recognizer.restarts == 0


# --- errors ----------------------------------------------------------------------------------------------------------


async def test_a_typed_failure_reaches_its_caller_and_costs_no_restart() -> None:
    async with engine(fail_on="zulu") as recognizer:
        with pytest.raises(RecognizerFailed, match="scripted failure"):
            await recognizer.decode(saying("zulu"))
        assert (await recognizer.decode(saying("alpha"))).text == "alpha"
        assert recognizer.restarts == 0


@both_kinds
async def test_a_request_the_engine_breaks_on_is_tried_again_in_a_fresh_process(kind: str) -> None:
    witness = Witness()
    async with engine(witness, kind=kind, fault_on="zulu") as recognizer:
        with pytest.raises(RecognizerFailed, match="OSError"):
            await recognizer.decode(saying("zulu"))
        assert recognizer.restarts == 1
        assert witness.gave_up == 1
        assert (await recognizer.decode(saying("alpha"))).text == "alpha"
        assert sum('"fault"' in line for line in witness.lines) == 3


async def test_audio_that_is_no_request_is_refused_before_it_is_sent() -> None:
    async with engine() as recognizer:
        request = DecodeRequest(1, 1, 0, Priority.FILE, encode_words([]), 0, 0)
        with pytest.raises(BadAudio):
            await recognizer.decode(request)
        assert (await recognizer.decode(saying("alpha"))).text == "alpha"


async def test_no_more_than_max_pending_is_held() -> None:
    async with engine(capacity=1, max_pending=3, hang_on="zulu") as recognizer:
        held = [asyncio.create_task(recognizer.decode(saying("zulu"))) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await recognizer.decode(saying("alpha"))
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        # Two waited and are forgotten, one hangs in the engine: there is room again.
        accepted = asyncio.create_task(recognizer.decode(saying("alpha")))
        await asyncio.sleep(0)
        assert not accepted.done()
        accepted.cancel()


async def test_a_cancelled_request_that_waits_is_never_decoded() -> None:
    async with engine(capacity=1, delay_s=0.2, crash_on="zulu") as recognizer:
        first = asyncio.create_task(recognizer.decode(saying("alpha")))
        waits = asyncio.create_task(recognizer.decode(saying("zulu")))
        await asyncio.sleep(0)
        waits.cancel()
        assert (await first).text == "alpha"
        assert (await recognizer.decode(saying("bravo"))).text == "bravo"
        assert recognizer.restarts == 0


async def test_an_engine_that_is_awaited_gives_up_what_it_has_begun() -> None:
    async with engine(kind="scripted_async", capacity=2, hang_on="zulu") as recognizer, asyncio.timeout(30):
        stuck = asyncio.create_task(recognizer.decode(saying("zulu")))
        assert (await recognizer.decode(saying("alpha"))).text == "alpha"  # asked later, so the other has begun
        stuck.cancel()
        stuck_too = asyncio.create_task(recognizer.decode(saying("zulu")))
        await asyncio.sleep(0)
        assert (await recognizer.decode(saying("bravo"))).text == "bravo"
        stuck_too.cancel()
        assert recognizer.restarts == 0


# --- start and end ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"engine": {"kind": "scripted", "fail_load": "no weights here"}}, "no weights here"),
        ({"engine": {"kind": "scripted_async", "fail_load": "no weights here"}}, "no weights here"),
        ({"engine": {"kind": "scripted", "garble": True}}, "0% of the warm-up sentence"),
        ({"engine": {"kind": "scripted_async", "garble": True}}, "0% of the warm-up sentence"),
        ({"engine": {"kind": "scripted", "capacity": 0}}, "at least 1"),
        ({"engine": {"kind": "scripted", "colour": "red"}}, "colour"),
        ({"engine": {"kind": "steam"}}, "no engine of kind 'steam'"),
        ({"engine": {"kind": "scripted", "fault_on": "bravo"}}, "scripted fault"),
        ({"engine": {"kind": "scripted", "load_s": 60}, "start_timeout_s": 0.5}, "not ready after 0.5 s"),
        ({"engine": {"kind": "scripted_async", "load_s": 60}, "start_timeout_s": 0.5}, "not ready after 0.5 s"),
        ({"engine": {"kind": "scripted"}, "interpreter": "/does/not/exist"}, "No such file"),
        ({"engine": {"kind": "scripted"}, "interpreter": "/bin/true"}, "the process ended"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_an_engine_that_cannot_start_says_why_and_leaves_nothing(settings: dict[str, Any], expected: str) -> None:
    before = own_resources()
    recognizer = RemoteRecognizer(RemoteConfig(**settings))
    with pytest.raises(RecognizerFailed, match=expected):
        await recognizer.start()
    assert not recognizer.ready
    with pytest.raises(RecognizerFailed):
        await recognizer.decode(saying("alpha"))
    await recognizer.close()
    assert own_resources() == before


async def test_when_it_cannot_be_restarted_nobody_is_kept_waiting(tmp_path: Path) -> None:
    interpreter = tmp_path / "python"
    interpreter.symlink_to(sys.executable)
    witness = Witness()
    async with engine(witness, interpreter=str(interpreter), capacity=1, delay_s=0.05) as recognizer:
        held = [asyncio.create_task(recognizer.decode(saying("alpha"))) for _ in range(3)]
        await asyncio.sleep(0)
        interpreter.unlink()
        kill(recognizer)
        results = await asyncio.gather(*held, return_exceptions=True)
        assert any(isinstance(result, RecognizerFailed) for result in results)
        with pytest.raises(RecognizerFailed, match="cannot be started"):
            await recognizer.decode(saying("alpha"))
        interpreter.symlink_to(sys.executable)
        async with asyncio.timeout(30):
            await witness.started_again.wait()
        assert (await recognizer.decode(saying("alpha"))).text == "alpha"


async def test_closing_fails_what_is_held_and_ends_the_process() -> None:
    async with engine(hang_on="zulu", capacity=1) as recognizer:
        pid = recognizer.pid
        assert pid is not None
        held = [asyncio.create_task(recognizer.decode(saying("zulu"))) for _ in range(3)]
        await asyncio.sleep(0.05)
        await recognizer.close()
        assert not psutil.pid_exists(pid)
        results = await asyncio.gather(*held, return_exceptions=True)
        assert all(isinstance(result, RecognizerFailed) for result in results)
        with pytest.raises(RecognizerFailed, match="closed"):
            await recognizer.decode(saying("alpha"))


@pytest.mark.parametrize("moment_s", [0.0, 0.01, 0.2])
async def test_it_can_be_closed_while_it_restarts(moment_s: float) -> None:
    before = own_resources()
    async with engine() as recognizer:
        kill(recognizer)
        await asyncio.sleep(moment_s)
    assert own_resources() == before


@pytest.mark.parametrize("moment_s", [0.0, 0.001, 0.1])
async def test_a_start_can_be_cancelled(moment_s: float) -> None:
    before = own_resources()
    recognizer = RemoteRecognizer(RemoteConfig(engine={"kind": "scripted", "load_s": 60}))
    start = asyncio.create_task(recognizer.start())
    await asyncio.sleep(moment_s)
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    await recognizer.close()
    assert own_resources() == before


PARENT = """
import asyncio, signal, sys
from models.remote import RemoteConfig, RemoteRecognizer
from models.scripted import encode_words
from streaming.types import DecodeRequest, Priority

# A shell starts its background jobs with SIGINT ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

async def main():
    recognizer = RemoteRecognizer(RemoteConfig(engine={"kind": "scripted", "hang_on": "zulu"}))
    await recognizer.start()
    task = asyncio.create_task(recognizer.decode(DecodeRequest(1, 1, 0, Priority.FILE, encode_words(["zulu"]), 0, 1)))
    await asyncio.sleep(0)
    print(recognizer.pid, flush=True)
    await task

asyncio.run(main())
"""


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
async def test_when_the_parent_dies_the_engine_goes_too_even_when_stuck(signal_number: int) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    assert psutil.pid_exists(pid)
    parent.send_signal(signal_number)
    await parent.wait()
    assert await gone(pid)


ON_UVLOOP = """
import os, psutil, uvloop
from models.remote import RemoteConfig, RemoteRecognizer
from models.scripted import encode_words
from streaming.errors import RecognizerFailed
from streaming.types import DecodeRequest, Priority

async def live(word):
    recognizer = RemoteRecognizer(RemoteConfig(engine={"kind": "scripted", "crash_on": "zulu"}, backoff_s=0.01))
    await recognizer.start()
    try:
        os.kill(recognizer.pid, 9)
        print((await recognizer.decode(DecodeRequest(1, 1, 0, Priority.FILE, encode_words([word]), 0, 1))).text)
    except RecognizerFailed:
        print("failed")
    await recognizer.close()

async def main():
    await live("alpha")
    before = psutil.Process().num_fds()
    for word in ("bravo", "zulu"):
        await live(word)
    print(psutil.Process().num_fds() - before, psutil.Process().num_threads(), psutil.Process().children())

uvloop.run(main())
"""


async def test_it_lives_on_uvloop_too_and_starts_no_thread_there() -> None:
    """uvicorn's loop; its processes and sockets are not asyncio's own."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", ON_UVLOOP, cwd=ROOT, stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    *answers, left = out.decode().splitlines()
    assert answers == ["alpha", "bravo", "failed"]
    assert left == "0 1 []"


def own_resources() -> tuple[int, set[int]]:
    me = psutil.Process()
    return me.num_fds(), {child.pid for child in me.children(recursive=True)}


@pytest.mark.slow
async def test_two_hundred_lives_leave_no_process_and_no_descriptor() -> None:
    async def live(n: int) -> None:
        async with engine() as recognizer:
            assert (await recognizer.decode(saying(HARMLESS[n % 24]))).text == HARMLESS[n % 24]
            if n % 3 == 0:
                kill(recognizer)

    await live(0)
    before = own_resources()
    for n in range(0, 200, 4):
        await asyncio.gather(*(live(m) for m in range(n, n + 4)))
    assert own_resources() == before


async def test_the_log_holds_no_words() -> None:
    witness = Witness()
    async with engine(witness, fail_on="zulu", fault_on="yankee") as recognizer:
        await recognizer.decode(saying("tango"))
        for word in ("zulu", "yankee"):
            with pytest.raises(RecognizerFailed):
                await recognizer.decode(saying(word))
    assert any('"ready"' in line for line in witness.lines)
    assert not any(word in line for line in witness.lines for word in ("tango", "zulu", "yankee"))


async def test_a_round_trip_costs_little() -> None:
    """A generous bound; the usual cost is 1 to 2 ms for 3 s of audio, of which a decode takes hundreds."""
    async with engine() as recognizer:
        request = saying(*["alpha"] * 30)
        await recognizer.decode(request)
        began = time.perf_counter()
        for _ in range(50):
            await recognizer.decode(request)
        assert (time.perf_counter() - began) / 50 < 0.05
