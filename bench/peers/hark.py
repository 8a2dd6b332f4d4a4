"""Hark's native WebSocket, as a screen. Settled are the finals and what partials call committed."""

import json
from collections.abc import Mapping
from typing import Any

from bench.peers.wire import Refused, Screen, Wire, joined
from streaming.types import Pcm16

PATH = "/v1/stream"


class HarkWire(Wire):
    """docs/protocol.md, part 1."""

    def __init__(self, language: str | None) -> None:
        self.hello = json.dumps({"type": "config", "language": language or "auto"})
        self.farewell: str | bytes = json.dumps({"type": "eof"})
        self.quiet_s = None
        self._screens: dict[int, Screen] = {}  # by utterance
        self._readies = 0

    def audio(self, pcm: Pcm16) -> bytes:
        return pcm.tobytes()

    def is_ready(self, event: Mapping[str, Any]) -> bool:
        """After the second ``ready``: one answers the connection, one the config."""
        _check(event)
        self._readies += event["type"] == "ready"
        return self._readies == 2

    def screen(self, event: Mapping[str, Any]) -> Screen | None:
        _check(event)
        match event["type"]:
            case "partial":
                shown = event["committed"] + event["tentative"]
                self._screens[event["utterance"]] = Screen(event["committed"], shown)
            case "final":
                self._screens[event["utterance"]] = Screen(event["text"], event["text"])
            case "failed":
                self._screens.pop(event["utterance"], None)
            case _:
                return None
        screens = [screen for _, screen in sorted(self._screens.items())]
        return Screen(joined([screen.settled for screen in screens]), joined([screen.shown for screen in screens]))

    def is_done(self, event: Mapping[str, Any]) -> bool:
        return bool(event["type"] == "done")


def _check(event: Mapping[str, Any]) -> None:
    if event["type"] == "error" and event["fatal"]:
        raise Refused(str(event["message"]))
