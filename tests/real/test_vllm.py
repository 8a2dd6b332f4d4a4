"""The vLLM engine for real: words, drafts, word times, and what happens when its processes are killed or stopped."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import psutil
import pytest
import pytest_asyncio

from models.ctranslate import CtranslateConfig, CtranslateWhisper
from models.host import share_of_words, warm_up_clip
from models.remote import RemoteObserver, RemoteRecognizer
from streaming.types import DecodeOptions, DecodeRequest, Hypothesis, Pcm16, Priority
from tests.support.vllm_engine import START_TIMEOUT_S, vllm_process
from tests.support.weights import require_weights

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(3 * START_TIMEOUT_S),
    pytest.mark.asyncio(loop_scope="module"),
]


@dataclass
class Witness:
    """What the engine's process said and how often it started."""

    lines: list[dict[str, object]] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)

    def observer(self) -> RemoteObserver:
        return RemoteObserver(stopped=self.stopped.append, log_line=self.hear)

    def hear(self, line: str) -> None:
        if line.startswith("{"):
            self.lines.append(json.loads(line))

    def last(self, event: str) -> dict[str, object]:
        return [line for line in self.lines if line["event"] == event][-1]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine() -> AsyncIterator[RemoteRecognizer]:
    async with vllm_process() as recognizer:
        yield recognizer


def ask(
    audio: Pcm16, *, request_id: int = 1, priority: Priority = Priority.LIVE_FINAL, start: int = 0, language: str = "en"
) -> DecodeRequest:
    options = DecodeOptions(language=language or None)
    return DecodeRequest(request_id, 1, 0, priority, audio, start, len(audio), options=options)


def same(one: Hypothesis, other: Hypothesis) -> bool:
    """Numbers may differ in the last places: a token alone and a token among others are added up differently."""
    return one.text == other.text and abs(one.average_logprob - other.average_logprob) < 1e-3


async def test_a_draft_changes_no_text_and_saves_steps() -> None:
    """Each length is asked as the utterance grows, and once as another utterance's whole, which has no draft."""
    audio, _ = warm_up_clip()
    audio = np.concatenate([audio, audio])
    witness = Witness()
    async with vllm_process(witness.observer()) as engine:
        for number, end in enumerate([*range(16_000, len(audio), 8_000), len(audio)]):
            grown = await engine.decode(ask(audio[:end], priority=Priority.LIVE_PARTIAL))
            alone = await engine.decode(ask(audio[:end], priority=Priority.LIVE_PARTIAL, start=1 + number))
            assert same(grown, alone), (end, grown, alone)
    steps = witness.last("decoder_steps")
    assert isinstance(steps["saved"], int)
    assert steps["saved"] > 0
    assert steps["held"]


async def test_words_lie_where_the_default_engine_finds_them(engine: RemoteRecognizer) -> None:
    audio, _ = warm_up_clip()
    config = CtranslateConfig(
        model_dir=require_weights("base"), model_name="base", workers=1, threads_per_worker=1, compute_type="float32"
    )
    expected = CtranslateWhisper(config).decode(ask(audio))
    found = await engine.decode(ask(audio))
    assert [word.text for word in found.words] == [word.text for word in expected.words]
    pairs = list(zip(found.words, expected.words, strict=True))
    errors = [abs(a.start_sample - b.start_sample) for a, b in pairs] + [
        abs(a.end_sample - b.end_sample) for a, b in pairs
    ]
    assert median(errors) <= 320
    assert max(errors) <= 3_200
    assert max(abs(a.probability - b.probability) for a, b in pairs) < 0.1


async def test_the_language_is_heard(engine: RemoteRecognizer) -> None:
    audio, _ = warm_up_clip()
    answer = await engine.decode(ask(audio, language=""))
    assert answer.language == "en"
    assert answer.language_probability > 0.8


# --- faults ----------------------------------------------------------------------------------------------------------


def descendants(recognizer: RemoteRecognizer) -> list[psutil.Process]:
    """vLLM's own processes: its core, and where there is one its worker."""
    assert recognizer.pid is not None
    return psutil.Process(recognizer.pid).children(recursive=True)


def core(recognizer: RemoteRecognizer) -> psutil.Process:
    return next(child for child in descendants(recognizer) if "EngineCore" in " ".join(child.cmdline()))


def kill_process(recognizer: RemoteRecognizer) -> None:
    assert recognizer.pid is not None
    os.kill(recognizer.pid, signal.SIGKILL)


def kill_core(recognizer: RemoteRecognizer) -> None:
    core(recognizer).kill()


def stop_all(recognizer: RemoteRecognizer) -> None:
    """As a forward pass that never ends."""
    for child in descendants(recognizer):
        child.suspend()


@contextmanager
def all_gone(processes: list[psutil.Process]) -> Iterator[None]:
    """What was running before has ended afterwards."""
    yield
    _, alive = psutil.wait_procs(processes, timeout=30)
    for process in alive:
        process.kill()
    assert not alive


@pytest.mark.parametrize("harm", [kill_process, kill_core, stop_all])
async def test_every_final_of_eight_sessions_arrives_once(harm: object) -> None:
    audio, text = warm_up_clip()
    async with vllm_process(request_timeout_s=60.0) as engine:
        with all_gone(descendants(engine)):
            finals = [asyncio.create_task(engine.decode(ask(audio, start=n))) for n in range(8)]
            await asyncio.wait(finals, return_when=asyncio.FIRST_COMPLETED)
            harm(engine)  # type: ignore[operator]
            answers = await asyncio.gather(*finals)
        assert [share_of_words(text, answer.text) for answer in answers] == [1.0] * 8
        assert engine.restarts == 1
