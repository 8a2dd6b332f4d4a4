"""Pure: which of the waiting steps an engine's worker takes up next, and which others it can answer in the same call.

A request is a chain of steps: encode, perhaps detect the language, decode, align. A worker that takes steps instead of
whole requests can let a live final in between the steps of a partial, and can decode several requests at once: a
decoder step reads all of the decoder's weights, and reads them once for a whole batch (docs/performance.md).
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from streaming.types import Priority


class Kind(IntEnum):
    """What a step is, in the order of their turns among equals.

    Aligning ends a request, so it goes first. Encoding goes before decoding, so that decodes come together: eight
    encodes in one call cost as much as eight calls, eight decodes a third of it.
    """

    ALIGN = 0
    DETECT = 1
    ENCODE = 2
    DECODE = 3


@dataclass(frozen=True, slots=True)
class Waiting:
    """A step that may be taken up. ``order``: of its request, the oldest is the smallest.

    Steps of one ``group`` can share a call; None is alone. ``length``: decoder steps that it is expected to take.
    """

    kind: Kind
    priority: Priority
    order: int
    group: Hashable = None
    length: int = 0


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """``max_batch``: steps in one call.

    A call lasts as long as the longest answer in it. So who has less right than the one that leads the call comes along
    only where it is expected to take at most ``spread`` times as long and ``slack`` decoder steps more.
    """

    max_batch: int = 8
    spread: float = 1.25
    slack: int = 6

    def __post_init__(self) -> None:
        if self.max_batch < 1 or self.spread < 1.0 or self.slack < 0:
            raise ValueError("max_batch and spread must be at least 1, slack at least 0")


def choose(waiting: Sequence[Waiting], config: BatchConfig) -> list[int]:
    """Indices of the steps to take up in one call, the leading one first; none where nothing waits."""
    if not waiting:
        return []
    leader = min(range(len(waiting)), key=lambda index: _turn(waiting[index]))
    others = sorted(_companions(waiting, leader, config), key=lambda index: _turn(waiting[index]))
    return [leader, *others[: config.max_batch - 1]]


def _turn(step: Waiting) -> tuple[Priority, Kind, int]:
    return step.priority, step.kind, step.order


def _companions(waiting: Sequence[Waiting], leader: int, config: BatchConfig) -> Iterator[int]:
    first = waiting[leader]
    if first.group is None:
        return
    longest = first.length * config.spread + config.slack
    for index, step in enumerate(waiting):
        if index == leader or (step.kind, step.group) != (first.kind, first.group):
            continue
        if step.priority == first.priority or step.length <= longest:
            yield index
