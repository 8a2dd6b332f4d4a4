"""What the engine asks of vLLM's worker process besides decoding: methods that vLLM adds to its worker class."""

from collections.abc import Sequence
from typing import Any


class WorkerExtension:
    """Called through AsyncLLM.collective_rpc, between two steps of the engine's loop."""

    model_runner: Any

    def hark_attention(self, key: int, tokens: Sequence[int], positions: int) -> tuple[bytes, bytes] | None:
        """ShapedWhisper.attention, as bytes: vLLM would send tensors as lists of numbers."""
        found = self.model_runner.get_model().attention(key, tokens, positions)
        return found and tuple(part.cpu().numpy().tobytes() for part in found)

    def hark_encoder_runs(self) -> int:
        """How often the encoder ran since the model was loaded."""
        return int(self.model_runner.get_model().encoder_runs)
