"""Conversations with a client that is a list of things it does at set times, in virtual time: in the native protocol,
and in a dialect whose messages are the actions themselves."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pytest
import structlog

from app.access import Access, AccessConfig, Grant, TooManyRequests, Visitor
from app.admission import Admission
from app.conversation import Conversation, Terms
from app.dialect import (
    Action,
    Audio,
    Close,
    Commit,
    Complaint,
    Dialect,
    Eof,
    Gap,
    Lag,
    Marked,
    Say,
    Start,
    ToClient,
    Wire,
)
from app.dispatch import DispatchConfig, Dispatcher
from app.errors import close_code
from app.live import ClientGone
from app.service import Service
from app.settings import load_settings
from app.telemetry import Metrics
from app.wire.native import NativeDialect
from models.scripted import ScriptedConfig, ScriptedDetector, ScriptedRecognizer, encode_words
from streaming.config import AudioFormat, Encoding, SessionConfig
from streaming.errors import BadMessage, ClientError, SttError
from streaming.events import FinalTranscript, PartialTranscript, SessionDone, SpeechStarted, SpeechStopped
from tests.support import virtual_time

TRACK = Terms(idle_timeout_s=5, has_track=True)
FREE = Terms(idle_timeout_s=5)
EOF = '{"type":"eof"}'
KEEPALIVE = '{"type":"keepalive"}'
T = TypeVar("T")
Deed = str | bytes | Gap | Exception
Script = Sequence[tuple[float, Deed]]  # s after opening, what it does


def say(*words: str | None) -> bytes:
    return encode_words(words).tobytes()


class Engine:
    """What the service asks of an engine."""

    ready = True


Planned = Action | SttError


@dataclass
class Plain:
    """A dialect in which a message is the number of a list of actions that it asks for; it renders what it is told."""

    plan: Sequence[Sequence[Planned]]
    told: list[ToClient] = field(default_factory=list)

    def open(self) -> Sequence[Action]:
        return self._do(0)

    def receive(self, message: Wire) -> Sequence[Action]:
        return self._do(int(message or 0))

    def _do(self, number: int) -> Sequence[Action]:
        done: list[Action] = []
        for planned in self.plan[number]:
            if isinstance(planned, SttError):
                raise planned
            done.append(planned)
        return done

    def render(self, event: ToClient) -> Sequence[Wire]:
        self.told.append(event)
        return [b'{"type":"%s"}' % type(event).__name__.encode()]

    def refuse(self, error: SttError) -> tuple[Sequence[Wire], int]:
        return ['{"type":"refused"}'], 4000

    def farewell(self, *, going_down: bool) -> tuple[Sequence[Wire], int, str]:
        return ['{"type":"bye"}'], 1001 if going_down else 1000, "so long"

    def of_type(self, kind: type[T]) -> list[T]:
        return [event for event in self.told if isinstance(event, kind)]


@dataclass
class Client:
    """A Peer. ``reads_s``: how long it takes to read a message; ``opens_s``: to be there at all."""

    script: Script
    reads_s: float = 0.0
    opens_s: float = 0.0
    heard: list[dict[str, Any]] = field(default_factory=list)
    closed: tuple[int, str] | None = None

    async def open(self) -> None:
        await asyncio.sleep(self.opens_s)
        self._began_s = asyncio.get_running_loop().time()
        self._ahead = list(self.script)

    async def receive(self) -> str | bytes | Gap:
        if not self._ahead:
            await asyncio.Event().wait()
        await asyncio.sleep(max(0.0, self._began_s + self._ahead[0][0] - asyncio.get_running_loop().time()))
        deed = self._ahead.pop(0)[1]
        if isinstance(deed, Exception):
            raise deed
        return deed

    async def send(self, message: str | bytes) -> None:
        await asyncio.sleep(self.reads_s)
        self.heard.append(json.loads(message))

    async def close(self, code: int, why: str) -> None:
        self.closed = (code, why)

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.heard if event["type"] == kind]

    @property
    def codes(self) -> list[tuple[str, bool]]:
        return [(event["code"], event["fatal"]) for event in self.of_type("error")]


@dataclass
class Run:
    """A conversation that has ended."""

    client: Client
    outcome: str
    took_s: float


def converse(
    client: Client,
    terms: Terms = FREE,
    dialect: Dialect | None = None,
    *,
    finish_s: float | None = None,
    decode_s: float = 0,
    spend: Callable[[float], None] = lambda audio_s: None,
    **given: object,
) -> Run:
    """Until it ends; ``finish_s`` after it began the service goes down. In the native protocol where none is given."""

    async def play() -> Run:
        metrics = Metrics()
        service = Service(
            settings=load_settings(engine="scripted"),
            metrics=metrics,
            logger=structlog.wrap_logger(
                None, processors=[_silent], wrapper_class=structlog.stdlib.BoundLogger, cache_logger_on_first_use=False
            ),
            engine=Engine(),
            dispatcher=Dispatcher(ScriptedRecognizer(ScriptedConfig(delay_s=decode_s)), DispatchConfig(), metrics),
            new_detectors=lambda count: [ScriptedDetector() for _ in range(count)],
            sessions=Admission(1, "streams"),
            files=Admission(1, "files"),
            access=Access(AccessConfig()),
        )
        spoken = dialect or NativeDialect(
            "id",
            service.stream_defaults,
            lambda: service.info,
            close_code,
            given=given,
            audio=AudioFormat() if terms.has_track else None,
        )

        @contextlib.contextmanager
        def admit() -> Iterator[Grant]:
            with service.access.stream_of(Visitor("")) as grant, service.stream_slot():
                grant.spend = spend  # type: ignore[assignment, method-assign]
                yield grant

        conversation = Conversation(service, client, admit, terms, spoken, "id")
        loop = asyncio.get_running_loop()
        timer = None if finish_s is None else loop.call_later(finish_s, conversation.finish)
        await conversation.serve()
        took_s = loop.time()
        if timer is not None:
            timer.cancel()
        assert not service.live
        assert service.sessions.open == 0
        [outcome] = [
            sample.labels["outcome"]
            for family in metrics.registry.collect()
            for sample in family.samples
            if sample.name == "hark_sessions_total"
        ]
        return Run(client, outcome, took_s)

    return virtual_time.run(play())


def _silent(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    raise structlog.DropEvent


# --- from opening to farewell ----------------------------------------------------------------------------------------


def test_config_audio_and_eof() -> None:
    script: Script = [(0, '{"type":"config","language":"de"}'), (0, say("alpha", "bravo", None)), (0.1, EOF)]
    run = converse(Client(script), words="false")
    assert [event["config"]["language"] for event in run.client.of_type("ready")] == [None, "de"]
    [final] = run.client.of_type("final")
    assert final["text"] == "alpha bravo"
    assert "words" not in final
    assert run.client.heard[-1] == {"type": "done", "audio_ms": 300}
    assert (run.outcome, run.client.closed) == ("done", (1000, ""))


def test_a_gap_keeps_the_clock() -> None:
    script: Script = [(0, say("alpha")), (0, Gap(160_000)), (0, say("bravo")), (0.1, EOF)]
    client = converse(Client(script)).client
    assert [final["text"] for final in client.of_type("final")] == ["alpha", "bravo"]
    assert client.of_type("speech_started")[1]["at_ms"] >= 9_900
    assert client.of_type("done")[0]["audio_ms"] == 10_200


def test_the_service_goes_down_while_the_client_speaks() -> None:
    run = converse(Client([(0, say(*["alpha"] * 5)), (60, say("bravo"))]), finish_s=1)
    assert [event["type"] for event in run.client.heard[-3:]] == ["final", "done", "error"]
    assert run.client.codes == [("shutting_down", True)]
    assert (run.outcome, run.client.closed) == ("draining", (1012, "service restart"))
    assert run.took_s < 2


def test_the_service_goes_down_before_the_client_is_there() -> None:
    run = converse(Client([], opens_s=60), finish_s=1)
    assert run.took_s < 2


def test_a_client_that_leaves_is_gone() -> None:
    run = converse(Client([(0, say("alpha")), (1, ClientGone())]))
    assert (run.outcome, run.client.closed) == ("gone", None)


def test_an_error_that_nobody_foresaw_is_said_and_ends_it() -> None:
    run = converse(Client([(0, say("alpha")), (1, ZeroDivisionError())]))
    assert run.client.codes == [("internal_error", True)]
    assert run.client.closed is not None
    assert (run.outcome, run.client.closed[0]) == ("internal_error", 1011)


def test_a_transports_own_error_is_said_after_what_was_heard_before() -> None:
    run = converse(Client([(0, say("alpha")), (1, ClientError("enough"))]))
    assert run.client.codes == [("bad_request", True)]
    assert run.client.heard[-1]["type"] == "error"


def test_a_client_that_does_not_read_is_dropped() -> None:
    run = converse(Client([(0, say("alpha"))], reads_s=60))
    assert run.outcome == "slow_client"


# --- wrong messages --------------------------------------------------------------------------------------------------


def test_every_complaint_counts_wherever_it_is_found() -> None:
    """Text that is no message is found here, audio after eof by the session."""
    wrong: list[tuple[float, Deed]] = [(0.0, "x"), (0.0, say("alpha"))] * 30
    run = converse(Client([(0, say(*["alpha"] * 5)), (0.1, EOF), *wrong]), decode_s=30)
    assert run.client.codes == [("bad_message", False), ("after_eof", False)] * 10 + [("bad_message", True)]


def test_after_twenty_complaints_the_next_is_fatal() -> None:
    run = converse(Client([(0, say("alpha")), *[(0.1, "x")] * 30]))
    assert run.client.codes == [("bad_message", False)] * 20 + [("bad_message", True)]
    assert run.client.closed is not None
    assert run.client.closed[0] == 1008


def test_a_late_config_is_complained_of() -> None:
    run = converse(Client([(0, say("alpha")), (0.1, '{"type":"config"}'), (0.2, EOF)]))
    assert run.client.codes == [("late_config", False)]
    assert run.outcome == "done"


def test_what_the_opening_asks_for_is_refused_with_a_code() -> None:
    run = converse(Client([]), language="xx")
    assert run.client.codes == [("unknown_language", True)]
    assert run.client.closed is not None
    assert run.client.closed[0] == 4400


# --- a track ---------------------------------------------------------------------------------------------------------


def test_a_track_has_one_format() -> None:
    same = '{"type":"config","encoding":"linear16","sample_rate":16000,"channels":1}'
    assert converse(Client([(0, same), (0, EOF)]), TRACK).outcome == "done"
    for other in ('"sample_rate":8000', '"channels":2', '"encoding":"mulaw"'):
        run = converse(Client([(0, f'{{"type":"config",{other}}}'), (0, EOF)]), TRACK)
        assert run.client.codes == [("bad_parameter", True)]


def test_without_audio_a_track_is_idle_whatever_else_comes() -> None:
    script: Script = [(0, say("alpha")), *[(second, KEEPALIVE) for second in range(1, 30)]]
    run = converse(Client(script), TRACK)
    assert run.client.codes == [("idle", True)]
    assert 4.9 < run.took_s < 5.5


def test_a_keepalive_keeps_a_client_that_has_no_track() -> None:
    script: Script = [(0, say("alpha")), *[(second, KEEPALIVE) for second in range(1, 30)]]
    run = converse(Client(script), FREE)
    assert run.client.codes == [("idle", True)]
    assert 33.9 < run.took_s < 34.5


def test_lost_audio_shows_that_the_track_is_there() -> None:
    script: Script = [*[(second, Gap(16_000)) for second in range(20)], (20, EOF)]
    assert converse(Client(script), TRACK).outcome == "done"


def test_what_a_track_brings_after_eof_goes_unheard() -> None:
    script: Script = [(0, say(*["alpha"] * 5)), (0.1, EOF), *[(0.1, say("bravo"))] * 40]
    run = converse(Client(script), TRACK)
    assert run.client.codes == []
    assert [final["text"] for final in run.client.of_type("final")] == [" ".join(["alpha"] * 5)]
    assert run.client.of_type("done")[0]["audio_ms"] == 500


# --- any dialect -----------------------------------------------------------------------------------------------------

START = Start(SessionConfig())
MULAW = Start(SessionConfig(audio=AudioFormat(Encoding.MULAW, 8_000)))


def mulaw(*words: str | None) -> bytes:
    """8 kHz mu-law of the words: every second sample, by the table of G.711."""
    linear = encode_words(words)[::2].astype(np.int32)
    biased = np.minimum(linear, 32_635) + 132
    exponent = np.floor(np.log2(biased)).astype(np.int32) - 7
    mantissa = (biased >> (exponent + 3)) & 0x0F
    return bytes((~(exponent << 4 | mantissa) & 0xFF | 0x80).astype(np.uint8))


def speak(*plan: Sequence[Planned], terms: Terms = FREE, after_s: float = 0.1, **options: Any) -> tuple[Plain, Run]:
    """A client that asks for each list of actions, one after the other."""
    dialect = Plain([[], *plan])
    script = [(after_s * number, str(number)) for number in range(1, len(plan) + 1)]
    return dialect, converse(Client(script), terms, dialect, **options)


def test_a_new_start_answers_what_came_before_and_goes_on_counting() -> None:
    dialect, run = speak(
        [START, Audio(say("alpha", "bravo", None, "charlie"))],
        [MULAW, Audio(mulaw(None, *["delta"] * 2, None)), Commit(), Audio(mulaw(None, "echo"))],
        [START, Audio(say("foxtrot")), Eof()],
    )
    finals = dialect.of_type(FinalTranscript)
    assert [final.text for final in finals] == ["alpha bravo charlie", "delta delta", "echo", "foxtrot"]
    assert [final.utterance_id for final in finals] == [0, 1, 2, 3]
    assert [final.words[0].start_sample // 1_600 for final in finals] == [0, 5, 9, 10]
    starts = dialect.of_type(SpeechStarted)
    assert [started.utterance_id for started in starts] == [0, 1, 2, 3]
    positions = [started.at_sample for started in starts]
    assert positions == sorted(positions)
    assert [stopped.at_sample for stopped in dialect.of_type(SpeechStopped)][-1] == 11 * 1_600
    assert dialect.of_type(SessionDone) == [SessionDone(11 * 1_600)]
    assert isinstance(dialect.told[-1], SessionDone)
    assert (run.outcome, run.client.closed) == ("done", (1000, "so long"))


def test_partials_and_heartbeats_of_a_later_session_are_on_the_connections_clock() -> None:
    audio = [[Audio(say(*["bravo"] * 5))] for _ in range(8)]
    dialect, _ = speak([START, Audio(say(*["alpha"] * 20))], [START], *audio, [Eof()], after_s=0.5)
    partials = [partial for partial in dialect.of_type(PartialTranscript) if partial.utterance_id == 1]
    assert partials
    assert all(20 * 1_600 <= partial.start_sample < partial.end_sample <= 60 * 1_600 for partial in partials)
    lags = dialect.of_type(Lag)
    assert [lag.received_samples for lag in lags] == sorted(lag.received_samples for lag in lags)
    assert lags[-1].received_samples > 20 * 1_600


def test_a_mark_comes_after_what_was_begun_before_it_and_before_what_follows() -> None:
    dialect, _ = speak(
        [Commit("before there is a session"), START, Audio(say(*["alpha"] * 5)), Commit("one"), Say('{"type":"x"}')],
        [Commit("two"), Commit(), Audio(say(*["bravo"] * 5)), Commit("three"), Eof()],
        decode_s=30,
    )
    kinds = [event.mark if isinstance(event, Marked) else type(event).__name__ for event in dialect.told]
    kinds = [kind for kind in kinds if kind not in ("Lag", "PartialTranscript")]
    first, second = ["SpeechStarted", "SpeechStopped", "one", "two"], ["SpeechStarted", "SpeechStopped", "three"]
    assert kinds == ["before there is a session", *first, *second, "FinalTranscript", "FinalTranscript", "SessionDone"]


def test_what_is_said_keeps_its_place() -> None:
    """Between the events of the session, as the actions are between its commands."""
    _, run = speak([START, Audio(say(*["alpha"] * 5)), Commit("m"), Say('{"type":"x"}')], [Eof()], decode_s=30)
    kinds = [event["type"] for event in run.client.heard if event["type"] not in ("Lag", "PartialTranscript")]
    assert kinds == ["SpeechStarted", "SpeechStopped", "Marked", "x", "FinalTranscript", "SessionDone", "bye"]


def test_a_dialect_may_close_after_what_it_said() -> None:
    dialect, run = speak(
        [START, Audio(say(*["alpha"] * 5)), Say('{"type":"x"}'), Close(4321, "enough"), Eof()], decode_s=30
    )
    assert run.client.heard[-1] == {"type": "x"}
    assert dialect.of_type(SessionDone) == []
    assert (run.outcome, run.client.closed) == ("closed", (4321, "enough"))


def test_a_dialect_may_close_before_anything_is_heard() -> None:
    _, run = speak([Say('{"type":"x"}'), Close(1000)])
    assert (run.outcome, run.client.heard, run.client.closed) == ("done", [{"type": "x"}], (1000, ""))


def test_an_error_that_the_dialect_raises_is_its_to_word() -> None:
    _, run = speak([START, Audio(say("alpha"))], [BadMessage("no", code="whatever")])
    assert run.client.heard[-1] == {"type": "refused"}
    assert (run.outcome, run.client.closed) == ("whatever", (4000, "no"))


def test_without_a_start_audio_goes_unheard_and_the_end_comes_at_once() -> None:
    dialect, run = speak([Audio(say("alpha")), Complaint(BadMessage("no"))], [Eof()])
    assert [type(event) for event in dialect.told] == [Complaint, SessionDone]
    assert run.outcome == "done"


def test_after_eof_nothing_is_begun() -> None:
    dialect, run = speak([START, Audio(say(*["alpha"] * 5)), Eof()], [START, Audio(say("bravo"))], decode_s=30)
    assert [final.text for final in dialect.of_type(FinalTranscript)] == [" ".join(["alpha"] * 5)]
    assert len(dialect.of_type(Complaint)) == 1
    assert run.outcome == "done"


def test_the_service_goes_down_between_two_sessions() -> None:
    """What came before is answered; the next is not begun."""
    dialect, run = speak([START, Audio(say(*["alpha"] * 5)), START, Audio(say("bravo"))], decode_s=30, finish_s=1)
    assert [final.text for final in dialect.of_type(FinalTranscript)] == [" ".join(["alpha"] * 5)]
    assert (run.outcome, run.client.closed) == ("draining", (1001, "so long"))


def test_a_gap_is_audio_that_a_stream_may_begin_with() -> None:
    client = converse(Client([(0, Gap(16_000)), (0.1, EOF)]), TRACK).client
    assert client.heard[-1] == {"type": "done", "audio_ms": 1_000}


def test_all_audio_is_paid_for_once_while_it_comes() -> None:
    spent: list[float] = []
    audio = [[Audio(say("alpha"))] for _ in range(20)]
    speak([START], *audio, [MULAW, Audio(mulaw("bravo", "bravo"))], [Eof()], spend=spent.append)
    assert sum(spent) == pytest.approx(2.2)
    assert len(spent) > 3, "only at the end"


def test_who_has_used_what_may_be_used_is_told_after_what_was_said() -> None:
    left_s = 1.5

    def spend(audio_s: float) -> None:
        nonlocal left_s
        left_s -= audio_s
        if left_s < 0:
            raise TooManyRequests("no more today", retry_after_s=1, code="audio_limit")

    script: Script = [(second / 10, say("alpha")) for second in range(60)]
    run = converse(Client(script), spend=spend)
    assert run.client.codes == [("audio_limit", True)]
    assert run.client.closed is not None
    assert run.client.closed[0] == 4429
    assert 1.9 < run.took_s < 2.1
    assert converse(Client([(0, say(*["alpha"] * 20)), (0.1, EOF)]), spend=spend).outcome == "done"


def test_an_idle_client_is_told_so_in_the_words_of_its_dialect() -> None:
    run = converse(Client([(0, say("alpha"))]), Terms(idle_timeout_s=5, idle_message="see the manual"))
    assert run.client.of_type("error")[0]["message"] == "see the manual"
