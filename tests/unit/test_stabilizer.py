"""LocalAgreement and the promise of committed words."""

from hypothesis import given
from hypothesis import strategies as st

from streaming.stabilizer import Stabilizer, Transcript, join, normalize
from streaming.types import Word

SECOND = 16_000


def words(text: str, step: int = SECOND // 2) -> tuple[Word, ...]:
    return tuple(Word(f" {w}", i * step, (i + 1) * step, 0.9) for i, w in enumerate(text.split()))


def test_what_two_hypotheses_agree_on_is_committed_up_to_the_hold_back() -> None:
    stabilizer = Stabilizer(hold_back_samples=SECOND)
    assert stabilizer.update(words("so my"), SECOND, 99 * SECOND) == Transcript("", "so my")
    assert stabilizer.update(words("So, my fellow"), 2 * SECOND, 99 * SECOND) == Transcript("So, my", " fellow")
    assert stabilizer.update(words("so my fellow Americans"), 2 * SECOND, 99 * SECOND).committed == "So, my"
    assert stabilizer.update(words("so my fellow Americans"), 4 * SECOND, 99 * SECOND) == Transcript(
        "So, my fellow Americans", ""
    )


def test_words_in_the_cut_zone_wait() -> None:
    stabilizer = Stabilizer(hold_back_samples=0)
    for _ in range(3):
        text = stabilizer.update(words("one two three four"), 9 * SECOND, SECOND)
    assert text == Transcript("one two", " three four")


def test_a_disagreeing_final_keeps_the_promise_and_takes_the_rest_by_time() -> None:
    stabilizer = Stabilizer(hold_back_samples=0)
    for _ in range(2):
        stabilizer.update(words("ask not what"), 9 * SECOND, 99 * SECOND)
    assert join(stabilizer.settle(words("as knot what your country"))) == "ask not what your country"


def test_a_repeated_word_at_the_joint_is_not_doubled_and_true_repetitions_survive() -> None:
    stabilizer = Stabilizer(hold_back_samples=0)
    for _ in range(2):
        stabilizer.update(words("kept me"), 9 * SECOND, 99 * SECOND)
    shifted = [Word(" held", 0, 8_000, 0.9), Word(" me", 8_500, 16_900, 0.9), Word(" honest", 17_000, 24_000, 0.9)]
    assert join(stabilizer.settle(shifted)) == "kept me honest"
    agreeing = words("kept me me honest")
    assert join(stabilizer.settle(agreeing)) == "kept me me honest"


def test_text_without_spaces_is_joined_without_spaces() -> None:
    stabilizer = Stabilizer(hold_back_samples=0)
    characters = [Word(c, i * 3_200, (i + 1) * 3_200, 0.9) for i, c in enumerate("今天天气好")]
    stabilizer.update(characters[:3], SECOND, 99 * SECOND)
    text = stabilizer.update(characters, SECOND, 99 * SECOND)
    assert text.committed + text.tentative == "今天天气好"
    assert text.committed == "今天天"


VOCABULARY = st.sampled_from(["a", "b", "c", "B,", "A."])


@given(st.lists(st.lists(VOCABULARY, max_size=8), min_size=1, max_size=8))
def test_committed_is_always_a_prefix_of_what_is_shown_next(hypotheses: list[list[str]]) -> None:
    stabilizer = Stabilizer(hold_back_samples=SECOND)
    committed: list[str] = []
    for number, hypothesis in enumerate(hypotheses):
        text = stabilizer.update(words(" ".join(hypothesis)), (number + 2) * SECOND, 99 * SECOND)
        assert text.committed.split()[: len(committed)] == committed
        committed = text.committed.split()
    final = join(stabilizer.settle(words(" ".join(hypotheses[-1])))).split()
    assert [normalize(w) for w in final[: len(committed)]] == [normalize(w) for w in committed]
