"""Which of vLLM's internals the model class and the engine rely on, compared with the vLLM that is there.

vLLM promises none of them. A version whose internals moved is told at start-up, in one line, and not by wrong text.
"""

import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any

TRIED = ("0.32.0",)

_WHISPER = "vllm.model_executor.models.whisper"
# Callable → parameters that must be there.
_MODEL_CALLS = {
    f"{_WHISPER}:WhisperForConditionalGeneration.embed_multimodal": ("kwargs",),
    f"{_WHISPER}:WhisperForConditionalGeneration.compute_logits": ("hidden_states",),
    f"{_WHISPER}:WhisperEncoder.forward": ("input_features",),
    f"{_WHISPER}:WhisperModel.forward": ("input_ids", "positions", "encoder_outputs"),
    "vllm:ModelRegistry.register_model": ("model_arch", "model_cls"),
}
# Class → attributes that its code must name as its own.
_MODEL_ATTRIBUTES = {
    f"{_WHISPER}:WhisperForConditionalGeneration": ("config", "dtype", "model"),
    f"{_WHISPER}:WhisperModel": ("encoder", "decoder"),
    f"{_WHISPER}:WhisperEncoder": ("layers", "layer_norm"),
    f"{_WHISPER}:WhisperDecoder": ("embed_tokens", "embed_positions", "layers", "layer_norm"),
    f"{_WHISPER}:WhisperDecoderLayer": (
        *("self_attn", "self_attn_layer_norm", "encoder_attn", "encoder_attn_layer_norm", "mlp", "final_layer_norm"),
    ),
    f"{_WHISPER}:WhisperAttention": ("num_heads", "head_dim", "scaling", "out_proj", "qkv_proj"),
    f"{_WHISPER}:WhisperCrossAttention": ("q_proj", "kv_proj"),
}
_ENGINE_CALLS = {
    "vllm.v1.engine.async_llm:AsyncLLM.generate": ("prompt", "sampling_params", "request_id", "priority"),
    "vllm.v1.engine.async_llm:AsyncLLM.collective_rpc": ("method", "args"),
    "vllm.inputs:tokens_input": ("prompt_token_ids",),
    "vllm.inputs:mm_input": ("prompt_token_ids", "mm_kwargs", "mm_hashes", "mm_placeholders"),
    "vllm.multimodal.inputs:MultiModalFieldElem": ("data", "field"),
    "vllm.multimodal.inputs:MultiModalKwargsItem": (),
    "vllm.multimodal.inputs:MultiModalKwargsItems": (),
    "vllm.multimodal.inputs:MultiModalBatchedField": (),
    "vllm.multimodal.inputs:PlaceholderRange": ("offset", "length"),
    "vllm:SamplingParams": (
        *("temperature", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "logprob_token_ids"),
        *("logit_bias", "detokenize", "output_kind", "stream_interval"),
    ),
}


def moved_in_model() -> str:
    """What the model class relies on and does not find, "" where it finds everything."""
    return _missing(_MODEL_CALLS, _parameters) or _missing(_MODEL_ATTRIBUTES, _named)


def moved_in_engine() -> str:
    """Likewise for the engine, which cannot do without."""
    return _missing(_ENGINE_CALLS, _parameters)


def _missing(wanted: Mapping[str, tuple[str, ...]], names: Any) -> str:
    for path, required in wanted.items():
        try:
            there = names(_find(path))
        except (ImportError, AttributeError, ValueError, TypeError, OSError):
            return path
        for name in required:
            if name not in there:
                return f"{path} without {name}"
    return ""


def _find(path: str) -> Any:
    module, _, dotted = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in dotted.split("."):
        found = getattr(found, name)
    return found


def _parameters(callable_: Any) -> set[str]:
    return set(inspect.signature(callable_).parameters)


def _named(cls: Any) -> set[str]:
    return set(re.findall(r"self\.(\w+)", inspect.getsource(cls)))
