"""The example for browsers in docs/clients.md, in one."""

import re
from pathlib import Path

import httpx
import pytest

from tests.support.browser import CLIP_TEXT, ROOT, Visitors, clip, error_rate, write_speech
from tests.support.server import Server

pytestmark = [pytest.mark.browser, pytest.mark.real, pytest.mark.slow]


def test_a_page_listens_with_a_token(visitors: Visitors, hearing: Server, tmp_path: Path) -> None:
    section = (ROOT / "docs" / "clients.md").read_text("utf-8").split("## Browsers")[1]
    [code] = re.findall(r"^```js\n(.*?)^```", section, re.M | re.S)
    token = httpx.post(hearing.url("/v1/tokens"), json={"expires_in_s": 60}).json()["token"]
    page = visitors.open(hearing.url("/"), speech=write_speech(tmp_path / "one.wav", [clip()]))
    local = code.replace("wss://hark.example.org", hearing.url("").replace("http", "ws"))
    assert local != code
    with page.expect_console_message(lambda message: bool(re.match("true .*good", message.text))) as said:
        page.evaluate(f"async (token) => {{ {local}\n Object.assign(window, {{ socket, recorder }}); }}", token)
    assert error_rate(CLIP_TEXT, said.value.text.removeprefix("true ")) < 0.2
    page.evaluate('async () => { recorder.stop(); socket.send(\'{"type":"CloseStream"}\'); }')
    page.wait_for_function("() => socket.readyState === WebSocket.CLOSED")
