"""What is said about a vLLM whose internals moved; the standard library stands in for it."""

import pytest

from models.vllm_plugin import contract

HERE = {"json:dumps": ("obj", "indent"), "json.decoder:JSONDecoder.decode": ("s",)}


@pytest.mark.parametrize(
    ("calls", "attributes", "said"),
    [
        (HERE, {"json:JSONEncoder": ("ensure_ascii", "indent")}, ""),
        ({"json:dumps": ("obj", "gone")}, {}, "json:dumps without gone"),
        ({"json:gone": ()}, {}, "json:gone"),
        ({"nowhere.at_all:dumps": ()}, {}, "nowhere.at_all:dumps"),
        ({}, {"json:JSONEncoder": ("gone",)}, "json:JSONEncoder without gone"),
    ],
)
def test_the_first_thing_that_moved_is_named(
    monkeypatch: pytest.MonkeyPatch,
    calls: dict[str, tuple[str, ...]],
    attributes: dict[str, tuple[str, ...]],
    said: str,
) -> None:
    monkeypatch.setattr(contract, "_MODEL_CALLS", calls)
    monkeypatch.setattr(contract, "_MODEL_ATTRIBUTES", attributes)
    assert contract.moved_in_model() == said


def test_the_engine_is_told_apart_from_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "_ENGINE_CALLS", {"json:dumps": ("gone",)})
    assert contract.moved_in_engine() == "json:dumps without gone"
