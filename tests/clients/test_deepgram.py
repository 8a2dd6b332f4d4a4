"""Deepgram's library: live and recorded."""

from typing import Any

import pytest

from tests.clients.conftest import SENTENCE, Clients, plain

Message = dict[str, Any]


@pytest.fixture(scope="module")
def messages(clients: Clients) -> list[Message]:
    return clients.run("deepgram_live.py")


def of_type(messages: list[Message], kind: str) -> list[Message]:
    return [message for message in messages if message["type"] == kind]


def text(result: Message) -> str:
    return plain(result["channel"]["alternatives"][0]["transcript"])


def finals(messages: list[Message]) -> list[Message]:
    return [result for result in of_type(messages, "Results") if result["is_final"]]


def test_the_words_come_first_as_guesses_then_for_good(messages: list[Message]) -> None:
    said = [text(result) for result in finals(messages) if text(result)]
    assert said[:2] == [SENTENCE, SENTENCE]
    assert SENTENCE.startswith(said[2][:9])  # the half sentence that Finalize cut
    assert len(said) == 3
    guesses = [result for result in of_type(messages, "Results") if not result["is_final"]]
    assert any(text(result) and SENTENCE.startswith(text(result)[:9]) for result in guesses)


def test_every_finalize_has_exactly_one_answer(messages: list[Message]) -> None:
    """Also where nothing was said: clients wait for it."""
    answers = [result for result in finals(messages) if result["from_finalize"]]
    assert [bool(text(result)) for result in answers] == [False, True]


def test_a_word_has_a_time_and_a_confidence(messages: list[Message]) -> None:
    first = next(result for result in finals(messages) if text(result))
    best = first["channel"]["alternatives"][0]
    assert plain(" ".join(word["word"] for word in best["words"])) == SENTENCE
    assert 0.5 < best["confidence"] <= 1.0
    assert all(0.0 < word["confidence"] <= 1.0 for word in best["words"])
    assert all(word["start"] <= word["end"] for word in best["words"])
    assert best["words"][-1]["end"] == pytest.approx(2.5, abs=0.4)
    assert first["speech_final"]


def test_events_and_the_end(messages: list[Message]) -> None:
    assert len(of_type(messages, "SpeechStarted")) == 3
    assert of_type(messages, "UtteranceEnd")
    assert messages[-1]["type"] == "Metadata"
    assert messages[-1]["duration"] == pytest.approx(7.68 + 1.4, abs=0.1)
    assert of_type(messages, "Error") == []


def test_a_recording(clients: Clients) -> None:
    [response] = clients.run("deepgram_files.py")
    [channel] = response["results"]["channels"]
    best = channel["alternatives"][0]
    assert plain(best["transcript"]) == f"{SENTENCE} {SENTENCE}"
    assert [plain(utterance["transcript"]) for utterance in response["results"]["utterances"]] == [SENTENCE, SENTENCE]
    assert len(best["paragraphs"]["paragraphs"]) == 2
    assert channel["detected_language"] == "en"
