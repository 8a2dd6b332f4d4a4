"""Whisper on vLLM: one persistent AsyncLLM, asked by the ladder. With models/vllm_plugin, all that imports vllm.

vLLM is given tokens and finished features, so nothing of its own text or audio processing is in the way. A request's
windows are encoded once each; detection, rungs, drafts and word times share the states (models/vllm_plugin/model.py).
"""

import asyncio
import contextlib
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from models import drafts, silence_tail, vllm_settings, whisper_text, word_alignment
from models.ladder import (
    Align,
    AsyncBackend,
    Decode,
    Decoded,
    Detect,
    Ladder,
    LadderConfig,
    LanguageShares,
    Timing,
    Window,
    climb_async,
)
from models.tokenizer import Tokenizer
from models.vllm_plugin import ARCHITECTURE, OPTIONS, contract
from streaming.audio import SAMPLE_RATE, to_float32
from streaming.errors import RecognizerFailed
from streaming.types import DecodeRequest, Float32, Hypothesis, RecognizerInfo

# Of the tokens that might follow <|startoftranscript|>, so many are told: <|nospeech|> is among them wherever it has a
# probability above 1 in 6, and the guards ask about 0.3 and more.
_TOP_TOKENS = 5
_HEALTH_INTERVAL_S = 0.5
_REPORT_INTERVAL_S = 60.0
_FORBIDDEN = -100.0  # the lowest bias that vLLM takes

Log = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig(LadderConfig):
    """What to load. How it is run is chosen by models/vllm_settings.py.

    ``model_dir``: Transformers' layout. ``drafts``: whether a growing utterance's last text is offered to the decoder.
    """

    model_dir: Path
    model_name: str
    drafts: bool = True


@dataclass(slots=True)
class Steps:
    """Decoder steps. ``saved``: those that drafts made unnecessary; what a wrong draft costs is in ``taken``."""

    taken: int = 0
    saved: int = 0
    drafts: int = 0
    drafts_held: int = 0

    def add(self, other: "Steps") -> None:
        self.taken += other.taken
        self.saved += other.saved
        self.drafts += other.drafts
        self.drafts_held += other.drafts_held


@dataclass(frozen=True, slots=True)
class _Files:
    """What stands in the model's directory."""

    shape: vllm_settings.ModelShape
    tokenizer: Tokenizer
    special: whisper_text.SpecialTokens
    no_speech: int
    alignment_heads: tuple[tuple[int, int], ...]
    suppressed: frozenset[int]
    suppressed_first: frozenset[int]

    @classmethod
    def read(cls, folder: Path) -> "_Files":
        """Raises OSError or ValueError."""
        config = json.loads((folder / "config.json").read_text("utf-8"))
        generation = json.loads((folder / "generation_config.json").read_text("utf-8"))
        tokenizer = Tokenizer(folder / "tokenizer.json")
        multilingual = int(config["vocab_size"]) >= 51865  # openai/whisper tells them apart so
        special = whisper_text.SpecialTokens.look_up(tokenizer.id_of, multilingual=multilingual)
        layers, heads = int(config["decoder_layers"]), int(config["decoder_attention_heads"])
        # Where a model does not name any, the reference takes all heads of the last half of the layers.
        default = itertools.product(range(layers // 2, layers), range(heads))
        return cls(
            shape=vllm_settings.ModelShape.read(config),
            tokenizer=tokenizer,
            special=special,
            no_speech=special.no_timestamps - 1,  # <|nospeech|>, which some tokenizers call <|nocaptions|>
            alignment_heads=tuple((at, head) for at, head in generation.get("alignment_heads") or default),
            suppressed=frozenset(generation.get("suppress_tokens") or ()),
            suppressed_first=frozenset(generation.get("begin_suppress_tokens") or ()),
        )


class VllmWhisper:
    """The engine, for models/host.py. Lives in one event loop."""

    def __init__(self, config: VllmConfig, log: Log) -> None:
        """``log``: takes an event's name and its fields. Raises RecognizerFailed where the files are not usable."""
        self._config = config
        self._log = log
        try:
            self._files = _Files.read(config.model_dir)
        except (OSError, ValueError, KeyError) as error:
            raise RecognizerFailed(f"cannot load {config.model_name} from {config.model_dir}: {error}") from error
        self._steps = Steps()
        self._drafts = drafts.Drafts(vllm_settings.KEPT_STATES) if config.drafts else None
        self._core: Core
        self._ladder: Ladder
        self._watch: asyncio.Task[None]

    @property
    def info(self) -> RecognizerInfo:
        """The model's name, its languages, and how many decodes run at once."""
        languages = frozenset(self._files.special.languages) or frozenset({"en"})
        sequences = self._core.settings.sequences  # each for as long as its decode lasts
        return RecognizerInfo(self._config.model_name, languages, sequences, workers=sequences)

    @property
    def core(self) -> "Core":
        """vLLM itself, for measurements. Not before ``start``."""
        return self._core

    async def start(self) -> None:
        """Load and warm up; blocks the loop while vLLM loads, half a minute or more. Raises RecognizerFailed."""
        self._core = Core.load(self._config, self._files, self._log)
        shaped = self._config.shaped and self._core.shaped
        config, tokenizer = replace(self._config, shaped=shaped), self._files.tokenizer
        self._ladder = Ladder(config, self._files.special, tokenizer.encode, tokenizer.decode)
        await self._core.warm_up()
        self._watch = asyncio.create_task(self._watch_health())

    async def decode(self, request: DecodeRequest) -> Hypothesis:
        """Answer the request. Cancelling aborts what vLLM is doing for it.

        Raises RecognizerFailed for audio or a language that the model cannot take, and where vLLM fails.
        """
        began = time.perf_counter()
        steps = Steps()
        listener: AsyncBackend = _Listener(self._core, self._drafts, steps, request)
        try:
            hypothesis = await climb_async(self._ladder.steps(request), listener)
        except Exception as error:
            if self._core.is_dead:  # then no error says anything about the request, which another process can answer
                self._leave()
            if isinstance(error, RuntimeError | ValueError):
                raise RecognizerFailed(f"decoding failed: {error}") from error
            raise
        finally:
            self._steps.add(steps)
        took_s = time.perf_counter() - began
        return replace(hypothesis, decode_s=took_s, decoder_steps=steps.taken, decoder_steps_saved=steps.saved)

    async def close(self) -> None:
        """End vLLM's processes."""
        self._watch.cancel()
        self._report()
        self._core.close()

    async def _watch_health(self) -> None:
        """Notice that vLLM's processes are gone while nobody asks."""
        for tick in itertools.count(1):
            await asyncio.sleep(_HEALTH_INTERVAL_S)
            if self._core.is_dead:
                self._leave()
            if tick % int(_REPORT_INTERVAL_S / _HEALTH_INTERVAL_S) == 0:
                self._report()

    def _leave(self) -> NoReturn:
        """Nothing can be answered any more: the parent starts another process and asks it what this one held."""
        self._log("stopped", reason="vLLM's engine core is gone")
        os._exit(1)  # vLLM's threads would keep the process

    def _report(self) -> None:
        steps = self._steps
        self._log("decoder_steps", taken=steps.taken, saved=steps.saved, drafts=steps.drafts, held=steps.drafts_held)


# --- vLLM ------------------------------------------------------------------------------------------------------------


class Core:
    """The running AsyncLLM, asked in tokens and features."""

    def __init__(
        self, llm: Any, files: _Files, settings: vllm_settings.VllmSettings, *, shaped: bool, margin_s: float
    ) -> None:
        from models.vllm_plugin.features import LogMel

        self.llm = llm
        self.files = files
        self.settings = settings
        self.shaped = shaped
        self.log_mel = LogMel(files.shape.mel_bins)
        self.margin_samples = int(margin_s * SAMPLE_RATE)
        self._numbers = itertools.count(1)
        self._bias = dict.fromkeys(files.suppressed, _FORBIDDEN)

    @classmethod
    def load(cls, config: VllmConfig, files: _Files, log: Log) -> "Core":
        """Raises RecognizerFailed."""
        try:
            if moved := contract.moved_in_engine():
                raise RecognizerFailed(f"this vLLM cannot be used (tried: {', '.join(contract.TRIED)}): {moved}")
            settings = vllm_settings.choose(_device(), files.shape)
            os.environ.update(settings.environment)
            moved = contract.moved_in_model()
            log("vllm_settings", **settings.reasons, **_class_chosen(moved))
            llm = _load(config, files, settings, stock=bool(moved))
            return cls(llm, files, settings, shaped=not moved, margin_s=config.margin_s)
        except (OSError, RuntimeError, ValueError, ImportError) as error:
            raise RecognizerFailed(f"vLLM cannot load {config.model_name}: {error}") from error

    @property
    def is_dead(self) -> bool:
        return bool(self.llm.errored)

    def close(self) -> None:
        self.llm.shutdown(timeout=0)

    async def warm_up(self) -> None:
        """Run every length that is compiled, and what finds word times."""
        for positions in self.settings.warm_positions if self.shaped else (silence_tail.WINDOW_POSITIONS,):
            encoded = self.at_length(np.zeros(0, np.float32), positions)
            start = self.files.special.start_of_transcript
            await self.ask(encoded, [start, self.files.special.no_timestamps], self.parameters(cap=2))
        await self.attention(encoded.key, [start, self.files.special.no_timestamps], silence_tail.WINDOW_POSITIONS)

    async def encoded(self, audio: Float32, *, full: bool) -> "_Encoded":
        """Features for the encoder: the audio, shape (n,), a margin, and what makes the length one of few."""
        margin = self.margin_samples if self.shaped and not full else silence_tail.WINDOW_SAMPLES
        step = self.settings.position_step
        positions = -(-silence_tail.positions_to_encode(audio.shape[0], margin) // step) * step
        return await asyncio.to_thread(self.at_length, audio, positions)

    def at_length(self, audio: Float32, positions: int) -> "_Encoded":
        """Features of the audio, completed with silence to so many encoder positions (20 ms each)."""
        return _Encoded(next(self._numbers), self.log_mel(silence_tail.pad_to(audio, positions)))

    def parameters(self, *, cap: int, **fields: Any) -> Any:
        """vLLM's SamplingParams: greedy, without detokenizing, only the finished answer."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            **{
                "temperature": 0.0,
                "max_tokens": cap,
                "logit_bias": self._bias or None,
                "detokenize": False,
                "output_kind": RequestOutputKind.FINAL_ONLY,
                **fields,
            }
        )

    async def ask(self, encoded: "_Encoded", prompt: Sequence[int], parameters: Any, priority: int = 0) -> Any:
        """vLLM's last RequestOutput. Cancelling aborts."""
        async for output in self.stream(encoded, prompt, parameters, priority):
            answer = output
        return answer

    def stream(self, encoded: "_Encoded", prompt: Sequence[int], parameters: Any, priority: int) -> Any:
        """An asynchronous generator of vLLM's RequestOutputs. Closing it aborts."""
        item = encoded.engine_input(list(prompt), keep=self.shaped)
        return self.llm.generate(item, parameters, str(next(self._numbers)), priority=priority)

    async def attention(self, key: int, tokens: Sequence[int], positions: int) -> tuple[Float32, Float32] | None:
        """ShapedWhisper.attention. None where it cannot be told."""
        if not self.shaped:
            return None
        (found,) = await self.llm.collective_rpc("hark_attention", args=(key, list(tokens), positions))
        if found is None:
            return None
        weights, logprobs = (np.frombuffer(part, np.float32) for part in found)
        return weights.reshape(len(tokens), -1), logprobs


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A window's features, float32, shape (mel bins, frames), and the key of the states that come of them."""

    key: int
    log_mel: Any

    def engine_input(self, prompt: list[int], *, keep: bool) -> Any:
        """What vLLM's own processor would make of audio and text."""
        import torch
        from vllm.inputs import mm_input, tokens_input
        from vllm.multimodal.inputs import (
            MultiModalBatchedField,
            MultiModalFieldElem,
            MultiModalKwargsItem,
            MultiModalKwargsItems,
            PlaceholderRange,
        )

        field = MultiModalBatchedField()
        fields = {"input_features": MultiModalFieldElem(data=self.log_mel, field=field)}
        if keep:
            fields["state_key"] = MultiModalFieldElem(data=torch.tensor(self.key), field=field)
        decoder = mm_input(
            prompt_token_ids=prompt,
            mm_kwargs=MultiModalKwargsItems({"audio": [MultiModalKwargsItem(fields)]}),
            mm_hashes={"audio": [str(self.key)]},
            mm_placeholders={"audio": [PlaceholderRange(offset=0, length=silence_tail.WINDOW_POSITIONS)]},
        )
        encoder = tokens_input([0] * silence_tail.WINDOW_POSITIONS)
        return {"type": "enc_dec", "encoder_prompt": encoder, "decoder_prompt": decoder}


def _device() -> vllm_settings.Device:
    """What vLLM will run on. Asked of its platform, since torch would take GPU memory for a context here."""
    from vllm.platforms import current_platform

    cpus = len(os.sched_getaffinity(0))
    if current_platform.is_cpu():
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return vllm_settings.Device("cpu", "CPU", memory, cpus=cpus)
    capability = current_platform.get_device_capability()
    return vllm_settings.Device(
        kind="cuda" if current_platform.is_cuda() else str(current_platform.device_name),
        name=str(current_platform.get_device_name()),
        memory_bytes=int(current_platform.get_device_total_memory()),
        capability=(capability.major, capability.minor) if capability else (0, 0),
        cpus=cpus,
    )


def _class_chosen(moved: str) -> dict[str, str]:
    import vllm

    tried = f"vLLM {vllm.__version__}, tried: {', '.join(contract.TRIED)}"
    if moved:
        return {"model_class": f"stock, 30 s windows and estimated word times, because {moved} has moved ({tried})"}
    return {"model_class": f"shaped ({tried})"}


def _load(config: VllmConfig, files: _Files, settings: vllm_settings.VllmSettings, *, stock: bool) -> Any:
    import torch
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    torch.set_num_threads(1)  # for features, in this process: the cores are the model's
    arguments: dict[str, Any] = {"model": str(config.model_dir), **settings.engine}
    if not stock:
        arguments |= {
            "hf_overrides": {"architectures": [ARCHITECTURE]},
            "worker_extension_cls": "models.vllm_plugin.worker.WorkerExtension",
            "additional_config": {
                OPTIONS: {
                    "kept_states": vllm_settings.KEPT_STATES,
                    "alignment_heads": files.alignment_heads,
                    "compile": settings.compile_encoder,
                }
            },
        }
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


# --- one request -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Said:
    """What followed a prompt, and how likely it was: the sum of the logarithms, over the end of text too."""

    tokens: tuple[int, ...]
    logprob: float
    capped: bool
    no_speech: float
    steps: int


class _Listener:
    """The ladder's backend for one request."""

    def __init__(self, core: Core, known: drafts.Drafts | None, steps: Steps, request: DecodeRequest) -> None:
        self._core = core
        self._special = core.files.special
        self._known = known
        self._steps = steps
        self._request = request
        self._audio = to_float32(request.audio)
        self._draft_key = drafts.key(request) if known else None
        self._windows: dict[Window, _Encoded] = {}

    async def detect(self, step: Detect) -> LanguageShares:
        ids = list(self._special.languages.values())
        asked = self._core.parameters(cap=1, logit_bias=None, logprob_token_ids=ids)
        answer = await self._ask(await self._encoded(step.window), [self._special.start_of_transcript], asked)
        logprobs = answer.outputs[0].logprobs[0]
        weights = {code: math.exp(logprobs[token].logprob) for code, token in self._special.languages.items()}
        total = sum(weights.values())
        return [(code, weight / total) for code, weight in weights.items()]

    async def decode(self, step: Decode) -> Decoded:
        encoded = await self._encoded(step.window)
        draft = self._draft(step)
        said = await self._checked(encoded, step, draft) if draft else await self._free(encoded, step)
        whole = len(said.tokens) + (not said.capped)  # steps from scratch: a token each, and the end of text
        self._steps.taken += said.steps
        self._steps.saved += max(0, whole - said.steps)
        text = tuple(token for token in said.tokens if token < self._special.end_of_text)
        if self._known and self._draft_key and self._may_draft(step):
            self._known.remember(self._draft_key, text)
        return Decoded(
            tokens=text,
            timing=await self.align(Align(step.window, step.start, (*step.prefix, *text))),
            capped=said.capped,
            average_logprob=said.logprob / max(1, whole),
            no_speech_probability=said.no_speech,
        )

    async def align(self, step: Align) -> Timing:
        if not step.tokens:
            return Timing((0,), ())
        encoded = await self._encoded(step.window)
        special = self._special
        tokens = [*step.start, special.no_timestamps, *step.tokens, special.end_of_text]
        positions = -(-step.window.samples // silence_tail.SAMPLES_PER_POSITION)
        seen = await self._core.attention(encoded.key, tokens, positions)
        if seen is None:
            return await asyncio.to_thread(self._estimated, step)
        weights, logprobs = seen
        first = len(step.start)  # of the row that predicts the text's first token
        path = await asyncio.to_thread(word_alignment.warp, weights[first:-1])
        begins = whisper_text.token_positions(path, len(step.tokens))
        return Timing(begins, np.exp(logprobs[first:-1]).tolist())

    def _estimated(self, step: Align) -> Timing:
        audio = self._audio[step.window.begin_sample : step.window.end_sample]
        lengths = [len(self._core.files.tokenizer.decode([token])) for token in step.tokens]
        return Timing(word_alignment.estimate(audio, lengths), [1.0] * len(lengths))

    # Decoding

    async def _free(self, encoded: _Encoded, step: Decode) -> _Said:
        """From the prompt alone. The empty text is for the no-speech guard to find, not for the decoder to choose."""
        asked = self._core.parameters(
            cap=step.cap,
            temperature=step.temperature,
            min_tokens=0 if step.prefix else 1,
            logprobs=0,
            prompt_logprobs=_TOP_TOKENS,
        )
        answer = await self._ask(encoded, step.prompt, asked)
        return _said(answer, no_speech=self._no_speech(step, answer.prompt_logprobs))

    async def _checked(self, encoded: _Encoded, step: Decode, draft: tuple[int, ...]) -> _Said:
        """From the prompt and a draft; as soon as the draft is found wrong, from what of it is right."""
        from vllm.sampling_params import RequestOutputKind

        asked = self._core.parameters(
            cap=step.cap - len(draft),
            logprobs=0,
            prompt_logprobs=_TOP_TOKENS,
            output_kind=RequestOutputKind.CUMULATIVE,
            stream_interval=whisper_text.MAX_LENGTH_TOKENS,  # the first output, with the verdict, and the last
        )
        self._steps.drafts += 1
        outputs = self._core.stream(encoded, [*step.prompt, *draft], asked, self._request.priority)
        verdict: drafts.Verdict | None = None
        async with contextlib.aclosing(outputs):
            async for answer in outputs:
                if verdict is None:
                    no_speech = self._no_speech(step, answer.prompt_logprobs)
                    verdict = _verdict(draft, answer.prompt_logprobs[len(step.prompt) :])
                    if verdict.kept < len(draft):
                        break
        assert verdict is not None  # a finished request has had an output
        if verdict.kept < len(draft):
            return await self._corrected(encoded, step, draft[: verdict.kept], verdict, no_speech)
        self._steps.drafts_held += 1
        said = _said(answer, no_speech=no_speech)
        return replace(said, tokens=(*draft, *said.tokens), logprob=verdict.logprob + said.logprob)

    async def _corrected(
        self, encoded: _Encoded, step: Decode, kept: tuple[int, ...], verdict: drafts.Verdict, no_speech: float
    ) -> _Said:
        """From the right part of a draft and the token that the decoder wants next, where it is allowed."""
        files, logprob = self._core.files, verdict.logprob
        forbidden = files.suppressed if kept else files.suppressed | files.suppressed_first
        if verdict.choice not in forbidden:
            logprob += verdict.choice_logprob
            if verdict.choice == self._special.end_of_text:
                return _Said(kept, logprob, capped=False, no_speech=no_speech, steps=1)
            kept = (*kept, verdict.choice)
        asked = self._core.parameters(cap=step.cap - len(kept), min_tokens=0 if kept else 1, logprobs=0)
        said = _said(await self._ask(encoded, (*step.prompt, *kept), asked), no_speech=no_speech)
        return replace(said, tokens=(*kept, *said.tokens), logprob=logprob + said.logprob, steps=said.steps + 1)

    def _may_draft(self, step: Decode) -> bool:
        return step.temperature == 0.0 and not step.prefix and step.window.begin_sample == 0

    def _draft(self, step: Decode) -> tuple[int, ...]:
        if not (self._known and self._draft_key and self._may_draft(step)):
            return ()
        room = min(step.cap, whisper_text.MAX_LENGTH_TOKENS - len(step.prompt)) - 1
        return self._known.offer(self._draft_key)[: max(0, room)]

    # Asking

    async def _encoded(self, window: Window) -> _Encoded:
        if window not in self._windows:
            audio = self._audio[window.begin_sample : window.end_sample]
            self._windows[window] = await self._core.encoded(audio, full=window.full)
        return self._windows[window]

    async def _ask(self, encoded: _Encoded, prompt: Sequence[int], parameters: Any) -> Any:
        return await self._core.ask(encoded, prompt, parameters, self._request.priority)

    def _no_speech(self, step: Decode, prompt_logprobs: Sequence[Mapping[int, Any]]) -> float:
        """Probability of <|nospeech|> after <|startoftranscript|>; 0 where it is not among the likeliest."""
        after_start = step.prompt.index(self._special.start_of_transcript) + 1
        found = prompt_logprobs[after_start].get(self._core.files.no_speech)
        return math.exp(found.logprob) if found else 0.0


def _said(answer: Any, *, no_speech: float) -> _Said:
    """The text of a finished answer, without its end."""
    output = answer.outputs[0]
    capped = output.finish_reason == "length"
    tokens = tuple(output.token_ids)
    return _Said(tokens if capped else tokens[:-1], output.cumulative_logprob, capped, no_speech, len(tokens))


def _verdict(draft: Sequence[int], rows: Sequence[Mapping[int, Any]]) -> drafts.Verdict:
    """``rows``: what vLLM tells of the draft's places, the token that is there and the likeliest ones."""
    best = [next((token, at.logprob) for token, at in row.items() if at.rank == 1) for row in rows]
    return drafts.judge(draft, [row[token].logprob for token, row in zip(draft, rows, strict=True)], best)
