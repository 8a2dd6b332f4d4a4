"""faster-whisper's own batched pipeline over one file. Runs in that peer's environment and imports nothing else.

    python batched.py WEIGHTS FILE WARM_UP_FILE LANGUAGE BEAM_SIZE

Prints one JSON line: the text, the seconds it took (loading the model and a first short file excluded), the options.
"""

import json
import sys
import time
from typing import Any

import ctranslate2
from faster_whisper import BatchedInferencePipeline, WhisperModel

BATCH_SIZE = 8  # of its README


def main(weights: str, path: str, warm_up: str, language: str, beam_size: str) -> None:
    # What its README takes, and what Hark takes too.
    compute_type = "float16" if ctranslate2.get_cuda_device_count() else "int8"
    model = WhisperModel(weights, device="auto", compute_type=compute_type, local_files_only=True)
    pipeline = BatchedInferencePipeline(model=model)
    options: dict[str, Any] = {"batch_size": BATCH_SIZE}
    if language:
        options["language"] = language
    if beam_size != "default":
        options["beam_size"] = int(beam_size)
    _transcribe(pipeline, warm_up, options)
    began_s = time.perf_counter()
    text = _transcribe(pipeline, path, options)
    taken_s = time.perf_counter() - began_s
    print(json.dumps({"text": text, "seconds": taken_s, "options": options, "compute_type": compute_type}))


def _transcribe(pipeline: Any, path: str, options: dict[str, Any]) -> str:
    segments, _ = pipeline.transcribe(path, **options)
    return " ".join(segment.text.strip() for segment in segments)


if __name__ == "__main__":
    main(*sys.argv[1:])
