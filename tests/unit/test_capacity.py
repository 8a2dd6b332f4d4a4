"""The capacity model, and what the soak makes of its minutes."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.capacity import BATCHES, SHAPES, USUAL, Costs, calculated, load, streams_at, table
from bench.capacity import plot as plot_costs
from bench.roofline import peak_of
from bench.soak import Minute, plot

COSTS = Costs(
    encode_base_s=0.01,
    encode_position_s=0.0003,
    prompt_s=dict.fromkeys(BATCHES, 0.03),
    step_s={1: 0.012, 2: 0.014, 4: 0.018, 8: 0.03},
    align_s=dict.fromkeys(BATCHES, 0.04),
)


def test_a_final_costs_what_its_parts_do() -> None:
    # 7 s and a margin of 3 s are 500 positions; 3.3 tokens a second and the end of text are 24.1 steps.
    assert COSTS.decode_s(7.0, 1) == pytest.approx(0.01 + 0.15 + 0.03 + 24.1 * 0.012 + 0.04)
    assert COSTS.decode_s(7.0, 4) == pytest.approx(0.01 + 0.15 + 0.03 + 24.1 * 0.018 / 4 + 0.04)


@given(st.integers(1, 200), st.sampled_from(BATCHES))
def test_load_grows_with_streams_and_partials_cost_what_they_are_asked_for(streams: int, batch: int) -> None:
    finals, partials = load(COSTS, USUAL, streams, batch)
    assert finals == pytest.approx(streams * load(COSTS, USUAL, 1, batch)[0])
    assert load(COSTS, replace(USUAL, partial_every_s=6.0), streams, batch)[1] == pytest.approx(partials / 2)
    assert load(COSTS, replace(USUAL, partial_every_s=0.0), streams, batch) == (finals, 0.0)


@given(st.sampled_from(BATCHES), st.floats(0.1, 4.0))
def test_so_many_streams_fit_and_one_more_does_not(batch: int, limit: float) -> None:
    fits = streams_at(COSTS, USUAL, batch, limit)
    assert sum(load(COSTS, USUAL, fits, batch)) <= limit + 1e-9
    assert sum(load(COSTS, USUAL, fits + 1, batch)) > limit


@pytest.mark.parametrize("model", SHAPES)
def test_on_a_gpu_larger_batches_carry_more_and_an_h100_more_than_an_l4(model: str) -> None:
    small, large = (calculated(SHAPES[model], peak) for name in ("L4", "H100") if (peak := peak_of(name)))
    for costs in (small, large):
        carried = [streams_at(costs, USUAL, batch, 0.9) for batch in sorted(costs.step_s)]
        assert carried == sorted(carried)
        assert str(carried[-1]) in table(costs, USUAL)
    assert streams_at(large, USUAL, 8, 0.9) > 4 * streams_at(small, USUAL, 8, 0.9)


def test_a_minute_shows_the_worst_that_was_seen_in_it() -> None:
    minute = Minute(finals_s=[0.5, 0.7, 2.0], lags_s=[1.0, 3.0], missing=1, streams=2)
    minute.samples = [{"gateway_mib": 100.0, "threads": 9}, {"gateway_mib": 120.0, "threads": 8}]
    figures = minute.figures()
    assert (figures["finals"], figures["never_final"], figures["final_p50_s"], figures["final_p99_s"]) == (
        3,
        1,
        0.7,
        2.0,
    )
    assert (figures["max_lag_s"], figures["gateway_mib"], figures["threads"]) == (3.0, 120.0, 9)
    assert Minute().figures()["final_p99_s"] is None


def test_the_plot_is_an_image_with_a_line_for_each_figure_that_is_known() -> None:
    minutes = [{"final_p50_s": 0.5 + n, "gateway_mib": 100.0, "max_lag_s": None} for n in range(5)]
    image = ElementTree.fromstring(plot(minutes))
    lines = image.findall("{http://www.w3.org/2000/svg}polyline")
    drawn = [line.attrib["points"].split() for line in lines]
    assert sorted(map(len, drawn)) == [0, 0, 0, 0, 0, 0, 5, 5]
    heights = [float(point.split(",")[1]) for point in drawn[0]]
    assert heights == sorted(heights, reverse=True), "more is higher"


def test_the_costs_have_a_picture_too() -> None:
    image = ElementTree.fromstring(plot_costs(COSTS, USUAL))
    assert len(image.findall("{http://www.w3.org/2000/svg}polyline")) == 5
