"""The native protocol with a client that is a list of things it does at set times, in virtual time."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from app.access import Access, AccessConfig
from app.admission import Admission
from app.conversation import Conversation, Terms
from app.dispatch import DispatchConfig, Dispatcher
from app.live import ClientGone, Gap
from app.service import Service
from app.settings import load_settings
from app.telemetry import Metrics
from models.scripted import ScriptedConfig, ScriptedDetector, ScriptedRecognizer, encode_words
from streaming.config import AudioFormat
from streaming.errors import ClientError
from tests.support import virtual_time

TRACK = Terms(idle_timeout_s=5, has_track=True, audio=AudioFormat())
FREE = Terms(idle_timeout_s=5)
EOF = '{"type":"eof"}'
KEEPALIVE = '{"type":"keepalive"}'
Deed = str | bytes | Gap | Exception
Script = Sequence[tuple[float, Deed]]  # s after opening, what it does


def say(*words: str | None) -> bytes:
    return encode_words(words).tobytes()


class Engine:
    """What the service asks of an engine."""

    ready = True


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

    async def send(self, text: str) -> None:
        await asyncio.sleep(self.reads_s)
        self.heard.append(json.loads(text))

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
    client: Client, terms: Terms = FREE, *, finish_s: float | None = None, decode_s: float = 0, **given: object
) -> Run:
    """Until it ends; ``finish_s`` after it began the service goes down."""

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
        conversation = Conversation(service, client, service.stream_slot, terms)
        loop = asyncio.get_running_loop()
        timer = None if finish_s is None else loop.call_later(finish_s, conversation.finish)
        await conversation.serve(given)
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
    wrong = [(0.0, "x"), (0.0, say("alpha"))] * 30
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
