"""LiveKit's plug-ins as agents use them, without a LiveKit server."""

from typing import Any

import pytest

from tests.clients.conftest import SENTENCE, Clients, plain


@pytest.fixture(scope="module", params=["livekit_openai.py", "livekit_deepgram.py"])
def script(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def events(script: str, clients: Clients) -> list[dict[str, Any]]:
    return clients.run(script)


def texts(events: list[dict[str, Any]], kind: str) -> list[str]:
    return [plain(event["text"]) for event in events if event["kind"] == kind]


def test_finals_are_the_sentences(events: list[dict[str, Any]]) -> None:
    assert texts(events, "final_transcript") == [SENTENCE, SENTENCE]
    assert texts(events, "recognized") == [f"{SENTENCE} {SENTENCE}"]


def test_interim_texts_are_of_one_sentence(script: str, events: list[dict[str, Any]]) -> None:
    """The plug-in for OpenAI adds deltas up over a whole socket: it mixes the words of two items where their deltas do,
    and repeats what a delta repeats. Deepgram's interim texts are guesses as a whole."""
    interim = texts(events, "interim_transcript")
    assert any(SENTENCE.startswith(text) for text in interim)
    if script == "livekit_openai.py":
        assert all(SENTENCE.startswith(text) for text in interim)
    assert all(len(text.split()) <= len(SENTENCE.split()) for text in interim)


def test_speech_starts_before_it_is_known(events: list[dict[str, Any]]) -> None:
    kinds = [event["kind"] for event in events]
    assert kinds.index("start_of_speech") < kinds.index("final_transcript")
