"""What both Pipecat scripts do with their service: a pipeline that is fed as by a microphone; tells the frames."""

import asyncio

from common import FRAME_MS, SPEED, frames, pcm, tell
from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    Frame,
    InputAudioRawFrame,
    InterimTranscriptionFrame,
    TranscriptionFrame,
    VADUserStartedSpeakingFrame,
    VADUserStoppedSpeakingFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineParams, PipelineTask
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.stt_service import STTService

RATE_HZ = 16_000
SENTENCE_S = 2.64
TOLD = (ErrorFrame, InterimTranscriptionFrame, TranscriptionFrame)


class Teller(FrameProcessor):
    """The pipeline's end: tells what is said, and when enough has been."""

    def __init__(self, finals: int) -> None:
        super().__init__()
        self._left = finals
        self.enough = asyncio.Event()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TOLD):
            told = frame.error if isinstance(frame, ErrorFrame) else frame.text
            tell(kind=type(frame).__name__, text=told)
        if isinstance(frame, TranscriptionFrame):
            self._left -= 1
            if not self._left:
                self.enough.set()
        await self.push_frame(frame, direction)


async def run(service: STTService, *, vad_frames: bool) -> None:
    """``vad_frames``: with the frames of the pipeline's own voice detector, on which services ask for the final."""
    teller = Teller(finals=2)
    params = PipelineParams(audio_in_sample_rate=RATE_HZ)
    task = PipelineTask(Pipeline([service, teller]), params=params, cancel_on_idle_timeout=False)
    feeding = asyncio.create_task(_feed(task, teller, vad_frames))
    async with asyncio.timeout(90):
        await PipelineRunner(handle_sigint=False).run(task)
    await feeding


async def _feed(task: PipelineTask, teller: Teller, vad_frames: bool) -> None:
    for _ in range(2):
        if vad_frames:
            await task.queue_frame(VADUserStartedSpeakingFrame())
        audio = pcm("talk", RATE_HZ)
        half = len(audio) // 2
        for number, data in enumerate(frames(audio[:half], RATE_HZ)):
            if vad_frames and number == round((SENTENCE_S + 0.2) * 1000 / FRAME_MS):
                await task.queue_frame(VADUserStoppedSpeakingFrame())
            await task.queue_frame(InputAudioRawFrame(audio=data, sample_rate=RATE_HZ, num_channels=1))
            await asyncio.sleep(FRAME_MS / 1000 / SPEED)
    async with asyncio.timeout(30):
        await teller.enough.wait()
    await task.queue_frame(EndFrame())
