"""Deepgram's answers over HTTP: to a recording, and to a request that is wrong. Pure.

Read against deepgram-sdk 7.17.0. A recording's channels are mixed, so there is always one of them, with one reading.
"""

import uuid
from collections.abc import Iterator, Sequence

from app.wire.deepgram import Identity
from app.wire.deepgram_query import ListenRequest
from app.wire.deepgram_text import JsonObject, Spelling, alternative, mean_probability, seconds
from app.wire.openai_http import Transcription
from streaming.errors import SttError
from streaming.events import FinalTranscript
from streaming.types import Word

_SENTENCE_ENDS = tuple(".?!。？！।")
_ERROR_NAMES = {
    400: "Bad Request",
    401: "INVALID_AUTH",
    403: "INSUFFICIENT_PERMISSIONS",
    413: "PAYLOAD_TOO_LARGE",
    429: "TOO_MANY_REQUESTS",
    503: "SERVICE_UNAVAILABLE",
}


def error_object(error: SttError, http_status: int, request_id: str) -> JsonObject:
    """``code`` is Hark's own, which says more than Deepgram's ``err_code``."""
    name = _ERROR_NAMES.get(http_status, "INTERNAL_SERVER_ERROR" if http_status >= 500 else "Bad Request")
    return {"err_code": name, "err_msg": error.message, "request_id": request_id, "code": error.code}


def recording_object(
    transcription: Transcription, request: ListenRequest, identity: Identity, sha256: str
) -> JsonObject:
    """``sha256``: of the body, in hex."""
    results: JsonObject = {"channels": [_channel(transcription, request)]}
    if request.utterances:
        results["utterances"] = list(_utterances(transcription, request, identity))
    return {"metadata": _metadata(transcription, identity, sha256), "results": results}


def _metadata(transcription: Transcription, identity: Identity, sha256: str) -> JsonObject:
    metadata: JsonObject = {
        "transaction_key": "deprecated",
        "request_id": identity.request_id,
        "sha256": sha256,
        "created": identity.created,
        "duration": round(transcription.duration_s, 3),
        "channels": 1,
        "models": [identity.model_uuid],
        "model_info": {identity.model_uuid: identity.model_info},
    }
    warnings = [{"type": "incomplete", "message": warning} for warning in transcription.warnings]
    return metadata | ({"warnings": warnings} if warnings else {})


def _spelling(request: ListenRequest) -> Spelling:
    return Spelling(request.is_punctuated, names_languages=request.language is None)


def _channel(transcription: Transcription, request: ListenRequest) -> JsonObject:
    words = [word for final in transcription.finals for word in final.words]
    language = transcription.language
    reading = alternative(transcription.text, words, mean_probability(words), language, _spelling(request))
    if request.paragraphs:
        reading["paragraphs"] = _paragraphs(transcription.finals)
    channel: JsonObject = {"alternatives": [reading]}
    return channel | ({"detected_language": language} if request.language is None and language else {})


def _utterances(transcription: Transcription, request: ListenRequest, identity: Identity) -> Iterator[JsonObject]:
    namespace = uuid.UUID(identity.request_id)
    said = (final for final in transcription.finals if final.text.strip())
    for number, final in enumerate(said):
        reading = alternative(final.text, final.words, final.confidence, final.language, _spelling(request))
        yield {
            "start": seconds(final.start_sample),
            "end": seconds(final.end_sample),
            "channel": 0,
            **reading,
            "id": str(uuid.uuid5(namespace, str(number))),
        }


def _paragraphs(finals: Sequence[FinalTranscript]) -> JsonObject:
    """One for each utterance: a pause is what a paragraph can be told by."""
    found = [_paragraph(final) for final in finals if final.text.strip()]
    texts = [final.text.strip() for final in finals if final.text.strip()]
    return {"transcript": "\n" + "\n\n".join(texts) if texts else "", "paragraphs": found}


def _paragraph(final: FinalTranscript) -> JsonObject:
    sentences = [
        {
            "text": "".join(word.text for word in words).strip(),
            "start": seconds(words[0].start_sample),
            "end": seconds(words[-1].end_sample),
        }
        for words in _sentences(final.words)
    ]
    return {
        "sentences": sentences,
        "num_words": len(final.words),
        "start": seconds(final.start_sample),
        "end": seconds(final.end_sample),
    }


def _sentences(words: Sequence[Word]) -> Iterator[list[Word]]:
    begun: list[Word] = []
    for word in words:
        begun.append(word)
        if word.text.rstrip("\"')”’»").endswith(_SENTENCE_ENDS):
            yield begun
            begun = []
    if begun:
        yield begun
