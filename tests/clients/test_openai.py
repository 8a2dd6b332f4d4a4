"""OpenAI's library: recordings and realtime sessions."""

from typing import Any

import pytest

from tests.clients.conftest import SENTENCE, Clients, plain

Event = dict[str, Any]
TWICE = f"{SENTENCE} {SENTENCE}"
PREFIX = "conversation.item.input_audio_transcription."


@pytest.fixture(scope="module")
def answers(clients: Clients) -> dict[str, Event]:
    return {answer["kind"]: answer for answer in clients.run("openai_files.py")}


def test_every_format_has_the_words_and_the_librarys_type(answers: dict[str, Event]) -> None:
    assert (answers["json"]["type"], plain(answers["json"]["text"])) == ("Transcription", TWICE)
    assert answers["json"]["seconds"] == 8
    verbose = answers["verbose_json"]
    assert (verbose["type"], plain(verbose["text"]), verbose["language"]) == ("TranscriptionVerbose", TWICE, "english")
    assert [(number, plain(text)) for number, _, _, text in verbose["segments"]] == [(0, SENTENCE), (1, SENTENCE)]
    assert plain(" ".join(word for word, _, _ in verbose["words"])) == TWICE
    starts = [start for _, start, _ in verbose["words"]]
    assert starts == sorted(starts)
    assert verbose["segments"][1][1] == pytest.approx(4.0, abs=0.3)


def test_text_and_subtitles_are_bare_bodies(answers: dict[str, Event]) -> None:
    assert [answers[form]["type"] for form in ("text", "srt", "vtt")] == ["str"] * 3
    assert plain(answers["text"]["text"]) == TWICE
    assert answers["srt"]["text"].startswith("1\n00:00:0")
    assert answers["vtt"]["text"].startswith("WEBVTT\n\n00:00:0")
    assert plain(answers["srt"]["text"]) == plain(answers["vtt"]["text"].removeprefix("WEBVTT")) == TWICE


def test_events_add_up_to_the_text(answers: dict[str, Event]) -> None:
    events = answers["events"]
    assert events["types"] == ["transcript.text.delta", "transcript.text.delta", "transcript.text.done"]
    assert "".join(events["deltas"]) == events["text"]
    assert plain(events["text"]) == TWICE


def test_silence_is_an_empty_text_and_no_error(answers: dict[str, Event]) -> None:
    assert answers["quiet"] == {"kind": "quiet", "text": "", "segments": 0, "words": 0}


def test_what_is_not_supported_is_said(answers: dict[str, Event]) -> None:
    refused = answers["refused"]
    assert (refused["status"], refused["code"], refused["param"]) == (400, "invalid_value", "response_format")
    assert "whisper-1" in answers["models"]["ids"]


def test_realtime(clients: Clients) -> None:
    events = clients.run("openai_realtime.py")
    begins = [number for number, event in enumerate(events) if event["type"] == "session.created"]
    turns, pushed = events[: begins[1]], events[begins[1] :]
    assert [plain(text) for text in transcripts(turns)] == [SENTENCE, SENTENCE]
    assert of_type(turns, "input_audio_buffer.speech_started")[1]["audio_start_ms"] == pytest.approx(3_800, abs=400)
    # A commit of nothing and one of silence are answered, and a pause within what was pushed makes no second item.
    assert [plain(text) for text in transcripts(pushed)] == ["", "", TWICE]
    assert of_type(pushed, "input_audio_buffer.speech_started") == []
    for half in (turns, pushed):
        assert_deltas(half)
        assert of_type(half, "error") == []
        assert [event for event in half if event["type"].startswith("response.")] == []


def of_type(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event["type"] == kind]


def transcripts(events: list[Event]) -> list[str]:
    return [event["transcript"] for event in of_type(events, PREFIX + "completed")]


def assert_deltas(events: list[Event]) -> None:
    """Deltas add up to their item's transcript and never come between those of an item that is not completed."""
    said: dict[str, str] = {}
    for event in events:
        if event["type"] == PREFIX + "delta":
            said[event["item_id"]] = said.get(event["item_id"], "") + event["delta"]
            assert len(said) == 1, "deltas of two items at once"
        elif event["type"] == PREFIX + "completed":
            assert said.pop(event["item_id"], "") == event["transcript"]
    assert said == {}
