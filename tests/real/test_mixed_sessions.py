"""Many sessions at once over several protocols: everyone gets their own words, on their own channel and clock."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.scoring import align, units
from models.scripted import VOCABULARY, encode_words
from tests.support.corpus import corpus_row
from tests.support.dialects import DIALECTS
from tests.support.server import EOF, PAUSE, Server, converse, pieces, serving
from tests.support.telephony import (
    CONNECTED,
    TWILIO_STOP,
    exchange,
    follow,
    of_type,
    send_all,
    twilio_call,
    twilio_start,
)
from tests.support.weights import require_vad, require_weights

Message = dict[str, Any]

# --- fifty at once ---------------------------------------------------------------------------------------------------

SESSIONS = 50
UTTERANCES = 3


def utterances(session: int) -> list[list[str]]:
    """What this session says: no utterance is said twice, in no session."""
    who = [VOCABULARY[session // 8], VOCABULARY[10 + session % 8], VOCABULARY[7 * session % 28]]
    return [[*who, VOCABULARY[20 + number]] for number in range(UTTERANCES)]


def script(session: int) -> list[str | None]:
    return [word for said in utterances(session) for word in (*said, *PAUSE, *PAUSE)]


def test_no_utterance_is_said_twice() -> None:
    said = [" ".join(words) for session in range(SESSIONS) for words in utterances(session)]
    assert len(set(said)) == SESSIONS * UTTERANCES


async def test_no_word_crosses_sessions() -> None:
    """Nobody speaks before all are connected, so that all are there at once."""
    all_here = asyncio.Barrier(SESSIONS)
    with serving(max_sessions=SESSIONS, max_load=0) as server:
        talks = [
            DIALECTS[session % len(DIALECTS)](
                server, encode_words(script(session)), finals=UTTERANCES, begin=all_here.wait
            )
            for session in range(SESSIONS)
        ]
        async with asyncio.timeout(120):
            everyone = await asyncio.gather(*talks)
    for session, heard in enumerate(everyone):
        said = [" ".join(words) for words in utterances(session)]
        assert heard.finals == said, (session, DIALECTS[session % len(DIALECTS)].__name__)
        assert all(any(text.startswith(guess.strip()) for text in said) for guess in heard.guesses), session
    assert sum(len(heard.guesses) for heard in everyone) > SESSIONS


# --- real calls ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """Somebody's turn in a call: what is said when, on which channel."""

    channel: int
    start: float
    end: float
    text: str


def turns(path: Path) -> list[Turn]:
    rows = json.loads(path.with_suffix(".segments.json").read_text(encoding="utf-8"))
    return [Turn(row["channel"], row["start"], row["end"], row["text"]) for row in rows]


def payload(path: Path) -> bytes:
    """The samples of a WAV of companded audio, as they are: the standard library does not read such files."""
    data = path.read_bytes()
    at = data.index(b"data") + 8
    return data[at : at + int.from_bytes(data[at - 4 : at], "little")]


@pytest.fixture(scope="module")
def real_server() -> Iterator[Server]:
    require_vad()
    require_weights("tiny.en")
    with serving(engine="ctranslate", model="tiny.en", max_load=0) as running:
        yield running


def assert_each_on_their_channel_and_clock(call: Sequence[Turn], finals: Sequence[Message]) -> None:
    """Words: of each channel nearly those of its party. Clock: each final lies within one of the party's own turns."""
    for channel in (0, 1):
        mine = [turn for turn in call if turn.channel == channel]
        heard = [final for final in finals if final["channel"] == channel]
        spoken = " ".join(turn.text for turn in mine)
        score = align(units(spoken, "en"), units(" ".join(final["text"] for final in heard), "en"))
        assert score.rate is not None
        assert score.rate < 0.3, (channel, score)
        for final in heard:
            middle_s = (final["start_ms"] + final["end_ms"]) / 2000
            assert any(turn.start <= middle_s <= turn.end for turn in mine), final
        for turn in mine:  # readers begin within some tenths of a second of their turn
            first_ms = min(final["start_ms"] for final in heard if final["end_ms"] / 1000 > turn.start + 0.5)
            assert abs(first_ms / 1000 - turn.start) < 1.0, turn


CALLS = ["phone-derived-calls-twochannel-mulaw-1688-1998", "phone-derived-calls-twochannel-alaw-2033-3331-overlap"]


@pytest.mark.real
@pytest.mark.corpus
@pytest.mark.slow
@pytest.mark.parametrize("row_id", CALLS)
async def test_both_parties_of_a_real_call_over_the_native_protocol(real_server: Server, row_id: str) -> None:
    path = corpus_row(row_id).path
    parameters = {"encoding": row_id.split("-")[4], "sample_rate": 8_000, "channels": 2, "partials": False}
    heard = await converse(real_server, *pieces(payload(path), 3_200), EOF, **parameters)
    assert heard.errors == []
    assert_each_on_their_channel_and_clock(turns(path), heard.of_type("final"))


@pytest.mark.real
@pytest.mark.corpus
@pytest.mark.slow
async def test_both_tracks_of_a_real_call_over_twilio(real_server: Server) -> None:
    path = corpus_row(CALLS[0]).path
    stereo = payload(path)
    media = twilio_call({"inbound": stereo[::2], "outbound": stereo[1::2]})
    async with exchange(real_server, "/twilio") as connection:
        following = asyncio.create_task(follow(real_server, "CAreal", wait_s=10))
        start = twilio_start("inbound", "outbound", call_id="CAreal", partials="false")
        await send_all(connection, [CONNECTED, start, *media, TWILIO_STOP])
        events = await following
    finals = of_type(events, "final")
    assert {(final["channel"], final["label"]) for final in finals} == {(0, "customer"), (1, "agent")}
    assert_each_on_their_channel_and_clock(turns(path), finals)
