"""What Whisper is asked, in which order, and which of its answers stands: the policy that every Whisper engine shares.

A request goes down a ladder until a rung's text is credible: the shaped window, the full 30 s window, the full
window at rising temperatures. Partials stop at the first rung: the next one is a fraction of a second away. Live finals
take the others only for a text that cannot be shown; where words are missing, the gaps are decoded by themselves.

Nothing here calls an engine. ``Ladder.steps`` is a generator: it yields a step, is sent what came of it, and returns
the hypothesis. ``climb`` carries the steps out on an engine that blocks, ``climb_async`` on one that is awaited.
"""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from models import silence_tail, whisper_text
from streaming.audio import SAMPLE_RATE
from streaming.types import DecodeOptions, DecodeRequest, Hypothesis, Priority, Task, Word

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
# the clips decoded twice), below -0.5 231 (4 %). A full window takes as long as six short utterances, so the second is
# the better bargain; live finals take it only while nobody else waits for the engine.
UNSURE_LOGPROB = {Priority.LIVE_PARTIAL: -math.inf, Priority.LIVE_FINAL: -0.5, Priority.FILE: -0.5}
MIN_ECHO_WORDS = 3  # people do answer "yes" to "yes"


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderConfig:
    """How the ladder is climbed, the same for every engine.

    ``shaped`` False always decodes the 30 s window. ``margin_s``: silence encoded after the audio before the
    precomputed tail begins; 1 s is too short, and 5 s gained next to nothing over 3 s (bench/accuracy.py).
    ``temperatures``: what is tried when the full window's greedy text is not credible. ``language_threshold``:
    detection below it yields to the hint.
    """

    shaped: bool = True
    margin_s: float = 3.0
    temperatures: tuple[float, ...] = (0.2, 0.4, 0.6)
    language_threshold: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 <= self.margin_s <= 30.0:
            raise ValueError("margin_s must be 0 to 30")
        if any(not 0.0 < temperature <= 1.0 for temperature in self.temperatures):
            raise ValueError("temperatures must be above 0 and at most 1")
        if not 0.0 <= self.language_threshold <= 1.0:
            raise ValueError("language_threshold must be 0 to 1")


# What is asked of an engine, and its answers


@dataclass(frozen=True, slots=True)
class Window:
    """The samples [begin, end) of the request's audio, and whether the encoder gets 30 s of them or a shaped window.

    A request comes back to the same window several times, so an engine may keep what it has encoded under this key.
    """

    begin_sample: int
    end_sample: int
    full: bool

    @property
    def samples(self) -> int:
        return self.end_sample - self.begin_sample


@dataclass(frozen=True, slots=True)
class Detect:
    """Which language is spoken? The answer: (code, probability) of each that the model knows."""

    window: Window


@dataclass(frozen=True, slots=True)
class Decode:
    """Which tokens follow the prompt, at most ``cap`` of them? The answer is a ``Decoded``.

    ``prompt`` is all that the decoder is given. It ends with ``prefix``, the tokens that the text has to begin
    with (none where it is free), and holds ``start``, the start sequence without <|notimestamps|>. ``temperature`` 0
    takes the likeliest token each time.
    """

    window: Window
    start: tuple[int, ...]
    prompt: tuple[int, ...]
    prefix: tuple[int, ...]
    temperature: float
    cap: int


@dataclass(frozen=True, slots=True)
class Align:
    """Where are these tokens, taken for the whole text? The answer is a ``Timing``."""

    window: Window
    start: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Timing:
    """Where n tokens lie in their window, by alignment or by estimate.

    ``positions``, shape (n + 1,): the encoder position (20 ms each) where each token begins and, last, where the text
    ends, never falling. ``probabilities``, shape (n,): how likely the model finds each token.
    """

    positions: Sequence[int]
    probabilities: Sequence[float]


@dataclass(frozen=True, slots=True)
class Decoded:
    """What followed a prompt.

    ``tokens``: the text after the prefix, without special tokens. ``timing``: of the prefix and these. ``capped``: cut
    off at the cap, not ended by the model. ``average_logprob``: natural logarithm, the mean over what was decoded, with
    the end of text and without the prefix. ``no_speech_probability``: of <|nospeech|> after <|startoftranscript|>.
    """

    tokens: Sequence[int]
    timing: Timing
    capped: bool
    average_logprob: float
    no_speech_probability: float


LanguageShares = Sequence[tuple[str, float]]
Step = Detect | Decode | Align
T = TypeVar("T")
Steps = Generator[Step, Any, T]  # sent is the answer to the step: LanguageShares, Decoded, Timing


class Backend(Protocol):
    """An engine that blocks, on the audio of one request."""

    def detect(self, step: Detect) -> LanguageShares: ...
    def decode(self, step: Decode) -> Decoded: ...
    def align(self, step: Align) -> Timing: ...


class AsyncBackend(Protocol):
    """An engine that is awaited, on the audio of one request."""

    async def detect(self, step: Detect) -> LanguageShares: ...
    async def decode(self, step: Decode) -> Decoded: ...
    async def align(self, step: Align) -> Timing: ...


def climb(steps: Steps[T], backend: Backend) -> T:
    """Carry the steps out to their end. Raises ValueError for a request that cannot be, and what the backend raises."""
    result: LanguageShares | Decoded | Timing | None = None
    while True:
        try:
            step = steps.send(result)
        except StopIteration as end:
            answer: T = end.value
            return answer
        match step:
            case Detect():
                result = backend.detect(step)
            case Decode():
                result = backend.decode(step)
            case Align():
                result = backend.align(step)


async def climb_async(steps: Steps[T], backend: AsyncBackend) -> T:
    """``climb`` on a backend that is awaited."""
    result: LanguageShares | Decoded | Timing | None = None
    while True:
        try:
            step = steps.send(result)
        except StopIteration as end:
            answer: T = end.value
            return answer
        match step:
            case Detect():
                result = await backend.detect(step)
            case Decode():
                result = await backend.decode(step)
            case Align():
                result = await backend.align(step)


# The policy


@dataclass(frozen=True, slots=True)
class _Plan:
    """What does not change between the rungs of one ladder: the request's, or that of a gap in its words."""

    request: DecodeRequest
    language: str
    language_probability: float
    spaced: bool
    start: tuple[int, ...]
    context: list[int]
    context_text: str  # what of it was said just before; a text that only repeats it is suspect
    has_time: Callable[[], bool]
    begin_sample: int = 0  # where the plan's audio lies in the one that was asked about
    is_gap: bool = False

    @property
    def has_one_rung(self) -> bool:
        """Whether nobody can wait for more than the shaped window."""
        priority = self.request.priority
        return priority is Priority.LIVE_PARTIAL or (self.is_gap and priority is Priority.LIVE_FINAL)

    @property
    def audio_samples(self) -> int:
        return int(self.request.audio.shape[0])

    def window(self, *, full: bool) -> Window:
        return Window(self.begin_sample, self.begin_sample + self.audio_samples, full)


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


class Ladder:
    """The policy for one model: its special tokens, and its tokenizer as two functions. Holds no state of a request."""

    def __init__(
        self,
        config: LadderConfig,
        special: whisper_text.SpecialTokens,
        encode: whisper_text.Encode,
        decode: whisper_text.Decode,
    ) -> None:
        self._config = config
        self._special = special
        self._tokens = encode
        self._text = decode

    def steps(self, request: DecodeRequest, has_time: Callable[[], bool] = lambda: True) -> Steps[Hypothesis]:
        """What to ask for this request; returns its hypothesis, whose ``decode_s`` is 0.

        ``has_time`` is asked before what improves a live final's text but can be left out.
        Raises ValueError for audio that fits no window, and for a language that the model does not know.
        """
        silence_tail.positions_to_encode(request.audio.shape[0], 0)  # for its ValueError
        plan = yield from self._begin(request, has_time)
        attempt = yield from self._climb(plan)
        if request.priority is not Priority.LIVE_PARTIAL:
            attempt = yield from self._fill_gaps(plan, attempt)
        rejected = _rejection(plan, attempt)
        if rejected and request.committed and request.priority is not Priority.LIVE_PARTIAL:
            attempt, rejected = (yield from self._committed_alone(plan, attempt)), ""
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
        )

    # What to ask

    def _begin(self, request: DecodeRequest, has_time: Callable[[], bool]) -> Steps[_Plan]:
        fixed = self._fixed_language(request.options)
        if fixed:
            return self._plan(request, has_time, fixed, 1.0)
        shares: LanguageShares = yield Detect(Window(0, request.audio.shape[0], full=not self._config.shaped))
        options = request.options
        threshold = self._config.language_threshold
        language, probability = whisper_text.choose_language(
            shares, options.languages, options.language_hint, threshold
        )
        return self._plan(request, has_time, language, probability)

    def _plan(self, request: DecodeRequest, has_time: Callable[[], bool], language: str, probability: float) -> _Plan:
        said_before = request.context if request.context_language == language else ""
        return _Plan(
            request=request,
            language=language,
            language_probability=probability,
            spaced=request.options.task is Task.TRANSLATE or language not in whisper_text.UNSPACED_LANGUAGES,
            start=tuple(self._special.start_sequence(language, request.options.task)),
            context=self._context(request, said_before),
            context_text=said_before,
            has_time=has_time,
        )

    def _context(self, request: DecodeRequest, said_before: str) -> list[int]:
        options = request.options
        return whisper_text.context_tokens(self._tokens, options.prompt, options.hotwords, said_before)

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

    # The ladder

    def _climb(self, plan: _Plan) -> Steps[_Attempt]:
        """The first credible attempt, or the best of all.

        What was said before helps the first rung only: where that fails, it may be what leads the decoder astray.
        """
        attempts: list[_Attempt] = []
        for full_window, temperature in self._rungs(plan):
            if attempts:
                plan = self._without_context(plan)
            attempt = yield from self._attempt(plan, full_window=full_window, temperature=temperature)
            if not _needs_next_rung(plan, attempt):
                return (yield from self._second_look(plan, attempt))
            attempts.append(attempt)
        return max(attempts, key=_credibility)

    def _second_look(self, plan: _Plan, attempt: _Attempt) -> Steps[_Attempt]:
        """An unsure text of the shaped window against the full window's: the likelier of the two."""
        is_unsure = attempt.average_logprob < UNSURE_LOGPROB[plan.request.priority]
        if attempt.full_window or attempt.fault or not is_unsure or plan.has_one_rung:
            return attempt
        if plan.request.priority is Priority.LIVE_FINAL and not plan.has_time():
            return attempt
        second = yield from self._attempt(plan, full_window=True, temperature=attempt.temperature)
        return max(attempt, second, key=_credibility)

    def _rungs(self, plan: _Plan) -> Iterator[tuple[bool, float]]:
        """(full window, temperature) in the order to try, from the temperature that was asked for."""
        first = plan.request.options.temperature
        yield not self._config.shaped, first
        if plan.has_one_rung:
            return
        if self._config.shaped or plan.context_text:
            yield True, first
        for temperature in self._config.temperatures:
            if temperature > first:
                yield True, temperature

    def _attempt(self, plan: _Plan, *, full_window: bool, temperature: float) -> Steps[_Attempt]:
        """Decode freely; where the text does not begin with what was committed, again with that forced."""
        committed = plan.request.committed
        attempt = yield from self._decode(plan, full_window=full_window, temperature=temperature)
        if committed and not whisper_text.begins_with(attempt.text, committed):
            prefix = self._committed_tokens(plan)
            attempt = yield from self._decode(plan, full_window=full_window, temperature=temperature, prefix=prefix)
        return attempt

    def _committed_tokens(self, plan: _Plan) -> list[int]:
        committed = plan.request.committed.strip()
        return self._tokens(" " + committed if plan.spaced else committed)

    def _decode(
        self, plan: _Plan, *, full_window: bool, temperature: float, prefix: Sequence[int] = ()
    ) -> Steps[_Attempt]:
        prompt = whisper_text.decoder_prompt(self._special, plan.start, plan.context, prefix)
        cap = whisper_text.token_cap(plan.audio_samples / SAMPLE_RATE, len(prompt))
        window = plan.window(full=full_window)
        decoded: Decoded = yield Decode(window, plan.start, tuple(prompt), tuple(prefix), temperature, cap)
        attempt = _Attempt(
            words=self._words(plan, prefix, decoded.tokens, decoded.timing),
            average_logprob=decoded.average_logprob,
            no_speech_probability=decoded.no_speech_probability,
            temperature=temperature,
            full_window=full_window,
        )
        return replace(attempt, fault=_fault(plan, attempt, capped=decoded.capped))

    def _words(self, plan: _Plan, prefix: Sequence[int], said: Sequence[int], timing: Timing) -> tuple[Word, ...]:
        """Words of the prefix, then those said after it, with their places in the plan's audio."""
        words = whisper_text.split_continued(prefix, said, self._text, spaced=plan.spaced)
        return whisper_text.time_words(words, timing.positions, timing.probabilities, plan.audio_samples)

    # Last resorts

    def _fill_gaps(self, plan: _Plan, attempt: _Attempt) -> Steps[_Attempt]:
        """Decode stretches of speech without words by themselves, while that finds credible words."""
        for _ in range(MAX_FILLS):
            if _fault(plan, attempt) != "coverage":
                break
            start, end = whisper_text.longest_gap(attempt.words, plan.audio_samples)
            found = yield from self._words_between(plan, start, end)
            if not found:
                break
            before = tuple(word for word in attempt.words if word.end_sample <= start)
            after = attempt.words[len(before) :]
            filled = replace(attempt, words=before + whisper_text.shift_words(found, start) + after)
            if not whisper_text.begins_with(filled.text, plan.request.committed):
                break
            attempt = filled
        return attempt

    def _words_between(self, plan: _Plan, start: int, end: int) -> Steps[tuple[Word, ...]]:
        """What the audio [start, end) says when decoded alone; nothing where that is doubtful or all of the audio."""
        if end - start == plan.audio_samples:
            return ()
        request = replace(plan.request, audio=plan.request.audio[start:end], speech_samples=end - start, committed="")
        part = replace(self._without_context(plan), request=request, begin_sample=start, is_gap=True)
        found = yield from self._climb(part)
        doubtful = found.average_logprob < whisper_text.MIN_AVERAGE_LOGPROB or whisper_text.is_silence_phrase(
            found.text
        )
        return () if doubtful or _rejection(part, found) else found.words

    def _committed_alone(self, plan: _Plan, attempt: _Attempt) -> Steps[_Attempt]:
        """What was already shown, when nothing after it is credible."""
        tokens = self._committed_tokens(plan)
        timing: Timing = yield Align(plan.window(full=not self._config.shaped), plan.start, tuple(tokens))
        return replace(attempt, words=self._words(plan, tokens, (), timing))


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


def _needs_next_rung(plan: _Plan, attempt: _Attempt) -> bool:
    """Whether another rung may do better.

    The full window settles silence and missing text: sampling finds no speech where there is none. The shaped
    window settles silence only where it is sure, since it takes some very short words for silence; and a live final's
    text with gaps, which are filled faster than 30 s are encoded.
    """
    if attempt.fault == "no_speech" and not attempt.full_window:
        return attempt.average_logprob > SURE_SILENCE_LOGPROB and not whisper_text.is_silence_phrase(attempt.text)
    if attempt.fault == "coverage":
        can_wait = plan.request.priority is not Priority.LIVE_FINAL or not attempt.text
        return can_wait and not attempt.full_window
    return attempt.fault not in ("", "no_speech")


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
