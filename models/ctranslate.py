"""Whisper on CTranslate2: the default engine.

``Model`` is what can be asked of the weights. ``CtranslateEngine`` serves many requests at once, step by step and in
batches, and runs in the engine process; ``CtranslateWhisper`` answers one request after the other and blocks.
models/ladder.py says what to ask and which answer stands, models/batching.py what is asked together.
"""

import asyncio
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
from faster_whisper.feature_extractor import FeatureExtractor
from numpy.typing import NDArray

from models import silence_tail, whisper_text
from models.batching import BatchConfig, Kind, Waiting, choose
from models.ladder import (
    Align,
    AsyncBackend,
    Backend,
    Decode,
    Decoded,
    Detect,
    Ladder,
    LadderConfig,
    LanguageShares,
    Timing,
    Window,
    climb,
    climb_async,
)
from models.tokenizer import Tokenizer
from streaming.audio import SAMPLE_RATE, to_float32
from streaming.errors import RecognizerFailed
from streaming.types import DecodeRequest, Float32, Hypothesis, Priority, RecognizerInfo

States = NDArray[np.generic]  # encoder states of one window, shape (1, positions, d)


@dataclass(frozen=True, slots=True)
class CtranslateConfig(LadderConfig):
    """What to load and how to run it.

    ``device``: "cpu", "cuda", or "auto" (cuda where there is one). ``compute_type``: a CTranslate2 type, or "auto"
    (int8 on a CPU, float16 on a GPU). ``workers`` calls run at once, each with ``threads_per_worker`` threads and at
    most ``max_batch`` decodes; ``at_once`` requests a worker are under way, so that there is something to batch.
    """

    model_dir: Path
    model_name: str
    workers: int
    threads_per_worker: int
    device: str = "auto"
    compute_type: str = "auto"
    max_batch: int = 8
    at_once: int = 8

    def __post_init__(self) -> None:
        LadderConfig.__post_init__(self)  # super() does not know the class that slots=True makes
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device must be auto, cpu or cuda, not {self.device}")
        if min(self.workers, self.threads_per_worker, self.max_batch, self.at_once) < 1:
            raise ValueError("workers, threads_per_worker, max_batch and at_once must be at least 1")


@dataclass(frozen=True, slots=True)
class Said:
    """What followed a prompt: text tokens after the prefix; the rest as in ``Decoded``."""

    tokens: tuple[int, ...]
    capped: bool
    average_logprob: float
    no_speech_probability: float


class Model:
    """A loaded model. Thread-safe: its own queue hands calls to its workers, and nothing here changes."""

    def __init__(self, config: CtranslateConfig) -> None:
        """Load the model and compute the silence tail (one encode). Raises RecognizerFailed where it cannot."""
        self._margin_s = config.margin_s
        try:
            self._model = _load(config)
            tokenizer = Tokenizer(config.model_dir / "tokenizer.json")
            self.special = whisper_text.SpecialTokens.look_up(tokenizer.id_of, multilingual=self._model.is_multilingual)
        except (OSError, RuntimeError, ValueError) as error:
            raise RecognizerFailed(f"cannot load {config.model_name} from {config.model_dir}: {error}") from error
        self.ladder = Ladder(config, self.special, tokenizer.encode, tokenizer.decode)
        self.info = RecognizerInfo(
            model=config.model_name,
            languages=frozenset(self.special.languages) or frozenset({"en"}),
            capacity=config.workers * config.at_once,
            workers=config.workers,
        )
        self._features = FeatureExtractor(feature_size=self._model.n_mels)
        self._tail = self._encode_features(silence_tail.silent_log_mel(self._model.n_mels))

    def encode(self, audio: Float32, *, full: bool) -> States:
        """Audio, shape (n,), → encoder states, shape (1, 1500, d): real ones for the audio, then the silence tail."""
        margin_samples = silence_tail.WINDOW_SAMPLES if full else int(self._margin_s * SAMPLE_RATE)
        positions = silence_tail.positions_to_encode(audio.shape[0], margin_samples)
        log_mel = self._features(silence_tail.pad_to(audio, positions), padding=0)
        return silence_tail.append_tail(self._encode_features(log_mel), self._tail)

    def detect(self, states: States) -> LanguageShares:
        """(code, probability) of each language."""
        return [(token[2:-2], share) for token, share in self._model.detect_language(_view([states]))[0]]

    def generate(self, states: Sequence[States], steps: Sequence[Decode]) -> list[Said]:
        """The text of each window. All steps have one ``decode_group``."""
        first = steps[0]
        results = self._model.generate(
            _view(states),
            [list(step.prompt) for step in steps],
            beam_size=1,
            sampling_topk=1 if first.temperature == 0.0 else 0,
            sampling_temperature=first.temperature or 1.0,
            # CTranslate2 stops at half of it, or at it less the prompt.
            max_length=max(max(2 * step.cap, len(step.prompt) + step.cap) for step in steps),
            suppress_blank=not first.prefix,
            return_scores=True,
            return_no_speech_prob=True,
        )
        return [self._said(step, result) for step, result in zip(steps, results, strict=True)]

    def _said(self, step: Decode, result: Any) -> Said:
        # CTranslate2 counts what follows <|notimestamps|> in its prompt as part of the result.
        ids, forced = result.sequences_ids[0], len(step.prefix)
        return Said(
            tokens=tuple(token for token in ids[forced:] if token < self.special.end_of_text),
            capped=len(ids) - forced >= step.cap,
            # The score is a mean over all of them, in which a forced token counts 0.
            average_logprob=result.scores[0] * len(ids) / (len(ids) - forced + 1),
            no_speech_probability=result.no_speech_prob,
        )

    def align(self, states: Sequence[States], steps: Sequence[Align]) -> list[Timing]:
        """Where each window's tokens are; none may be without any. All steps have one ``align_group``."""
        frames = [-(-step.window.samples // silence_tail.HOP_SAMPLES) for step in steps]
        texts = [list(step.tokens) for step in steps]
        found = self._model.align(_view(states), list(steps[0].start), texts, frames)
        return [
            Timing(whisper_text.token_positions(one.alignments, len(text)), one.text_token_probs[: len(text)])
            for one, text in zip(found, texts, strict=True)
        ]

    def _encode_features(self, log_mel: Float32) -> States:
        features = ctranslate2.StorageView.from_array(np.ascontiguousarray(log_mel[np.newaxis], dtype=np.float32))
        return np.array(self._model.encode(features, to_cpu=True))


def decode_group(step: Decode) -> Hashable:
    """Decodes can share a call where CTranslate2 takes their options and prompts together: sampling is for all alike,
    and <|startoftranscript|> must stand at the same place of each prompt."""
    context = len(step.prompt) - len(step.prefix) - len(step.start)
    return context, len(step.start), step.temperature, bool(step.prefix)


def align_group(step: Align) -> Hashable:
    """Alignments can share a call where they have one start sequence."""
    return step.start


def _view(states: Sequence[States]) -> ctranslate2.StorageView:
    together = states[0] if len(states) == 1 else np.concatenate(states)
    return ctranslate2.StorageView.from_array(np.ascontiguousarray(together))


def _decoded(said: Said, timing: Timing) -> Decoded:
    return Decoded(said.tokens, timing, said.capped, said.average_logprob, said.no_speech_probability)


def _alignment(step: Decode, said: Said) -> Align:
    return Align(step.window, step.start, (*step.prefix, *said.tokens))


_NO_WORDS = Timing((0,), ())


def _load(config: CtranslateConfig) -> ctranslate2.models.Whisper:
    device = config.device
    if device == "auto":
        device = "cuda" if ctranslate2.get_cuda_device_count() > 0 else "cpu"
    compute_type = config.compute_type
    if compute_type == "auto":
        wanted = "int8" if device == "cpu" else "float16"
        compute_type = wanted if wanted in ctranslate2.get_supported_compute_types(device) else "default"
    return ctranslate2.models.Whisper(
        str(config.model_dir),
        device=device,
        compute_type=compute_type,
        inter_threads=config.workers,
        intra_threads=config.threads_per_worker,
    )


# One after the other --------------------------------------------------------------------------------------------------


class CtranslateWhisper:
    """Answers one request at a time. May be called from several threads."""

    def __init__(self, config: CtranslateConfig) -> None:
        """Raises RecognizerFailed where the model cannot be loaded."""
        self.model = Model(config)

    @property
    def info(self) -> RecognizerInfo:
        return self.model.info

    def decode(self, request: DecodeRequest) -> Hypothesis:
        """Answer the request; blocks for the decode, without the interpreter lock for most of it.

        Raises RecognizerFailed for audio or a language the model cannot take, and where CTranslate2 fails.
        """
        began = time.perf_counter()
        try:
            hypothesis = climb(self.model.ladder.steps(request), self._backend(to_float32(request.audio)))
        except (RuntimeError, ValueError) as error:
            raise RecognizerFailed(f"decoding failed: {error}") from error
        return replace(hypothesis, decode_s=time.perf_counter() - began)

    def _backend(self, audio: Float32) -> Backend:
        return _Listener(self.model, audio)


class _Listener:
    """The ladder's backend for one request: its audio, of which each window is encoded once."""

    def __init__(self, model: Model, audio: Float32) -> None:
        self._model = model
        self._audio = audio
        self._encoded: dict[Window, States] = {}  # at most two, and two for each gap: some 60 MB

    def detect(self, step: Detect) -> LanguageShares:
        return self._model.detect(self._states(step.window))

    def decode(self, step: Decode) -> Decoded:
        said = self._model.generate([self._states(step.window)], [step])[0]
        return _decoded(said, self.align(_alignment(step, said)))

    def align(self, step: Align) -> Timing:
        return self._model.align([self._states(step.window)], [step])[0] if step.tokens else _NO_WORDS

    def _states(self, window: Window) -> States:
        if window not in self._encoded:
            audio = self._audio[window.begin_sample : window.end_sample]
            self._encoded[window] = self._model.encode(audio, full=window.full)
        return self._encoded[window]


# Many at once ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """A step that waits for a worker: what stands for it in the policy, and the call that answers all like it."""

    waiting: Waiting
    argument: Any
    call: Callable[[Sequence[Any]], list[Any]]  # the arguments of a batch → their answers
    answer: "asyncio.Future[tuple[Any, float]]"  # with this step's share of the call's seconds


class CtranslateEngine:
    """The engine, for models/host.py: requests are taken apart into steps, and workers take those in turn."""

    def __init__(self, config: CtranslateConfig) -> None:
        """Raises RecognizerFailed where the model cannot be loaded."""
        self.model = Model(config)
        self._batches = BatchConfig(max_batch=config.max_batch)
        self._n_workers = config.workers
        self._pool = ThreadPoolExecutor(config.workers, thread_name_prefix="decode")
        self._steps: list[_Step] = []
        self._filled = asyncio.Condition()
        self._workers: list[asyncio.Task[None]] = []
        self._requests = 0  # so far
        self._under_way = 0

    @property
    def info(self) -> RecognizerInfo:
        return self.model.info

    @property
    def waiting(self) -> int:
        """Steps that no worker has taken up."""
        return len(self._steps)

    async def start(self) -> None:
        """The weights are loaded; from now on there are workers."""
        self._workers = [asyncio.create_task(self._work()) for _ in range(self._n_workers)]

    async def close(self) -> None:
        for worker in self._workers:
            worker.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def decode(self, request: DecodeRequest) -> Hypothesis:
        """Answer the request. Cancelling gives up the steps that no worker has begun.

        ``decode_s`` of the answer is what it took of a worker's time. Raises RecognizerFailed for audio or a language
        that the model cannot take, and where CTranslate2 fails.
        """
        self._requests += 1
        self._under_way += 1
        listener = _Questions(self, request, self._requests)
        backend: AsyncBackend = listener
        try:
            steps = self.model.ladder.steps(request, has_time=lambda: self._under_way == 1)
            hypothesis = await climb_async(steps, backend)
        except (RuntimeError, ValueError) as error:
            raise RecognizerFailed(f"decoding failed: {error}") from error
        finally:
            self._under_way -= 1
        return replace(hypothesis, decode_s=listener.took_s)

    async def ask(
        self, waiting: Waiting, argument: Any, call: Callable[[Sequence[Any]], list[Any]]
    ) -> tuple[Any, float]:
        """The answer, and this step's share of the seconds that its call took."""
        step = _Step(waiting, argument, call, asyncio.get_running_loop().create_future())
        async with self._filled:
            self._steps.append(step)
            self._filled.notify()
        try:
            return await step.answer
        finally:
            if step in self._steps:
                self._steps.remove(step)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            async with self._filled:
                await self._filled.wait_for(lambda: self._steps)
                steps = [self._steps[index] for index in choose([s.waiting for s in self._steps], self._batches)]
                self._steps = [step for step in self._steps if step not in steps]
            began = time.perf_counter()
            try:
                answers = await loop.run_in_executor(self._pool, steps[0].call, [step.argument for step in steps])
            except Exception as error:  # noqa: BLE001 - the worker's edge: it is the requests' error, and they raise it
                for step in steps:
                    _settle(step, error)
            else:
                share_s = (time.perf_counter() - began) / len(steps)
                for step, answer in zip(steps, answers, strict=True):
                    _settle(step, (answer, share_s))
            await asyncio.sleep(0)  # the requests answered now have their next steps among those to choose from


def _settle(step: _Step, outcome: tuple[Any, float] | Exception) -> None:
    if step.answer.done():  # given up meanwhile
        return
    if isinstance(outcome, Exception):
        step.answer.set_exception(outcome)
    else:
        step.answer.set_result(outcome)


class _Questions:
    """The ladder's backend for one request of the engine."""

    def __init__(self, engine: CtranslateEngine, request: DecodeRequest, order: int) -> None:
        self._engine = engine
        self._model = engine.model
        self._priority: Priority = request.priority
        self._order = order
        self._audio = to_float32(request.audio)
        self._encoded: dict[Window, States] = {}
        self.took_s = 0.0

    async def detect(self, step: Detect) -> LanguageShares:
        shares: LanguageShares = await self._ask(Kind.DETECT, await self._states(step.window), self._detect)
        return shares

    async def decode(self, step: Decode) -> Decoded:
        states = await self._states(step.window)
        # About three tokens a second of speech; only the comparison of one request with another matters.
        length = len(step.prefix) + 3 * step.window.samples // SAMPLE_RATE
        said: Said = await self._ask(Kind.DECODE, (states, step), self._generate, decode_group(step), length)
        return _decoded(said, await self.align(_alignment(step, said)))

    async def align(self, step: Align) -> Timing:
        if not step.tokens:
            return _NO_WORDS
        states = await self._states(step.window)
        timing: Timing = await self._ask(Kind.ALIGN, (states, step), self._align, align_group(step))
        return timing

    async def _states(self, window: Window) -> States:
        if window not in self._encoded:
            audio = self._audio[window.begin_sample : window.end_sample]
            self._encoded[window] = await self._ask(Kind.ENCODE, (audio, window.full), self._encode)
        return self._encoded[window]

    async def _ask(
        self,
        kind: Kind,
        argument: Any,
        call: Callable[[Sequence[Any]], list[Any]],
        group: Hashable = None,
        length: int = 0,
    ) -> Any:
        waiting = Waiting(kind, self._priority, self._order, group, length)
        answer, share_s = await self._engine.ask(waiting, argument, call)
        self.took_s += share_s
        return answer

    def _encode(self, windows: Sequence[tuple[Float32, bool]]) -> list[States]:
        return [self._model.encode(audio, full=full) for audio, full in windows]

    def _detect(self, states: Sequence[States]) -> list[LanguageShares]:
        return [self._model.detect(one) for one in states]

    def _generate(self, batch: Sequence[tuple[States, Decode]]) -> list[Said]:
        return self._model.generate([states for states, _ in batch], [step for _, step in batch])

    def _align(self, batch: Sequence[tuple[States, Align]]) -> list[Timing]:
        return self._model.align([states for states, _ in batch], [step for _, step in batch])
