"""LiveKit's plug-in for OpenAI: a realtime stream, and one recording; without a LiveKit server."""

import asyncio

from common import URL
from livekit.agents.utils import http_context
from livekit.plugins import openai
from livekit_stream import listen, recognize


async def main() -> None:
    base_url = f"{URL}/v1"
    async with http_context.open():
        live = openai.STT(
            base_url=base_url, api_key="none", use_realtime=True, model="gpt-4o-transcribe", language="en"
        )
        await listen(live, 24_000)
        await live.aclose()
        await recognize(openai.STT(base_url=base_url, api_key="none", model="whisper-1", language="en"))


asyncio.run(main())
