"""OpenAI's ``POST /v1/audio/transcriptions`` and ``/translations``: form fields in, response bodies out. Pure.

Read against openai-python 3.57.0. Fields that are not known are ignored, as OpenAI's own server ignores those of other
models; a bad value of a known field is an error that names the field.
"""

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from app.wire.subtitles import cues, to_srt, to_vtt
from streaming.audio import SAMPLE_RATE
from streaming.config import SessionConfig
from streaming.errors import BadMessage
from streaming.events import FinalTranscript, TranscriptFailed
from streaming.types import DecodeOptions, Task

JsonObject = dict[str, object]

# Whisper's languages, by the names OpenAI answers with in verbose_json.
LANGUAGE_NAMES = {
    "af": "afrikaans", "am": "amharic", "ar": "arabic", "as": "assamese", "az": "azerbaijani", "ba": "bashkir",
    "be": "belarusian", "bg": "bulgarian", "bn": "bengali", "bo": "tibetan", "br": "breton", "bs": "bosnian",
    "ca": "catalan", "cs": "czech", "cy": "welsh", "da": "danish", "de": "german", "el": "greek", "en": "english",
    "es": "spanish", "et": "estonian", "eu": "basque", "fa": "persian", "fi": "finnish", "fo": "faroese",
    "fr": "french", "gl": "galician", "gu": "gujarati", "ha": "hausa", "haw": "hawaiian", "he": "hebrew",
    "hi": "hindi", "hr": "croatian", "ht": "haitian creole", "hu": "hungarian", "hy": "armenian", "id": "indonesian",
    "is": "icelandic", "it": "italian", "ja": "japanese", "jw": "javanese", "ka": "georgian", "kk": "kazakh",
    "km": "khmer", "kn": "kannada", "ko": "korean", "la": "latin", "lb": "luxembourgish", "ln": "lingala",
    "lo": "lao", "lt": "lithuanian", "lv": "latvian", "mg": "malagasy", "mi": "maori", "mk": "macedonian",
    "ml": "malayalam", "mn": "mongolian", "mr": "marathi", "ms": "malay", "mt": "maltese", "my": "myanmar",
    "ne": "nepali", "nl": "dutch", "nn": "nynorsk", "no": "norwegian", "oc": "occitan", "pa": "punjabi",
    "pl": "polish", "ps": "pashto", "pt": "portuguese", "ro": "romanian", "ru": "russian", "sa": "sanskrit",
    "sd": "sindhi", "si": "sinhala", "sk": "slovak", "sl": "slovenian", "sn": "shona", "so": "somali",
    "sq": "albanian", "sr": "serbian", "su": "sundanese", "sv": "swedish", "sw": "swahili", "ta": "tamil",
    "te": "telugu", "tg": "tajik", "th": "thai", "tk": "turkmen", "tl": "tagalog", "tr": "turkish", "tt": "tatar",
    "uk": "ukrainian", "ur": "urdu", "uz": "uzbek", "vi": "vietnamese", "yi": "yiddish", "yo": "yoruba",
    "yue": "cantonese", "zh": "chinese",
}  # fmt: skip
_CODES_BY_NAME = {name: code for code, name in LANGUAGE_NAMES.items()} | {"mandarin": "zh", "jv": "jw", "nb": "no"}
_CHUNKING = "chunking_strategy"
_WRITTEN_WITHOUT_SPACES = frozenset({"zh", "yue", "ja", "th", "lo", "my", "km", "bo"})


class BadField(BadMessage):
    """A form field with a value that is not allowed; ``param`` is the field's name, which OpenAI's errors carry."""

    code = "invalid_value"

    def __init__(self, message: str, *, param: str, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.param = param


class ResponseFormat(Enum):
    """What the answer looks like; text, srt and vtt are bare bodies and no JSON strings.

    OpenAI's ``diarized_json`` is not among them: nothing here tells voices apart, and made-up speakers help nobody.
    """

    JSON = "json"
    TEXT = "text"
    SRT = "srt"
    VTT = "vtt"
    VERBOSE_JSON = "verbose_json"


@dataclass(frozen=True, slots=True)
class Chunking:
    """A ``server_vad`` object: how speech is cut into utterances. None keeps what is usual for recordings."""

    threshold: float | None = None
    silence_duration_ms: int | None = None
    prefix_padding_ms: int | None = None

    def applied_to(self, config: SessionConfig) -> SessionConfig:
        """Raises BadMessage where a value is out of range."""
        usual, segmenter = config.endpointer, config.segmenter
        threshold = usual.threshold if self.threshold is None else self.threshold
        pause_ms = usual.pause_ms if self.silence_duration_ms is None else self.silence_duration_ms
        pre_roll_ms = segmenter.pre_roll_ms if self.prefix_padding_ms is None else self.prefix_padding_ms
        release = min(threshold, max(0.05, threshold - (usual.threshold - usual.release_threshold)))
        return replace(
            config,
            endpointer=replace(usual, threshold=threshold, release_threshold=release, pause_ms=pause_ms),
            segmenter=replace(segmenter, pre_roll_ms=pre_roll_ms),
        )


@dataclass(frozen=True, slots=True)
class TranscriptionForm:
    """A valid request. ``model`` is the client's name for it; ``segments`` and ``words`` are parts of verbose_json,
    ``logprobs`` of json."""

    model: str
    options: DecodeOptions
    response_format: ResponseFormat
    segments: bool
    words: bool
    stream: bool
    logprobs: bool = False
    chunking: Chunking = Chunking()

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes as events; OpenAI's other formats have no streamed form."""
        return self.stream and self.response_format in (ResponseFormat.JSON, ResponseFormat.TEXT)


@dataclass(frozen=True, slots=True)
class Transcription:
    """All that was said in a file. ``warnings``: what is missing from it, one sentence each."""

    task: Task
    duration_s: float
    finals: tuple[FinalTranscript, ...]
    warnings: tuple[str, ...] = ()

    @property
    def pieces(self) -> list[str]:
        """What each utterance adds to the text."""
        pieces: list[str] = []
        for final in self.finals:
            if text := piece(final, is_first=not pieces):
                pieces.append(text)
        return pieces

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def language(self) -> str:
        """The code of the language that most of the speech is in; "" where nothing was said."""
        return next(iter(self.languages), "")

    @property
    def languages(self) -> list[str]:
        """The codes of all that is spoken, most of it first."""
        spoken: dict[str, int] = {}
        for final in self.finals:
            if final.text.strip() and final.language:
                spoken[final.language] = spoken.get(final.language, 0) + final.end_sample - final.start_sample
        return sorted(spoken, key=lambda code: -spoken[code])


def piece(final: FinalTranscript, *, is_first: bool) -> str:
    """What an utterance adds to the text: a space before it, but for the first and where none are written."""
    text = final.text.strip()
    return text if not text or is_first or final.language in _WRITTEN_WITHOUT_SPACES else " " + text


def parse_form(fields: Iterable[tuple[str, str]], task: Task) -> TranscriptionForm:
    """The form's text fields, in order, → the request. Raises BadField."""
    values: dict[str, list[str]] = {}
    for name, value in fields:
        values.setdefault(name.removesuffix("[]"), []).append(value.strip())
    response_format = _response_format(_last(values, "response_format"))
    granularities = _granularities(values.get("timestamp_granularities", []), response_format)
    return TranscriptionForm(
        model=_last(values, "model"),
        options=_options(values, task),
        response_format=response_format,
        segments="segment" in granularities or not granularities,
        words="word" in granularities,
        stream=_boolean("stream", _last(values, "stream")),
        logprobs=_logprobs_wanted(values.get("include", []), response_format),
        chunking=_chunking(values),
    )


def parse_language(value: str, param: str) -> str:
    """An ISO 639-1 code, one with a region ("pt-BR"), or an English name → Whisper's code. Raises BadField."""
    wanted = value.strip().lower()
    code = _CODES_BY_NAME.get(wanted, wanted)
    code = code if code in LANGUAGE_NAMES else code.replace("_", "-").split("-")[0]
    code = _CODES_BY_NAME.get(code, code)
    if code not in LANGUAGE_NAMES:
        raise BadField(
            f"Language {value!r} is not supported. Give an ISO 639-1 code such as 'en', or leave the field out to "
            "have the language detected.",
            param=param,
            code="unsupported_language",
        )
    return code


def _last(values: dict[str, list[str]], name: str) -> str:
    return values[name][-1] if values.get(name) else ""


def _options(values: dict[str, list[str]], task: Task) -> DecodeOptions:
    language = _last(values, "language")
    languages = [item for value in values.get("languages", []) for item in value.split(",") if item.strip()]
    hotwords = [
        item.strip()
        for name in ("hotwords", "keywords")
        for value in values.get(name, [])
        for item in value.split(",")
        if item.strip()
    ]
    return DecodeOptions(
        language=None if language.lower() in ("", "auto") else parse_language(language, "language"),
        languages=tuple(dict.fromkeys(parse_language(item, "languages") for item in languages)),
        task=task,
        prompt=_last(values, "prompt"),
        hotwords=tuple(dict.fromkeys(hotwords)),
        temperature=_temperature(_last(values, "temperature")),
    )


def _response_format(value: str) -> ResponseFormat:
    if value == "diarized_json":
        message = (
            "response_format 'diarized_json' is not supported: this model does not tell speakers apart. Where each "
            "speaker has a channel, transcribe the channels as files of their own."
        )
        raise BadField(message, param="response_format")
    try:
        return ResponseFormat(value or "json")
    except ValueError as error:
        allowed = ", ".join(f"'{item.value}'" for item in ResponseFormat)
        message = f"response_format {value!r} is not supported. It is one of {allowed}."
        raise BadField(message, param="response_format") from error


def _granularities(items: Sequence[str], response_format: ResponseFormat) -> frozenset[str]:
    wanted = frozenset(piece.strip() for item in items for piece in item.split(",") if piece.strip())
    if unknown := wanted - {"word", "segment"}:
        message = f"timestamp granularity {min(unknown)!r} is not supported. It is 'word' or 'segment'."
        raise BadField(message, param="timestamp_granularities[]")
    if "word" in wanted and response_format in (ResponseFormat.JSON, ResponseFormat.TEXT):
        message = f"response_format '{response_format.value}' carries no word timestamps; ask for 'verbose_json'."
        raise BadField(message, param="timestamp_granularities[]")
    return wanted


def _logprobs_wanted(items: Sequence[str], response_format: ResponseFormat) -> bool:
    if unknown := set(items) - {"logprobs", ""}:
        raise BadField(f"include {min(unknown)[:80]!r} is not supported. It is 'logprobs'.", param="include[]")
    if "logprobs" in items and response_format is not ResponseFormat.JSON:
        message = f"response_format '{response_format.value}' carries no logprobs; ask for 'json'."
        raise BadField(message, param="include[]")
    return "logprobs" in items


def _chunking(values: Mapping[str, Sequence[str]]) -> Chunking:
    """ "auto", a JSON object, or its members as fields of their own, as OpenAI's Python library writes them."""
    prefix = f"{_CHUNKING}["
    given: dict[str, object] = {
        name.removeprefix(prefix).rstrip("]"): items[-1] for name, items in values.items() if name.startswith(prefix)
    }
    whole = values[_CHUNKING][-1] if values.get(_CHUNKING) else ""
    if whole not in ("", "auto"):
        try:
            found = json.loads(whole)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise BadField("chunking_strategy is 'auto' or an object of type 'server_vad'.", param=_CHUNKING)
        given |= found
    elif not given:
        return Chunking()
    if given.get("type") != "server_vad":
        raise BadField("chunking_strategy.type is 'server_vad'.", param=_CHUNKING)
    chunking = Chunking(
        threshold=_number(given, "threshold"),
        silence_duration_ms=_whole(given, "silence_duration_ms"),
        prefix_padding_ms=_whole(given, "prefix_padding_ms"),
    )
    try:
        chunking.applied_to(SessionConfig())  # checks the ranges
    except BadMessage as error:
        raise BadField(f"chunking_strategy is out of range: {error.message}.", param=_CHUNKING) from None
    return chunking


def _number(given: Mapping[str, object], name: str) -> float | None:
    value = given.get(name)
    if value is None:
        return None
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise BadField(f"chunking_strategy.{name} must be a number.", param=_CHUNKING)
    return number


def _whole(given: Mapping[str, object], name: str) -> int | None:
    number = _number(given, name)
    if number is not None and number != int(number):
        raise BadField(f"chunking_strategy.{name} must be a whole number.", param=_CHUNKING)
    return None if number is None else int(number)


def _temperature(value: str) -> float:
    try:
        temperature = float(value or 0.0)
    except ValueError:
        temperature = -1.0
    if not 0.0 <= temperature <= 1.0:
        raise BadField("temperature must be a number from 0 to 1.", param="temperature")
    return temperature


def _boolean(name: str, value: str) -> bool:
    match value.lower():
        case "true" | "1":
            return True
        case "" | "false" | "0":
            return False
        case _:
            raise BadField(f"{name} must be true or false.", param=name)


def split_results(
    results: Iterable[FinalTranscript | TranscriptFailed],
) -> tuple[tuple[FinalTranscript, ...], tuple[TranscriptFailed, ...]]:
    """Finals and failures, each in order of time."""
    items = sorted(results, key=lambda item: item.start_sample)
    return (
        tuple(item for item in items if isinstance(item, FinalTranscript)),
        tuple(item for item in items if isinstance(item, TranscriptFailed)),
    )


def failure_warning(failure: TranscriptFailed) -> str:
    """What a failed utterance is called in ``Transcription.warnings``."""
    span = f"{failure.start_sample / SAMPLE_RATE:.2f}-{failure.end_sample / SAMPLE_RATE:.2f} s"
    return f"speech at {span} could not be transcribed ({failure.error.code})"


def render(transcription: Transcription, form: TranscriptionForm) -> tuple[str, str]:
    """The body and its media type."""
    match form.response_format:
        case ResponseFormat.TEXT:
            return transcription.text + "\n", "text/plain; charset=utf-8"
        case ResponseFormat.SRT:
            return to_srt(cues(transcription.finals)), "text/plain; charset=utf-8"
        case ResponseFormat.VTT:
            return to_vtt(cues(transcription.finals)), "text/vtt; charset=utf-8"
        case ResponseFormat.JSON:
            return _dump(_whole_json(transcription, logprobs=form.logprobs)), "application/json"
        case ResponseFormat.VERBOSE_JSON:
            return _dump(_verbose_json(transcription, form)), "application/json"


# Server-sent events for ``stream=true``: a delta for each utterance as it is settled, then the whole.
SSE_KEEPALIVE = ": nothing new yet\n\n"  # a comment: clients pass it over


def render_delta(final: FinalTranscript, *, is_first: bool, logprobs: bool = False) -> str:
    """``segment`` is Hark's own addition: where the utterance lies, and its words."""
    segment: JsonObject = {
        "start": _seconds(final.start_sample),
        "end": _seconds(final.end_sample),
        "text": final.text.strip(),
        "language": final.language,
        "words": list(_words(final)),
    }
    body: JsonObject = {"type": "transcript.text.delta", "delta": piece(final, is_first=is_first)}
    if logprobs:
        body["logprobs"] = word_logprobs(final, is_first=is_first)
    return _event(body | {"segment": segment})


def render_done(transcription: Transcription, *, logprobs: bool = False) -> str:
    return _event({"type": "transcript.text.done", **_whole_json(transcription, logprobs=logprobs)})


def render_failure(error: JsonObject) -> str:
    """An error object where the answer has begun and no status can be sent any more; OpenAI's SDKs raise it."""
    return _event(error)


def _event(body: JsonObject) -> str:
    return f"data: {_dump(body)}\n\n"


def _dump(body: JsonObject) -> str:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _json(transcription: Transcription) -> JsonObject:
    # Whole seconds, rounded up, as OpenAI bills: clients with an integer there can read it, and so can the others.
    body: JsonObject = {
        "text": transcription.text,
        "usage": {"type": "duration", "seconds": math.ceil(transcription.duration_s)},
    }
    if transcription.warnings:
        body["warnings"] = list(transcription.warnings)
    return body


def _whole_json(transcription: Transcription, *, logprobs: bool) -> JsonObject:
    """``languages``: of what was said, the most spoken first."""
    body = _json(transcription) | {"languages": [{"code": code} for code in transcription.languages]}
    if logprobs:
        said = [final for final in transcription.finals if final.text.strip()]
        body["logprobs"] = [item for final in said for item in word_logprobs(final, is_first=final is said[0])]
    return body


def word_logprobs(final: FinalTranscript, *, is_first: bool) -> list[JsonObject]:
    """A token is a word here, and they add up to the text; ``logprob`` is the logarithm of the word's probability.

    Where there are no words the text is one token, as likely as its utterance.
    """
    text = piece(final, is_first=is_first)
    tokens = [(word.text, word.probability) for word in final.words]
    spoken = "".join(token for token, _ in tokens)
    if tokens and spoken.strip() == text.strip():
        start, end = len(spoken) - len(spoken.lstrip()), len(spoken.rstrip())
        tokens = list(_cut(tokens, start, end))
        tokens[0] = (text[: len(text) - len(text.lstrip())] + tokens[0][0], tokens[0][1])
    else:
        tokens = [(text, final.confidence)]
    return [{"token": token, "bytes": list(token.encode()), "logprob": _log(value)} for token, value in tokens]


def _cut(tokens: Iterable[tuple[str, float]], start: int, end: int) -> Iterator[tuple[str, float]]:
    """The tokens' characters from start to end of the whole; tokens of which nothing is left are left out."""
    at = 0
    for token, probability in tokens:
        kept = token[max(0, start - at) : max(0, end - at)]
        at += len(token)
        if kept:
            yield kept, probability


def _log(probability: float) -> float:
    return round(math.log(min(1.0, max(probability, 1e-6))), 4)


def _verbose_json(transcription: Transcription, form: TranscriptionForm) -> JsonObject:
    translated = transcription.task is Task.TRANSLATE
    code = "en" if translated else transcription.language or form.options.language or "en"
    body: JsonObject = {
        "task": transcription.task.value,
        "language": LANGUAGE_NAMES.get(code, code),
        "duration": round(transcription.duration_s, 3),
    }
    said = [final for final in transcription.finals if final.text.strip()]
    if form.segments:
        body["segments"] = [_segment(number, final) for number, final in enumerate(said)]
    if form.words:
        body["words"] = [word for final in said for word in _words(final)]
    return body | _json(transcription)


def _segment(number: int, final: FinalTranscript) -> JsonObject:
    """One utterance in the form of a Whisper segment.

    Not kept for an utterance are its tokens (an empty list), the temperature and the no-speech probability (0: the
    detector heard speech and no guard dropped the text). ``avg_logprob`` is the confidence's logarithm.
    """
    text = final.text.strip()
    raw = text.encode()
    return {
        "id": number,
        "seek": final.start_sample * 100 // SAMPLE_RATE,
        "start": _seconds(final.start_sample),
        "end": _seconds(final.end_sample),
        "text": text,
        "tokens": [],
        "temperature": 0.0,
        "avg_logprob": _log(final.confidence),
        "compression_ratio": round(len(raw) / len(zlib.compress(raw)), 4),
        "no_speech_prob": 0.0,
    }


def _words(final: FinalTranscript) -> Iterator[JsonObject]:
    for word in final.words:
        if text := word.text.strip():
            yield {
                "word": text,
                "start": _seconds(word.start_sample),
                "end": _seconds(word.end_sample),
                "probability": round(word.probability, 4),
            }


def _seconds(samples: int) -> float:
    return round(samples / SAMPLE_RATE, 3)


def model_object(model_id: str) -> JsonObject:
    """An entry of ``GET /v1/models``. ``created`` is there because the SDKs' types require it."""
    return {"id": model_id, "object": "model", "created": 0, "owned_by": "hark"}
