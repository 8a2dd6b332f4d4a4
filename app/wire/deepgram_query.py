"""The query of Deepgram's ``/v1/listen``, live and recorded: names and values in, frozen requests out. Pure.

Read against deepgram-sdk 7.17.0. A name that is not known is ignored, as clients send many that only Deepgram's models
know; a bad value of a known one is an error. Features that would change the text (filters, formats, speakers) are not
there: their parameters are among those that are ignored. Two are refused, since to ignore them would do harm:
``redact``, whose user relies on it, and ``callback``, whose user waits for a call that never comes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from app.wire.native import MAX_HOTWORD_CHARS, MAX_HOTWORDS, StreamParameters
from streaming.config import AudioFormat, Encoding, SessionConfig
from streaming.errors import BadMessage
from streaming.types import DecodeOptions

# Deepgram's own default of 10 ms would cut Whisper's utterances between words. A client that asks for so little wants
# its results soon, and gets the shortest pause after which a text is still worth having.
MIN_PAUSE_MS = 300
MAX_PAUSE_MS = 10_000
MAX_UTTERANCE_END_MS = 60_000
DEFAULT_LANGUAGE = "en"  # Deepgram's, where none is named
MULTI = "multi"  # every utterance in whatever language it is

_TELEPHONE_HZ = 8_000
_RAW = {encoding.value: encoding for encoding in (Encoding.LINEAR16, Encoding.MULAW, Encoding.ALAW)}
_IN_CONTAINERS = ("opus", "ogg-opus", "flac", "amr-nb", "amr-wb")  # which say themselves what they are
_TRUTH = {"true": True, "1": True, "false": False, "0": False}
_LONGEST_NUMBER = 9  # digits
_SHOWN = 60  # characters of a wrong value in its error


@dataclass(frozen=True, slots=True)
class ListenRequest:
    """What a query asks for.

    ``language``: None detects it for each utterance, among ``languages`` where there are any. ``encoding``: None where
    the audio says itself what it is; ``sample_rate_hz`` and ``channels`` then mean nothing. ``is_punctuated``: False
    where the client asks for text without punctuation. ``pause_ms``: None where the service decides.
    ``has_endpoints``: whether the end of an utterance is told. ``utterance_end_ms``: None where it is not.
    ``utterance_split_ms``: the pause between a recording's utterances, where it is not the usual one.
    """

    language: str | None = DEFAULT_LANGUAGE
    languages: tuple[str, ...] = ()
    keyterms: tuple[str, ...] = ()
    is_punctuated: bool = True
    encoding: Encoding | None = None
    sample_rate_hz: int = 16_000
    channels: int = 1
    multichannel: bool = False
    interim_results: bool = False
    has_endpoints: bool = True
    pause_ms: int | None = None
    utterance_end_ms: int | None = None
    vad_events: bool = False
    utterances: bool = False
    utterance_split_ms: int | None = None
    paragraphs: bool = False

    @property
    def audio(self) -> AudioFormat | None:
        """What the client declares; None where its audio says so itself."""
        return None if self.encoding is None else AudioFormat(self.encoding, self.sample_rate_hz, self.channels)

    @property
    def options(self) -> DecodeOptions:
        return DecodeOptions(language=self.language, languages=self.languages, hotwords=self.keyterms)

    def session_config(self, audio: AudioFormat, defaults: StreamParameters) -> SessionConfig:
        """``audio`` is what the session is given, which need not be what the client sends; ``defaults`` is the
        service's own for what this protocol leaves open."""
        return replace(
            defaults,
            language=self.language,
            languages=self.languages,
            hotwords=self.keyterms,
            encoding=audio.encoding,
            sample_rate=audio.sample_rate_hz,
            channels=audio.channels,
            partials=self.interim_results,
            pause_ms=defaults.pause_ms if self.pause_ms is None else self.pause_ms,
        ).session_config()

    def adjusted(self, config: SessionConfig) -> SessionConfig:
        """What is usual for recordings, but for what the client asks."""
        if self.utterance_split_ms is None:
            return config
        return replace(config, endpointer=replace(config.endpointer, pause_ms=self.utterance_split_ms))


def parse_live(pairs: Iterable[tuple[str, str]], languages: frozenset[str]) -> ListenRequest:
    """A WebSocket's query; ``languages`` are the codes that the model knows. Raises BadMessage."""
    request = _parse(pairs, languages)
    named = _grouped(pairs).get("encoding", [""])[-1].lower()
    if named and request.encoding is None and named not in _IN_CONTAINERS:
        raise _wrong("encoding", named, f"one of {', '.join([*_RAW, *_IN_CONTAINERS])}")
    return request


def parse_recorded(pairs: Iterable[tuple[str, str]], languages: frozenset[str]) -> ListenRequest:
    """A POST's query. Raises BadMessage."""
    request = _parse(pairs, languages)
    if request.multichannel:
        raise BadMessage(
            "multichannel=true is not supported for recordings: their channels are mixed. Send them live, or one "
            "channel at a time.",
            code="bad_parameter",
        )
    return request


def parse_keyterms(values: Sequence[str]) -> tuple[str, ...]:
    """Words to expect, each once. Raises BadMessage where they are too many or too long."""
    terms = tuple(dict.fromkeys(value.strip() for value in values if value.strip()))
    if len(terms) > MAX_HOTWORDS or any(len(term) > MAX_HOTWORD_CHARS for term in terms):
        raise BadMessage(
            f"there may be at most {MAX_HOTWORDS} keyterms of at most {MAX_HOTWORD_CHARS} characters",
            code="bad_parameter",
        )
    return terms


def _parse(pairs: Iterable[tuple[str, str]], languages: frozenset[str]) -> ListenRequest:
    given = _grouped(pairs)
    _refuse_what_must_not_be_ignored(given)
    language, candidates = _languages(given, languages)
    encoding = _RAW.get(_last(given, "encoding").lower())
    has_endpoints, pause_ms = _endpointing(_last(given, "endpointing"))
    request = ListenRequest(
        language=language,
        languages=candidates,
        keyterms=parse_keyterms([*given.get("keyterm", []), *(_keyword(item) for item in given.get("keywords", []))]),
        is_punctuated=_flag(given, "punctuate", default=True) or _flag(given, "smart_format"),
        encoding=encoding,
        sample_rate_hz=_sample_rate(given, encoding),
        channels=_number(given, "channels", 1),
        multichannel=_flag(given, "multichannel"),
        interim_results=_flag(given, "interim_results"),
        has_endpoints=has_endpoints,
        pause_ms=pause_ms,
        utterance_end_ms=_utterance_end(_last(given, "utterance_end_ms")),
        vad_events=_flag(given, "vad_events"),
        utterances=_flag(given, "utterances"),
        utterance_split_ms=_utterance_split(_last(given, "utt_split")),
        paragraphs=_flag(given, "paragraphs"),
    )
    _ = request.audio  # checks the ranges
    return request


def _refuse_what_must_not_be_ignored(given: Mapping[str, Sequence[str]]) -> None:
    if any(value.lower() not in ("", "false") for value in given.get("redact", [])):
        raise BadMessage("redact is not supported: whoever runs the service can set HARK_REDACT", code="bad_parameter")
    if given.get("callback"):
        raise BadMessage("callback is not supported: results come over this connection", code="bad_parameter")


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    given: dict[str, list[str]] = {}
    for name, value in pairs:
        given.setdefault(name, []).append(value.strip())
    return given


def _last(given: Mapping[str, Sequence[str]], name: str) -> str:
    return given[name][-1] if name in given else ""


def _wrong(name: str, value: str, expected: str) -> BadMessage:
    return BadMessage(f"{name} must be {expected}, not {value[:_SHOWN]!r}", code="bad_parameter")


def _flag(given: Mapping[str, Sequence[str]], name: str, *, default: bool = False) -> bool:
    value = _last(given, name)
    if not value:
        return default
    found = _TRUTH.get(value.lower())
    if found is None:
        raise _wrong(name, value, "true or false")
    return found


def _integer(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= _LONGEST_NUMBER):
        raise _wrong(name, value, "a whole number")
    return int(value)


def _number(given: Mapping[str, Sequence[str]], name: str, default: int) -> int:
    value = _last(given, name)
    return _integer(name, value) if value else default


def _sample_rate(given: Mapping[str, Sequence[str]], encoding: Encoding | None) -> int:
    if _last(given, "sample_rate") or encoding is None:
        return _number(given, "sample_rate", 16_000)
    if encoding is Encoding.LINEAR16:  # of which there is no usual rate: a guess would give nonsense for text
        raise BadMessage("sample_rate is required with encoding=linear16", code="bad_parameter")
    return _TELEPHONE_HZ


def _endpointing(value: str) -> tuple[bool, int | None]:
    """Whether ends are told, and after which pause. LiveKit writes 0 for false."""
    match value.lower():
        case "" | "true":
            return True, None
        case "false" | "0":
            return False, None
        case _:
            return True, min(MAX_PAUSE_MS, max(MIN_PAUSE_MS, _integer("endpointing", value)))


def _utterance_end(value: str) -> int | None:
    if value.lower() in ("", "false"):
        return None
    ms = _integer("utterance_end_ms", value)
    if not 1 <= ms <= MAX_UTTERANCE_END_MS:
        raise _wrong("utterance_end_ms", value, f"1 to {MAX_UTTERANCE_END_MS}")
    return ms


def _utterance_split(value: str) -> int | None:
    """In seconds, of silence between two utterances of a recording."""
    if not value:
        return None
    try:
        split_ms = float(value[:_LONGEST_NUMBER]) * 1000
    except ValueError:
        split_ms = -1.0
    if not MIN_PAUSE_MS <= split_ms <= MAX_PAUSE_MS:
        raise _wrong("utt_split", value, f"{MIN_PAUSE_MS / 1000:g} to {MAX_PAUSE_MS / 1000:g}")
    return round(split_ms)


def _keyword(value: str) -> str:
    """``word:intensifier``; Whisper cannot be told how much a word is to be expected."""
    word, colon, boost = value.rpartition(":")
    is_boost = bool(colon) and boost.strip().lstrip("+-").replace(".", "", 1).isdigit()
    return word if is_boost else value


def _languages(given: Mapping[str, Sequence[str]], known: frozenset[str]) -> tuple[str | None, tuple[str, ...]]:
    """The one language, or None and those that detection chooses among. ``detect_language`` is true or lists some."""
    detect = [value for value in given.get("detect_language", []) if value and _TRUTH.get(value.lower()) is not False]
    listed = [value for value in detect if value.lower() not in _TRUTH]
    if detect:
        return None, tuple(dict.fromkeys(_language("detect_language", value, known) for value in listed))
    named = _last(given, "language")
    if named.lower() == MULTI:
        return None, ()
    if not named:
        return (DEFAULT_LANGUAGE if DEFAULT_LANGUAGE in known else None), ()
    return _language("language", named, known), ()


def _language(name: str, value: str, known: frozenset[str]) -> str:
    """Deepgram's codes name a region, a script or a dialect too: en-US, zh-Hant, es-419."""
    code = value.lower().replace("_", "-").split("-")[0]
    if code not in known:
        raise BadMessage(f"{name} {value[:_SHOWN]!r} is not one that this model knows", code="unknown_language")
    return code
