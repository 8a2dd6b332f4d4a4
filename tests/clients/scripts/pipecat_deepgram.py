"""Pipecat's service for Deepgram."""

import asyncio
import sys

from common import WS_URL
from pipecat.services.deepgram.stt import DeepgramSTTService
from pipecat_stt import RATE_HZ, run

service = DeepgramSTTService(api_key="none", base_url=WS_URL, sample_rate=RATE_HZ)
asyncio.run(run(service, vad_frames=sys.argv[3] == "client"))
