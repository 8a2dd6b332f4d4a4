"""TwiML, which tells Twilio what to do with a call, and the signature by which it shows that it is Twilio. Pure."""

import base64
import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit
from xml.sax.saxutils import escape, quoteattr

from streaming.errors import BadMessage

MAX_PARAMETER_CHARS = 500  # of a name and its value together; Twilio's own limit
_PAUSE_S = 14_400  # the longest call that Twilio has
_PORTS = {"https": 443, "wss": 443, "http": 80, "ws": 80}


@dataclass(frozen=True, slots=True)
class Answer:
    """``stream_url``: where the call's audio goes. ``dial``: whom the caller is connected with, a number or what else
    Twilio dials. ``then``: where Twilio asks how the call goes on; without both, the caller is heard until hanging up.
    """

    stream_url: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    dial: str = ""
    then: str = ""


def render(answer: Answer) -> str:
    """Raises BadMessage where a parameter is longer than Twilio passes on."""
    for name, value in answer.parameters.items():
        if len(name) + len(value) > MAX_PARAMETER_CHARS:
            raise BadMessage(f"{name[:40]!r} and its value may have {MAX_PARAMETER_CHARS} characters")
    parameters = "".join(
        f"<Parameter name={quoteattr(name)} value={quoteattr(value)}/>" for name, value in answer.parameters.items()
    )
    stream = f'<Start><Stream url={quoteattr(answer.stream_url)} track="both_tracks">{parameters}</Stream></Start>'
    if answer.dial:
        after = f"<Dial>{escape(answer.dial)}</Dial>"
    else:
        after = "" if answer.then else f'<Pause length="{_PAUSE_S}"/>'
    after += f"<Redirect>{escape(answer.then)}</Redirect>" if answer.then else ""
    return f'<?xml version="1.0" encoding="UTF-8"?><Response>{stream}{after}</Response>'


def sign(token: str, url: str, form: Iterable[tuple[str, str]] = ()) -> str:
    """``X-Twilio-Signature`` of a request, as twilio.com/docs/usage/security describes it."""
    text = url + "".join(name + value for name, value in sorted(set(form)))
    return base64.b64encode(hmac.new(token.encode(), text.encode(), hashlib.sha1).digest()).decode()


def is_signed(token: str, signature: str, urls: Sequence[str], form: Sequence[tuple[str, str]] = ()) -> bool:
    """Whether it is the signature of one of these URLs. Each is compared, in constant time."""
    given = signature.encode()
    return bool(sum(hmac.compare_digest(sign(token, url, form).encode(), given) for url in urls))


def known_as(scheme: str, hosts: Iterable[str], path_and_query: str) -> list[str]:
    """What Twilio may have asked for, where a proxy took the request: the URL that it signs, of which a service sees
    only parts. A host may come with the scheme's own port or without, a path with a slash at its end or without."""
    schemes = ("wss", "ws", "https", "http") if scheme.startswith("ws") else ("https", "http")
    urls: dict[str, None] = {}
    for host in hosts:
        for tried in schemes:
            try:
                split = urlsplit(f"{tried}://{host}{path_and_query}")
            except ValueError:  # a host that is none
                continue
            bare = split.netloc.removesuffix(f":{_PORTS[tried]}")
            for netloc in (bare, f"{bare}:{_PORTS[tried]}" if ":" not in bare else bare):
                urls[urlunsplit(split._replace(netloc=netloc))] = None
                urls[urlunsplit(split._replace(netloc=netloc, path=split.path.rstrip("/") + "/"))] = None
    return list(urls)
