"""Known mistakes of servers that only a real client shows. tests/real/test_traps.py says where others are tested."""

import subprocess

import pytest

from tests.clients.conftest import SCRIPTS, SENTENCE, Clients, plain
from tests.support.server import wait_for


def test_a_muted_client_stays_connected_and_keeps_its_clock(clients: Clients) -> None:
    messages = clients.run("deepgram_muted.py")
    said = [message["channel"]["alternatives"][0] for message in messages if message["type"] == "Results"]
    assert [plain(best["transcript"]) for best in said if best["transcript"]] == [SENTENCE, SENTENCE]
    started = [message["timestamp"] for message in messages if message["type"] == "SpeechStarted"]
    assert started == [pytest.approx(0.2, abs=0.2), pytest.approx(4.04, abs=0.2)]  # of audio: muting takes no time
    assert messages[-1]["type"] == "Metadata"


@pytest.mark.parametrize(
    "script", ["openai_realtime.py", "deepgram_live.py", "livekit_openai.py", "livekit_deepgram.py"]
)
def test_a_client_that_is_killed_in_mid_speech_leaves_nothing_behind(clients: Clients, script: str) -> None:
    command = [clients.python, str(SCRIPTS / script), clients.server.url(""), str(clients.folder)]
    with subprocess.Popen(command, env=clients.environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while "tarted" not in (line := process.stdout.readline()) and "start_of_speech" not in line:
            assert line, "it ended before it spoke"
        assert clients.server.metric("hark_sessions_open") == 1
        process.kill()
    wait_for(lambda: clients.server.metric("hark_sessions_open") == 0)
    wait_for(lambda: clients.server.metric("hark_decodes_running") == 0)
    assert clients.server.tracebacks == []
    assert plain(clients.run("deepgram_files.py")[0]["results"]["channels"][0]["alternatives"][0]["transcript"])
