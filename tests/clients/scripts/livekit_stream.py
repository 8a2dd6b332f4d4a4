"""What both LiveKit scripts do with their STT: push audio frames as an agent does, and tell the events."""

import asyncio

from common import FRAME_MS, SPEED, frames, pcm, tell
from livekit import rtc
from livekit.agents import stt


def frame_of(data: bytes, rate_hz: int) -> rtc.AudioFrame:
    return rtc.AudioFrame(data=data, sample_rate=rate_hz, num_channels=1, samples_per_channel=len(data) // 2)


async def listen(source: stt.STT, rate_hz: int, finals: int = 2) -> None:
    """Tells the events until so many finals have come."""
    stream = source.stream()
    sending = asyncio.create_task(_send(stream, rate_hz))
    async with asyncio.timeout(60):
        async for event in stream:
            best = event.alternatives[0] if event.alternatives else None
            times = [best.start_time, best.end_time] if best else None
            tell(kind=event.type.value, text=best.text if best else "", times=times, language=best and best.language)
            finals -= event.type is stt.SpeechEventType.FINAL_TRANSCRIPT
            if not finals:
                break
    await sending
    await stream.aclose()


async def _send(stream: stt.RecognizeStream, rate_hz: int) -> None:
    for data in frames(pcm("talk", rate_hz), rate_hz):
        stream.push_frame(frame_of(data, rate_hz))
        await asyncio.sleep(FRAME_MS / 1000 / SPEED)


async def recognize(source: stt.STT) -> None:
    event = await source.recognize(frame_of(pcm("talk", 16_000), 16_000))
    tell(kind="recognized", text=event.alternatives[0].text)
