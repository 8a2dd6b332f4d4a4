"""What a wire dialect is: a pure object for each connection. Messages in, commands out; events in, messages out.

    client ──▶ receive(message) ──▶ actions ──▶ the live session ──▶ events ──▶ render(event) ──▶ client

A dialect knows no clock, no socket and no task. app/conversation.py drives it, whatever carries the messages. Here are
all the words that it is spoken to in, and speaks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from streaming.config import SessionConfig
from streaming.errors import SttError
from streaming.events import ClientEvent

Wire = str | bytes  # one message of the transport


# --- what a dialect asks for -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Audio:
    """Bytes in the session's declared format."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Gap:
    """Audio that never came, in samples at 16 kHz."""

    samples: int


@dataclass(frozen=True, slots=True)
class Commit:
    """End the open utterances now. Where it has a ``mark``, the event ``Marked`` says that this has been done."""

    mark: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """Only the event ``Marked``, at this place in the stream: what was heard before it, and what after."""

    mark: str


@dataclass(frozen=True, slots=True)
class Eof:
    """No more audio will come."""


@dataclass(frozen=True, slots=True)
class Complaint:
    """Something the client did wrong that the stream survives. After too many (LiveConfig) the next one ends it."""

    error: SttError


@dataclass(frozen=True, slots=True)
class Start:
    """Begin to hear with this configuration; what comes next is audio. Without a Start, audio goes unheard.

    Given again later, it ends the open utterances, and the audio that follows is heard with the new configuration, once
    what came before is answered. The clock goes on: positions in events count from the first audio of the connection,
    and utterances are numbered through, whatever was started since.
    """

    config: SessionConfig


@dataclass(frozen=True, slots=True)
class Say:
    """A message for the client, after everything that was to be sent to it before."""

    message: Wire


@dataclass(frozen=True, slots=True)
class Close:
    """Send what was said so far, then close with this code. Nothing that comes later is heard."""

    code: int
    why: str = ""


Command = Audio | Gap | Commit | Mark | Eof | Complaint  # what a running session carries out
Action = Command | Start | Say | Close


# --- what a dialect is told ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lag:
    """A heartbeat: how much audio came and up to where it is answered, in samples at 16 kHz."""

    received_samples: int
    covered_samples: int


@dataclass(frozen=True, slots=True)
class Marked:
    """All that was asked for before the Mark, or with the Commit, of this text has been carried out.

    Of each utterance that was begun before it SpeechStarted has come already, and after a Commit SpeechStopped too;
    finals may be owed.
    """

    mark: str


ToClient = ClientEvent | Lag | Complaint | Marked


class Dialect(Protocol):
    """One connection's language. Every method returns at once; lists are in order.

    ``render`` is asked when an event is about to be sent, which is after later messages may have been received. What
    belongs to a place in the stream (and not to a moment) therefore goes with a mark.
    """

    def open(self) -> Sequence[Action]:
        """What is done once the client can be spoken to, before its first message. Raises SttError to refuse it."""
        ...

    def receive(self, message: Wire) -> Sequence[Action]:
        """What the client's message asks for. A mistake that the connection survives is a ``Say`` or ``Complaint``.

        Raises SttError for one that it does not survive.
        """
        ...

    def render(self, event: ToClient) -> Sequence[Wire]:
        """What the client is told of an event of the session; may be nothing. Events come in the session's order."""
        ...

    def refuse(self, error: SttError) -> tuple[Sequence[Wire], int]:
        """The connection ends for this reason: what is sent first, and the close code. The reason is its message."""
        ...

    def farewell(self, *, going_down: bool) -> tuple[Sequence[Wire], int, str]:
        """Everything is answered, and SessionDone was rendered: what is sent last, the close code and its reason.

        ``going_down``: not the client has ended it but the service, which is about to stop.
        """
        ...
