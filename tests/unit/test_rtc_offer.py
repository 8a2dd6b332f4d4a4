"""What an offer must be. Offers as a browser makes them are tested against the service in tests/real/test_rtc.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.rtc.offer import MAX_CANDIDATES, BadOffer, check_offer, parse_candidate

OFFER = """v=0
o=- 4611731400430051336 2 IN IP4 127.0.0.1
s=-
t=0 0
a=group:BUNDLE 0 1
m=audio 9 UDP/TLS/RTP/SAVPF 111
c=IN IP4 0.0.0.0
a=rtcp:9 IN IP4 0.0.0.0
a=candidate:1 1 udp 2122260223 192.0.2.1 63692 typ host generation 0
a=ice-ufrag:abcd
a=ice-pwd:0123456789abcdef01234567
a=fingerprint:sha-256 00:11
a=setup:actpass
a=mid:0
a=sendonly
a=rtcp-mux
a=rtpmap:111 opus/48000/2
a=fmtp:111 minptime=10;useinbandfec=1
a=ssrc:1 cname:x
m=application 9 UDP/DTLS/SCTP webrtc-datachannel
c=IN IP4 0.0.0.0
a=ice-ufrag:abcd
a=ice-pwd:0123456789abcdef01234567
a=fingerprint:sha-256 00:11
a=setup:actpass
a=mid:1
a=sctp-port:5000
a=max-message-size:262144
""".replace("\n", "\r\n")
CANDIDATE = "candidate:1 1 udp 2122260223 192.0.2.1 63692 typ host"


def test_an_offer_of_a_microphone_and_a_channel_is_good() -> None:
    check_offer(OFFER)


def test_candidates_are_bounded() -> None:
    line = OFFER[OFFER.index("a=candidate") :].split("\r\n")[0] + "\r\n"
    check_offer(OFFER.replace(line, line * MAX_CANDIDATES))
    with pytest.raises(BadOffer):
        check_offer(OFFER.replace(line, line * (MAX_CANDIDATES + 1)))


@given(st.data())
def test_whatever_is_wrong_with_an_offer_it_is_refused_or_good(data: st.DataObject) -> None:
    """Lines lost, repeated and cut at any place: aiortc's parser falls over many of them."""
    lines = OFFER.split("\r\n")
    for _ in range(data.draw(st.integers(1, 6))):
        index = data.draw(st.integers(0, len(lines) - 1))
        line = lines[index]
        cut = data.draw(st.integers(0, len(line)))
        lines[index : index + 1] = data.draw(
            st.sampled_from([[], [line, line], [line[:cut]], [line[cut:]], [line[:cut] + "\x00 x:" + line[cut:]]])
        ) or ["a="]
    try:
        check_offer("\r\n".join(lines))
    except BadOffer:
        pass


@pytest.mark.parametrize(
    "text", ["", "v=0", "m=", "m=audio", "\x00", "a=" * 10_000, "v=0\r\nm=audio 9 X 1\r\na=fmtp:1 a"]
)
def test_what_is_no_offer_is_refused(text: str) -> None:
    with pytest.raises(BadOffer):
        check_offer(text)


def test_a_candidate_as_browsers_give_it() -> None:
    found = parse_candidate({"candidate": CANDIDATE + " generation 0 ufrag x network-cost 10", "sdpMid": "0"})
    assert found is not None
    assert (found.ip, found.port, found.protocol, found.type, found.sdpMid) == ("192.0.2.1", 63692, "udp", "host", "0")
    assert parse_candidate({"candidate": "", "sdpMid": "0"}) is None


@given(st.recursive(st.none() | st.text() | st.integers(), lambda deeper: st.lists(deeper), max_leaves=4))
def test_any_other_candidate_is_refused(value: object) -> None:
    for given_ in (value, {"candidate": value, "sdpMid": "0"}, {"candidate": CANDIDATE, "sdpMid": None, "x": value}):
        if given_ == {"candidate": "", "sdpMid": "0"}:
            continue
        with pytest.raises(BadOffer):
            parse_candidate(given_)
