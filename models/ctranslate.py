"""Whisper on CTranslate2: the default engine. Synchronous; called from several threads of the engine process at once.

A request goes down a ladder until a rung's text is credible: the shaped window, the full 30 s window, the full
window at rising temperatures. Partials stop at the first rung: the next one is a fraction of a second away.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import ctranslate2
import numpy as np
import tokenizers
from faster_whisper.feature_extractor import FeatureExtractor
from numpy.typing import NDArray

from models import silence_tail, whisper_text
from streaming.audio import SAMPLE_RATE, to_float32
from streaming.errors import RecognizerFailed
from streaming.types import (
    DecodeOptions,
    DecodeRequest,
    Float32,
    Hypothesis,
    Priority,
    RecognizerInfo,
    Task,
    Word,
)

MAX_UNCOVERED_SAMPLES = 2 * SAMPLE_RATE  # speech without words that makes a text incomplete
MAX_FILLS = 3
# Chosen on the base weights over 24 recordings of noise and music and 85 clips of speech: of what the shaped window
# takes for silence, no speech was below the first (the lowest was a lone "six" at -1.04), half of the noise was.
SURE_SILENCE_LOGPROB = -1.2
WEAK_LOGPROB = -0.8
WEAK_SPEECH_SHARE = 0.25  # of the audio
# A text below the reference's log-probability threshold stands only where it is not below this, or likely silence.
HOPELESS_LOGPROB = -1.5
DOUBTFUL_NO_SPEECH_PROBABILITY = 0.3
# Below this mean log-probability the shaped window's text is compared with the full window's. On 155 read clips with
# the base weights the shaped window made 238 errors, the full one 218; taking the likelier below -0.3 left 228 (15 % of
# the clips decoded twice), below -0.5 231 (4 %). Live finals cannot wait as often as files.
UNSURE_LOGPROB = {Priority.LIVE_PARTIAL: -math.inf, Priority.LIVE_FINAL: -0.5, Priority.FILE: -0.3}
MIN_ECHO_WORDS = 3  # people do answer "yes" to "yes"


@dataclass(frozen=True, slots=True)
class CtranslateConfig:
    """What to load and how to run it.

    ``device``: "cpu", "cuda", or "auto" (cuda where there is one). ``compute_type``: a CTranslate2 type, or "auto"
    (int8 on a CPU, float16 on a GPU). ``workers`` decodes run at once, each with ``threads_per_worker`` threads.
    ``margin_s``: silence encoded after the audio before the precomputed tail begins; 1 s is too short, and 5 s gained
    next to nothing over 3 s (bench/accuracy.py). ``shaped`` False always decodes the 30 s window. ``temperatures``:
    what is tried when the full window's greedy text is not credible. ``language_threshold``: detection below it
    yields to the hint.
    """

    model_dir: Path
    model_name: str
    workers: int
    threads_per_worker: int
    device: str = "auto"
    compute_type: str = "auto"
    margin_s: float = 3.0
    shaped: bool = True
    temperatures: tuple[float, ...] = (0.2, 0.4, 0.6)
    language_threshold: float = 0.5

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device must be auto, cpu or cuda, not {self.device}")
        if self.workers < 1 or self.threads_per_worker < 1:
            raise ValueError("workers and threads_per_worker must be at least 1")
        if not 0.0 <= self.margin_s <= 30.0:
            raise ValueError("margin_s must be 0 to 30")
        if any(not 0.0 < temperature <= 1.0 for temperature in self.temperatures):
            raise ValueError("temperatures must be above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class _Plan:
    """What does not change between the rungs of one request's ladder."""

    request: DecodeRequest
    language: str
    language_probability: float
    spaced: bool
    start: list[int]
    context: list[int]
    context_text: str  # what of it was said just before; a text that only repeats it is suspect

    @property
    def audio_samples(self) -> int:
        return int(self.request.audio.shape[0])


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One rung's text with everything that speaks for and against it. ``fault`` is "" where it is credible."""

    words: tuple[Word, ...]
    average_logprob: float
    no_speech_probability: float
    temperature: float
    full_window: bool
    fault: str = ""

    @property
    def text(self) -> str:
        return "".join(word.text for word in self.words).strip()


class CtranslateWhisper:
    """A loaded model. Thread-safe: the model's own queue hands decodes to its workers, and nothing here changes."""

    def __init__(self, config: CtranslateConfig) -> None:
        """Load the model and compute the silence tail (one encode). Raises RecognizerFailed where it cannot."""
        self._config = config
        try:
            self._model = _load(config)
            self._tokenizer = _read_tokenizer(config.model_dir / "tokenizer.json")
            self._special = whisper_text.SpecialTokens.look_up(
                self._tokenizer.token_to_id, multilingual=self._model.is_multilingual
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise RecognizerFailed(f"cannot load {config.model_name} from {config.model_dir}: {error}") from error
        self._features = FeatureExtractor(feature_size=self._model.n_mels)
        self._tail = self._encode_features(silence_tail.silent_log_mel(self._model.n_mels))
        self._info = RecognizerInfo(
            model=config.model_name,
            languages=frozenset(self._special.languages) or frozenset({"en"}),
            capacity=config.workers,
        )

    @property
    def info(self) -> RecognizerInfo:
        """The model's name, its languages, and how many decodes run at once."""
        return self._info

    def decode(self, request: DecodeRequest) -> Hypothesis:
        """Answer the request; blocks for the decode, without the interpreter lock for most of it.

        Raises RecognizerFailed for audio or a language the model cannot take, and where CTranslate2 fails.
        """
        began = time.perf_counter()
        try:
            return self._hypothesis(request, began)
        except (RuntimeError, ValueError) as error:
            raise RecognizerFailed(f"decoding failed: {error}") from error

    def _hypothesis(self, request: DecodeRequest, began: float) -> Hypothesis:
        audio = to_float32(request.audio)
        states, plan = self._begin(request, audio)
        attempt = self._climb(plan, audio, states)
        if request.priority is not Priority.LIVE_PARTIAL:
            attempt = self._fill_gaps(plan, audio, attempt)
        rejected = _rejection(plan, attempt)
        if rejected and request.committed and request.priority is not Priority.LIVE_PARTIAL:
            attempt, rejected = self._committed_alone(plan, states, attempt), ""
        return Hypothesis(
            request_id=request.request_id,
            text="" if rejected else attempt.text,
            words=() if rejected else attempt.words,
            language=plan.language,
            language_probability=plan.language_probability,
            average_logprob=attempt.average_logprob,
            no_speech_probability=attempt.no_speech_probability,
            compression_ratio=whisper_text.compression_ratio(attempt.text),
            temperature=attempt.temperature,
            full_window=attempt.full_window,
            rejected=rejected,
            decode_s=time.perf_counter() - began,
        )

    def _begin(self, request: DecodeRequest, audio: Float32) -> tuple[ctranslate2.StorageView, _Plan]:
        """States and plan of the first rung."""
        states = self._encode(audio, full_window=not self._config.shaped)
        fixed = self._fixed_language(request.options)
        language, probability = (fixed, 1.0) if fixed else self._detect_language(request.options, states)
        return states, self._plan(request, language, probability)

    # Encoder

    def _encode(self, audio: Float32, *, full_window: bool) -> ctranslate2.StorageView:
        """Audio, shape (n,), → encoder states, shape (1, 1500, d): real ones for the audio, then the silence tail."""
        margin_samples = silence_tail.WINDOW_SAMPLES if full_window else int(self._config.margin_s * SAMPLE_RATE)
        positions = silence_tail.positions_to_encode(audio.shape[0], margin_samples)
        log_mel = self._features(silence_tail.pad_to(audio, positions), padding=0)
        states = silence_tail.append_tail(self._encode_features(log_mel), self._tail)
        return ctranslate2.StorageView.from_array(np.ascontiguousarray(states))

    def _encode_features(self, log_mel: Float32) -> NDArray[np.generic]:
        features = ctranslate2.StorageView.from_array(np.ascontiguousarray(log_mel[np.newaxis], dtype=np.float32))
        return np.array(self._model.encode(features, to_cpu=True))

    # What to ask

    def _plan(self, request: DecodeRequest, language: str, probability: float) -> _Plan:
        said_before = request.context if request.context_language == language else ""
        return _Plan(
            request=request,
            language=language,
            language_probability=probability,
            spaced=request.options.task is Task.TRANSLATE or language not in whisper_text.UNSPACED_LANGUAGES,
            start=self._special.start_sequence(language, request.options.task),
            context=self._context(request, said_before),
            context_text=said_before,
        )

    def _context(self, request: DecodeRequest, said_before: str) -> list[int]:
        prompt = f"{request.options.prompt} {said_before}".strip()
        return whisper_text.context_tokens(self._tokens, prompt, request.options.hotwords)

    def _without_context(self, plan: _Plan) -> _Plan:
        return replace(plan, context=self._context(plan.request, ""), context_text="")

    def _fixed_language(self, options: DecodeOptions) -> str | None:
        """The language where there is no choice, else None."""
        if not self._special.languages:
            return "en"
        fixed = options.language or (options.languages[0] if len(options.languages) == 1 else None)
        if fixed is not None and fixed not in self._special.languages:
            raise ValueError(f"the model does not know the language {fixed}")
        return fixed

    def _detect_language(self, options: DecodeOptions, states: ctranslate2.StorageView) -> tuple[str, float]:
        detected = ((token[2:-2], share) for token, share in self._model.detect_language(states)[0])
        return whisper_text.choose_language(
            detected, options.languages, options.language_hint, self._config.language_threshold
        )

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens))

    # The ladder

    def _climb(self, plan: _Plan, audio: Float32, states: ctranslate2.StorageView) -> _Attempt:
        """The first credible attempt, or the best of all.

        What was said before helps the first rung only: where that fails, it may be what leads the decoder astray.
        """
        attempts: list[_Attempt] = []
        encoded_full = not self._config.shaped
        for full_window, temperature in self._rungs(plan):
            if attempts:
                plan = self._without_context(plan)
            if full_window and not encoded_full:
                states, encoded_full = self._encode(audio, full_window=True), True
            attempts.append(self._attempt(plan, states, full_window=full_window, temperature=temperature))
            if not _needs_next_rung(attempts[-1]):
                return self._second_look(plan, audio, attempts[-1])
        return max(attempts, key=_credibility)

    def _second_look(self, plan: _Plan, audio: Float32, attempt: _Attempt) -> _Attempt:
        """An unsure text of the shaped window against the full window's: the likelier of the two."""
        is_unsure = attempt.average_logprob < UNSURE_LOGPROB[plan.request.priority]
        if attempt.full_window or attempt.fault or not is_unsure:
            return attempt
        states = self._encode(audio, full_window=True)
        second = self._attempt(plan, states, full_window=True, temperature=attempt.temperature)
        return max(attempt, second, key=_credibility)

    def _rungs(self, plan: _Plan) -> Iterator[tuple[bool, float]]:
        """(full window, temperature) in the order to try, from the temperature that was asked for."""
        first = plan.request.options.temperature
        yield not self._config.shaped, first
        if plan.request.priority is Priority.LIVE_PARTIAL:
            return
        if self._config.shaped or plan.context_text:
            yield True, first
        for temperature in self._config.temperatures:
            if temperature > first:
                yield True, temperature

    def _attempt(
        self, plan: _Plan, states: ctranslate2.StorageView, *, full_window: bool, temperature: float
    ) -> _Attempt:
        """Decode freely; where the text does not begin with what was committed, again with that forced."""
        committed = plan.request.committed
        attempt = self._generate(plan, states, full_window=full_window, temperature=temperature)
        if committed and not whisper_text.begins_with(attempt.text, committed):
            prefix = self._tokens(" " + committed.strip() if plan.spaced else committed.strip())
            attempt = self._generate(plan, states, full_window=full_window, temperature=temperature, prefix=prefix)
        return attempt

    def _generate(
        self,
        plan: _Plan,
        states: ctranslate2.StorageView,
        *,
        full_window: bool,
        temperature: float,
        prefix: Sequence[int] = (),
    ) -> _Attempt:
        prompt = whisper_text.decoder_prompt(self._special, plan.start, plan.context, prefix)
        cap = whisper_text.token_cap(plan.audio_samples / SAMPLE_RATE, len(prompt))
        result = self._model.generate(
            states,
            [prompt],
            beam_size=1,
            sampling_topk=1 if temperature == 0.0 else 0,
            sampling_temperature=temperature or 1.0,
            max_length=max(2 * cap, len(prompt) + cap),  # CTranslate2 stops at half of it, or at it less the prompt
            suppress_blank=not prefix,
            return_scores=True,
            return_no_speech_prob=True,
        )[0]
        # CTranslate2 counts what follows <|notimestamps|> in its prompt as part of the result.
        said = [token for token in result.sequences_ids[0][len(prefix) :] if token < self._special.end_of_text]
        count = len(result.sequences_ids[0])
        attempt = _Attempt(
            words=self._words(plan, states, said, prefix),
            # The score is a mean over all of them, in which a forced token counts 0.
            average_logprob=result.scores[0] * count / (count - len(prefix) + 1),
            no_speech_probability=result.no_speech_prob,
            temperature=temperature,
            full_window=full_window,
        )
        return replace(attempt, fault=_fault(plan, attempt, capped=count - len(prefix) >= cap))

    def _words(
        self, plan: _Plan, states: ctranslate2.StorageView, said: Sequence[int], prefix: Sequence[int]
    ) -> tuple[Word, ...]:
        """Words of the prefix, then those said after it, with their places in the audio."""
        tokens = [*prefix, *said]
        if not tokens:
            return ()
        frames = -(-plan.audio_samples // silence_tail.HOP_SAMPLES)
        aligned = self._model.align(states, plan.start, [tokens], frames)[0]
        positions = whisper_text.token_positions(aligned.alignments, len(tokens))
        words = whisper_text.split_continued(prefix, said, self._text, spaced=plan.spaced)
        return whisper_text.time_words(words, positions, aligned.text_token_probs, plan.audio_samples)

    # Last resorts

    def _fill_gaps(self, plan: _Plan, audio: Float32, attempt: _Attempt) -> _Attempt:
        """Decode stretches of speech without words by themselves, while that finds credible words."""
        for _ in range(MAX_FILLS):
            if _fault(plan, attempt) != "coverage":
                break
            start, end = whisper_text.longest_gap(attempt.words, plan.audio_samples)
            found = self._words_between(plan, audio, start, end)
            if not found:
                break
            before = tuple(word for word in attempt.words if word.end_sample <= start)
            after = attempt.words[len(before) :]
            filled = replace(attempt, words=before + whisper_text.shift_words(found, start) + after)
            if not whisper_text.begins_with(filled.text, plan.request.committed):
                break
            attempt = filled
        return attempt

    def _words_between(self, plan: _Plan, audio: Float32, start: int, end: int) -> tuple[Word, ...]:
        """What the audio [start, end) says when decoded alone; nothing where that is doubtful or all of the audio."""
        if end - start == plan.audio_samples:
            return ()
        request = replace(plan.request, audio=plan.request.audio[start:end], speech_samples=end - start, committed="")
        part = replace(self._without_context(plan), request=request)
        states = self._encode(audio[start:end], full_window=not self._config.shaped)
        found = self._climb(part, audio[start:end], states)
        doubtful = found.average_logprob < whisper_text.MIN_AVERAGE_LOGPROB or whisper_text.is_silence_phrase(
            found.text
        )
        return () if doubtful or _rejection(part, found) else found.words

    def _committed_alone(self, plan: _Plan, states: ctranslate2.StorageView, attempt: _Attempt) -> _Attempt:
        """What was already shown, when nothing after it is credible."""
        committed = plan.request.committed.strip()
        words = self._words(plan, states, (), self._tokens(" " + committed if plan.spaced else committed))
        return replace(attempt, words=words)


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Raises OSError where it cannot be read, ValueError where it is no tokenizer."""
    text = path.read_text("utf-8")
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # tokenizers has no type of its own for a file that it cannot use
        raise ValueError(f"{path.name} cannot be used: {error}") from error


def _load(config: CtranslateConfig) -> ctranslate2.models.Whisper:
    device = config.device
    if device == "auto":
        device = "cuda" if ctranslate2.get_cuda_device_count() > 0 else "cpu"
    compute_type = config.compute_type
    if compute_type == "auto":
        wanted = "int8" if device == "cpu" else "float16"
        compute_type = wanted if wanted in ctranslate2.get_supported_compute_types(device) else "default"
    return ctranslate2.models.Whisper(
        str(config.model_dir),
        device=device,
        compute_type=compute_type,
        inter_threads=config.workers,
        intra_threads=config.threads_per_worker,
    )


def _fault(plan: _Plan, attempt: _Attempt, *, capped: bool = False) -> str:
    """The first thing that speaks against the text, "" where nothing does."""
    silent = attempt.no_speech_probability > whisper_text.MAX_NO_SPEECH_PROBABILITY
    doubtful = attempt.average_logprob < whisper_text.MIN_AVERAGE_LOGPROB
    if silent and doubtful:
        return "no_speech"
    if whisper_text.has_loop(whisper_text.units(attempt.text)):
        return "repetition"
    if whisper_text.compression_ratio(attempt.text) > whisper_text.MAX_COMPRESSION_RATIO:
        return "compression_ratio"
    if capped:
        return "token_cap"
    repeats = plan.context_text and whisper_text.is_echo(attempt.text, plan.context_text)
    if repeats and len(whisper_text.units(attempt.text)) >= MIN_ECHO_WORDS:
        return "context_echo"
    if doubtful:
        return "low_logprob"
    uncovered = whisper_text.uncovered_samples(attempt.words, plan.audio_samples, plan.request.speech_samples)
    return "coverage" if uncovered > MAX_UNCOVERED_SAMPLES else ""


# Worst first. What is merely doubtful is better than what loops, and what is short better than what is doubtful.
_FAULTS = ("repetition", "compression_ratio", "token_cap", "no_speech", "context_echo", "low_logprob", "coverage", "")


def _credibility(attempt: _Attempt) -> tuple[int, float]:
    return _FAULTS.index(attempt.fault), attempt.average_logprob


def _needs_next_rung(attempt: _Attempt) -> bool:
    """Whether another rung may do better.

    The full window settles silence and missing text: sampling finds no speech where there is none. The shaped
    window settles silence only where it is sure, since it takes some very short words for silence.
    """
    if attempt.fault == "no_speech" and not attempt.full_window:
        return attempt.average_logprob > SURE_SILENCE_LOGPROB and not whisper_text.is_silence_phrase(attempt.text)
    return attempt.fault not in ("", "no_speech", "coverage") or (
        attempt.fault == "coverage" and not attempt.full_window
    )


def _is_weak(plan: _Plan, attempt: _Attempt) -> bool:
    """Whether little speaks for speech, so that a text which Whisper is known to make up is taken for made up."""
    return (
        attempt.no_speech_probability > whisper_text.MAX_NO_SPEECH_PROBABILITY
        or attempt.average_logprob < WEAK_LOGPROB
        or plan.request.speech_samples < WEAK_SPEECH_SHARE * plan.audio_samples
    )


def _rejection(plan: _Plan, attempt: _Attempt) -> str:
    """The guard that drops this text, "" where it stands."""
    if not attempt.text:
        return "no_speech"
    if attempt.fault in ("no_speech", "repetition", "compression_ratio", "context_echo"):
        return attempt.fault
    doubtful = attempt.average_logprob < whisper_text.MIN_AVERAGE_LOGPROB
    if doubtful and (
        attempt.no_speech_probability > DOUBTFUL_NO_SPEECH_PROBABILITY or attempt.average_logprob < HOPELESS_LOGPROB
    ):
        return "low_logprob"
    weak = _is_weak(plan, attempt)
    speech_s = plan.request.speech_samples / SAMPLE_RATE
    if weak and whisper_text.is_too_fast(attempt.text, speech_s, spaced=plan.spaced):
        return "too_fast"
    if weak and whisper_text.is_silence_phrase(attempt.text):
        return "silence_phrase"
    if weak and whisper_text.is_echo(
        attempt.text, " ".join((plan.request.options.prompt, *plan.request.options.hotwords))
    ):
        return "prompt_echo"
    return ""
