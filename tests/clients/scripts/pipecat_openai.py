"""Pipecat's service for OpenAI's realtime interface: with its own turns, and with the service's."""

import asyncio
import sys

from common import WS_URL
from pipecat.services.openai.stt import OpenAIRealtimeSTTService
from pipecat_stt import run

server_turns = sys.argv[3] == "server"
turns = {"turn_detection": None} if server_turns else {}
service = OpenAIRealtimeSTTService(api_key="none", base_url=f"{WS_URL}/v1/realtime", **turns)
asyncio.run(run(service, vad_frames=not server_turns))
