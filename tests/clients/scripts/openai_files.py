"""OpenAI's library: recordings in every format, as events, and what it is told when something is wrong."""

import openai
from common import URL, path, tell

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


def create(name: str = "talk", **fields: object):
    with path(name).open("rb") as file:
        return client.audio.transcriptions.create(file=file, model="whisper-1", **fields)


answer = create(response_format="json", language="en")
tell(kind="json", type=type(answer).__name__, text=answer.text, seconds=answer.usage.seconds)
verbose = create(response_format="verbose_json", timestamp_granularities=["word", "segment"])
tell(
    kind="verbose_json",
    type=type(verbose).__name__,
    text=verbose.text,
    language=verbose.language,
    segments=[[segment.id, segment.start, segment.end, segment.text] for segment in verbose.segments],
    words=[[word.word, word.start, word.end] for word in verbose.words],
)
for form in ("text", "srt", "vtt"):
    body = create(response_format=form)
    tell(kind=form, type=type(body).__name__, text=body)
events = list(create(stream=True))
tell(kind="events", types=[event.type for event in events], deltas=[e.delta for e in events[:-1]], text=events[-1].text)
quiet = create("quiet", response_format="verbose_json", timestamp_granularities=["word", "segment"])
tell(kind="quiet", text=quiet.text, segments=len(quiet.segments), words=len(quiet.words))
try:
    create(response_format="diarized_json")
except openai.BadRequestError as error:
    tell(kind="refused", status=error.status_code, code=error.code, param=error.param)
tell(kind="models", ids=[model.id for model in client.models.list()])
