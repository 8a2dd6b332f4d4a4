"""Pipecat's services in a pipeline, and its telephone serializers as senders."""

import json
from typing import Any

import httpx
import pytest

from bench.corpus import read_audio
from tests.clients.conftest import SENTENCE, Clients, plain, write_recording
from tests.support.corpus import corpus_row


@pytest.mark.parametrize("turns", ["client", "server"])
@pytest.mark.parametrize("script", ["pipecat_openai.py", "pipecat_deepgram.py"])
def test_a_pipeline_hears_both_sentences(clients: Clients, script: str, turns: str) -> None:
    told = clients.run(script, turns)
    said = [plain(frame["text"]) for frame in told if frame["kind"] == "TranscriptionFrame"]
    assert said == [SENTENCE, SENTENCE]
    assert [frame for frame in told if frame["kind"] == "ErrorFrame"] == []


def follow(clients: Clients, call_id: str) -> list[dict[str, Any]]:
    """The events of a call that has ended or will."""
    answer = httpx.get(clients.server.url(f"/v1/calls/{call_id}/events?wait_s=5"), timeout=60)
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]


def is_about_the_sentence(text: str) -> bool:
    """At 8 kHz the smallest model does not get the synthetic voice quite right in the middle."""
    return plain(text).startswith("we are going to the park") and plain(text).endswith("good")


@pytest.mark.parametrize("exchange", ["twilio", "telnyx", "telnyx_alaw", "genesys"])
def test_what_its_serializers_send_is_heard(clients: Clients, exchange: str) -> None:
    [sent] = clients.run("pipecat_calls.py", exchange, "talk")
    events = follow(clients, sent["call_id"])
    finals = [event for event in events if event["type"] == "final"]
    assert [is_about_the_sentence(final["text"]) for final in finals] == [True, True]
    assert {final["label"] for final in finals} == {"customer"}
    assert finals[1]["start_ms"] == pytest.approx(4_000, abs=300)
    assert events[-1]["type"] == "done"
    if exchange == "genesys":
        assert sent["types"][0] == "opened"
        assert sent["types"][-1] == "closed"
        assert sent["transcripts"] == [final["text"] for final in finals]
    else:
        assert sent["types"] == []


@pytest.mark.corpus
@pytest.mark.parametrize("exchange", ["twilio", "telnyx", "telnyx_alaw", "genesys"])
def test_a_human_voice_is_understood_over_the_telephone(clients: Clients, exchange: str) -> None:
    write_recording(clients.folder / "president-8000.wav", read_audio(corpus_row("read-en-jfk-jfk").path), 8_000)
    [sent] = clients.run("pipecat_calls.py", exchange, "president")
    said = " ".join(event["text"] for event in follow(clients, sent["call_id"]) if event["type"] == "final")
    assert "ask not what your country can do for you ask what you can do for your country" in plain(said)
