"""The shell around one session, in virtual time: its pace, its bounds, and that nothing outlives it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import pytest

from app.dispatch import Decoder, Renew
from app.live import (
    Audio,
    ClientGone,
    Command,
    Commit,
    Complaint,
    Eof,
    Gap,
    Lag,
    LiveConfig,
    LiveSession,
    Outbox,
    SlowClient,
    ToClient,
    reason,
)
from models.scripted import ScriptedConfig, ScriptedDetector, ScriptedRecognizer, encode_words
from streaming.config import AudioFormat, Encoding, EndpointerConfig, PartialConfig, SegmenterConfig, SessionConfig
from streaming.errors import BadAudio, BadMessage, RecognizerFailed
from streaming.events import (
    Decode,
    FinalTranscript,
    Output,
    PartialTranscript,
    SessionDone,
    SpeechStarted,
    SpeechStopped,
    TranscriptFailed,
)
from streaming.session import Session
from streaming.types import DecodeRequest, Hypothesis, Priority, RecognizerInfo
from tests.support import virtual_time

T = TypeVar("T")

CONFIG = SessionConfig(
    endpointer=EndpointerConfig(pause_ms=300),
    segmenter=SegmenterConfig(pre_roll_ms=320, post_roll_ms=192, max_utterance_ms=4_000, cut_zone_ms=1_500),
    partials=PartialConfig(interval_ms=200, hold_back_ms=0),
)
PAUSE = [None] * 4


def said(*words: str | None) -> bytes:
    return encode_words(words).tobytes()


@dataclass
class Engine:
    """The scripted recognizer, and a note of what was asked of it and what was given up."""

    config: ScriptedConfig = field(default_factory=ScriptedConfig)
    asked: list[DecodeRequest] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    running: int = 0

    def __post_init__(self) -> None:
        self._recognizer = ScriptedRecognizer(self.config)

    @property
    def info(self) -> RecognizerInfo:
        return self._recognizer.info

    async def decode(self, request: DecodeRequest, renew: Renew | None = None) -> Hypothesis:
        self.asked.append(request)
        self.running += 1
        try:
            return await self._recognizer.decode(request)
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        finally:
            self.running -= 1


@dataclass
class Stage:
    """A live session, with everything it says and when it says it."""

    engine: Decoder = field(default_factory=Engine)
    config: SessionConfig = CONFIG
    live_config: LiveConfig = field(default_factory=LiveConfig)
    put: Callable[[ToClient], None] | None = None
    events: list[tuple[float, ToClient]] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.session = Session(self.config, [ScriptedDetector() for _ in range(self.config.audio.channels)])
        self.live = LiveSession(
            self.session,
            self.config.audio,
            self.engine,
            self.put or self._note,
            self.live_config,
            self.outputs.append,
        )

    def _note(self, event: ToClient) -> None:
        self.events.append((asyncio.get_running_loop().time(), event))

    def of_type(self, kind: type[T]) -> list[T]:
        return [event for _, event in self.events if isinstance(event, kind)]

    @property
    def texts(self) -> list[str]:
        return [final.text for final in self.of_type(FinalTranscript)]

    def play(self, *commands: Command | float, then: str = "wait") -> None:
        """Give it the commands, a number being seconds to wait; ``then`` the client waits, or leaves."""

        async def source() -> AsyncIterator[Command]:
            for command in commands:
                if isinstance(command, float):
                    await asyncio.sleep(command)
                else:
                    yield command
            if then == "wait":
                await asyncio.Event().wait()

        virtual_time.run(self.live.run(source()))


# --- what a client gets ----------------------------------------------------------------------------------------------


def test_each_utterance_is_started_stopped_and_said_once_and_done_comes_last() -> None:
    stage = Stage()
    stage.play(Audio(said("alpha", "bravo", *PAUSE, "charlie", *PAUSE)), Eof())
    assert stage.texts == ["alpha bravo", "charlie"]
    assert len(stage.of_type(SpeechStarted)) == len(stage.of_type(SpeechStopped)) == 2
    assert [type(event) for _, event in stage.events].index(SessionDone) == len(stage.events) - 1
    assert len(stage.of_type(SessionDone)) == 1


def test_an_empty_stream_is_done_at_once() -> None:
    stage = Stage()
    stage.play(Eof())
    assert stage.events == [(0.0, SessionDone(0))]


def test_commit_brings_the_final_without_a_pause() -> None:
    stage = Stage()
    stage.play(Audio(said(*["alpha"] * 8)), Commit(), 5.0, Eof())
    final_at_s = next(at for at, event in stage.events if isinstance(event, FinalTranscript))
    assert final_at_s == 0
    assert stage.texts == [" ".join(["alpha"] * 8)]


def test_a_gap_is_heard_as_silence() -> None:
    stage = Stage()
    stage.play(Audio(said("alpha")), Gap(16_000), Audio(said("bravo")), Eof())
    assert stage.texts == ["alpha", "bravo"]
    assert stage.of_type(FinalTranscript)[1].start_sample >= 17_600 - 512  # to the window


def test_the_heartbeat_tells_each_second_how_far_behind_the_answers_are() -> None:
    stage = Stage(Engine(ScriptedConfig(delay_s=3.5)), config=replace(CONFIG, partials=PartialConfig(enabled=False)))
    stage.play(Audio(said(*["alpha"] * 10, *PAUSE)), 10.0, Eof())
    beats = [(at, event) for at, event in stage.events if isinstance(event, Lag)]
    assert [at for at, _ in beats] == [float(second) for second in range(1, 11)]
    received = 14 * 1_600
    assert beats[0][1] == Lag(received, 0)
    assert beats[2][1].covered_samples == 0
    assert beats[3][1] == Lag(received, received), "answered after 3.5 s"


def test_the_final_of_a_pause_is_asked_before_the_pause_is_over() -> None:
    """With 200 ms for a decode and 300 ms for a pause, the final is there the moment the pause is."""
    stage = Stage(Engine(ScriptedConfig(delay_s=0.1)))
    words = [*["alpha"] * 4, None, None, None, None]
    pieces: list[Command | float] = []
    for word in words:
        pieces += [Audio(said(word)), 0.1]
    stage.play(*pieces, 5.0, Eof())
    stopped_at_s = next(at for at, event in stage.events if isinstance(event, SpeechStopped))
    final_at_s = next(at for at, event in stage.events if isinstance(event, FinalTranscript))
    assert final_at_s == stopped_at_s
    assert stage.texts == ["alpha alpha alpha alpha"]


def test_at_most_one_partial_is_in_flight_and_always_of_the_newest_audio() -> None:
    engine = Engine(ScriptedConfig(delay_s=0.97))
    stage = Stage(engine)
    stage.play(*[piece for _ in range(30) for piece in (Audio(said("alpha")), 0.1)], Eof())
    partials = [request for request in engine.asked if request.priority is Priority.LIVE_PARTIAL]
    # The first after 200 ms of speech; then each as soon as the last is answered, of all that came meanwhile.
    assert [request.audio.size // 1_600 for request in partials] == [2, 11, 21]


# --- bounds ----------------------------------------------------------------------------------------------------------


def test_reading_pauses_while_too_many_finals_are_out() -> None:
    engine = Engine(ScriptedConfig(capacity=1, delay_s=1.0))
    stage = Stage(
        engine,
        config=replace(CONFIG, early_final=False, partials=PartialConfig(enabled=False)),
        live_config=LiveConfig(max_outstanding=3),
    )
    most = 0

    def observe(output: Output) -> None:
        nonlocal most
        most = max(most, stage.session.outstanding)

    stage.live = LiveSession(stage.session, AudioFormat(), engine, stage._note, stage.live_config, observe)
    stage.play(*[Audio(said("alpha", "bravo", *PAUSE)) for _ in range(12)], Eof())
    assert stage.texts == ["alpha bravo"] * 12
    assert 3 <= most <= 4  # the one that made it too many was heard already
    finals = [at for at, event in stage.events if isinstance(event, FinalTranscript)]
    assert finals == [float(second) for second in range(1, 13)]


def test_one_long_message_is_heard_in_pieces_that_let_others_run() -> None:
    stage = Stage(live_config=LiveConfig(slice_ms=100))
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main() -> None:
        task = asyncio.create_task(other())

        async def source() -> AsyncIterator[Command]:
            yield Audio(bytes(2 * 16_000 * 30))
            yield Eof()

        await stage.live.run(source())
        task.cancel()

    virtual_time.run(main())
    assert turns > 300


def test_an_unsent_partial_gives_way_to_a_newer_one_of_its_utterance_only() -> None:
    def partial(utterance: int, text: str) -> PartialTranscript:
        return PartialTranscript(utterance, 0, text, "", 0, 0)

    async def main() -> list[ToClient]:
        outbox = Outbox(100)
        before: list[ToClient] = [partial(0, "a"), Lag(1, 0), SpeechStarted(1, 0, 0), partial(1, "x")]
        after: list[ToClient] = [partial(0, "a b"), Lag(2, 0), partial(1, "x y")]
        for earlier in before + after:
            outbox.put(earlier)
        outbox.close()
        taken: list[ToClient] = []
        while (event := await outbox.get()) is not None:
            taken.append(event)
        return taken

    expected = [SpeechStarted(1, 0, 0), partial(0, "a b"), Lag(2, 0), partial(1, "x y")]
    assert virtual_time.run(main()) == expected


def final(number: int) -> FinalTranscript:
    return FinalTranscript(number, 0, "text", (), "en", 1.0, 1.0, 0, 0)


def test_finals_are_never_dropped_and_too_many_unread_end_the_stream() -> None:
    async def main() -> None:
        outbox = Outbox(10)
        for number in range(10):
            outbox.put(final(number))
        with pytest.raises(SlowClient):
            outbox.put(final(10))
        with pytest.raises(SlowClient):
            outbox.put(Lag(0, 0))
        for number in range(10):
            assert await outbox.get() == final(number)

    virtual_time.run(main())


def test_a_full_outbox_still_takes_a_newer_partial_in_an_older_ones_place() -> None:
    async def main() -> None:
        outbox = Outbox(2)
        outbox.put(final(0))
        for text in ("a", "a b", "a b c"):
            outbox.put(PartialTranscript(1, 0, text, "", 0, 0))
        await outbox.get()
        assert await outbox.get() == PartialTranscript(1, 0, "a b c", "", 0, 0)

    virtual_time.run(main())


def test_the_outbox_wakes_its_reader_for_each_event_and_for_its_end() -> None:
    async def main() -> list[object]:
        outbox = Outbox(10)
        taken: list[object] = []

        async def reader() -> None:
            while (event := await outbox.get()) is not None:
                taken.append(event)

        task = asyncio.create_task(reader())
        for number in range(3):
            await asyncio.sleep(1)
            outbox.put(Lag(number, 0))
        await asyncio.sleep(1)
        outbox.close()
        await task
        return taken

    assert virtual_time.run(main()) == [Lag(0, 0), Lag(1, 0), Lag(2, 0)]


def test_a_client_that_does_not_read_ends_its_session_and_nothing_is_left() -> None:
    def full(event: ToClient) -> None:
        raise SlowClient("full")

    engine = Engine(ScriptedConfig(delay_s=10))
    stage = Stage(engine, put=full)
    with pytest.raises(SlowClient):
        stage.play(Audio(said("alpha", "bravo", *PAUSE)), 100.0, Eof())
    assert engine.running == 0


# --- the client leaves, or errs ---------------------------------------------------------------------------------------


def test_a_client_that_leaves_takes_its_decodes_with_it() -> None:
    engine = Engine(ScriptedConfig(capacity=8, delay_s=60))
    stage = Stage(engine, config=replace(CONFIG, audio=AudioFormat(channels=2)))
    both_speak = np.repeat(encode_words(["alpha", "bravo", *PAUSE]), 2).tobytes()
    with pytest.raises(ClientGone):
        stage.play(Audio(both_speak), 1.0, then="leave")
    assert engine.running == 0
    assert len(engine.cancelled) == len(engine.asked) == 2


def test_a_client_that_leaves_while_reading_is_paused_is_noticed_by_the_writer() -> None:
    """The transport's writer fails in its own task; to the session that is a cancellation."""
    engine = Engine(ScriptedConfig(capacity=1, hang_on="alpha"))
    stage = Stage(engine, live_config=LiveConfig(max_outstanding=1))

    async def main() -> None:
        async def source() -> AsyncIterator[Command]:
            while True:
                yield Audio(said("alpha", "alpha", *PAUSE))

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100):
                await stage.live.run(source())

    virtual_time.run(main())
    assert engine.running == 0
    assert stage.session.outstanding == 2, "reading had paused"


def test_leaving_after_eof_before_done_is_leaving() -> None:
    engine = Engine(ScriptedConfig(hang_on="alpha"))
    stage = Stage(engine)

    async def main() -> None:
        async def source() -> AsyncIterator[Command]:
            yield Audio(said("alpha", "alpha"))
            yield Eof()
            await asyncio.sleep(5)
            raise ClientGone

        await stage.live.run(source())

    with pytest.raises(ClientGone):
        virtual_time.run(main())
    assert engine.running == 0


def test_audio_after_eof_is_complained_of_and_changes_nothing() -> None:
    stage = Stage(Engine(ScriptedConfig(delay_s=1)))
    stage.play(Audio(said("alpha", "alpha")), Eof(), Audio(said("bravo", "bravo")), Commit(), Eof())
    assert stage.texts == ["alpha alpha"]
    assert [complaint.error.code for complaint in stage.of_type(Complaint)] == ["after_eof", "after_eof"]


def test_a_client_that_errs_without_end_is_sent_away() -> None:
    stage = Stage(Engine(ScriptedConfig(delay_s=1)), live_config=LiveConfig(max_complaints=5))
    with pytest.raises(BadMessage):
        stage.play(Audio(said("alpha", "alpha")), Eof(), *[Commit()] * 6)
    assert len(stage.of_type(Complaint)) == 5


def test_int16_declared_as_float32_ends_the_stream() -> None:
    stage = Stage(config=replace(CONFIG, audio=AudioFormat(Encoding.FLOAT32)))
    with pytest.raises(BadAudio):
        stage.play(Audio(bytes([255] * 4_000)), Eof())
    assert stage.events == [], "nothing was heard, and it is not done"


def test_what_was_said_before_implausible_audio_is_finished_before_the_stream_ends() -> None:
    engine = Engine(ScriptedConfig(delay_s=1.0))
    stage = Stage(engine, config=replace(CONFIG, audio=AudioFormat(Encoding.FLOAT32)))
    good = (encode_words(["alpha", *PAUSE, "bravo", "bravo"]) / np.float32(32_768)).astype("<f4").tobytes()
    with pytest.raises(BadAudio) as raised:
        stage.play(Audio(good), Audio(bytes([255] * 4_000)), Audio(good), Eof())
    assert raised.value.code == "implausible_audio"
    assert stage.texts == ["alpha", "bravo bravo"], "what comes after it is not heard"
    assert stage.of_type(SessionDone) == []
    assert stage.of_type(Complaint) == []
    assert engine.running == 0


def test_a_client_that_leaves_after_implausible_audio_is_not_waited_for() -> None:
    engine = Engine(ScriptedConfig(hang_on="alpha"))
    stage = Stage(engine, config=replace(CONFIG, audio=AudioFormat(Encoding.FLOAT32)))
    good = (encode_words(["alpha", *PAUSE]) / np.float32(32_768)).astype("<f4").tobytes()
    with pytest.raises(ClientGone):
        stage.play(Audio(good), Audio(bytes([255] * 4_000)), 5.0, then="leave")
    assert engine.running == 0


# --- the engine errs --------------------------------------------------------------------------------------------------


def test_an_utterance_whose_decode_fails_is_reported_and_the_next_is_said() -> None:
    stage = Stage(Engine(ScriptedConfig(fail_on="bravo")))
    stage.play(Audio(said("alpha", *PAUSE, "bravo", *PAUSE, "charlie", *PAUSE)), Eof())
    assert stage.texts == ["alpha", "charlie"]
    (failed,) = stage.of_type(TranscriptFailed)
    assert isinstance(failed.error, RecognizerFailed)


def test_a_bug_in_the_engine_ends_this_session_with_the_bug_itself() -> None:
    class Broken(Engine):
        async def decode(self, request: DecodeRequest, renew: Renew | None = None) -> Hypothesis:
            raise ZeroDivisionError

    stage = Stage(Broken())
    with pytest.raises(ExceptionGroup) as raised:
        stage.play(Audio(said("alpha", *PAUSE)), Eof())
    assert raised.group_contains(ZeroDivisionError)


# --- the service goes down -------------------------------------------------------------------------------------------


def finishing(stage: Stage, *audio: bytes, at_s: float) -> None:
    async def main() -> None:
        async def source() -> AsyncIterator[Command]:
            for piece in audio:
                yield Audio(piece)
            await asyncio.Event().wait()

        asyncio.get_running_loop().call_later(at_s, stage.live.finish)
        await stage.live.run(source())

    virtual_time.run(main())


def test_finish_brings_the_finals_of_what_was_said() -> None:
    stage = Stage(Engine(ScriptedConfig(delay_s=2)))
    finishing(stage, said("alpha", "bravo"), at_s=1.0)
    assert stage.texts == ["alpha bravo"]
    assert len(stage.of_type(SessionDone)) == 1
    assert stage.of_type(Complaint) == []


def test_finish_in_the_middle_of_a_message_that_waits_for_room_is_no_error_of_the_client() -> None:
    stage = Stage(Engine(ScriptedConfig(capacity=1, delay_s=5)), live_config=LiveConfig(max_outstanding=1))
    finishing(stage, said(*["alpha", "bravo", *PAUSE] * 20), at_s=1.0)
    assert stage.of_type(Complaint) == []
    assert 0 < len(stage.texts) < 20
    assert len(stage.of_type(SessionDone)) == 1


def test_finish_ignores_what_the_client_still_sends() -> None:
    stage = Stage(Engine(ScriptedConfig(delay_s=2)))

    async def main() -> None:
        async def source() -> AsyncIterator[Command]:
            while True:
                yield Audio(said("alpha"))
                await asyncio.sleep(0.1)

        asyncio.get_running_loop().call_later(0.55, stage.live.finish)
        await stage.live.run(source())

    virtual_time.run(main())
    assert stage.texts == ["alpha " * 5 + "alpha"]
    assert stage.of_type(Complaint) == []


def test_finish_may_come_before_the_start_after_the_end_and_twice() -> None:
    stage = Stage()
    stage.live.finish()
    finishing(stage, said("alpha"), at_s=0.0)
    stage.live.finish()
    stage.live.finish()
    assert len(stage.of_type(SessionDone)) == 1


def test_finish_of_a_session_whose_client_does_not_read_raises_nothing_to_the_one_who_asked() -> None:
    def full(event: ToClient) -> None:
        raise SlowClient("full")

    with pytest.raises(SlowClient):
        finishing(Stage(put=full), at_s=0.5)


# --- small parts -----------------------------------------------------------------------------------------------------


def test_outputs_are_observed_before_they_are_carried_out() -> None:
    stage = Stage()
    stage.play(Audio(said("alpha", *PAUSE)), Eof())
    kinds = [type(output) for output in stage.outputs]
    assert kinds.index(SpeechStarted) < kinds.index(Decode) < kinds.index(FinalTranscript)
    assert kinds[-1] is SessionDone


def test_leaving_explains_whatever_else_went_wrong() -> None:
    def group(*errors: Any) -> Any:
        return ExceptionGroup("at once", errors)

    assert isinstance(reason(group(SlowClient("x"))), SlowClient)
    assert isinstance(reason(group(SlowClient("x"), group(BadMessage("y"), ClientGone()))), ClientGone)
