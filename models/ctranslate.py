"""Whisper on CTranslate2: the default engine. Synchronous; called from several threads of the engine process at once.

models/ladder.py says what to ask and which answer stands; here it is asked.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import ctranslate2
import numpy as np
from faster_whisper.feature_extractor import FeatureExtractor
from numpy.typing import NDArray

from models import silence_tail, whisper_text
from models.ladder import (
    Align,
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
)
from models.tokenizer import Tokenizer
from streaming.audio import SAMPLE_RATE, to_float32
from streaming.errors import RecognizerFailed
from streaming.types import DecodeRequest, Float32, Hypothesis, RecognizerInfo


@dataclass(frozen=True, slots=True)
class CtranslateConfig(LadderConfig):
    """What to load and how to run it.

    ``device``: "cpu", "cuda", or "auto" (cuda where there is one). ``compute_type``: a CTranslate2 type, or "auto"
    (int8 on a CPU, float16 on a GPU). ``workers`` decodes run at once, each with ``threads_per_worker`` threads.
    """

    model_dir: Path
    model_name: str
    workers: int
    threads_per_worker: int
    device: str = "auto"
    compute_type: str = "auto"

    def __post_init__(self) -> None:
        LadderConfig.__post_init__(self)  # super() does not know the class that slots=True makes
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device must be auto, cpu or cuda, not {self.device}")
        if self.workers < 1 or self.threads_per_worker < 1:
            raise ValueError("workers and threads_per_worker must be at least 1")


class CtranslateWhisper:
    """A loaded model. Thread-safe: the model's own queue hands decodes to its workers, and nothing here changes."""

    def __init__(self, config: CtranslateConfig) -> None:
        """Load the model and compute the silence tail (one encode). Raises RecognizerFailed where it cannot."""
        self._config = config
        try:
            self._model = _load(config)
            tokenizer = Tokenizer(config.model_dir / "tokenizer.json")
            self._special = whisper_text.SpecialTokens.look_up(
                tokenizer.id_of, multilingual=self._model.is_multilingual
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise RecognizerFailed(f"cannot load {config.model_name} from {config.model_dir}: {error}") from error
        self._ladder = Ladder(config, self._special, tokenizer.encode, tokenizer.decode)
        self._features = FeatureExtractor(feature_size=self._model.n_mels)
        self._tail = self._encode_features(silence_tail.silent_log_mel(self._model.n_mels))
        self._info = RecognizerInfo(
            model=config.model_name,
            languages=frozenset(self._special.languages) or frozenset({"en"}),
            capacity=config.workers,
        )

    @property
    def info(self) -> RecognizerInfo:
        """The model's name, its languages, and how many decodes run at once."""
        return self._info

    def decode(self, request: DecodeRequest) -> Hypothesis:
        """Answer the request; blocks for the decode, without the interpreter lock for most of it.

        Raises RecognizerFailed for audio or a language the model cannot take, and where CTranslate2 fails.
        """
        began = time.perf_counter()
        try:
            hypothesis = climb(self._ladder.steps(request), self._backend(to_float32(request.audio)))
        except (RuntimeError, ValueError) as error:
            raise RecognizerFailed(f"decoding failed: {error}") from error
        return replace(hypothesis, decode_s=time.perf_counter() - began)

    def _backend(self, audio: Float32) -> Backend:
        return _Listener(self._model, self._special.end_of_text, audio, self._encode)

    def _encode(self, audio: Float32, full: bool) -> ctranslate2.StorageView:
        """Audio, shape (n,), → encoder states, shape (1, 1500, d): real ones for the audio, then the silence tail."""
        margin_samples = silence_tail.WINDOW_SAMPLES if full else int(self._config.margin_s * SAMPLE_RATE)
        positions = silence_tail.positions_to_encode(audio.shape[0], margin_samples)
        log_mel = self._features(silence_tail.pad_to(audio, positions), padding=0)
        states = silence_tail.append_tail(self._encode_features(log_mel), self._tail)
        return ctranslate2.StorageView.from_array(np.ascontiguousarray(states))

    def _encode_features(self, log_mel: Float32) -> NDArray[np.generic]:
        features = ctranslate2.StorageView.from_array(np.ascontiguousarray(log_mel[np.newaxis], dtype=np.float32))
        return np.array(self._model.encode(features, to_cpu=True))


class _Listener:
    """The ladder's backend for one request: its audio, of which each window is encoded once."""

    def __init__(
        self,
        model: ctranslate2.models.Whisper,
        end_of_text: int,
        audio: Float32,
        encode: Callable[[Float32, bool], ctranslate2.StorageView],
    ) -> None:
        self._model = model
        self._end_of_text = end_of_text
        self._audio = audio
        self._encode = encode
        self._encoded: dict[Window, ctranslate2.StorageView] = {}  # at most two, and two for each gap: some 60 MB

    def detect(self, step: Detect) -> LanguageShares:
        return [(token[2:-2], share) for token, share in self._model.detect_language(self._states(step.window))[0]]

    def decode(self, step: Decode) -> Decoded:
        result = self._model.generate(
            self._states(step.window),
            [list(step.prompt)],
            beam_size=1,
            sampling_topk=1 if step.temperature == 0.0 else 0,
            sampling_temperature=step.temperature or 1.0,
            # CTranslate2 stops at half of it, or at it less the prompt.
            max_length=max(2 * step.cap, len(step.prompt) + step.cap),
            suppress_blank=not step.prefix,
            return_scores=True,
            return_no_speech_prob=True,
        )[0]
        # CTranslate2 counts what follows <|notimestamps|> in its prompt as part of the result.
        count, forced = len(result.sequences_ids[0]), len(step.prefix)
        said = tuple(token for token in result.sequences_ids[0][forced:] if token < self._end_of_text)
        return Decoded(
            tokens=said,
            timing=self.align(Align(step.window, step.start, (*step.prefix, *said))),
            capped=count - forced >= step.cap,
            # The score is a mean over all of them, in which a forced token counts 0.
            average_logprob=result.scores[0] * count / (count - forced + 1),
            no_speech_probability=result.no_speech_prob,
        )

    def align(self, step: Align) -> Timing:
        if not step.tokens:
            return Timing((0,), ())
        frames = -(-step.window.samples // silence_tail.HOP_SAMPLES)
        aligned = self._model.align(self._states(step.window), list(step.start), [list(step.tokens)], frames)[0]
        positions = whisper_text.token_positions(aligned.alignments, len(step.tokens))
        return Timing(positions, aligned.text_token_probs)

    def _states(self, window: Window) -> ctranslate2.StorageView:
        if window not in self._encoded:
            audio = self._audio[window.begin_sample : window.end_sample]
            self._encoded[window] = self._encode(audio, window.full)
        return self._encoded[window]


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
