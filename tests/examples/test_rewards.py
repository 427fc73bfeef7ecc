"""The example reward functions give what their words say."""

import pytest

from examples import rewards


def test_the_last_number_counts():
    texts = ["5", "2 + 3 is 5", "5 or 6", "five", "5"]
    answers = [5, "5", 5, 5, None]
    assert rewards.right_number([], texts, [], answer=answers) == [1, 1, 0, 0, None]


def test_brevity_is_counted_in_tokens():
    lengths = [0, 64, 256, 1000]
    found = rewards.brief([], [""] * 4, [[0] * length for length in lengths])
    assert found == pytest.approx([1.0, 0.75, 0.0, 0.0])


def test_right_places_count_where_the_length_is_right():
    texts = ["1234", "12345", "21345", ""]
    assert rewards.per_digit([], texts, [], answer=["12345"] * 4) == [0, 1, 0.6, 0]
