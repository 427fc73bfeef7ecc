"""Prompts: reading them, refusing what is not one, and their order."""

import json

import pytest

from gspo_kernels.trainer.data import PromptOrder, check_rows, columns_of, encode_prompts, load_prompts
from gspo_kernels.trainer.errors import DataError


def write(tmp_path, text):
    path = tmp_path / "data.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_rows_keep_their_columns(tmp_path):
    path = write(tmp_path, '{"prompt": "a", "answer": 1}\n\n{"prompt": "é\\n", "answer": [2], "level": 3}\n')
    rows = load_prompts(path)
    assert rows == [{"prompt": "a", "answer": 1}, {"prompt": "é\n", "answer": [2], "level": 3}]
    assert columns_of(rows) == {"answer": [1, [2]], "level": [None, 3]}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["there is no dataset file"]),
        ("", ["is empty"]),
        ("\n\n", ["is empty"]),
        ('{"prompt": "a"}\n{"prompt":\n', ["line 2", "not valid JSON"]),
        ('["a"]\n', ["line 1", "list"]),
        ('{"prompt": "a"}\n{"question": "b"}\n', ["row 2", "'prompt'", "'question'"]),
        ('{"prompt": ""}\n', ["row 1", "non-empty text"]),
        ('{"prompt": 3}\n', ["row 1", "text", "3"]),
        (json.dumps({"prompt": [{"role": "user", "content": "a"}]}), ["row 1", "chat template"]),
    ],
)
def test_what_is_not_a_dataset_is_refused(tmp_path, text, words):
    path = tmp_path / "data.jsonl" if text is None else write(tmp_path, text)
    with pytest.raises(DataError) as caught:
        load_prompts(path)
    for word in ["data.jsonl", *words]:
        assert word in str(caught.value)


def test_rows_given_in_python_are_checked_as_well():
    with pytest.raises(DataError, match="the eval dataset is empty"):
        check_rows([], "the eval dataset")


def test_order_is_a_new_permutation_in_every_epoch():
    order = PromptOrder(5, seed=3)
    epochs = [order.indices(start, 5) for start in (0, 5, 10)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_order_needs_nothing_but_the_position():
    straight = PromptOrder(7, seed=1).indices(0, 40)
    pieces = PromptOrder(7, seed=1)
    assert [i for start in range(0, 40, 4) for i in pieces.indices(start, 4)] == straight
    assert PromptOrder(7, seed=1).indices(13, 9) == straight[13:22]
    assert PromptOrder(7, seed=2).indices(0, 40) != straight


def test_prompts_that_do_not_fit_are_refused(tokenizer):
    rows = [{"prompt": "ab"}, {"prompt": "abcdef"}]
    assert encode_prompts(tokenizer, rows, "data", 6) == tokenizer(["ab", "abcdef"])["input_ids"]
    with pytest.raises(DataError, match=r"data, row 2: the prompt has 6 tokens.* 5 "):
        encode_prompts(tokenizer, rows, "data", 5)
