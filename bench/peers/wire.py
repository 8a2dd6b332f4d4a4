"""What differs between live servers: how audio is sent to them and how their messages become a screen. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from streaming.types import Pcm16


class Refused(Exception):
    """The server refused the stream or broke it off; the message is its own."""


@dataclass(frozen=True, slots=True)
class Screen:
    """All text that a server has settled so far, and all that it shows, the settled text with it."""

    settled: str
    shown: str


class Wire(Protocol):
    """One connection's codec. Every message of a server is JSON text.

    ``hello`` is sent first, ``farewell`` after the last audio. Where a server never says that it is done, ``quiet_s``
    is how long it may say nothing after the last audio until the client says farewell and takes that for the end.
    """

    hello: str | None
    farewell: str | bytes
    quiet_s: float | None

    def audio(self, pcm: Pcm16) -> bytes: ...

    def is_ready(self, event: Mapping[str, Any]) -> bool:
        """Whether audio may be sent now. Raises Refused."""

    def screen(self, event: Mapping[str, Any]) -> Screen | None:
        """What is on the screen after this message, None where it changes nothing. Raises Refused."""

    def is_done(self, event: Mapping[str, Any]) -> bool:
        """Whether everything has been said."""


@dataclass(frozen=True, slots=True)
class Request:
    """What every server is told alike. ``programs``: the folder of its interpreter; ``language``: None for several."""

    programs: Path
    weights: Path
    port: int
    language: str | None


@dataclass(frozen=True, slots=True)
class Peer:
    """A live server.

    ``requirements``: arguments of one ``pip install`` each. ``packages``: whose versions are written down.
    ``ready_path``: answers 200 when it may be connected to; None where an open
    port says so. ``path``: of its WebSocket. ``wire``: a codec for one connection, for a language.
    """

    name: str
    requirements: Sequence[Sequence[str]]
    packages: Sequence[str]
    command: Callable[[Request], list[str]]
    ready_path: str | None
    path: str
    wire: Callable[[str | None], Wire]


def joined(texts: Sequence[str]) -> str:
    return " ".join(text.strip() for text in texts if text.strip())
