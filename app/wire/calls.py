"""What the dialects of telephony have in common: what a call is, and what its followers are told. Pure.

A telephone exchange sends audio and reads nothing. So what is said in a call goes to its followers (app/calls.py):
Hark's own events, each with the ``label`` of its channel, after a first ``call`` that says whose words they are.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from app.dialect import Complaint, Lag, Marked, ToClient
from app.wire import native
from streaming.config import AudioFormat, SessionConfig
from streaming.errors import BadMessage, SttError
from streaming.types import RecognizerInfo

# Not a message of any exchange: its transport says with it that the connection has ended, however it did.
HANG_UP = "hang-up"

CUSTOMER, AGENT = "customer", "agent"
CLOSE_DONE = 1000
CLOSE_RESTART = 1012
MAX_DETAILS_CHARS = 16_384
SECRET_NAMES = frozenset({"key", "token", "api_key"})  # parameters that say who may come in, and are told to nobody
_AUDIO_NAMES = frozenset({"encoding", "sample_rate", "channels"})  # the call's own, whatever a parameter says
_CONFIG_NAMES = frozenset(native.StreamParameters.__dataclass_fields__) - _AUDIO_NAMES


class CallLog(Protocol):
    """Where a call's events go. Both return at once and never raise."""

    def begin(self, ids: Sequence[str]) -> None:
        """From now on it can be found under each of these."""
        ...

    def put(self, event: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Channel:
    """``track``: what the exchange calls it; ``label``: who speaks."""

    track: str
    label: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call at its beginning. ``ids``: all under which it can be followed, the usual one first. ``parameters``: what
    whoever set it up wrote along, ``details``: what the exchange did; both plain JSON."""

    protocol: str
    ids: tuple[str, ...]
    channels: tuple[Channel, ...]
    parameters: Mapping[str, Any]
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a call's dialect needs of the service. ``info`` raises Overloaded while the engine starts. ``session_id``:
    what the service's log calls the conversation. ``hides_keys``: which key was pressed is told to nobody, as card
    numbers are typed too."""

    log: CallLog
    session_id: str
    defaults: native.StreamParameters
    info: Callable[[], RecognizerInfo]
    close_code: Callable[[SttError], int]
    hides_keys: bool = False


class Teller:
    """Tells the followers of one call."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._channels: tuple[Channel, ...] = ()
        self._words = around.defaults.words

    def begin(self, call: Call, audio: AudioFormat) -> SessionConfig:
        """The call's configuration, of which its followers are told. Raises BadMessage where a parameter is wrong, or
        Overloaded while the engine starts; they are told of that then too."""
        self._channels = call.channels
        if _size([call.parameters, call.details]) > MAX_DETAILS_CHARS:
            raise BadMessage(f"what comes along with a call may take {MAX_DETAILS_CHARS} characters")
        self._around.log.begin(call.ids)
        given = {name: value for name, value in call.parameters.items() if name in _CONFIG_NAMES}
        self._put(
            {
                "type": "call",
                "protocol": call.protocol,
                "id": call.ids[0] if call.ids else "",
                "session": self._around.session_id,
                "channels": [
                    {"channel": number, "track": channel.track, "label": channel.label}
                    for number, channel in enumerate(call.channels)
                ],
                "parameters": {name: value for name, value in call.parameters.items() if name not in SECRET_NAMES},
                "details": dict(call.details),
            }
        )
        parameters = native.parse_parameters(self._around.defaults, given, self._around.info().languages)
        self._words = parameters.words
        return replace(parameters.session_config(), audio=audio)

    def event(self, event: ToClient) -> None:
        match event:
            case Lag(received, covered):
                self._put(native.render_lag(received, covered))
            case Complaint(error):
                self.error(error, fatal=False)
            case Marked():  # no Commit of these dialects has a mark
                pass
            case _:
                self._put(native.render(event, words=self._words))

    def key_pressed(self, channel: int, digit: str, at_ms: int) -> None:
        shown = "" if self._around.hides_keys else digit[:8]
        self._put({"type": "dtmf", "channel": channel, "digit": shown, "at_ms": at_ms})

    def error(self, error: SttError, *, fatal: bool) -> None:
        self._put(native.render_error(error, fatal=fatal))

    def going_down(self) -> None:
        self.error(
            SttError("the service is going down; all audio so far is transcribed", code="shutting_down"), fatal=True
        )

    def _put(self, event: dict[str, Any]) -> None:
        channel = event.get("channel")
        label = {} if channel is None else {"label": self._channels[channel].label}
        self._around.log.put(event | label)


def _size(value: object) -> int:
    """Of plain JSON, in characters. Raises BadMessage where it is nested too deep to be written."""
    try:
        return len(json.dumps(value))
    except RecursionError:
        raise BadMessage("what comes along with a call is nested too deep") from None


def parse_object(text: str) -> dict[str, Any]:
    """A JSON object. Raises BadMessage."""
    try:
        message = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):  # an integer of thousands of digits is a plain ValueError
        raise BadMessage("a text message must be JSON") from None
    if not isinstance(message, dict):
        raise BadMessage("a message must be a JSON object")
    return message


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")  # though Python reads it, others do not


def object_in(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The object of that name; an empty one where there is none. Raises BadMessage where it is something else."""
    found = message.get(name)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise BadMessage(f"{name!r} must be an object")
    return found


def text_in(message: Mapping[str, Any], name: str) -> str:
    """The text of that name, "" where there is none. Raises BadMessage where it is something else, or too long."""
    found = message.get(name)
    if found is None:
        return ""
    if not isinstance(found, str) or len(found) > 500:
        raise BadMessage(f"{name!r} must be a text of at most 500 characters")
    return found
