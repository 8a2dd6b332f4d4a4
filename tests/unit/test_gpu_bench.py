"""The arithmetic and the table of bench.gpu. That it measures is for tests/real/test_vllm_bench.py."""

from dataclasses import replace
from typing import Any

import pytest

from bench import gpu, roofline
from bench.gpu_engine import Figures
from bench.roofline import Peak, Work
from models.vllm_settings import ModelShape

TURBO = ModelShape(
    width=1280,
    encoder_layers=32,
    decoder_layers=4,
    encoder_feed_forward=5120,
    decoder_feed_forward=5120,
    vocabulary=51_866,
    mel_bins=128,
)
SMALL = ModelShape(4, 1, 1, 8, 8, 10, 2)


def test_an_encoder_is_counted_multiplication_by_multiplication() -> None:
    """Of 3 positions: two convolutions over 6 frames and 3 positions, four projections, two layers, attention."""
    convolutions = 6 * 3 * 2 * 4 + 3 * 3 * 4 * 4
    projections = 4 * 3 * 4 * 4
    feed_forward = 2 * 3 * 4 * 8
    attention = 2 * 3 * 3 * 4
    work = roofline.encoder(SMALL, 3, number_bytes=2)
    assert work.flops == 2 * (convolutions + projections + feed_forward + attention)
    assert work.bytes_read == 2 * (3 * 2 * 4 + 3 * 4 * 4 + 4 * 4 * 4 + 2 * 4 * 8)


def test_a_decoder_step_is_counted_multiplication_by_multiplication() -> None:
    """Self attention has four projections, cross attention two here: its keys and values are made once a request."""
    weights = 6 * 4 * 4 + 2 * 4 * 8 + 4 * 10
    cached = 2 * 4 * (1500 + 7)
    work = roofline.decoder_step(SMALL, batch=3, tokens=7, number_bytes=2, cache_number_bytes=1)
    assert work.flops == 2 * 3 * (weights + cached)
    assert work.bytes_read == 2 * weights + 3 * cached


def test_the_counts_have_the_size_that_the_model_is_known_for() -> None:
    """large-v3's encoder has 637 million parameters; 30 s of it are 2 FLOPs each at 1500 positions, and attention."""
    work = roofline.encoder(TURBO, 1500, number_bytes=2)
    assert work.bytes_read / 2 == pytest.approx(635e6, rel=0.01)
    assert work.flops == pytest.approx(2 * 1500 * 635e6, rel=0.25)
    step = roofline.decoder_step(TURBO, 1, 0, number_bytes=2, cache_number_bytes=2)
    assert step.bytes_read / 2 - 4 * 2 * 1280 * 1500 == pytest.approx(TURBO.parameters - 635e6, rel=0.1)


def test_the_slower_of_computing_and_reading_decides() -> None:
    peak = Peak(tflops=100, gb_s=500)
    assert peak.seconds(Work(flops=1e12, bytes_read=1e9)) == pytest.approx(0.01)
    assert peak.seconds(Work(flops=1e10, bytes_read=1e9)) == pytest.approx(0.002)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("NVIDIA L4, compute capability 8.9", Peak(121, 300)),
        ("NVIDIA A10", Peak(125, 600)),
        ("NVIDIA A100-SXM4-40GB", Peak(312, 1_555)),
        ("NVIDIA A100-PCIE-40GB", Peak(312, 1_555)),
        ("NVIDIA A100 80GB PCIe", Peak(312, 1_935)),
        ("NVIDIA A100-SXM4-80GB", Peak(312, 2_039)),
        ("NVIDIA H100 80GB HBM3", Peak(989, 3_350)),
        ("NVIDIA H100 PCIe", Peak(756, 2_000)),
        ("NVIDIA H100 NVL", Peak(835, 3_900)),
        ("NVIDIA H200", Peak(989, 4_800)),
        ("NVIDIA H200 NVL", Peak(835, 4_800)),
        ("NVIDIA A10G", None),
        ("NVIDIA L40S", None),
        ("NVIDIA L40", None),
        ("2 CPUs", None),
    ],
)
def test_a_device_is_known_by_its_name(device: str, expected: Peak | None) -> None:
    assert roofline.peak_of(device) == expected


FIGURES = Figures(
    device="NVIDIA L4, compute capability 8.9",
    vllm="0.32.0",
    model_class="shaped",
    number_bytes=2,
    cache_number_bytes=1,
    start_s=61.2,
    encoder=[(100, 0.004), (1500, 0.0)],
    prompt_s=0.003,
    step=[(64, 0.01)],
    step_tokens=50,
    recordings=256,
    at_once=64,
    audio_s=2_000.0,
    wall_s=8.0,
)


def test_a_share_is_the_least_time_over_the_measured_one() -> None:
    rows = {row[0]: row[1:] for row in gpu.engine_rows(FIGURES, TURBO)}
    least_s = roofline.encoder(TURBO, 100, 2).bytes_read / 300e9  # 2 s of one stream: reading the weights decides
    assert rows["encoder, a window of 2 s"] == ("4.00 ms", f"{1e3 * least_s:.2f} ms", f"{100 * least_s / 0.004:.0f} %")
    assert rows["encoder, a window of 30 s"][0] == "0.00 ms"
    assert rows["encoder, a window of 30 s"][2] == "-"
    assert rows["RTFx, 256 recordings, 2000 s, 64 at once"][0] == "250.0"
    unknown = gpu.engine_rows(replace(FIGURES, device="2 CPUs"), TURBO)
    assert [row[2:] for row in unknown if row[0].startswith(("encoder", "decoder"))] == [("not known", "-")] * 3


def figures_of(p95: float | None, never: float = 0.0, *, valid: bool = True, errors: list[str] | None = None) -> Any:
    final = {"p50": p95, "p95": p95}
    return {"final_after_detected_end_s": final, "never_final": never, "valid": valid, "errors": errors or []}


@pytest.mark.parametrize(
    ("figures", "passes"),
    [
        (figures_of(0.5), True),
        (figures_of(0.51), False),
        (figures_of(0.1, never=0.01), False),
        (figures_of(0.1, valid=False), False),
        (figures_of(0.1, errors=["the connection was closed"]), False),
        (figures_of(None), False),
    ],
)
def test_streams_pass_with_all_finals_in_time_by_a_client_that_was_in_time(figures: Any, passes: bool) -> None:
    assert gpu.streams_of(8, figures).within(0.5) is passes


def test_the_most_streams_that_pass_are_told() -> None:
    found = [gpu.streams_of(8, figures_of(0.2)), gpu.streams_of(16, figures_of(0.4))]
    assert gpu.stream_rows(found, 0.5)[-1][1] == "16 or more"
    found.append(gpu.streams_of(32, figures_of(0.9, never=0.5)))
    *_, last, most = gpu.stream_rows(found, 0.5)
    assert last == ("p95 of finals, 32 at once", "0.90 s", "50.0 % never final", "")
    assert most[1] == "16"
    assert gpu.stream_rows([gpu.streams_of(8, figures_of(None))], 0.5)[-1][1] == "0"


def test_the_table_is_markdown() -> None:
    lines = gpu.table("title", gpu.engine_rows(FIGURES, TURBO)).splitlines()
    assert lines[:2] == ["title", ""]
    assert {line.count("|") for line in lines[2:]} == {5}


@pytest.mark.parametrize("wrong", [["--streams", "0"], ["--streams", "a"], ["--seconds", "0"], ["--recordings", "0"]])
def test_wrong_arguments_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.arguments(wrong)
