"""The items of a Realtime session: which utterances each holds, what of its text was sent, and whose turn it is. Pure.

An item's deltas and its ``completed`` are sent when every item before it has its ``completed`` or ``failed``: there are
clients that keep one text for the whole connection and begin it anew with any ``completed``.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from app.wire.openai_http import piece, word_logprobs
from streaming.errors import ClientError, SttError
from streaming.events import FinalTranscript

Json = dict[str, Any]
_TRANSCRIPTION = "conversation.item.input_audio_transcription"


@dataclass(slots=True)
class _Part:
    """One utterance of an item."""

    committed: str = ""
    final: FinalTranscript | None = None
    is_settled: bool = False


@dataclass(slots=True, eq=False)
class Item:
    """All that is said in ``parts``, which are in order. ``seconds``: of audio."""

    id: str
    parts: dict[int, _Part] = field(default_factory=dict)
    seconds: float = 0.0
    is_committed: bool = False
    sent: str = ""
    error: SttError | None = None

    @property
    def is_answered(self) -> bool:
        return self.is_committed and all(part.is_settled for part in self.parts.values())

    def text(self) -> str:
        """What is certain of it: up to and into the first utterance that has no final yet."""
        text, joint = "", ""
        for part in self.parts.values():
            said = part.committed if part.final is None else part.final.text.strip()
            text += joint + said if said else ""
            if not part.is_settled:
                break
            if part.final is not None and said:
                joint = " " if piece(part.final, is_first=False).startswith(" ") else ""
        return text

    def finals(self) -> list[FinalTranscript]:
        """Of the utterances in which something was said."""
        return [part.final for part in self.parts.values() if part.final is not None and part.final.text.strip()]


class Ledger:
    """The items that are not answered yet, oldest first; every method gives the events that follow, without ids."""

    def __init__(self, prefix: str) -> None:
        """``prefix``: what each item's id begins with."""
        self._prefix = prefix
        self._items: deque[Item] = deque()
        self._of: dict[int, Item] = {}  # utterance → its item, until it has its final
        self._begun = 0
        self._previous: str | None = None

    # Which item ----------------------------------------------------------------------------------------------

    def begin(self) -> Item:
        self._begun += 1
        item = Item(f"{self._prefix}{self._begun}")
        self._items.append(item)
        return item

    def uncommitted(self) -> Item | None:
        """The newest item, where more may still be added to it."""
        return self._items[-1] if self._items and not self._items[-1].is_committed else None

    def add(self, utterance: int, item: Item) -> None:
        item.parts[utterance] = _Part()
        self._of[utterance] = item

    def drop(self, item: Item) -> None:
        """Nothing more is said of it."""
        self._items.remove(item)
        for utterance in item.parts:
            self._of.pop(utterance, None)

    def has_begun(self, item_id: str) -> bool:
        number = item_id.removeprefix(self._prefix)
        return item_id.startswith(self._prefix) and number.isdecimal() and 0 < int(number[:12]) <= self._begun

    # What is said of it --------------------------------------------------------------------------------------

    def commit(self, item: Item, seconds: float) -> Iterator[Json]:
        item.is_committed, item.seconds = True, seconds
        previous, self._previous = self._previous, item.id
        yield {"type": "input_audio_buffer.committed", "previous_item_id": previous, "item_id": item.id}
        shown = {
            "id": item.id,
            "object": "realtime.item",
            "type": "message",
            "status": "completed",
            "role": "user",
            "content": [{"type": "input_audio", "transcript": None}],
        }
        yield {"type": "conversation.item.added", "previous_item_id": previous, "item": shown}
        yield {"type": "conversation.item.done", "previous_item_id": previous, "item": shown}

    def hear(self, utterance: int, committed: str) -> None:
        if utterance in self._of:
            self._of[utterance].parts[utterance].committed = committed

    def settle(self, utterance: int, outcome: FinalTranscript | SttError) -> None:
        item = self._of.pop(utterance, None)
        if item is None:
            return
        part = item.parts[utterance]
        part.is_settled = True
        if isinstance(outcome, FinalTranscript):
            part.final = outcome
        else:
            item.error = item.error or outcome

    def news(self, *, with_logprobs: bool) -> Iterator[Json]:
        """What can be said now: of the oldest item, and of those after it as far as each is answered."""
        while self._items:
            item = self._items[0]
            text = item.text()
            if len(text) > len(item.sent) and text.startswith(item.sent):
                delta, item.sent = text[len(item.sent) :], text
                yield {"type": f"{_TRANSCRIPTION}.delta", "item_id": item.id, "content_index": 0, "delta": delta}
            if not item.is_answered:
                return
            self._items.popleft()
            yield _failed(item, item.error) if item.error else _completed(item, with_logprobs=with_logprobs)


def _completed(item: Item, *, with_logprobs: bool) -> Json:
    finals = item.finals()
    event = {
        "type": f"{_TRANSCRIPTION}.completed",
        "item_id": item.id,
        "content_index": 0,
        "transcript": item.text(),
        "usage": {"type": "duration", "seconds": round(item.seconds, 3)},
        "languages": [{"code": code} for code in dict.fromkeys(final.language for final in finals if final.language)],
    }
    if with_logprobs:
        event["logprobs"] = [token for final in finals for token in word_logprobs(final, is_first=final is finals[0])]
    return event


def _failed(item: Item, error: SttError) -> Json:
    return {
        "type": f"{_TRANSCRIPTION}.failed",
        "item_id": item.id,
        "content_index": 0,
        "error": {"type": kind(error), "code": error.code, "message": error.message, "param": None},
    }


def kind(error: SttError) -> str:
    """``type`` in OpenAI's error objects."""
    return "invalid_request_error" if isinstance(error, ClientError) else "server_error"
