"""Deepgram's library, live: keep-alive, speech, finalize in a pause and in the middle of speech, close."""

import threading
import time

from common import FRAME_MS, SPEED, URL, WS_URL, frames, pcm, tell
from deepgram import DeepgramClient
from deepgram.core.events import EventType
from deepgram.environment import DeepgramClientEnvironment

RATE_HZ = 16_000
HALF_A_SENTENCE_S = 1.4
closed, finalized = threading.Event(), threading.Semaphore(0)
environment = DeepgramClientEnvironment(base=URL, production=WS_URL, agent=WS_URL, agent_rest=URL)


def on_message(message) -> None:
    tell(**message.model_dump(mode="json", exclude_none=True))
    if message.type == "Results" and message.from_finalize:
        finalized.release()


def finalize(connection) -> None:
    connection.send_finalize()
    assert finalized.acquire(timeout=20)


options = {"model": "nova-3", "language": "en-US", "encoding": "linear16", "sample_rate": RATE_HZ}
asks = {"interim_results": True, "vad_events": True, "utterance_end_ms": 1000, "endpointing": 300, "smart_format": True}
client = DeepgramClient(api_key="none", environment=environment)
with client.listen.v1.connect(**options, **asks, tag="not known here") as connection:
    connection.on(EventType.MESSAGE, on_message)
    connection.on(EventType.CLOSE, lambda _: closed.set())
    threading.Thread(target=connection.start_listening, daemon=True).start()
    finalize(connection)  # nothing was said yet
    connection.send_keep_alive()
    audio = pcm("talk", RATE_HZ)
    for frame in frames(audio, RATE_HZ):
        connection.send_media(frame)
        time.sleep(FRAME_MS / 1000 / SPEED)
    connection.send_media(audio[: int(2 * RATE_HZ * HALF_A_SENTENCE_S)])
    finalize(connection)
    connection.send_close_stream()
    assert closed.wait(20)
