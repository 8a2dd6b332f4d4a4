"""Every example in docs/clients.md does what it says: code runs against the service, configuration is read."""

import asyncio
import json
import re
import shutil
import subprocess
import sys
import uuid
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from xml.etree.ElementTree import Element

import httpx
import pytest

from tests.clients.conftest import SENTENCE, Clients, plain, recording
from tests.support.server import ROOT
from tests.support.telephony import (
    CONNECTED,
    TWILIO_STOP,
    asterisk_call,
    exchange,
    follow,
    mulaw,
    of_type,
    send_all,
    twilio_call,
    twilio_start,
)

CLIENTS_MD = (ROOT / "docs" / "clients.md").read_text("utf-8")
CALL_ID = "CA0123"
TIMEOUT_S = 120


@dataclass(frozen=True)
class Example:
    """A fenced block, and the heading that it stands under."""

    heading: str
    language: str
    code: str


def examples(*languages: str) -> list[Example]:
    found, heading = [], ""
    heading_or_block = r"^#+ (?P<heading>[^\n]+)$|^```(?P<language>\w+)\n(?P<code>.*?)^```$"
    for match in re.finditer(heading_or_block, CLIENTS_MD, re.M | re.S):
        heading = match["heading"] or heading
        if match["language"] in languages:
            found.append(Example(heading, match["language"], match["code"]))
    return found


def example(heading: str, language: str) -> str:
    [found] = [example.code for example in examples(language) if example.heading == heading]
    return found


def executed(*languages: str) -> pytest.MarkDecorator:
    found = examples(*languages)
    ids = [f"{number}-{example.heading}" for number, example in enumerate(found)]
    return pytest.mark.parametrize("example", found, ids=ids)


@pytest.fixture
def folder(clients: Clients, tmp_path: Path) -> Path:
    """Where the reader stands: beside their recording."""
    shutil.copy(clients.folder / "talk-16000.wav", tmp_path / "talk.wav")
    shutil.copy(clients.folder / "talk-24000.wav", tmp_path / "talk24.wav")
    return tmp_path


def run(clients: Clients, folder: Path, command: list[str], code: str) -> str:
    local = code.replace("localhost:7860", clients.server.url("").removeprefix("http://"))
    assert local != code, "the example does not say where the service is"
    done = subprocess.run(
        [*command, local],
        cwd=folder,
        env=clients.environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@executed("python")
def test_python_says_the_words(clients: Clients, folder: Path, example: Example) -> None:
    said = plain(run(clients, folder, [clients.python, "-c"], example.code))
    assert SENTENCE in said


EXPECTED = {
    "Recordings": "because the weather is good",
    "Deepgram": "because the weather is good",
    "Telephone calls": '"type": "final"',
    "Twilio": 'track="both_tracks"',
    "Browsers": "hark_tmp_",
}


@executed("sh")
async def test_the_shell_gets_an_answer(clients: Clients, folder: Path, example: Example) -> None:
    assert shutil.which("curl"), "curl is not installed"
    if CALL_ID in example.code:
        await call(clients)
    said = await asyncio.to_thread(run, clients, folder, ["bash", "-euc"], example.code)
    assert re.sub(r'":(?! )', '": ', EXPECTED[example.heading]) in re.sub(r'":(?! )', '": ', said).replace("\n", " ")


async def call(clients: Clients) -> None:
    media = twilio_call({"inbound": mulaw(recording(clients.folder / "talk-8000.wav"))})
    start = twilio_start("inbound", call_id=CALL_ID)
    async with exchange(clients.server, "/twilio") as twilio:
        await send_all(twilio, [CONNECTED, start, *media, TWILIO_STOP])
        await twilio.wait_closed()


def test_nothing_is_left_out() -> None:
    """Of every language that stands in the document, somebody looks at the examples."""
    assert {example.language for example in examples("python", "sh", "xml", "json", "ini", "js")} == set(
        re.findall(r"^```(\w+)$", CLIENTS_MD, re.M)
    )
    assert set(EXPECTED) == {example.heading for example in examples("sh")}
    assert len(examples("python")) >= 8


# --- configuration of exchanges --------------------------------------------------------------------------------------


def shape(element: Element) -> tuple[object, ...]:
    """An element without the host and the values of parameters, which are the reader's."""
    attributes = {name: re.sub(r"//[^/]+", "//", value) for name, value in element.items() if name != "value"}
    return element.tag, attributes, [shape(child) for child in element]


def test_the_twiml_is_what_the_service_writes(clients: Clients) -> None:
    mine = ElementTree.fromstring(example("Twilio", "xml").encode())
    query = {"language": "de", "order": "4711", "key": "k", "dial": "+15550102"}
    written = httpx.get(clients.server.url("/twilio/twiml"), params=query)
    assert shape(mine) == shape(ElementTree.fromstring(written.content))
    assert mine.findtext("Dial") == "+15550102"


def test_telnyx_is_given_an_address_that_is_there(clients: Clients) -> None:
    fields = json.loads(example("Telnyx", "json"))
    path = "/" + fields["stream_url"].split("/", 3)[3]
    assert fields["stream_track"] == "both_tracks"

    async def knock() -> None:
        async with exchange(clients.server, path, **{"x-telnyx-streaming-auth-token": fields["stream_auth_token"]}):
            pass

    asyncio.run(knock())


async def test_the_dialplan_leads_a_call_to_its_words(clients: Clients) -> None:
    """It is read here as Asterisk would: each step's application and arguments, with the variables filled in."""
    steps = re.findall(r"^(?:exten => 100,1| same => n),(\w+)\((.*)\)(?: ;.*)?$", example("Asterisk", "ini"), re.M)
    assert [application for application, _ in steps] == ["Answer", "Set", "System", "AudioSocket", "Hangup"]
    call_id = uuid.uuid4()
    name, value = dict(steps)["Set"].split("=")
    assert value == "${UUID()}"
    data, address = dict(steps)["AudioSocket"].replace(f"${{{name}}}", str(call_id)).split(",")
    assert (data, address) == (str(call_id), "127.0.0.1:9092")
    lines = [json.loads(line) for line in clients.server.log.splitlines() if "audiosocket_listens" in line]
    reader, writer = await asyncio.open_connection("127.0.0.1", lines[0]["port"])
    pcm = recording(clients.folder / "talk-8000.wav")
    writer.write(b"".join(asterisk_call(uuid.UUID(data), pcm.tobytes())) + b"\0\0\0")
    await writer.drain()
    assert (await reader.read()).endswith(b"\0\0\0")
    writer.close()
    finals = of_type(await follow(clients.server, str(call_id)), "final")
    assert len(finals) == 2
    assert all(plain(final["text"]).startswith("we are going to the park") for final in finals)


def test_the_settings_in_the_text_are_taken(clients: Clients) -> None:
    """`NAME=value` before `hark serve`, or alone: the command starts with them, as far as printing what holds."""
    stated = dict(re.findall(r"`(HARK_\w+)=([^` ]+)", CLIENTS_MD))
    assert set(stated) == {"HARK_AUDIOSOCKET_PORT", "HARK_AUDIOSOCKET_PARAMETERS"}
    environment = clients.environment | {name: value.strip("'") for name, value in stated.items()}
    command = [sys.executable, "-m", "app", "serve", "--print-config"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "language=de&pause_ms=400" in done.stdout
