"""OpenAI's library: a realtime transcription session with the service's turns, one whose turns the client ends."""

import asyncio
import base64

from common import FRAME_MS, SPEED, URL, frames, pcm, tell
from openai import AsyncOpenAI

RATE_HZ = 24_000


async def configure(connection, **sound: object) -> None:
    await connection.session.update(session={"type": "transcription", "audio": {"input": sound}})


async def say(connection, name: str) -> None:
    for frame in frames(pcm(name, RATE_HZ), RATE_HZ, 2 * FRAME_MS):
        await connection.input_audio_buffer.append(audio=base64.b64encode(frame).decode())
        await asyncio.sleep(2 * FRAME_MS / 1000 / SPEED)


async def until(connection, count: int) -> None:
    """Tell every event up to the ``count``-th `completed`."""
    while count:
        event = await connection.recv()
        tell(**event.model_dump(mode="json", exclude_none=True))
        count -= event.type.endswith(".completed")


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
    async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
        await configure(
            connection,
            transcription={"model": "gpt-4o-transcribe", "language": "en"},
            turn_detection={"type": "server_vad", "silence_duration_ms": 350},
        )
        speaking = asyncio.create_task(say(connection, "talk"))
        await until(connection, 2)
        await speaking
    async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
        await configure(connection, turn_detection=None)
        await connection.input_audio_buffer.commit()
        for name in ("quiet", "talk"):
            await say(connection, name)
            await connection.input_audio_buffer.commit()
        await until(connection, 3)


asyncio.run(main())
