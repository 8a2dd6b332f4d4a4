"""TwiML and Twilio's signature."""

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.wire import twiml
from streaming.errors import BadMessage

# The example of twilio.com/docs/usage/security: this request, with this token, has this signature.
TOKEN = "12345"
URL = "https://example.com/myapp.php?foo=1&bar=2"
FORM = {
    "CallSid": "CA1234567890ABCDE",
    "Caller": "+14158675310",
    "Digits": "1234",
    "From": "+14158675310",
    "To": "+18005551212",
}

xml_text = st.text(st.characters(exclude_categories=("Cc", "Cs"), exclude_characters="\ufffe\uffff"), max_size=40)


def test_a_signature_is_computed_as_twilio_does_it() -> None:
    assert twiml.sign(TOKEN, URL, FORM.items()) == "L/OH5YylLD5NRKLltdqwSvS0BnU="


def test_a_request_is_known_whatever_the_proxy_made_of_its_url() -> None:
    signature = twiml.sign(TOKEN, URL, FORM.items())
    for hosts in (["example.com"], ["inside:7860", "example.com"], ["example.com:443"]):
        urls = twiml.known_as("http", hosts, "/myapp.php?foo=1&bar=2")
        assert twiml.is_signed(TOKEN, signature, urls, list(FORM.items()))
    for scheme, signed in (("ws", "wss://example.com/twilio"), ("wss", "wss://example.com:443/twilio/")):
        urls = twiml.known_as(scheme, ["example.com"], "/twilio")
        assert twiml.is_signed(TOKEN, twiml.sign(TOKEN, signed), urls)
    assert twiml.known_as("wss", ["[::", ""], "/twilio") is not None


@pytest.mark.parametrize("change", ["token", "url", "form", "signature", "none"])
def test_what_is_not_signed_is_not_known(change: str) -> None:
    urls = [URL + ("0" if change == "url" else "")]
    signature = {"signature": "L/OH5YylLD5NRKLltdqwSvS0BnU", "none": ""}.get(
        change, twiml.sign(TOKEN, URL, FORM.items())
    )
    form = [*FORM.items()] if change != "form" else [*FORM.items(), ("Extra", "")]
    assert not twiml.is_signed("54321" if change == "token" else TOKEN, signature, urls, form)


@given(st.dictionaries(xml_text, xml_text, max_size=4), xml_text.filter(str.strip), xml_text.filter(str.strip))
def test_the_answer_is_xml_whatever_is_written_into_it(parameters: dict[str, str], dial: str, then: str) -> None:
    answer = twiml.Answer("wss://example.com/twilio", parameters, dial, then)
    root = ElementTree.fromstring(twiml.render(answer))
    stream = root.find("Start/Stream")
    assert stream is not None
    assert stream.attrib == {"url": "wss://example.com/twilio", "track": "both_tracks"}
    assert {one.attrib["name"]: one.attrib["value"] for one in stream} == parameters
    assert root.findtext("Dial") == dial
    assert root.findtext("Redirect") == then


def test_who_is_connected_with_nobody_is_heard_until_hanging_up() -> None:
    root = ElementTree.fromstring(twiml.render(twiml.Answer("wss://h/twilio")))
    assert [child.tag for child in root] == ["Start", "Pause"]


def test_what_twilio_would_not_pass_on_is_refused() -> None:
    with pytest.raises(BadMessage):
        twiml.render(twiml.Answer("wss://h/twilio", {"prompt": "x" * 500}))
