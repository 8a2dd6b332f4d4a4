"""vLLM's Whisper that encodes the audio there is, not always 30 s, and can tell where its words lie.

The window's remaining positions are filled with the states of pure silence (models/silence_tail.py). So the decoder
always attends to 1500 positions, and everything that vLLM knows about lengths stays as it is for the stock class.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn import functional
from vllm.config import VllmConfig
from vllm.model_executor.models.whisper import WhisperForConditionalGeneration

from models.silence_tail import SILENT_LOG_MEL, WINDOW_FRAMES, WINDOW_POSITIONS
from models.vllm_plugin import OPTIONS

_MOST_LENGTHS = 64


class ShapedWhisper(WhisperForConditionalGeneration):  # type: ignore[misc]
    """The stock class with another ``embed_multimodal``, and ``attention`` for word times.

    A request's features may have any even number of frames up to 3000. Its ``state_key`` names its audio: requests
    with the same key share one run of the encoder, while it is among the ``kept_states`` last ones.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        options = vllm_config.additional_config[OPTIONS]
        self._kept_states = int(options["kept_states"])
        self._alignment_heads = [tuple(pair) for pair in options["alignment_heads"]]
        if options["compile"]:
            _compile(self.model.encoder.layers)
        self._tail: torch.Tensor | None = None
        self._states: OrderedDict[int, torch.Tensor] = OrderedDict()
        self.encoder_runs = 0

    def embed_multimodal(
        self,
        *,
        input_features: torch.Tensor | Sequence[torch.Tensor],
        state_key: torch.Tensor | Sequence[torch.Tensor] | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, ...]:
        """Features, each (mel bins, frames) → states, each (1500, d). One at a time: few shapes for the compiler."""
        keys = [None] * len(input_features) if state_key is None else [int(key) for key in state_key]
        return tuple(self._window(self._encoded(f, k)) for f, k in zip(input_features, keys, strict=True))

    def _encoded(self, features: torch.Tensor, key: int | None) -> torch.Tensor:
        """States of the features, (frames / 2, d)."""
        if key is not None and key in self._states:
            self._states.move_to_end(key)
            return self._states[key]
        self.encoder_runs += 1
        states: torch.Tensor = self.model.encoder(features.to(self.dtype)[None])[0]
        if key is not None:
            self._states[key] = states
            while len(self._states) > self._kept_states:
                self._states.popitem(last=False)
        return states

    def _window(self, states: torch.Tensor) -> torch.Tensor:
        """States completed to (1500, d)."""
        if states.shape[0] == WINDOW_POSITIONS:
            return states
        if self._tail is None:  # not at loading: some back ends change the weights' layout after that
            silence = states.new_full((self.config.num_mel_bins, WINDOW_FRAMES), SILENT_LOG_MEL)
            self._tail = self._encoded(silence, None)
        return torch.cat((states, self._tail[states.shape[0] :]))

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def attention(self, key: int, tokens: Sequence[int], positions: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Where the decoder looks, and what it thinks of tokens that are given: one pass without vLLM's caches.

        ``tokens`` are a whole transcript from <|startoftranscript|> on, ``positions`` those with audio. Returns what
        models/word_alignment.py aligns by, (tokens, positions), and log-probabilities of the tokens after the first,
        (tokens - 1,), both float32; None where the audio's states are no longer kept.
        """
        states = self._states.get(key)
        if states is None:
            return None
        window, decoder = self._window(states), self.model.decoder
        ids = torch.tensor(tokens, device=window.device)
        x = decoder.embed_tokens(ids) + decoder.embed_positions(torch.arange(len(tokens), device=window.device))
        seen: list[torch.Tensor] = []
        for number, layer in enumerate(decoder.layers):
            x = x + _self_attention(layer.self_attn, layer.self_attn_layer_norm(x))
            cross, queries, keys = _cross_attention(layer.encoder_attn, layer.encoder_attn_layer_norm(x), window)
            x = x + cross
            heads = [head for at, head in self._alignment_heads if at == number]
            if heads:
                scaled = queries[heads] * layer.encoder_attn.scaling
                seen.append(scaled @ keys[heads, :positions].transpose(1, 2))
            x = x + layer.mlp(layer.final_layer_norm(x))
        logits = self.compute_logits(decoder.layer_norm(x[:-1]))
        chosen = logits.float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        return _sharpened(torch.cat(seen).float().softmax(-1)), chosen


def _compile(layers: Iterable[torch.nn.Module]) -> None:
    """Compile layer by layer: they share their code, so each length of audio is compiled once, not once a layer."""
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, _MOST_LENGTHS)  # beyond it dynamo gives up compiling
    for layer in layers:
        layer.compile(dynamic=False)


_MEDIAN_POSITIONS = 7


def _sharpened(weights: torch.Tensor) -> torch.Tensor:
    """Attention, (heads, tokens, positions) → (tokens, positions): normal over the tokens, smooth in time, averaged."""
    deviation, mean = torch.std_mean(weights, dim=-2, keepdim=True, correction=0)
    normal = (weights - mean) / deviation.clamp_min(1e-8)
    side = _MEDIAN_POSITIONS // 2
    if normal.shape[-1] > side:  # reflection needs more than it adds
        padded = functional.pad(normal, (side, side), mode="reflect")
        normal = padded.unfold(-1, _MEDIAN_POSITIONS, 1).median(dim=-1).values
    return normal.mean(dim=0)


def _heads(x: torch.Tensor, module: Any) -> torch.Tensor:
    """(n, heads * size) → (heads, n, size)."""
    return x.view(x.shape[0], module.num_heads, module.head_dim).transpose(0, 1)


def _self_attention(module: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (_heads(part, module) for part in module.qkv_proj(x)[0].chunk(3, dim=-1))
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    out: torch.Tensor = module.out_proj(mixed.transpose(0, 1).flatten(1))[0]
    return out


def _cross_attention(
    module: Any, x: torch.Tensor, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the layer adds, and the queries and keys it came from."""
    q = _heads(module.q_proj(x)[0], module)
    k, v = (_heads(part, module) for part in module.kv_proj(states)[0].chunk(2, dim=-1))
    mixed = functional.scaled_dot_product_attention(q, k, v)
    return module.out_proj(mixed.transpose(0, 1).flatten(1))[0], q, k
