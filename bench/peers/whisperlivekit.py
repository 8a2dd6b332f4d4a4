"""WhisperLiveKit with its LocalAgreement policy, the one of its two that takes CTranslate2's weights."""

from collections.abc import Mapping
from typing import Any

from bench.peers.wire import Peer, Refused, Request, Screen, Wire, joined
from streaming.types import Pcm16


class WhisperLiveKitWire(Wire):
    """int16 samples, an empty message at the end; every message holds the whole screen.

    Settled are the lines, which hold the words on which two decodes agreed.
    """

    def __init__(self, language: str | None) -> None:
        self.hello = None  # the language is one of the server's options
        self.farewell: str | bytes = b""
        self.quiet_s = None

    def audio(self, pcm: Pcm16) -> bytes:
        return pcm.tobytes()

    def is_ready(self, event: Mapping[str, Any]) -> bool:
        _check(event)
        return event.get("type") == "config"

    def screen(self, event: Mapping[str, Any]) -> Screen | None:
        _check(event)
        if "lines" not in event:
            return None
        settled = joined([line["text"] or "" for line in event["lines"]])
        return Screen(settled, joined([settled, event["buffer_transcription"]]))

    def is_done(self, event: Mapping[str, Any]) -> bool:
        return event.get("type") == "ready_to_stop"


def _check(event: Mapping[str, Any]) -> None:
    if event.get("error"):
        raise Refused(str(event["error"]))


def _command(request: Request) -> list[str]:
    return [
        str(request.programs / "wlk"), "serve", "--host", "127.0.0.1", "--port", str(request.port),
        "--backend", "faster-whisper", "--backend-policy", "localagreement", "--model-path", str(request.weights),
        "--lan", request.language or "auto", "--pcm-input", "--warmup-file", "",
    ]  # fmt: skip


WHISPERLIVEKIT = Peer(
    name="WhisperLiveKit",
    requirements=(("whisperlivekit==0.2.26", "faster-whisper==1.2.1", "torch==2.13.0"),),
    packages=("whisperlivekit", "faster-whisper", "ctranslate2", "torch", "numpy", "fastapi"),
    command=_command,
    ready_path="/health",
    path="/asr",
    wire=WhisperLiveKitWire,
)
