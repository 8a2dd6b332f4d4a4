"""What every Recognizer must do, run over each of them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import pytest_asyncio

from models.host import share_of_words, warm_up_clip
from models.remote import RemoteConfig, RemoteRecognizer, Setting
from models.scripted import VOCABULARY, ScriptedConfig, ScriptedRecognizer, encode_words
from streaming.ports import Recognizer
from streaming.types import DecodeOptions, DecodeRequest, Hypothesis, Pcm16, Priority
from tests.support.vllm_engine import START_TIMEOUT_S, vllm_process
from tests.support.weights import require_weights


@dataclass(frozen=True)
class Case:
    """A recognizer and what it can be asked: sentence ``n`` of audio with the words expected."""

    recognizer: Recognizer
    sentence: Callable[[int], tuple[Pcm16, str]]


@asynccontextmanager
async def scripted() -> AsyncIterator[Case]:
    yield Case(ScriptedRecognizer(ScriptedConfig(capacity=2, delay_s=0.01)), scripted_sentence)


@asynccontextmanager
async def scripted_process(kind: str) -> AsyncIterator[Case]:
    config = RemoteConfig(engine={"kind": kind, "capacity": 2, "delay_s": 0.01})
    async with running(config) as recognizer:
        yield Case(recognizer, scripted_sentence)


@asynccontextmanager
async def ctranslate_process() -> AsyncIterator[Case]:
    engine: dict[str, Setting] = {
        "kind": "ctranslate",
        "model_dir": str(require_weights("tiny.en")),
        "model_name": "tiny.en",
        "workers": 1,
        "threads_per_worker": 2,
    }
    async with running(RemoteConfig(engine=engine)) as recognizer:
        yield Case(recognizer, clip_sentence)


@asynccontextmanager
async def vllm() -> AsyncIterator[Case]:
    async with vllm_process() as recognizer:
        yield Case(recognizer, clip_sentence)


@asynccontextmanager
async def running(config: RemoteConfig) -> AsyncIterator[RemoteRecognizer]:
    recognizer = RemoteRecognizer(config)
    await recognizer.start()
    try:
        yield recognizer
    finally:
        await recognizer.close()


def scripted_sentence(n: int) -> tuple[Pcm16, str]:
    words = [VOCABULARY[(n + i) % len(VOCABULARY)] for i in range(3)]
    return encode_words(words), " ".join(words)


def clip_sentence(n: int) -> tuple[Pcm16, str]:
    """The warm-up clip, or its first half, so that two successive requests have different answers."""
    audio, text = warm_up_clip()
    return (audio, text) if n % 2 == 0 else (audio[: len(audio) * 45 // 100], "We are going to the park")


IMPLEMENTATIONS: dict[str, Callable[[], AbstractAsyncContextManager[Case]]] = {
    "scripted": scripted,
    "scripted-process": partial(scripted_process, "scripted"),
    "scripted-async-process": partial(scripted_process, "scripted_async"),
    "ctranslate-process": ctranslate_process,
    "vllm-process": vllm,
}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(
    loop_scope="module",
    scope="module",
    params=[
        "scripted",
        "scripted-process",
        "scripted-async-process",
        pytest.param("ctranslate-process", marks=[pytest.mark.real, pytest.mark.slow]),
        pytest.param("vllm-process", marks=[pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(START_TIMEOUT_S)]),
    ],
)
async def case(request: pytest.FixtureRequest) -> AsyncIterator[Case]:
    async with IMPLEMENTATIONS[request.param]() as case:
        yield case


def ask(audio: Pcm16, request_id: int = 1, priority: Priority = Priority.LIVE_FINAL, start: int = 0) -> DecodeRequest:
    options = DecodeOptions(language="en")
    return DecodeRequest(request_id, 1, 0, priority, audio, start, len(audio), options=options)


def check(hypothesis: Hypothesis, request: DecodeRequest) -> None:
    """What holds for any answer."""
    assert hypothesis.request_id == request.request_id
    assert "".join(word.text for word in hypothesis.words).strip() == hypothesis.text
    at = 0
    for word in hypothesis.words:
        assert at <= word.start_sample <= word.end_sample <= len(request.audio)
        assert 0.0 <= word.probability <= 1.0
        at = word.start_sample
    assert 0.0 <= hypothesis.language_probability <= 1.0
    assert 0.0 <= hypothesis.no_speech_probability <= 1.0
    assert hypothesis.average_logprob <= 0.0
    assert hypothesis.decode_s >= 0.0


async def test_it_says_what_it_is(case: Case) -> None:
    info = case.recognizer.info
    assert info.model
    assert "en" in info.languages
    assert info.capacity >= 1


@pytest.mark.parametrize("priority", Priority)
async def test_it_hears_the_words(case: Case, priority: Priority) -> None:
    audio, expected = case.sentence(0)
    request = ask(audio, priority=priority)
    hypothesis = await case.recognizer.decode(request)
    check(hypothesis, request)
    assert share_of_words(expected, hypothesis.text) == 1.0
    assert hypothesis.language == "en"
    assert hypothesis.words
    assert not hypothesis.rejected


async def test_the_same_question_has_the_same_answer(case: Case) -> None:
    audio, _ = case.sentence(0)
    first, second = [await case.recognizer.decode(ask(audio)) for _ in range(2)]
    assert (first.text, first.words) == (second.text, second.words)


async def test_where_the_audio_lies_in_the_stream_changes_nothing(case: Case) -> None:
    audio, _ = case.sentence(0)
    here, there = [await case.recognizer.decode(ask(audio, start=start)) for start in (0, 16_000 * 3_600)]
    assert (here.text, here.words) == (there.text, there.words)


@pytest.mark.parametrize("samples", [1, 159, 16_000, 480_000])
async def test_silence_of_any_length_has_no_words(case: Case, samples: int) -> None:
    request = ask(np.zeros(samples, np.int16))
    hypothesis = await case.recognizer.decode(request)
    check(hypothesis, request)
    assert hypothesis.text == ""
    assert hypothesis.words == ()


async def test_many_at_once_each_get_their_own_answer(case: Case) -> None:
    sentences = [case.sentence(n) for n in range(8)]
    requests = [ask(audio, request_id=n % 2) for n, (audio, _) in enumerate(sentences)]  # two sessions count alike
    answers = await asyncio.gather(*(case.recognizer.decode(request) for request in requests))
    for request, hypothesis, (_, expected) in zip(requests, answers, sentences, strict=True):
        check(hypothesis, request)
        assert share_of_words(expected, hypothesis.text) >= 0.6
    assert answers[0].text != answers[1].text


async def test_giving_some_up_harms_no_other(case: Case) -> None:
    audio, expected = case.sentence(0)
    tasks = [asyncio.create_task(case.recognizer.decode(ask(audio, request_id=n))) for n in range(6)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for n, result in enumerate(results):
        if n % 2 == 0:
            assert isinstance(result, asyncio.CancelledError)
        else:
            assert isinstance(result, Hypothesis)
            assert result.request_id == n
    hypothesis = await case.recognizer.decode(ask(audio))
    assert share_of_words(expected, hypothesis.text) == 1.0
