"""Whisper for vLLM with a shaped encoder: entry point ``hark_whisper`` of the group ``vllm.general_plugins``.

vLLM calls ``register`` in each of its processes before it looks for a model's class. Nothing heavy is imported here.
"""

import ctypes
import multiprocessing
import signal
import sys

ARCHITECTURE = "HarkWhisperForConditionalGeneration"
OPTIONS = "hark"  # our key in vLLM's additional_config
_PR_SET_PDEATHSIG = 1  # prctl(2)


def register() -> None:
    """Make the model known under ``ARCHITECTURE``; models/vllm_engine.py chooses it.

    vLLM's own processes die with their parent from here on: they would go on for ever, with the GPU's memory, where the
    engine process is killed.
    """
    from vllm import ModelRegistry

    if sys.platform == "linux" and multiprocessing.parent_process():
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    ModelRegistry.register_model(ARCHITECTURE, "models.vllm_plugin.model:ShapedWhisper")
