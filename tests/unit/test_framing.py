"""The wire of the engine socket: what is written is what is read, however the bytes are cut."""

import dataclasses
import json
import struct
from enum import EnumType
from functools import partial
from operator import ne
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.framing import (
    MAX_AUDIO_SAMPLES,
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    Answer,
    Ask,
    Cancel,
    Dropped,
    Failure,
    Fault,
    FramingError,
    Message,
    Parser,
    Ping,
    Pong,
    Ready,
    encode,
)
from streaming.errors import BadAudio, BadMessage, Overloaded, RecognizerFailed, ServerError, SttError
from streaming.types import DecodeOptions, DecodeRequest, Hypothesis, Pcm16, Priority, RecognizerInfo

keys = st.integers(0, 2**53)
texts = st.text(max_size=20)


def of_type(kind: Any, *, least: int = 0) -> st.SearchStrategy[Any]:
    """Values of a field's type; ``least`` 1 leaves out what is empty, as most defaults are.

    A type that this does not know fails here rather than goes untested.
    """
    simple: dict[object, st.SearchStrategy[Any]] = {
        int: st.integers(least, 2**53),
        float: st.floats(-100, 100),
        bool: st.booleans(),
        str: st.text(min_size=least, max_size=20),
        Pcm16: st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1, max_size=200).map(pcm),
        NoneType: st.none(),
    }
    if kind in simple:
        return simple[kind]
    if dataclasses.is_dataclass(kind):
        return every_field(kind, unlike_defaults=bool(least))
    if isinstance(kind, EnumType):
        return st.sampled_from(list(kind))
    if isinstance(kind, UnionType):
        return st.one_of([of_type(choice, least=least) for choice in get_args(kind) if not least or choice != NoneType])
    if get_origin(kind) is tuple and get_args(kind)[1:] == (Ellipsis,):
        return st.lists(of_type(get_args(kind)[0]), min_size=least, max_size=3).map(tuple)
    raise TypeError(f"no strategy for {kind}")


def pcm(samples: list[int]) -> Pcm16:
    return np.array(samples, np.int16)


def every_field(cls: Any, *, unlike_defaults: bool = False) -> st.SearchStrategy[Any]:
    """The dataclass with a value drawn for each of its fields, also for those that will be added to it."""
    kinds, strategies = get_type_hints(cls), {}
    for field in dataclasses.fields(cls):
        strategy = of_type(kinds[field.name], least=int(unlike_defaults))
        if unlike_defaults and field.default is not dataclasses.MISSING:
            strategy = strategy.filter(partial(ne, field.default))
        strategies[field.name] = strategy
    return st.builds(cls, **strategies)


requests, hypotheses = every_field(DecodeRequest), every_field(Hypothesis)
infos = st.builds(RecognizerInfo, texts, st.frozensets(texts, max_size=5), st.integers(1, 64))
errors = st.one_of(
    st.builds(
        lambda kind, text, code: kind(text, code=code), st.sampled_from([RecognizerFailed, BadAudio]), texts, texts
    ),
    st.builds(lambda text, s: Overloaded(text, retry_after_s=s), texts, st.floats(0, 100)),
)
messages = st.one_of(
    st.builds(Ask, keys, requests),
    st.builds(Answer, keys, hypotheses),
    st.builds(Ready, infos),
    st.builds(Failure, keys, errors),
    st.builds(Fault, keys, texts),
    st.builds(Cancel, keys),
    st.builds(Dropped, keys),
    st.just(Ping()),
    st.just(Pong()),
)


def plain(message: Message) -> object:
    """The message as something that compares by value: arrays and exceptions do not."""
    match message:
        case Ask(key, request):
            fields = {f.name: getattr(request, f.name) for f in dataclasses.fields(request)}
            arrays = {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}
            return ("ask", key, fields | {name: (array.dtype, array.tolist()) for name, array in arrays.items()})
        case Failure(key, error):
            return ("failure", key, type(error), vars(error) | {"code": error.code})
    return message


@given(st.lists(messages, max_size=5), st.data())
def test_what_is_written_is_read_however_it_is_cut(sent: list[Message], data: st.DataObject) -> None:
    stream = b"".join(encode(message) for message in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    parser = Parser()
    received: list[Message] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += parser.feed(stream[start:end])
    assert [plain(m) for m in received] == [plain(m) for m in sent]


@given(every_field(DecodeRequest, unlike_defaults=True), every_field(Hypothesis, unlike_defaults=True))
def test_no_field_is_forgotten(request: DecodeRequest, hypothesis: Hypothesis) -> None:
    sent: list[Message] = [Ask(1, request), Answer(1, hypothesis)]
    received = Parser().feed(b"".join(map(encode, sent)))
    assert [plain(m) for m in received] == [plain(m) for m in sent]


def test_audio_travels_as_raw_samples() -> None:
    audio = np.arange(1000, dtype=np.int16)
    request = DecodeRequest(1, 2, 0, Priority.FILE, audio, 0, 1000)
    frame = encode(Ask(1, request))
    assert frame.endswith(audio.astype("<i2").tobytes())
    assert len(frame) < audio.nbytes + 1000


@pytest.mark.parametrize(
    "audio",
    [
        np.zeros(0, np.int16),
        np.zeros(MAX_AUDIO_SAMPLES + 1, np.int16),
        np.zeros(10, np.float32),
        np.zeros((2, 10), np.int16),
    ],
    ids=["empty", "too long", "float", "two channels"],
)
def test_audio_that_is_no_request_is_refused(audio: np.ndarray) -> None:
    with pytest.raises(BadAudio):
        encode(Ask(1, DecodeRequest(1, 1, 0, Priority.FILE, audio, 0, 1)))


def test_the_longest_audio_fits() -> None:
    audio = np.full(MAX_AUDIO_SAMPLES, -1, np.int16)
    (ask,) = Parser().feed(encode(Ask(1, DecodeRequest(1, 1, 0, Priority.FILE, audio, 0, 1))))
    assert isinstance(ask, Ask)
    assert np.array_equal(ask.request.audio, audio)


def test_a_prompt_without_end_is_refused() -> None:
    request = DecodeRequest(
        1, 1, 0, Priority.FILE, np.ones(1, np.int16), 0, 1, options=DecodeOptions(prompt="x" * MAX_HEADER_BYTES)
    )
    with pytest.raises(BadMessage):
        encode(Ask(1, request))


@pytest.mark.parametrize(
    "sizes", [(MAX_HEADER_BYTES + 1, 0), (10, MAX_PAYLOAD_BYTES + 1), (2**32 - 1, 2**32 - 1)], ids=str
)
def test_a_frame_too_large_is_refused_before_its_bytes_come(sizes: tuple[int, int]) -> None:
    with pytest.raises(FramingError):
        Parser().feed(struct.pack("<II", *sizes))


@pytest.mark.parametrize(
    "header",
    [b"", b"{", b"[]", b"7", b"{}", b'{"type":"nothing"}', b'{"type":"ask","key":1}', b'{"type":["ask"]}', b"\xff\xfe"],
    ids=repr,
)
def test_a_frame_that_makes_no_sense_is_refused(header: bytes) -> None:
    with pytest.raises(FramingError):
        Parser().feed(struct.pack("<II", len(header), 0) + header)


@given(st.binary(max_size=200))
def test_any_bytes_give_messages_or_a_framing_error(data: bytes) -> None:
    header = json.dumps({"type": "answer", "key": 1, "hypothesis": data.hex()}).encode()
    for stream in (data, struct.pack("<II", len(data), 0) + data, struct.pack("<II", len(header), 0) + header):
        try:
            Parser().feed(stream)
        except FramingError:
            pass


def test_an_error_of_a_kind_the_wire_does_not_know_arrives_as_its_nearest_kind() -> None:
    class DiskFull(ServerError):
        code = "disk_full"

    (failure,) = Parser().feed(encode(Failure(1, DiskFull("no space"))))
    assert isinstance(failure, Failure)
    error: SttError = failure.error
    assert (type(error), error.code, error.message) == (ServerError, "disk_full", "no space")
