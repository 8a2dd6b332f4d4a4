"""The form's fields and every response format, as OpenAI's clients send and read them."""

import contextlib
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.wire.openai_http import (
    LANGUAGE_NAMES,
    BadField,
    ResponseFormat,
    Transcription,
    TranscriptionForm,
    failure_warning,
    parse_form,
    parse_language,
    render,
    render_delta,
    render_done,
    split_results,
)
from streaming.audio import SAMPLE_RATE
from streaming.config import SegmenterConfig, SessionConfig
from streaming.errors import RecognizerFailed
from streaming.events import FinalTranscript, TranscriptFailed
from streaming.types import Task, Word


def form(*fields: tuple[str, str], task: Task = Task.TRANSCRIBE) -> TranscriptionForm:
    return parse_form(fields, task)


def final(text: str, start_s: float = 0.0, end_s: float = 1.0, language: str = "en") -> FinalTranscript:
    parts = text.split()
    step = (end_s - start_s) / max(1, len(parts))
    words = tuple(
        Word(
            f" {part}",
            round((start_s + i * step) * SAMPLE_RATE),
            round((start_s + (i + 1) * step) * SAMPLE_RATE),
            0.75,
        )
        for i, part in enumerate(parts)
    )
    return FinalTranscript(
        1, 0, text, words, language, 0.9, 0.5, round(start_s * SAMPLE_RATE), round(end_s * SAMPLE_RATE)
    )


def rendered(transcription: Transcription, **fields: str) -> tuple[Any, str]:
    body, media_type = render(transcription, form(*fields.items()))
    return (json.loads(body) if media_type == "application/json" else body), media_type


SPEECH = Transcription(Task.TRANSCRIBE, 9.2, (final("Hello there.", 1.0, 2.0), final("Bye.", 8.0, 9.0)))


class TestForm:
    def test_nothing_but_a_file_is_a_good_request(self) -> None:
        parsed = form()
        assert parsed.response_format is ResponseFormat.JSON
        assert parsed.options.language is None
        assert (parsed.segments, parsed.words, parsed.stream, parsed.is_streamed) == (True, False, False, False)

    def test_every_field_arrives(self) -> None:
        parsed = form(
            ("model", "whisper-1"),
            ("language", "de"),
            ("languages[]", "de"),
            ("languages[]", "en"),
            ("prompt", "Zuvor."),
            ("hotwords", "Hark, Flux"),
            ("keywords[]", "Flux"),
            ("keywords[]", "Whisper"),
            ("response_format", "verbose_json"),
            ("temperature", "0.2"),
            ("timestamp_granularities[]", "word"),
            ("timestamp_granularities[]", "segment"),
            ("stream", "false"),
            ("chunking_strategy", "auto"),
            ("some_new_field", "x"),
        )
        assert parsed.model == "whisper-1"
        assert parsed.options.language == "de"
        assert parsed.options.languages == ("de", "en")
        assert parsed.options.prompt == "Zuvor."
        assert parsed.options.hotwords == ("Hark", "Flux", "Whisper")
        assert parsed.response_format is ResponseFormat.VERBOSE_JSON
        assert (parsed.words, parsed.segments) == (True, True)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("response_format", "diarized_json"),
            ("response_format", "xml"),
            ("temperature", "hot"),
            ("temperature", "1.5"),
            ("temperature", "nan"),
            ("language", "klingon"),
            ("languages[]", "xx"),
            ("timestamp_granularities[]", "letter"),
            ("stream", "maybe"),
            ("include[]", "text"),
            ("chunking_strategy", "manual"),
            ("chunking_strategy", "[]"),
            ("chunking_strategy", "{}"),
            ("chunking_strategy", '{"type":"semantic_vad"}'),
            ("chunking_strategy", '{"type":"server_vad","threshold":1}'),
            ("chunking_strategy", '{"type":"server_vad","threshold":0}'),
            ("chunking_strategy", '{"type":"server_vad","threshold":true}'),
            ("chunking_strategy", '{"type":"server_vad","threshold":NaN}'),
            ("chunking_strategy", '{"type":"server_vad","silence_duration_ms":20}'),
            ("chunking_strategy", '{"type":"server_vad","silence_duration_ms":100.5}'),
            ("chunking_strategy", '{"type":"server_vad","silence_duration_ms":1e400}'),
            ("chunking_strategy", '{"type":"server_vad","prefix_padding_ms":-1}'),
            ("chunking_strategy", "[" * 100_000),
            ("chunking_strategy[threshold]", "0.4"),
        ],
    )
    def test_a_bad_value_names_its_field(self, name: str, value: str) -> None:
        with pytest.raises(BadField) as caught:
            form((name, value))
        assert caught.value.param.removesuffix("[]") == name.split("[")[0]

    def test_word_times_are_refused_where_the_format_has_no_place_for_them(self) -> None:
        with pytest.raises(BadField):
            form(("timestamp_granularities[]", "word"), ("response_format", "json"))
        assert form(("timestamp_granularities[]", "segment"), ("response_format", "json"))

    @pytest.mark.parametrize(
        "fields",
        [
            [("chunking_strategy", '{"type":"server_vad","threshold":0.6,"silence_duration_ms":300}')],
            [
                ("chunking_strategy[type]", "server_vad"),
                ("chunking_strategy[threshold]", "0.6"),
                ("chunking_strategy[silence_duration_ms]", "300"),
            ],
        ],
    )
    def test_how_speech_is_cut_can_be_said(self, fields: list[tuple[str, str]]) -> None:
        usual = SessionConfig(segmenter=SegmenterConfig(pre_roll_ms=700))
        cut = form(*fields).chunking.applied_to(usual)
        assert (cut.endpointer.threshold, cut.endpointer.pause_ms) == (0.6, 300)
        assert cut.endpointer.release_threshold == pytest.approx(0.45)
        assert cut.segmenter == usual.segmenter
        padded = form(("chunking_strategy", '{"type":"server_vad","prefix_padding_ms":100,"threshold":0.01}'))
        assert padded.chunking.applied_to(usual).segmenter.pre_roll_ms == 100

    @pytest.mark.parametrize("value", ["", "auto"])
    def test_speech_is_cut_as_usual_else(self, value: str) -> None:
        assert form(("chunking_strategy", value)).chunking.applied_to(SessionConfig()) == SessionConfig()

    def test_logprobs_are_refused_where_the_format_has_no_place_for_them(self) -> None:
        assert form(("include[]", "logprobs")).logprobs
        assert not form().logprobs
        with pytest.raises(BadField):
            form(("include[]", "logprobs"), ("response_format", "text"))

    @pytest.mark.parametrize(
        ("value", "code"),
        [
            ("EN", "en"),
            ("pt-BR", "pt"),
            ("zh_CN", "zh"),
            ("German", "de"),
            ("yue", "yue"),
            ("nb", "no"),
            (" fr ", "fr"),
        ],
    )
    def test_languages_are_understood_as_people_write_them(self, value: str, code: str) -> None:
        assert parse_language(value, "language") == code

    @pytest.mark.parametrize("value", ["", "auto", "AUTO"])
    def test_no_language_means_detection(self, value: str) -> None:
        assert form(("language", value)).options.language is None

    def test_a_hundred_languages_with_distinct_names(self) -> None:
        assert len(LANGUAGE_NAMES) == 100
        assert len(set(LANGUAGE_NAMES.values())) == 100

    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["language", "languages[]", "temperature", "stream", "x", "chunking_strategy"]),
                st.text(max_size=50),
            ),
            max_size=20,
        )
    )
    def test_arbitrary_fields_never_raise_anything_but_bad_field(self, fields: list[tuple[str, str]]) -> None:
        with contextlib.suppress(BadField):
            assert parse_form(fields, Task.TRANSCRIBE).options.task is Task.TRANSCRIBE


class TestText:
    def test_utterances_are_joined_as_their_language_is_written(self) -> None:
        assert SPEECH.text == "Hello there. Bye."
        chinese = (final("你好。", language="zh"), final("再见。", 1, 2, language="zh"))
        assert Transcription(Task.TRANSCRIBE, 2, chinese).text == "你好。再见。"

    def test_empty_finals_add_nothing(self) -> None:
        assert Transcription(Task.TRANSCRIBE, 2, (final(""), final("Yes."), final(""))).text == "Yes."

    def test_the_language_is_that_of_most_of_the_speech(self) -> None:
        mixed = (final("Ja.", 0, 1, "de"), final("Yes indeed.", 1, 5, "en"), final("", 5, 60, "fr"))
        assert Transcription(Task.TRANSCRIBE, 60, mixed).language == "en"


class TestRender:
    def test_text_is_a_bare_body(self) -> None:
        assert rendered(SPEECH, response_format="text") == ("Hello there. Bye.\n", "text/plain; charset=utf-8")

    def test_srt_and_vtt_are_bare_bodies(self) -> None:
        srt, srt_type = rendered(SPEECH, response_format="srt")
        assert srt.startswith("1\n00:00:01,000 --> 00:00:02,000\nHello there.\n\n2\n00:00:08,000 -->")
        assert srt_type.startswith("text/plain")
        vtt, vtt_type = rendered(SPEECH, response_format="vtt")
        assert vtt.startswith("WEBVTT\n\n00:00:01.000 --> 00:00:02.000\nHello there.\n")
        assert vtt_type.startswith("text/vtt")

    def test_json(self) -> None:
        assert rendered(SPEECH) == (
            {
                "text": "Hello there. Bye.",
                "usage": {"type": "duration", "seconds": 10},
                "languages": [{"code": "en"}],
            },
            "application/json",
        )

    def test_json_names_every_language_and_the_most_spoken_first(self) -> None:
        mixed = (final("Ja.", 0, 1, "de"), final("Yes indeed.", 1, 5, "en"), final("", 5, 60, "fr"))
        body, _ = rendered(Transcription(Task.TRANSCRIBE, 60, mixed))
        assert body["languages"] == [{"code": "en"}, {"code": "de"}]

    def test_logprobs_add_up_to_the_text(self) -> None:
        wordless = replace(final("And so on.", 9, 9.2), words=())
        speech = replace(SPEECH, finals=(final(""), *SPEECH.finals, wordless))
        body, _ = rendered(speech, include="logprobs")
        assert [item["token"] for item in body["logprobs"]] == ["Hello", " there.", " Bye.", " And so on."]
        assert "".join(item["token"] for item in body["logprobs"]) == body["text"]
        assert [item["logprob"] for item in body["logprobs"]] == [-0.2877] * 3 + [-0.6931]
        assert bytes(body["logprobs"][0]["bytes"]) == b"Hello"

    @given(
        st.lists(
            st.tuples(
                st.text(max_size=8),
                st.lists(st.text(max_size=4), max_size=4),
                st.sampled_from(["en", "ja"]),
                st.booleans(),
            ),
            max_size=4,
        )
    )
    def test_tokens_always_add_up_to_the_delta(self, said: list[tuple[str, list[str], str, bool]]) -> None:
        finals = []
        for number, (text, parts, language, fits) in enumerate(said):
            words = tuple(Word(part, 0, 1, 0.5) for part in parts)
            text = "".join(parts) if fits else text
            finals.append(replace(final("", number, number + 1, language), text=text, words=words))
        body, _ = rendered(Transcription(Task.TRANSCRIBE, 9, tuple(finals)), include="logprobs")
        assert "".join(item["token"] for item in body["logprobs"]) == body["text"]
        assert "" not in [item["token"] for item in body["logprobs"]]

    def test_verbose_json_has_segments_by_default(self) -> None:
        body, _ = rendered(SPEECH, response_format="verbose_json")
        assert (body["task"], body["language"], body["duration"]) == ("transcribe", "english", 9.2)
        assert body["text"] == "Hello there. Bye."
        assert "words" not in body
        first, second = body["segments"]
        assert (first["id"], first["start"], first["end"], first["text"], first["seek"]) == (
            0,
            1.0,
            2.0,
            "Hello there.",
            100,
        )
        assert second["id"] == 1
        assert first["avg_logprob"] == pytest.approx(math.log(0.5), abs=1e-3)
        assert set(first) == {
            "id", "seek", "start", "end", "text", "tokens", "temperature", "avg_logprob", "compression_ratio",
            "no_speech_prob",
        }  # fmt: skip

    def test_verbose_json_has_what_was_asked_for(self) -> None:
        body = json.loads(
            render(SPEECH, form(("response_format", "verbose_json"), ("timestamp_granularities[]", "word")))[0]
        )
        assert "segments" not in body
        assert body["words"] == [
            {"word": "Hello", "start": 1.0, "end": 1.5, "probability": 0.75},
            {"word": "there.", "start": 1.5, "end": 2.0, "probability": 0.75},
            {"word": "Bye.", "start": 8.0, "end": 9.0, "probability": 0.75},
        ]

    def test_silence_is_an_empty_text_in_every_format(self) -> None:
        silence = Transcription(Task.TRANSCRIBE, 3.0, (final(""),))
        body, _ = rendered(silence, response_format="verbose_json")
        assert (body["text"], body["segments"]) == ("", [])
        assert rendered(silence, response_format="text")[0].strip() == ""
        assert rendered(silence, response_format="srt")[0] == ""

    def test_a_translation_is_english(self) -> None:
        body = json.loads(
            render(
                Transcription(Task.TRANSLATE, 2.0, (final("Good day.", language="de"),)),
                form(("response_format", "verbose_json"), task=Task.TRANSLATE),
            )[0]
        )
        assert (body["task"], body["language"]) == ("translate", "english")

    def test_what_is_missing_is_said(self) -> None:
        failed = TranscriptFailed(2, 0, 2 * SAMPLE_RATE, 3 * SAMPLE_RATE, RecognizerFailed("no"))
        finals, failures = split_results([failed, final("Hello.")])
        warnings = tuple(map(failure_warning, failures))
        body, _ = rendered(Transcription(Task.TRANSCRIBE, 3.0, finals, warnings))
        assert body["warnings"] == ["speech at 2.00-3.00 s could not be transcribed (recognizer_failed)"]

    def test_events_add_up_to_the_text(self) -> None:
        said = [final for final in SPEECH.finals if final.text.strip()]
        lines = [*(render_delta(final, is_first=final is said[0]) for final in said), render_done(SPEECH)]
        events = [json.loads(line.removeprefix("data: ").strip()) for line in lines]
        deltas = "".join(e["delta"] for e in events if e["type"] == "transcript.text.delta")
        assert deltas == SPEECH.text == events[-1]["text"]
        assert [e["type"] for e in events].count("transcript.text.done") == 1
