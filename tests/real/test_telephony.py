"""Calls over real sockets, with the scripted engine: each exchange sends as it does, and somebody follows the call."""

import asyncio
import base64
import hmac
import json
import random
import signal
import socket
import time
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection

from app.settings import load_settings
from app.wire import twiml
from tests.support.server import Server, eventually, serving, wait_for
from tests.support.telephony import (
    CALL_ID,
    CONNECTED,
    CONVERSATION_ID,
    FRAME,
    STREAM_ID,
    TELNYX_STOP,
    TWILIO_STOP,
    Genesys,
    alaw,
    asterisk_call,
    closed,
    exchange,
    follow,
    frame,
    frames,
    mulaw,
    of_type,
    send_all,
    speech,
    telnyx_media,
    telnyx_start,
    texts,
    twilio_call,
    twilio_key,
    twilio_start,
)

BOTH = ("inbound", "outbound")
PAUSE = (None,) * 8
CUSTOMER = mulaw(speech(None, None, "alpha", "bravo", *PAUSE, *PAUSE, "charlie", *PAUSE))
AGENT = mulaw(speech(*PAUSE, *PAUSE, "zulu", *PAUSE, None, None, None, None))
TOKEN = "12345"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(audiosocket_port=0, audiosocket_parameters="language=de") as running:
        yield running


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    with serving(api_keys="right") as running:
        yield running


@pytest.fixture(scope="module")
def signed() -> Iterator[Server]:
    with serving(twilio_auth_token=TOKEN, audiohook_secret="c2VjcmV0") as running:
        yield running


def audiosocket_port(server: Server) -> int:
    lines = [json.loads(line) for line in server.log.splitlines() if "audiosocket_listens" in line]
    return int(lines[0]["port"])


# --- Twilio ----------------------------------------------------------------------------------------------------------


async def test_both_tracks_of_a_call_are_heard_on_their_channels_and_on_one_clock(server: Server) -> None:
    following = asyncio.create_task(follow(server, CALL_ID))  # before the call is there
    async with exchange(server, "/twilio") as twilio:
        call = twilio_call({"inbound": CUSTOMER, "outbound": AGENT})
        await send_all(twilio, [CONNECTED, twilio_start(*BOTH, language="en", order="4711"), *call[:40]])
        await send_all(twilio, [twilio_key("5"), *call[40:], TWILIO_STOP])
        assert await closed(twilio) == (1000, [])
    events = await following
    assert events[0]["type"] == "call"
    assert events[0]["channels"] == [
        {"channel": 0, "track": "inbound", "label": "customer"},
        {"channel": 1, "track": "outbound", "label": "agent"},
    ]
    assert events[0]["parameters"] == {"language": "en", "order": "4711"}
    assert (events[0]["id"], events[0]["details"]["streamSid"]) == (CALL_ID, STREAM_ID)
    assert f'"session": "{events[0]["session"]}"' in server.log
    assert sorted(texts(events)) == [("agent", "zulu"), ("customer", "alpha bravo"), ("customer", "charlie")]
    starts = {event["text"]: event["start_ms"] for event in of_type(events, "final")}
    assert abs(starts["alpha bravo"] - 200) < 64
    assert abs(starts["zulu"] - 1600) < 64
    assert abs(starts["charlie"] - 2000) < 64
    assert of_type(events, "dtmf") == [{"type": "dtmf", "channel": 0, "digit": "5", "at_ms": 400, "label": "customer"}]
    assert events[-1]["type"] == "done"
    assert await follow(server, STREAM_ID, wait_s=0) == events_without_replaced(events)


def events_without_replaced(events: list[dict[str, object]]) -> list[dict[str, object]]:
    """What a late follower gets: partials of utterances that have their final are not kept, nor all but one lag."""
    last_lag = max((i for i, event in enumerate(events) if event["type"] == "lag"), default=-1)
    return [e for i, e in enumerate(events) if e["type"] != "partial" and (e["type"] != "lag" or i == last_lag)]


async def test_media_that_never_came_leave_a_gap(server: Server) -> None:
    """Twilio sends nothing for what is silent: whoever joins the payloads gets every later time too early."""
    call = twilio_call({"inbound": mulaw(speech("alpha", *PAUSE)), "outbound": mulaw(speech(*PAUSE))})
    later = twilio_call({"inbound": mulaw(speech("delta", *PAUSE))}, start_ms=60_000)
    async with exchange(server, "/twilio") as twilio:
        await send_all(twilio, [CONNECTED, twilio_start(*BOTH, call_id="CAgap"), *call, *later, TWILIO_STOP])
        await closed(twilio)
    [first, second] = of_type(await follow(server, "CAgap"), "final")
    assert (first["text"], second["text"], second["label"]) == ("alpha", "delta", "customer")
    assert abs(second["start_ms"] - 60_000) < 64


@pytest.mark.parametrize("ending", ["close", "abort"])
async def test_a_call_that_is_cut_off_is_transcribed_to_its_end(server: Server, ending: str) -> None:
    async with exchange(server, "/twilio") as twilio:
        media = twilio_call({"inbound": mulaw(speech("alpha", "bravo"))})
        await send_all(twilio, [CONNECTED, twilio_start("inbound", call_id=f"CA{ending}"), *media])
        if ending == "abort":
            await follow(server, f"CA{ending}", until="speech_started")
            twilio.transport.abort()
    events = await follow(server, f"CA{ending}")
    assert texts(events) == [("customer", "alpha bravo")]
    assert events[-1]["type"] == "done"


@pytest.mark.parametrize(
    "messages",
    [
        ["no JSON"],
        [CONNECTED, '{"event":"media","media":{"payload":""}}'],
        [b"\0\0"],
        [CONNECTED, '{"event":"start","start":{}}'],
        [CONNECTED, twilio_start("inbound").replace("audio/x-mulaw", "audio/opus")],
    ],
)
async def test_a_stream_that_does_not_begin_as_one_is_refused(server: Server, messages: list[str | bytes]) -> None:
    async with exchange(server, "/twilio") as twilio:
        await send_all(twilio, [*messages, CONNECTED, CONNECTED])
        assert (await closed(twilio))[0] in (1008, 4400)


async def test_a_wrong_parameter_ends_the_call_and_its_followers_learn_why(server: Server) -> None:
    async with exchange(server, "/twilio") as twilio:
        await send_all(twilio, [CONNECTED, twilio_start("inbound", call_id="CAbad", language="xx")])
        assert (await closed(twilio))[0] == 4400
    [call, error] = await follow(server, "CAbad", wait_s=0)
    assert (call["type"], error["code"], error["fatal"]) == ("call", "unknown_language", True)


async def test_wrong_messages_within_a_call_are_complained_of(server: Server) -> None:
    media = twilio_call({"inbound": mulaw(speech("alpha", *PAUSE))})
    wrong = ["{", '{"event":"media","media":{"payload":"%"}}', '{"event":"media","media":{"track":"x","payload":""}}']
    async with exchange(server, "/twilio") as twilio:
        start = twilio_start("inbound", call_id="CAwrong")
        await send_all(twilio, [CONNECTED, start, *wrong, '{"event":"new"}', *media, TWILIO_STOP])
        assert (await closed(twilio))[0] == 1000
    events = await follow(server, "CAwrong")
    assert [error["code"] for error in of_type(events, "error")] == ["bad_message"] * 3
    assert texts(events) == [("customer", "alpha")]


async def test_a_restart_ends_calls_with_all_that_was_said() -> None:
    with serving() as server:
        async with exchange(server, "/twilio") as twilio:
            media = twilio_call({"inbound": mulaw(speech("alpha", "bravo"))})
            await send_all(twilio, [CONNECTED, twilio_start("inbound"), *media])
            following = asyncio.create_task(follow(server, CALL_ID))
            await follow(server, CALL_ID, until="speech_started")
            server.signal(signal.SIGTERM)
            assert (await closed(twilio))[0] == 1012
            events = await following
        assert server.wait_exit() == 0
    assert texts(events) == [("customer", "alpha bravo")]
    assert [event["type"] for event in events[-2:]] == ["done", "error"]
    assert events[-1]["code"] == "shutting_down"


# --- who may ---------------------------------------------------------------------------------------------------------


async def test_followers_and_streams_need_a_key_where_there_are_keys(guarded: Server) -> None:
    [refused] = await follow(guarded, CALL_ID, wait_s=0)
    assert (refused["status"], refused["code"]) == (401, "unauthorized")
    async with exchange(guarded, "/twilio") as twilio:
        await send_all(twilio, [CONNECTED, twilio_start("inbound", key="wrong")])
        assert (await closed(twilio))[0] == 4401
    async with exchange(guarded, "/twilio") as twilio:  # Twilio drops the query: the key is a parameter
        media = twilio_call({"inbound": mulaw(speech("alpha", *PAUSE))})
        await send_all(twilio, [CONNECTED, twilio_start("inbound", key="right"), *media, TWILIO_STOP])
        assert (await closed(twilio))[0] == 1000
    events = await follow(guarded, CALL_ID, authorization="Bearer right")
    assert texts(events) == [("customer", "alpha")]
    assert events[0]["parameters"] == {}, "a key is told to nobody"
    async with exchange(guarded, "/telnyx", **{"x-telnyx-streaming-auth-token": "right"}) as telnyx:
        await send_all(telnyx, [telnyx_start(), TELNYX_STOP])
        assert (await closed(telnyx))[0] == 1000
    async with exchange(guarded, "/audiohook", **{"x-api-key": "right"}) as genesys:
        exchange_side = Genesys()
        await genesys.send(exchange_side.open("external"))
        assert exchange_side.take(await genesys.recv())["type"] == "opened"


async def test_an_unknown_call_is_said_to_be_unknown(server: Server) -> None:
    for wait_s in (0.0, 0.2):
        [refused] = await follow(server, "CAnobody", wait_s=wait_s)
        assert (refused["status"], refused["code"]) == (404, "unknown_call")


async def test_only_what_twilio_has_signed_comes_in(signed: Server) -> None:
    host = f"127.0.0.1:{signed.port}"
    async with exchange(signed, "/twilio") as twilio:
        await send_all(twilio, [CONNECTED, twilio_start("inbound")])
        assert (await closed(twilio))[0] == 4401
    outside = {"x-forwarded-host": "hark.example.org", "x-forwarded-proto": "https"}
    for headers, url in (({}, f"wss://{host}/twilio"), (outside, "wss://hark.example.org/twilio")):
        signature = twiml.sign(TOKEN, url)
        async with exchange(signed, "/twilio", **headers, **{"x-twilio-signature": signature}) as twilio:
            await send_all(twilio, [CONNECTED, twilio_start("inbound"), TWILIO_STOP])
            assert (await closed(twilio))[0] == 1000


async def test_only_what_genesys_has_signed_comes_in(signed: Server) -> None:
    names = ["@request-target", "@authority", "audiohook-organization-id", "audiohook-session-id"]
    names += ["audiohook-correlation-id", "x-api-key"]
    values = ("/audiohook", f"127.0.0.1:{signed.port}", "organization", "session", "correlation", "an-api-key")
    listed = " ".join(f'"{name}"' for name in names)
    described = f'({listed});keyid="an-api-key";nonce="VGhpc0lzQVVuaXF1ZU5vbmNl";created={int(time.time())}'
    lines = [f'"{name}": {value}' for name, value in zip(names, values, strict=True)]
    base = "\n".join([*lines, f'"@signature-params": {described}']).encode()
    signature = base64.b64encode(hmac.digest(b"secret", base, "sha256")).decode()
    headers = dict(zip(names[2:], values[2:], strict=True))
    headers |= {"signature-input": f"sig1={described}", "signature": f"sig1=:{signature}:"}
    for extra, kind in ((headers, "opened"), ({}, "disconnect")):
        genesys = Genesys()
        async with exchange(signed, "/audiohook", **extra) as connection:
            if extra:
                await connection.send(genesys.open("external"))
            answer = json.loads(await connection.recv())
        assert answer["type"] == kind
    assert answer["parameters"]["reason"] == "unauthorized"


def test_the_answer_to_a_call_is_signed_too(signed: Server) -> None:
    outside = {"x-forwarded-host": "hark.example.org", "x-forwarded-proto": "https"}
    form = {"CallSid": CALL_ID, "From": "+15550100", "To": "+15550101"}
    url = "https://hark.example.org/twilio/twiml?dial=%2B15550102&language=de"
    headers = {**outside, "x-twilio-signature": twiml.sign(TOKEN, url, form.items())}
    path = signed.url("/twilio/twiml?dial=%2B15550102&language=de")
    answer = httpx.post(path, data=form, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/xml"
    assert '<Stream url="wss://hark.example.org/twilio" track="both_tracks">' in answer.text
    for part in ('name="from" value="+15550100"', 'name="language" value="de"', "<Dial>+15550102</Dial>"):
        assert part in answer.text
    assert httpx.post(path, data={**form, "From": "+1999"}, headers=headers).status_code == 401
    assert httpx.get(path).status_code == 401


async def test_an_exchange_that_has_vanished_has_hung_up() -> None:
    """A half-open connection: nothing comes any more, and what was said before is not lost."""
    with serving(idle_timeout_s=1.0, audiosocket_port=0) as server:
        async with exchange(server, "/twilio") as twilio:
            media = twilio_call({"inbound": mulaw(speech("alpha", "bravo"))})
            await send_all(twilio, [CONNECTED, twilio_start("inbound"), *media])
            assert (await closed(twilio))[0] == 1000
        assert texts(await follow(server, CALL_ID)) == [("customer", "alpha bravo")]
        call_id = uuid.uuid4()
        reader, writer = await asyncio.open_connection("127.0.0.1", audiosocket_port(server))
        writer.write(b"".join(asterisk_call(call_id, speech("charlie").tobytes())))
        assert await reader.read() == b"\0\0\0"
        writer.close()
        assert texts(await follow(server, str(call_id))) == [("customer", "charlie")]


async def test_who_waits_for_a_call_or_follows_one_holds_no_shutdown_up() -> None:
    with serving() as server:
        waiting = asyncio.create_task(follow(server, "CAnobody", wait_s=50))
        async with exchange(server, "/twilio") as twilio:
            await send_all(twilio, [CONNECTED, twilio_start("inbound")])
            following = asyncio.create_task(follow(server, CALL_ID))
            await follow(server, CALL_ID, until="call")
            server.signal(signal.SIGTERM)
            assert (await closed(twilio))[0] == 1012
            assert (await following)[-1]["code"] == "shutting_down"
            [refused] = await waiting
            assert (refused["status"], refused["code"]) == (503, "shutting_down")
        assert await asyncio.to_thread(server.wait_exit) == 0


# --- Telnyx ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["PCMU", "PCMA", "L16 little", "L16 big"])
async def test_telnyx_media_out_of_order_are_put_in_order(server: Server, encoding: str) -> None:
    pcm = speech("alpha", "bravo", "charlie", "delta", "echo", "foxtrot", *PAUSE)
    codec, _, order = encoding.partition(" ")
    coded = {
        "PCMU": mulaw(pcm),
        "PCMA": alaw(pcm),
        "L16": np.repeat(pcm, 2).astype("<i2" if order == "little" else ">i2").tobytes(),
    }[codec]
    size = FRAME if codec != "L16" else FRAME * 4
    media = [telnyx_media(number, piece) for number, piece in enumerate(frames(coded, size), 1)]
    shuffle, groups = random.Random(7), [media[start : start + 4] for start in range(0, len(media), 4)]
    shuffled = [piece for group in groups for piece in shuffle.sample(group, len(group))]
    start = telnyx_start(codec, 8_000 if codec != "L16" else 16_000, call_id=f"v2:{encoding}", desk="7")
    async with exchange(server, "/telnyx") as telnyx:
        await send_all(telnyx, ['{"event":"connected","version":"1.0.0"}', start, *shuffled, TELNYX_STOP])
        assert await closed(telnyx) == (1000, [])
    events = await follow(server, f"v2:{encoding}")
    assert texts(events) == [("customer", "alpha bravo charlie delta echo foxtrot")]
    assert events[0]["parameters"] == {"desk": "7"}
    assert events[0]["details"]["from"] == "+13122010094"


async def test_a_codec_that_cannot_be_heard_is_refused(server: Server) -> None:
    async with exchange(server, "/telnyx") as telnyx:
        await telnyx.send(telnyx_start("G722"))
        assert (await closed(telnyx))[0] == 4400


# --- AudioSocket -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "repeat"), [(0x10, 1), (0x12, 2), (0x16, 6)])
@pytest.mark.parametrize("ending", ["hang-up", "eof"])
async def test_asterisk_sends_a_call(server: Server, kind: int, repeat: int, ending: str) -> None:
    call_id = uuid.uuid4()
    audio = np.repeat(speech("alpha", "bravo", *PAUSE, "charlie"), repeat).tobytes()
    reader, writer = await asyncio.open_connection("127.0.0.1", audiosocket_port(server))
    sent = b"".join([*asterisk_call(call_id, audio, kind), frame(0x03, b"#")])
    for piece in frames(sent, 777):  # TCP cuts where it likes
        writer.write(piece)
        await writer.drain()
    if ending == "hang-up":
        writer.write(frame(0x00))
    else:
        writer.write_eof()
    assert await reader.read() == b"\0\0\0"
    writer.close()
    events = await follow(server, str(call_id))
    assert texts(events) == [("customer", "alpha bravo"), ("customer", "charlie")]
    assert [event["language"] for event in of_type(events, "final")] == ["de", "de"]
    assert of_type(events, "dtmf")[0]["digit"] == "#"
    assert abs(of_type(events, "dtmf")[0]["at_ms"] - 1100) < 20
    assert events[-1]["type"] == "done"


async def test_asterisk_may_change_the_rate_within_a_call(server: Server) -> None:
    call_id = uuid.uuid4()
    narrow, wide = speech("alpha", *PAUSE), np.repeat(speech("bravo", *PAUSE), 2)
    reader, writer = await asyncio.open_connection("127.0.0.1", audiosocket_port(server))
    writer.write(b"".join(asterisk_call(call_id, narrow.tobytes())))
    writer.write(b"".join(frame(0x12, piece) for piece in frames(wide.tobytes(), 640)))
    writer.write(frame(0x00))
    assert await reader.read() == b"\0\0\0"
    writer.close()
    [first, second] = of_type(await follow(server, str(call_id)), "final")
    assert (first["text"], second["text"]) == ("alpha", "bravo")
    assert abs(second["start_ms"] - 900) < 64


@pytest.mark.parametrize("opening", [b"GET / HTTP/1.1\r\n\r\n", frame(0x01, b"short"), frame(0x10, b"\0\0")])
async def test_what_is_no_audiosocket_is_refused(server: Server, opening: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", audiosocket_port(server))
    writer.write(opening)
    writer.write_eof()
    assert await reader.read() in (b"\0\0\0", b"")
    writer.close()


# --- AudioHook -------------------------------------------------------------------------------------------------------


async def hear(connection: ClientConnection, genesys: Genesys, kind: str) -> dict[str, Any]:
    while True:
        event = genesys.take(await connection.recv())
        if event["type"] == kind:
            return event


def stereo(left: bytes, right: bytes) -> bytes:
    mixed = bytearray(2 * len(left))
    mixed[0::2], mixed[1::2] = left, right.ljust(len(left), b"\xff")
    return bytes(mixed)


async def test_genesys_gets_transcripts_of_both_channels(server: Server) -> None:
    genesys = Genesys()
    async with exchange(server, "/audiohook") as connection:
        await connection.send(genesys.open("external", "internal", language="en-US", supportedLanguages=True))
        opened = await hear(connection, genesys, "opened")
        assert opened["parameters"]["media"][0]["channels"] == ["external", "internal"]
        assert opened["parameters"]["supportedLanguages"] == ["de", "en", "fr"]
        await send_all(connection, frames(stereo(CUSTOMER, AGENT), 1_600))
        genesys.position_s = len(CUSTOMER) / 8_000
        await connection.send(genesys.message("ping"))
        await hear(connection, genesys, "pong")
        await connection.send(genesys.message("paused"))
        await connection.send(genesys.message("resumed", start="PT3.0S", discarded="PT20.0S"))
        genesys.position_s += 30
        await connection.send(genesys.message("discarded", start="PT3.0S", discarded="PT30.0S"))
        await connection.send(stereo(mulaw(speech("delta", *PAUSE)), b""))
        await connection.send(genesys.message("close", reason="end"))
        await hear(connection, genesys, "closed")
        assert (await closed(connection))[0] == 1000
    entities = [entity for event in of_type(genesys.heard, "event") for entity in event["parameters"]["entities"]]
    assert {entity["type"] for entity in entities} == {"transcript"}
    said = {
        entity["data"]["alternatives"][0]["interpretations"][0]["transcript"]: entity["data"] for entity in entities
    }
    assert {text: data["channel"] for text, data in said.items()} == {
        "alpha bravo": "external",
        "charlie": "external",
        "zulu": "internal",
        "delta": "external",
    }
    after_s = len(CUSTOMER) / 8_000 + 30
    assert abs(float(said["delta"]["offset"].removeprefix("PT").removesuffix("S")) - after_s) < 0.1
    events = await follow(server, CONVERSATION_ID)
    assert sorted(texts(events))[0] == ("agent", "zulu")
    assert events[0]["details"]["participant"]["ani"] == "+1-555-555-1234"


@pytest.mark.parametrize("fault", ["seq", "media", "early", "version"])
async def test_genesys_is_told_what_it_did_wrong(server: Server, fault: str) -> None:
    genesys = Genesys()
    async with exchange(server, "/audiohook") as connection:
        opening = genesys.open("external")
        if fault == "seq":
            opening = opening.replace('"seq": 1', '"seq": 5')
        elif fault == "media":
            opening = opening.replace("PCMU", "OPUS")
        elif fault == "version":
            opening = opening.replace('"version": "2"', '"version": "1"')
        await connection.send(b"\xff" * 160 if fault == "early" else opening)
        code, messages = await closed(connection)
    disconnect = json.loads(messages[-1])
    assert code == 1008
    assert (disconnect["type"], disconnect["parameters"]["reason"]) == ("disconnect", "error")


def test_a_port_that_is_taken_ends_the_service_with_the_reason() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        serving(ready=False, audiosocket_port=taken.getsockname()[1]) as server,
    ):
        assert server.wait_exit() == 1
        assert "AudioSocket cannot listen on 127.0.0.1" in server.log


@pytest.mark.parametrize("query", ["language=xx&pause=1", "pause_ms=1"])
def test_parameters_for_asterisk_are_checked_when_the_service_starts(query: str) -> None:
    with pytest.raises(ValueError, match="AUDIOSOCKET_PARAMETERS"):
        load_settings(audiosocket_parameters=query)
    assert load_settings(audiosocket_parameters="language=de&hotwords=Hark,Asterisk").audiosocket_port is None


async def test_calls_do_not_hear_each_other(server: Server) -> None:
    words = ["alpha", "bravo", "charlie", "delta", "echo", "foxtrot"]

    async def call(word: str) -> list[tuple[str, str]]:
        async with exchange(server, "/twilio") as twilio:
            media = twilio_call({"inbound": mulaw(speech(word, word, *PAUSE)), "outbound": mulaw(speech(*PAUSE))})
            start = twilio_start(*BOTH, call_id=f"CA{word}")
            await send_all(twilio, [CONNECTED, start.replace(STREAM_ID, f"MZ{word}"), *media, TWILIO_STOP])
            await closed(twilio)
        return texts(await follow(server, f"CA{word}"))

    heard = await asyncio.gather(*(call(word) for word in words))
    assert heard == [[("customer", f"{word} {word}")] for word in words]


async def test_the_log_has_nothing_that_was_said(server: Server) -> None:
    await eventually(lambda: server.metric("hark_sessions_open") == 0)
    assert "alpha" not in server.log
    wait_for(lambda: "session_ended" in server.log)
