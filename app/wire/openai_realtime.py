"""OpenAI's Realtime protocol, transcription sessions, ``/v1/realtime``: JSON events both ways, audio in base64. Pure.

The GA form, as openai-python 3.57 has it; the beta's ``transcription_session.update`` is understood too. Events that
are not about transcription are answered with an ``error``, after which the session goes on.
"""

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from app.dialect import Action, Audio, Commit, Complaint, Lag, Mark, Marked, Say, Start, ToClient, Wire
from app.wire.native import StreamParameters
from app.wire.openai_http import BadField
from app.wire.realtime_items import Item, Json, Ledger, kind
from app.wire.realtime_session import RealtimeSession, Turns, from_beta
from streaming.audio import samples_to_ms
from streaming.errors import BadMessage, ClientError, SttError
from streaming.events import (
    FinalTranscript,
    PartialTranscript,
    SessionDone,
    SpeechStarted,
    SpeechStopped,
    TranscriptFailed,
)
from streaming.types import RecognizerInfo

CLOSE_DONE = 1000
CLOSE_AWAY = 1001  # SDKs connect again after this and the next one
CLOSE_RESTART = 1012
_MAX_UTTERANCES = 1_000  # in an item: over an hour of speech; a client that never commits gets its text then
_UNDERSTOOD = (
    "session.update",
    "transcription_session.update",
    "input_audio_buffer.append",
    "input_audio_buffer.commit",
    "input_audio_buffer.clear",
    "conversation.item.delete",
)


class OpenAIRealtime:
    """One connection. What ``receive`` knows is ahead of what ``render`` has told; marks are where the two meet.

    start N            from here on audio is heard with other settings
    commit, commit N   around a commit of the client: between them an utterance ends that was being spoken
    clear, cleared     likewise
    """

    def __init__(
        self,
        session_id: str,
        defaults: StreamParameters,
        info: Callable[[], RecognizerInfo],
        close_code: Callable[[SttError], int],
        *,
        model: str = "",
    ) -> None:
        """``info`` raises Overloaded while the engine starts. ``model``: that of the query, which any may be."""
        self._id = f"sess_{session_id}"
        self._info = info
        self._close_code = close_code
        turns = Turns(silence_duration_ms=defaults.pause_ms)
        self._session = RealtimeSession(defaults=defaults, turns=turns, model=model)
        self._preset: Mapping[str, Any] = {}
        self._is_beta = False
        self._events = 0
        # As received
        self._heard_with: RealtimeSession | None = None  # the settings of the audio that came last
        self._marks = 0
        self._starts: dict[str, tuple[RealtimeSession, float]] = {}  # by mark; and seconds that were uncommitted then
        self._commits: dict[str, float] = {}  # by mark: seconds of audio since the commit before
        self._heard_s = 0.0
        self._committed_s = 0.0
        # As told
        self._shown = self._session
        self._ledger = Ledger(f"item_{session_id[:12]}_")
        self._open: Item | None = None  # of the utterance that is being spoken, where there are turns
        self._opened_ms = 0
        self._open_at_commit: Item | None = None
        self._dropped: Item | None = None  # its audio was cleared while it was being spoken

    def preset(self, session: Mapping[str, Any]) -> None:
        """Settings that came with a client secret; taken at the opening."""
        self._preset = session

    # Incoming ------------------------------------------------------------------------------------------------

    def begin(self) -> Json:
        """The settings that the session begins with, as the client sees them. Raises BadField, or Overloaded."""
        info = self._info()
        self._session = replace(self._session, model=self._session.model or info.model)
        self._session = self._session.merged(self._preset, info.languages)
        return self._session.as_json(self._id)

    def open(self) -> Sequence[Action]:
        return [self._say({"type": "session.created", "session": self.begin()})]

    def receive(self, message: Wire) -> Sequence[Action]:
        if isinstance(message, bytes):
            return [self._error(BadMessage("audio goes into 'input_audio_buffer.append' events, as base64"))]
        event_id: str | None = None
        try:
            event = _parse(message)
            given = event.get("event_id")
            event_id = given[:512] if isinstance(given, str) else None
            return self._on_event(event)
        except BadMessage as error:
            return [self._error(error, event_id)]

    def _on_event(self, event: Mapping[str, Any]) -> Sequence[Action]:
        match event.get("type"):
            case "session.update":
                return self._update(_session_in(event))
            case "transcription_session.update":
                self._is_beta = True
                return self._update(from_beta(_session_in(event)))
            case "input_audio_buffer.append":
                return self._append(event.get("audio"))
            case "input_audio_buffer.commit":
                return self._commit()
            case "input_audio_buffer.clear":
                self._committed_s = self._heard_s
                return [Mark("clear"), Commit("cleared")]
            case "conversation.item.delete":
                return [self._say({"type": "conversation.item.deleted", "item_id": self._known_item(event)})]
            case "conversation.item.retrieve":
                raise BadField("items are not kept here", param="item_id", code="item_retrieve_unsupported")
            case other:
                names = ", ".join(f"'{name}'" for name in _UNDERSTOOD)
                shown = repr(other[:80]) if isinstance(other, str) else f"a {type(other).__name__}"
                raise BadField(f"Invalid value: {shown}. Supported values are: {names}.", param="type")

    def _update(self, given: Mapping[str, Any]) -> Sequence[Action]:
        """Takes effect with the next audio. What was heard before is answered as it was heard."""
        self._session = self._session.merged(given, self._info().languages)
        if self._is_beta:
            return [
                self._say({"type": "transcription_session.updated", "session": self._session.as_beta_json(self._id)})
            ]
        return [self._say({"type": "session.updated", "session": self._session.as_json(self._id)})]

    def _append(self, audio: object) -> Sequence[Action]:
        try:
            data = base64.b64decode(audio if isinstance(audio, str) else "?", validate=True)
        except (binascii.Error, ValueError):
            message = "Invalid 'audio': expected base64 of audio in the format of the session."
            raise BadField(message, param="audio") from None
        actions = [*self._begin(), Audio(data)]
        self._heard_s += len(data) / self._session.bytes_per_s
        return actions

    def _begin(self) -> Sequence[Action]:
        """Where the settings have changed: a mark, and a Start if they change how audio is heard."""
        before, now = self._heard_with, self._session
        if before is now:
            return []
        self._heard_with = now
        mark = self._mark("start")
        self._starts[mark] = now, self._heard_s - self._committed_s
        if before is not None and (before.config(), before.turns is None) == (now.config(), now.turns is None):
            return [Mark(mark)]
        if before is not None and before.turns is not None:
            self._committed_s = self._heard_s  # turns were committed by the service
        return [Start(now.config()), Mark(mark)]

    def _commit(self) -> Sequence[Action]:
        mark = self._mark("commit")
        self._commits[mark], self._committed_s = self._heard_s - self._committed_s, self._heard_s
        return [Mark("commit"), Commit(mark)]

    def _mark(self, name: str) -> str:
        self._marks += 1
        return f"{name} {self._marks}"

    def _known_item(self, event: Mapping[str, Any]) -> str:
        item_id = event.get("item_id")
        if not isinstance(item_id, str) or not self._ledger.has_begun(item_id):
            raise BadField("there is no such item", param="item_id", code="item_delete_invalid_item_id")
        return item_id

    # Outgoing ------------------------------------------------------------------------------------------------

    def render(self, event: ToClient) -> Sequence[Wire]:
        match event:
            case SpeechStarted():
                bodies: Iterable[Json] = self._on_started(event)
            case SpeechStopped():
                bodies = self._on_stopped(event)
            case PartialTranscript(utterance, committed=committed):
                self._ledger.hear(utterance, committed)
                bodies = []
            case FinalTranscript(utterance):
                self._ledger.settle(utterance, event)
                bodies = []
            case TranscriptFailed(utterance, error=error):
                self._ledger.settle(utterance, error)
                bodies = []
            case Marked(mark):
                bodies = self._on_mark(mark)
            case SessionDone():  # the service goes down: what the client would have committed is all there is
                bodies = self._commit_rest(self._heard_s - self._committed_s) if self._shown.turns is None else []
            case Complaint(error):
                bodies = [_error_body(error, None)]
            case Lag():
                return []
        bodies = [*bodies, *self._ledger.news(with_logprobs=self._shown.logprobs)]
        if self._is_beta:
            bodies = [body for body in bodies if body["type"] != "conversation.item.done"]
        return [self._text(body) for body in bodies]

    def _on_started(self, event: SpeechStarted) -> Sequence[Json]:
        turns, item = self._shown.turns, self._ledger.uncommitted()
        if turns is None:
            is_full = item is not None and len(item.parts) >= _MAX_UTTERANCES
            bodies = list(self._commit_rest(self._heard_s - self._committed_s)) if is_full else []
            self._ledger.add(event.utterance_id, self._ledger.uncommitted() or self._ledger.begin())
            return bodies
        self._open = self._ledger.begin()
        self._ledger.add(event.utterance_id, self._open)
        self._opened_ms = max(0, samples_to_ms(event.at_sample) - turns.prefix_padding_ms)
        kind, at_ms = "input_audio_buffer.speech_started", self._opened_ms
        return [{"type": kind, "audio_start_ms": at_ms, "item_id": self._open.id}]

    def _on_stopped(self, event: SpeechStopped) -> Iterable[Json]:
        turns, item = self._shown.turns, self._open
        if turns is None or item is None:
            return []
        self._open = None
        heard_ms = round(self._heard_s * 1000)
        at_ms = min(samples_to_ms(event.at_sample) + turns.silence_duration_ms, heard_ms)
        stopped = {"type": "input_audio_buffer.speech_stopped", "audio_end_ms": at_ms, "item_id": item.id}
        if item is self._dropped:
            return [stopped]
        return [stopped, *self._ledger.commit(item, max(0, at_ms - self._opened_ms) / 1000)]

    def _on_mark(self, mark: str) -> Iterable[Json]:
        match mark.split():
            case ["start", _]:
                before, (self._shown, rest_s) = self._shown, self._starts.pop(mark)
                if before.turns is None and self._shown.turns is not None:
                    return self._commit_rest(rest_s)
            case ["commit"]:
                self._open_at_commit = self._open
            case ["commit", _]:
                return self._on_commit(self._commits.pop(mark))
            case ["clear"] if self._open is not None:
                self._dropped = self._open
                self._ledger.drop(self._open)
            case ["cleared"]:
                self._dropped = None
                if self._shown.turns is None and (item := self._ledger.uncommitted()) is not None:
                    self._ledger.drop(item)
                return [{"type": "input_audio_buffer.cleared"}]
        return []

    def _on_commit(self, seconds: float) -> Iterable[Json]:
        """Each commit has its item, if need be an empty one. With turns it may be that of an utterance it ended."""
        if self._shown.turns is None:
            return self._ledger.commit(self._ledger.uncommitted() or self._ledger.begin(), seconds)
        was_open, self._open_at_commit = self._open_at_commit, None
        return [] if was_open is not None else self._ledger.commit(self._ledger.begin(), 0.0)

    def _commit_rest(self, seconds: float) -> Iterable[Json]:
        """What the client would have committed, where it will not any more."""
        item = self._ledger.uncommitted()
        return [] if item is None else self._ledger.commit(item, seconds)

    def refuse(self, error: SttError) -> tuple[Sequence[Wire], int]:
        """What may be tried again is only a close code: some clients take any ``error`` for the end of all tries."""
        if error.code == "idle":
            return [], CLOSE_AWAY
        said = [self._text(_error_body(error, None))] if isinstance(error, ClientError) else []
        return said, self._close_code(error)

    def farewell(self, *, going_down: bool) -> tuple[Sequence[Wire], int, str]:
        return ([], CLOSE_RESTART, "service restart") if going_down else ([], CLOSE_DONE, "")

    # Messages ------------------------------------------------------------------------------------------------

    def _say(self, body: Mapping[str, Any]) -> Say:
        return Say(self._text(body))

    def _error(self, error: SttError, event_id: str | None = None) -> Say:
        return self._say(_error_body(error, event_id))

    def _text(self, body: Mapping[str, Any]) -> str:
        """The beta had one event where there are two now."""
        if self._is_beta and body["type"] == "conversation.item.added":
            body = {**body, "type": "conversation.item.created"}
        self._events += 1
        numbered = {"type": body["type"], "event_id": f"event_{self._id[5:17]}_{self._events}", **body}
        text = json.dumps(numbered, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace").decode()  # what a client sent, and gets back, may be no valid text


def _parse(text: str) -> Mapping[str, Any]:
    """Raises BadMessage."""
    try:
        event = json.loads(text)
    except (ValueError, RecursionError):  # an integer of thousands of digits is a plain ValueError
        event = None
    if not isinstance(event, dict):
        raise BadMessage("the message is no JSON object", code="invalid_json")
    return event


def _session_in(event: Mapping[str, Any]) -> Mapping[str, Any]:
    session = event.get("session")
    if not isinstance(session, dict):
        raise BadField("Missing required parameter: 'session'.", param="session", code="missing_required_parameter")
    return session


def _error_body(error: SttError, event_id: str | None) -> Json:
    param = error.param if isinstance(error, BadField) else None
    shown = {"type": kind(error), "code": error.code, "message": error.message, "param": param, "event_id": event_id}
    return {"type": "error", "error": shown}
