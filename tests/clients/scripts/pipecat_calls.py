"""Pipecat's serializers as senders of calls: they write the audio; what begins and ends a call stands here.

In Pipecat they are the application's side of an exchange, so what they write has less in it than what an exchange sends
(no track, no timestamp, no number): the least that an endpoint can be asked to understand.
"""

import asyncio
import json
import sys
import uuid

import websockets
from common import WS_URL, frames, pcm, tell
from pipecat.frames.frames import OutputAudioRawFrame, StartFrame
from pipecat.serializers.base_serializer import FrameSerializer
from pipecat.serializers.genesys import GenesysAudioHookSerializer
from pipecat.serializers.telnyx import TelnyxFrameSerializer
from pipecat.serializers.twilio import TwilioFrameSerializer

RATE_HZ = 8_000
EXCHANGE, RECORDING = sys.argv[3:5]
CALL_ID = str(uuid.uuid4())


def twilio() -> tuple[FrameSerializer, str, list[dict], dict]:
    params = TwilioFrameSerializer.InputParams(auto_hang_up=False)
    media = {"encoding": "audio/x-mulaw", "sampleRate": RATE_HZ, "channels": 1}
    start = {"accountSid": "AC1", "streamSid": "MZ1", "callSid": CALL_ID, "tracks": ["inbound"], "mediaFormat": media}
    begin = [
        {"event": "connected", "protocol": "Call", "version": "1.0.0"},
        {"event": "start", "sequenceNumber": "1", "streamSid": "MZ1", "start": start},
    ]
    return TwilioFrameSerializer(stream_sid="MZ1", params=params), "/twilio", begin, {"event": "stop"}


def telnyx(encoding: str = "PCMU") -> tuple[FrameSerializer, str, list[dict], dict]:
    params = TelnyxFrameSerializer.InputParams(auto_hang_up=False)
    serializer = TelnyxFrameSerializer(
        stream_id="1", outbound_encoding=encoding, inbound_encoding=encoding, params=params
    )
    media = {"encoding": encoding, "sample_rate": RATE_HZ, "channels": 1}
    start = {"event": "start", "stream_id": "1", "start": {"call_control_id": CALL_ID, "media_format": media}}
    return serializer, "/telnyx", [start], {"event": "stop", "stream_id": "1"}


async def send_audio(connection, serializer: FrameSerializer, pause_s: float = 0.0) -> None:
    for data in frames(pcm(RECORDING, RATE_HZ), RATE_HZ):
        frame = OutputAudioRawFrame(audio=data, sample_rate=RATE_HZ, num_channels=1)
        if written := await serializer.serialize(frame):
            await connection.send(written)
        await asyncio.sleep(pause_s)


async def media_stream(serializer: FrameSerializer, path: str, begin: list[dict], end: dict) -> list[dict]:
    async with websockets.connect(WS_URL + path) as connection:
        for message in begin:
            await connection.send(json.dumps(message))
        await send_audio(connection, serializer)
        await connection.send(json.dumps(end))
        return [json.loads(message) async for message in connection]


async def audiohook() -> list[dict]:
    """The serializer writes the audio once its own session is open, which an `open` message does."""
    serializer = GenesysAudioHookSerializer()
    session, heard, number = str(uuid.uuid4()), [], 0

    async def send(kind: str, **parameters: object) -> str:
        nonlocal number
        number += 1
        head = {"version": "2", "type": kind, "id": session, "seq": number, "serverseq": len(heard)}
        text = json.dumps({**head, "position": "PT0S", "parameters": parameters})
        await connection.send(text)
        return text

    async def hear(kind: str) -> None:
        while not heard or heard[-1]["type"] != kind:
            heard.append(json.loads(await connection.recv()))

    async with websockets.connect(f"{WS_URL}/audiohook") as connection:
        await serializer.setup(StartFrame(audio_in_sample_rate=RATE_HZ, audio_out_sample_rate=RATE_HZ))
        media = [{"type": "audio", "format": "PCMU", "channels": ["external"], "rate": RATE_HZ}]
        people = {"organizationId": session, "conversationId": CALL_ID, "participant": {"id": CALL_ID}}
        await serializer.deserialize(await send("open", **people, media=media, language="en-US"))
        await hear("opened")
        await send_audio(connection, serializer)
        await send("close", reason="end")
        await hear("closed")
    return heard


async def main() -> None:
    if EXCHANGE == "genesys":
        heard = await audiohook()
    else:
        kinds = {"twilio": twilio, "telnyx": telnyx, "telnyx_alaw": lambda: telnyx("PCMA")}
        serializer, *rest = kinds[EXCHANGE]()
        await serializer.setup(StartFrame(audio_in_sample_rate=RATE_HZ, audio_out_sample_rate=RATE_HZ))
        heard = await media_stream(serializer, *rest)
    events = [message["parameters"]["entities"] for message in heard if message["type"] == "event"]
    said = [entity["data"]["alternatives"][0]["interpretations"][0]["transcript"] for [entity] in events]
    tell(call_id=CALL_ID, types=[message["type"] for message in heard], transcripts=said)


asyncio.run(main())
