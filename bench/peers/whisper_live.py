"""WhisperLive: pinned, in an environment without what only its microphone client and other backends need."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from bench.peers.wire import Peer, Refused, Request, Screen, Wire, joined
from streaming.types import Pcm16

# Its own program has no switch for one model for all clients without a limit on them, so its class is called as its
# documentation shows; everything else is its default.
_PROGRAM = (
    "import sys; from whisper_live.server import TranscriptionServer as Server; "
    "Server().run('127.0.0.1', int(sys.argv[1]), backend='faster_whisper', "
    "faster_whisper_custom_model_path=sys.argv[2], single_model=True, max_clients=256, max_connection_time=86400)"
)
_QUIET_S = 15.0  # its own client hangs up so long after the last answer


class WhisperLiveWire(Wire):
    """JSON hello, float32 samples, then messages with the last ten completed segments and one that is not.

    Settled are the completed segments. They are told apart by their starts and kept when they leave the messages.
    """

    def __init__(self, language: str | None) -> None:
        # The fields and values of its own client.
        self.hello = json.dumps(
            {
                "uid": "bench",
                "language": language,
                "task": "transcribe",
                "model": "base",
                "use_vad": True,
                "send_last_n_segments": 10,
                "no_speech_thresh": 0.45,
                "clip_audio": False,
                "same_output_threshold": 10,
            }
        )
        self.farewell: str | bytes = b"END_OF_AUDIO"
        self.quiet_s = _QUIET_S
        self._completed: dict[float, str] = {}

    def audio(self, pcm: Pcm16) -> bytes:
        return (pcm.astype(np.float32) / 32_768).tobytes()

    def is_ready(self, event: Mapping[str, Any]) -> bool:
        _check(event)
        return event.get("message") == "SERVER_READY"

    def screen(self, event: Mapping[str, Any]) -> Screen | None:
        _check(event)
        if "segments" not in event:
            return None
        open_texts = [segment["text"] for segment in event["segments"] if not segment["completed"]]
        self._completed |= {float(s["start"]): s["text"] for s in event["segments"] if s["completed"]}
        settled = joined([text for _, text in sorted(self._completed.items())])
        return Screen(settled, joined([settled, *open_texts]))

    def is_done(self, event: Mapping[str, Any]) -> bool:
        return event.get("message") == "DISCONNECT"


def _check(event: Mapping[str, Any]) -> None:
    if event.get("status") in ("WAIT", "ERROR"):
        raise Refused(f"{event['status']}: {event.get('message', '')}")


def _command(request: Request) -> list[str]:
    return [str(request.programs / "python"), "-c", _PROGRAM, str(request.port), str(request.weights)]


WHISPER_LIVE = Peer(
    name="WhisperLive",
    # Its dependencies name PyAudio (which needs portaudio's headers), OpenVINO, NVIDIA's libraries and more, which its
    # server with this backend does not import. These are the ones that it does, pinned where it pins them.
    requirements=(
        ("--no-deps", "whisper-live==0.10.0"),
        (
            "faster-whisper==1.2.0", "tokenizers==0.20.3", "torch==2.13.0", "numpy<2.5", "websockets", "fastapi",
            "uvicorn", "python-multipart",
        ),
    ),
    packages=("whisper-live", "faster-whisper", "ctranslate2", "torch", "numpy", "websockets"),
    command=_command,
    ready_path=None,
    path="",
    wire=WhisperLiveWire,
)  # fmt: skip
