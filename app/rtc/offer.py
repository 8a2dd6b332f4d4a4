"""An SDP offer, checked before anything is built for it. Pure: what it asks for must be what this service does."""

from aiortc import sdp
from aiortc.rtcicetransport import RTCIceCandidate

from streaming.errors import BadMessage

MAX_CANDIDATES = 64  # the service sends packets to each of them: a browser has a handful


class BadOffer(BadMessage):
    """An offer or a candidate that cannot be used."""

    code = "bad_offer"


def check_offer(text: str) -> None:
    """Raises BadOffer unless it is one microphone and one data channel.

    Without a data channel FastRTC waits for one for ever. A second track would be mixed into the first, and video be
    decoded for nothing.
    """
    try:
        media = sdp.SessionDescription.parse(text).media
    except (ValueError, LookupError, AssertionError, AttributeError, TypeError, StopIteration) as error:
        raise BadOffer("the SDP is malformed") from error  # aiortc's parser checks little and falls over the rest
    kinds = sorted(part.kind for part in media)
    if "application" not in kinds:
        raise BadOffer("the offer has no data channel: create one before the offer", code="no_data_channel")
    if "audio" not in kinds:
        raise BadOffer("the offer has no audio track", code="no_audio_track")
    if kinds != ["application", "audio"]:
        raise BadOffer("the offer must have one audio track, one data channel and nothing else")
    if next(part for part in media if part.kind == "audio").direction not in ("sendrecv", "sendonly"):
        raise BadOffer("the offer's audio track does not send", code="no_audio_track")
    if sum(len(part.ice_candidates) for part in media) > MAX_CANDIDATES:
        raise BadOffer(f"the offer has more than {MAX_CANDIDATES} candidates")


def parse_candidate(given: object) -> RTCIceCandidate | None:
    """A browser's ``RTCIceCandidate.toJSON()``; None for the end of candidates. Raises BadOffer."""
    if not isinstance(given, dict) or not isinstance(text := given.get("candidate"), str):
        raise BadOffer("candidate must be an object with a text 'candidate'")
    if not text:
        return None
    mid, index = given.get("sdpMid"), given.get("sdpMLineIndex")
    if not (isinstance(mid, str) or isinstance(index, int)):
        raise BadOffer("candidate must have sdpMid or sdpMLineIndex")
    try:
        candidate = sdp.candidate_from_sdp(text.removeprefix("candidate:"))
    except (ValueError, IndexError, AssertionError) as error:
        raise BadOffer("the candidate is malformed") from error
    candidate.sdpMid = mid if isinstance(mid, str) else None
    candidate.sdpMLineIndex = index if isinstance(index, int) else None
    return candidate
