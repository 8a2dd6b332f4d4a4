"""Deepgram's library: a recording."""

from common import URL, WS_URL, path, tell
from deepgram import DeepgramClient
from deepgram.environment import DeepgramClientEnvironment

environment = DeepgramClientEnvironment(base=URL, production=WS_URL, agent=WS_URL, agent_rest=URL)
client = DeepgramClient(api_key="none", environment=environment)
response = client.listen.v1.media.transcribe_file(
    request=path("talk").read_bytes(), model="nova-3", utterances=True, paragraphs=True, detect_language=True
)
tell(**response.model_dump(mode="json", exclude_none=True))
