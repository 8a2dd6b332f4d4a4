"""RED: what a payload holds, and the answer that asks for it."""

import pytest
from aiortc import sdp
from hypothesis import given
from hypothesis import strategies as st

from app.rtc.redundancy import prefer, unpack
from tests.support.rtc import red_payload

# What Chromium 156 offers for a microphone, shortened to what matters here; and aiortc's answer to it.
ANSWER = "\r\n".join(
    [
        "v=0",
        "o=- 4005111885 4005111885 IN IP4 0.0.0.0",
        "s=-",
        "t=0 0",
        "a=group:BUNDLE 0 1",
        "m=audio 53237 UDP/TLS/RTP/SAVPF 111 63 9 0 8",
        "c=IN IP4 127.0.0.1",
        "a=recvonly",
        "a=mid:0",
        "a=rtcp-mux",
        "a=rtpmap:111 opus/48000/2",
        "a=rtpmap:63 red/48000/2",
        "a=rtpmap:9 G722/8000",
        "a=rtpmap:0 PCMU/8000",
        "a=rtpmap:8 PCMA/8000",
        "m=application 53237 UDP/DTLS/SCTP webrtc-datachannel",
        "c=IN IP4 127.0.0.1",
        "a=mid:1",
        "a=sctp-port:5000",
        "",
    ]
)


@given(st.binary(max_size=1_000), st.lists(st.binary(max_size=1_000), max_size=9))
def test_every_frame_is_found_with_its_own_time(frame: bytes, before: list[bytes]) -> None:
    back = [960 * n for n in range(len(before), 0, -1)]
    assert unpack(red_payload(frame, *before)) == [*zip(back, before, strict=True), (0, frame)]


@given(st.binary(max_size=60))
def test_whatever_comes_is_read_or_refused(payload: bytes) -> None:
    try:
        frames = unpack(payload)
    except ValueError:
        return
    assert b"".join(frame for _, frame in frames) == payload[len(payload) - sum(len(frame) for _, frame in frames) :]


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (red_payload(b"", b"before")[:-1], "within a block"),
        (red_payload(b"frame", b"before")[:3], "within a block"),
        (b"", "within a block"),
        (red_payload(b"frame", *[b"before"] * 10), "too many"),
    ],
)
def test_what_is_malformed_is_refused(payload: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        unpack(payload)


def test_the_answer_names_red_first_and_what_is_in_it() -> None:
    preferred = prefer(ANSWER)
    before, after = ANSWER.split("\r\n"), preferred.split("\r\n")
    assert [line for line in after if line not in before] == [
        "m=audio 53237 UDP/TLS/RTP/SAVPF 63 111 9 0 8",
        "a=fmtp:63 111/111",
    ]
    assert len(after) == len(before) + 1
    assert after.index("a=fmtp:63 111/111") == after.index("a=rtpmap:63 red/48000/2") + 1
    sdp.SessionDescription.parse(preferred)


@pytest.mark.parametrize("missing", ["a=rtpmap:111 opus/48000/2\r\n", "a=rtpmap:63 red/48000/2\r\n"])
def test_where_a_client_has_not_both_the_answer_stays_as_it_is(missing: str) -> None:
    answer = ANSWER.replace(missing, "")
    assert prefer(answer) == answer
