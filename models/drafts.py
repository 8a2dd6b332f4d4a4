"""Pure: what was heard in the beginning of this audio before, offered to the decoder as a draft of its text.

A growing utterance is decoded again and again, and most of its text does not change. The decoder checks a draft in one
pass; what it would have chosen itself is kept, and it goes on from there. So the text is that of decoding from scratch,
whatever the draft is.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from streaming.types import DecodeRequest, Task

_KEY_SAMPLES = 6_400  # 0.4 s: less than any partial has
_DROPPED_TOKENS = 2  # a draft's last ones were said at a cut; see docs/vllm.md

Key = tuple[bytes, int, Task]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far a draft holds: ``kept`` of its tokens, and what the decoder would say next where it does not hold.

    ``logprob``: the sum over the kept ones. ``choice`` and ``choice_logprob`` mean nothing where all are kept.
    """

    kept: int
    logprob: float
    choice: int
    choice_logprob: float


def judge(draft: Sequence[int], logprobs: Sequence[float], best: Sequence[tuple[int, float]]) -> Verdict:
    """Compare a draft's tokens, and their log-probabilities, with the likeliest ones at their places."""
    for place, (token, (choice, choice_logprob)) in enumerate(zip(draft, best, strict=True)):
        if token != choice:
            return Verdict(place, sum(logprobs[:place]), choice, choice_logprob)
    return Verdict(len(draft), sum(logprobs), 0, 0.0)


def key(request: DecodeRequest) -> Key | None:
    """What names the utterance a request belongs to: how its audio begins. None where the audio is too short to tell.

    ``request_id`` and ``utterance_id`` count within a session, and the engine does not know sessions.
    """
    if request.audio.shape[0] < _KEY_SAMPLES:
        return None
    return (
        hashlib.blake2b(request.audio[:_KEY_SAMPLES].tobytes(), digest_size=16).digest(),
        request.start_sample,
        request.options.task,
    )


class Drafts:
    """The last texts of the ``capacity`` utterances that were heard last."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._tokens: OrderedDict[Key, tuple[int, ...]] = OrderedDict()

    def remember(self, name: Key, tokens: Sequence[int]) -> None:
        self._tokens[name] = tuple(tokens)
        self._tokens.move_to_end(name)
        while len(self._tokens) > self._capacity:
            self._tokens.popitem(last=False)

    def offer(self, name: Key) -> tuple[int, ...]:
        """The draft; empty where there is none."""
        return self._tokens.get(name, ())[:-_DROPPED_TOKENS]
