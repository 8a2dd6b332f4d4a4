"""Drafts: what is kept of them, and whose they are."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from models.drafts import Drafts, judge, key
from streaming.types import DecodeOptions, DecodeRequest, Pcm16, Priority, Task

tokens = st.lists(st.integers(0, 3), max_size=8)


def request(audio: Pcm16, start_sample: int = 0, task: Task = Task.TRANSCRIBE) -> DecodeRequest:
    options = DecodeOptions(task=task)
    return DecodeRequest(1, 1, 0, Priority.LIVE_PARTIAL, audio, start_sample, len(audio), options=options)


@given(tokens, tokens)
def test_what_is_kept_is_what_the_decoder_would_have_said(draft: list[int], wanted: list[int]) -> None:
    """``wanted``: the decoder's own choices, as far as the draft goes."""
    size = min(len(draft), len(wanted))
    draft, wanted = draft[:size], wanted[:size]
    verdict = judge(draft, [-1.0] * size, [(token, -0.5) for token in wanted])
    assert draft[: verdict.kept] == wanted[: verdict.kept]
    assert verdict.logprob == -verdict.kept
    if verdict.kept < size:
        assert wanted[verdict.kept] == verdict.choice != draft[verdict.kept]
        assert verdict.choice_logprob == -0.5


def test_an_utterance_is_known_by_how_it_begins() -> None:
    audio = np.arange(16_000, dtype=np.int16)
    assert key(request(audio)) == key(request(audio[:8_000])) != key(request(audio[::-1]))
    assert key(request(audio)) != key(request(audio, start_sample=1))
    assert key(request(audio)) != key(request(audio, task=Task.TRANSLATE))
    assert key(request(audio[:6_399])) is None


def test_only_the_latest_are_remembered() -> None:
    known = Drafts(capacity=2)
    names = [key(request(np.full(8_000, n, np.int16))) for n in range(3)]
    for n, name in enumerate(names):
        assert name is not None
        assert known.offer(name) == ()
        known.remember(name, [n] * 5)
    offered = [known.offer(name) for name in names if name]
    assert offered == [(), (1, 1, 1), (2, 2, 2)]


def test_the_last_tokens_are_not_offered() -> None:
    known = Drafts(capacity=1)
    name = key(request(np.ones(8_000, np.int16)))
    assert name is not None
    known.remember(name, [1, 2])
    assert known.offer(name) == ()
    known.remember(name, [1, 2, 3])
    assert known.offer(name) == (1,)
