"""LiveKit's plug-in for Deepgram: a stream, and one recording; without a LiveKit server."""

import asyncio

from common import URL
from livekit.agents.utils import http_context
from livekit.plugins import deepgram
from livekit_stream import listen, recognize


async def main() -> None:
    async with http_context.open():
        source = deepgram.STT(model="nova-3", base_url=f"{URL}/v1/listen", api_key="none", language="en-US")
        await listen(source, 16_000)
        await recognize(source)


asyncio.run(main())
