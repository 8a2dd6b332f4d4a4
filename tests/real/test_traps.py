"""Mistakes that other servers made, each as a test of its kind over every dialect that could make it, without a model.

Of the known ones, those below are here. Elsewhere, because a smaller part shows them better:
  * text that ends before the speech does, silence and unfinished output of the engine: test_ladder, test_openai_http;
  * words lost or doubled where long speech is cut, true repetitions: test_session, test_whisper_text;
  * a language that nobody knows: test_stream, test_deepgram, test_openai_realtime (each says so before any audio);
  * engine failures taken for silence, and the same with batches: test_transport_http, test_dispatch, test_batching;
  * bytes that are not what they were declared to be: test_session, test_stream;
  * a muted client: test_deepgram, tests/clients/test_traps.py;
  * a client that is killed: test_stream, test_telephony, tests/clients/test_traps.py;
  * deltas that repeat text, responses to what is only transcribed: test_openai_realtime, tests/clients/test_openai.py;
  * one session's words in another: test_mixed_sessions.
"""

from collections.abc import Iterator

import pytest

from models.scripted import VOCABULARY, encode_words
from streaming.types import Pcm16
from tests.support.dialects import DIALECTS, Client, deepgram, native, realtime
from tests.support.server import PAUSE, Server, serving

MANY = 72
EVERY_MS = 5_000


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(max_load=0) as running:
        yield running


def talk() -> Pcm16:
    """Three utterances in 6 s, the first of one short word."""
    return encode_words(
        [
            *PAUSE,
            "alpha",
            "alpha",
            "alpha",
            *PAUSE,
            "bravo",
            "charlie",
            "delta",
            *PAUSE,
            *PAUSE,
            "echo",
            "foxtrot",
            *PAUSE,
        ]
    )


SAID = ["alpha alpha alpha", "bravo charlie delta", "echo foxtrot"]


@pytest.mark.parametrize("size", [33, 640, 1_001, 64_000, 1_000_000])
@pytest.mark.parametrize("client", [native, realtime, deepgram], ids=lambda client: client.__name__)
async def test_however_audio_is_cut_into_messages_the_same_is_heard(server: Server, client: Client, size: int) -> None:
    """A message may hold the end of one utterance and the whole of the next, or end in the middle of a sample."""
    assert (await client(server, talk(), finals=3, size=size)).finals == SAID


@pytest.mark.slow
@pytest.mark.parametrize("client", DIALECTS, ids=lambda client: client.__name__)
async def test_nothing_is_forgotten_in_a_long_session(server: Server, client: Client) -> None:
    """Six minutes with an utterance every five seconds."""
    said = [[VOCABULARY[number % 20], VOCABULARY[number // 20]] for number in range(MANY)]
    quiet: list[str | None] = [None] * (EVERY_MS // 100 - 2)
    audio = encode_words([word for words in said for word in (*words, *quiet)])
    heard = await client(server, audio, finals=MANY, size=32_000)
    assert heard.finals == [" ".join(words) for words in said]
