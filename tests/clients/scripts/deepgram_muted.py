"""Deepgram's library: speaks, is muted for longer than the idle limit but says that it is there, and speaks again."""

import threading
import time

from common import FRAME_MS, SPEED, URL, WS_URL, frames, pcm, tell
from deepgram import DeepgramClient
from deepgram.core.events import EventType
from deepgram.environment import DeepgramClientEnvironment

RATE_HZ = 16_000
MUTED_S, KEEP_ALIVE_S = 12.0, 4.0
closed = threading.Event()
environment = DeepgramClientEnvironment(base=URL, production=WS_URL, agent=WS_URL, agent_rest=URL)
client = DeepgramClient(api_key="none", environment=environment)


def say(connection, audio: bytes) -> None:
    for frame in frames(audio, RATE_HZ):
        connection.send_media(frame)
        time.sleep(FRAME_MS / 1000 / SPEED)


with client.listen.v1.connect(model="nova-3", encoding="linear16", sample_rate=RATE_HZ, vad_events=True) as connection:
    connection.on(EventType.MESSAGE, lambda message: tell(**message.model_dump(mode="json", exclude_none=True)))
    connection.on(EventType.CLOSE, lambda _: closed.set())
    threading.Thread(target=connection.start_listening, daemon=True).start()
    audio = pcm("talk", RATE_HZ)
    say(connection, audio[: len(audio) // 2])
    for _ in range(int(MUTED_S / KEEP_ALIVE_S)):
        connection.send_keep_alive()
        time.sleep(KEEP_ALIVE_S)
    say(connection, audio[len(audio) // 2 :])
    connection.send_close_stream()
    assert closed.wait(20)
