"""Which numbers are taken out, and that nothing else changes."""

from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import main
from app.redaction import Kind, parse_kinds, redact, redact_text, redact_words
from app.settings import load_settings
from models import scripted
from models.scripted import ScriptedDetector, encode_words
from streaming.errors import BadMessage
from streaming.events import FinalTranscript, PartialTranscript, SpeechStarted
from streaming.types import DecodeOptions, DecodeRequest, Hypothesis, RecognizerInfo, Word
from tests.support.server import EOF, say
from tests.unit.test_conversation import Client, Script, converse

BOTH = frozenset(Kind)
CARD, PHONE = frozenset({Kind.CARD}), frozenset({Kind.PHONE})

# Numbers that payment companies publish for tests.
CARDS = [
    "4111111111111111",
    "4111 1111 1111 1111",
    "4111-1111-1111-1111",
    "4111, 1111, 1111, 1111",
    "4 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1",
    "3782 822463 10005",
    "4222222222222",
    "6011000990139424",
    "４１１１ １１１１ １１１１ １１１１",
]
PHONES = [
    "555-123-4567",
    "(555) 123-4567",
    "555.123.4567",
    "+1 555 123 4567",
    "+49 (0) 30 1234567",
    "+45 12345678",
    "030 / 123 456 78",
    "0171 1234567",
    "5, 5, 5, 1, 2, 3, 4, 5, 6, 7",
    "555-1234",
    "22 33 91 08",
    "13812345678",
]
HARMLESS = [
    "2026-12-01",
    "01.12.2026",
    "12/1/2026",
    "10:30",
    "1,234,567,890.50",
    "1914–1918",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10",
    "10, 20, 30, 40, 50",
    "room 101",
    "A4",
    "the 3rd of 12",
    "90210",
]


@pytest.mark.parametrize("number", CARDS)
def test_a_card_number_is_replaced(number: str) -> None:
    assert redact_text(f"My card is {number}. Thanks.", CARD) == "My card is [CARD]. Thanks."
    assert redact_text(number, BOTH) == "[CARD]"


def test_what_belongs_to_a_card_goes_with_it() -> None:
    assert redact_text("It is 4111 1111 1111 1111, 12/27, 123, right?", CARD) == "It is [CARD], right?"
    two = "4111 1111 1111 1111 and 3782 822463 10005"
    assert redact_text(two, CARD) == "[CARD] and [CARD]"


@pytest.mark.parametrize("number", ["4111 1111 1111 1112", "1234 5678 9012 345", "4111 1111 1111"])
def test_a_number_with_a_wrong_check_digit_is_no_card(number: str) -> None:
    assert redact_text(number, CARD) == number
    assert redact_text(number, BOTH) == "[PHONE]"


@pytest.mark.parametrize("number", PHONES)
def test_a_phone_number_is_replaced(number: str) -> None:
    assert redact_text(f"Call {number}, please.", PHONE) == "Call [PHONE], please."
    assert redact_text(f"电话是{number}。", PHONE) == "电话是[PHONE]。"
    assert redact_text(f"Call {number}.", CARD) == f"Call {number}."


@pytest.mark.parametrize("text", HARMLESS)
def test_other_numbers_stay(text: str) -> None:
    assert redact_text(f"It was {text} then", BOTH) == f"It was {text} then"


@given(st.integers(10**11, 10**18 - 1), st.data())
def test_every_right_card_number_is_found_however_it_is_grouped(body: int, data: st.DataObject) -> None:
    digits = str(body)
    total = sum(d * 2 - 9 * (d > 4) if i % 2 == 0 else d for i, d in enumerate(map(int, reversed(digits))))
    number = digits + str(-total % 10)
    gaps = st.sampled_from(["", " ", "-", ", ", "."])
    spoken = number[0] + "".join(data.draw(gaps) + digit for digit in number[1:])
    assert redact_text(f"a {spoken} b", CARD) == "a [CARD] b"


# --- words -----------------------------------------------------------------------------------------------------------


def words(*texts: str) -> tuple[Word, ...]:
    return tuple(Word(text, 100 * i, 100 * i + 90, 0.9 - i / 100) for i, text in enumerate(texts))


def test_the_words_of_a_number_become_one_with_their_times() -> None:
    spoken = words(" Card", " 4111", " 1111", " 1111-", "1111.", " Thanks.")
    assert redact_words(spoken, CARD) == (
        spoken[0],
        Word(" [CARD].", 100, 490, spoken[4].probability),
        spoken[5],
    )


def test_two_numbers_that_share_a_word_become_one_word() -> None:
    spoken = words(" 555-", "1234;555-", "1234", " ok")
    assert [word.text for word in redact_words(spoken, PHONE)] == [" [PHONE];[PHONE]", " ok"]


TEXTS = st.text(alphabet="0123456789 -.,/+()ab\u2013", max_size=40)


@given(st.lists(TEXTS, max_size=8), st.sampled_from([BOTH, CARD, PHONE]))
def test_the_words_joined_are_the_text_before_and_after(texts: list[str], kinds: frozenset[Kind]) -> None:
    spoken = words(*texts)
    redacted = redact_words(spoken, kinds)
    assert "".join(word.text for word in redacted) == redact_text("".join(texts), kinds)
    assert [word for word in redacted if "[" not in word.text] == [word for word in spoken if word in redacted]
    assert all(a.start_sample < b.start_sample for a, b in pairwise(redacted))


# --- events ----------------------------------------------------------------------------------------------------------


def partial(committed: str, tentative: str = "") -> PartialTranscript:
    return PartialTranscript(1, 0, committed, tentative, 0, 16_000)


def final(text: str) -> FinalTranscript:
    return FinalTranscript(1, 0, text, words(text), "en", 0.9, 0.9, 0, 16_000)


def test_a_final_is_redacted_in_text_and_words() -> None:
    redacted = redact(final("Call 555-123-4567."), BOTH)
    assert redacted.text == "Call [PHONE]." == redacted.words[0].text
    assert (redacted.start_sample, redacted.end_sample, redacted.language) == (0, 16_000, "en")


def test_what_holds_no_text_is_left_alone() -> None:
    event = SpeechStarted(1, 0, 5)
    assert redact(event, BOTH) is event
    said = final("Call 555-123-4567.")
    assert redact(said, frozenset()) is said


def test_digits_at_the_end_of_a_partial_wait_for_what_follows() -> None:
    assert redact(partial("My card is 4111 1111", " 1111"), BOTH) == partial("My card is ")
    assert redact(partial("My card is 4111 1111 1111 1111", " thanks"), BOTH) == partial("My card is ", "[CARD] thanks")
    assert redact(partial("My card is 4111 1111 1111 1111 thanks"), BOTH) == partial("My card is [CARD] thanks")
    assert redact(partial("I am", " 25"), BOTH) == partial("I am", " ")
    assert redact(partial("It is +", ""), BOTH) == partial("It is ")


def test_a_partials_words_are_those_of_its_text() -> None:
    spoken = words(" My", " card", " 4111", " 1111", " 1111", " 1111")
    open_ended = replace(partial("My card 4111 1111", " 1111 1111"), words=spoken)
    assert redact(open_ended, BOTH).words == spoken[:2]
    closed = replace(partial("My card 4111 1111 1111 1111", " thanks"), words=(*spoken, *words(" thanks")))
    assert [word.text for word in redact(closed, BOTH).words] == [" My", " card", " [CARD]", " thanks"]


@given(TEXTS, st.data(), st.sampled_from([BOTH, CARD, PHONE]))
def test_committed_text_only_grows_and_the_final_begins_with_it(
    text: str, data: st.DataObject, kinds: frozenset[Kind]
) -> None:
    whole = redact(final(text), kinds).text
    before = ""
    for cut in sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6))):
        guess = data.draw(TEXTS)
        shown = redact(partial(text[:cut], guess), kinds)
        assert shown.committed.startswith(before)
        assert whole.startswith(shown.committed)
        before = shown.committed


def test_kinds_are_named() -> None:
    assert parse_kinds(["card", " PHONE ", ""]) == BOTH
    assert parse_kinds([]) == frozenset()
    with pytest.raises(BadMessage):
        parse_kinds(["cards"])


# --- recordings ------------------------------------------------------------------------------------------------------


class SaysANumber:
    """A recognizer that always hears the same."""

    info = RecognizerInfo("fixed", frozenset({"en"}), 1)

    async def decode(self, request: DecodeRequest) -> Hypothesis:
        return Hypothesis(request.request_id, "Call 555-123-4567.", words(" Call", " 555-", "123-", "4567."), "en")


@pytest.mark.parametrize("setting", ["", "phone"])
async def test_recordings_and_the_log_are_redacted_too(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    monkeypatch.setattr(main.StreamTelemetry, "observe", lambda self, output: logged.append(output))
    app = main.create_app(load_settings(engine="scripted", redact=setting, log_text=True))
    service = app.state.service
    service.dispatcher = main.make_dispatcher(SaysANumber(), service.metrics)
    service.new_detectors = lambda count: [ScriptedDetector() for _ in range(count)]
    progress: list[str] = []

    async def audio() -> AsyncIterator[bytes]:
        yield encode_words(["alpha"] * 5).tobytes()

    def told(transcript: main.Transcript) -> None:
        assert isinstance(transcript, FinalTranscript)
        progress.append(transcript.text)

    (heard,) = await main._Telemetered(service).transcribe(audio(), DecodeOptions(), told)
    expected = "Call [PHONE]." if setting else "Call 555-123-4567."
    assert isinstance(heard, FinalTranscript)
    finals = [output.text for output in logged if isinstance(output, FinalTranscript)]
    assert [heard.text, *progress, *finals] == [expected] * 3
    assert "".join(word.text for word in heard.words).strip() == expected


# --- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["", "phone"])
def test_a_stream_is_redacted_while_it_is_heard(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted, "VOCABULARY", ("call", "555", "123", "4567", "now"))
    monkeypatch.setenv("HARK_REDACT", setting)
    spoken = ["call", "call", "call", "call", "call", "555", "123", "4567", "now", "now", "now", "now", "now", None]
    script: Script = [(number * 0.1, say(word)) for number, word in enumerate(spoken)]
    client = converse(Client([*script, (2, EOF)])).client
    shown = [partial["committed"] + partial["tentative"] for partial in client.of_type("partial")]
    assert any("call" in text and "now" in text for text in shown)
    (heard,) = client.of_type("final")
    assert heard["text"] == " ".join(word["word"] for word in heard["words"])
    if setting:
        assert heard["text"] == "call call call call call [PHONE] now now now now now"
        assert not [text for text in shown if set(text) & set("0123456789")]
    else:
        assert "555 123 4567" in heard["text"]
        assert [text for text in shown if "555 123" in text]
