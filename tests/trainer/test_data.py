"""Prompts: how they are read and ordered, and which are refused."""

import json
import warnings

import datasets
import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from gspo_kernels import demo
from gspo_kernels.trainer.config import DataConfig, InputError
from gspo_kernels.trainer.data import Prompts, columns_of, load_prompts, prepare_prompts, prompt_order

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if brief %}!{% endif %}{% endif %}"
)
BARE = DataConfig(prompt_template="{prompt}")
ROWS = [{"prompt": "a", "answer": 1, "level": "x"}, {"prompt": "bc", "answer": 2, "level": None}]


def test_rows_keep_their_columns(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "answer": 1}\n\n{"prompt": "é\\n", "answer": [2], "level": 3}\n')
    rows = load_prompts(path)
    assert rows == [{"prompt": "a", "answer": 1}, {"prompt": "é\n", "answer": [2], "level": 3}]
    assert columns_of(rows) == {"answer": [1, [2]], "level": [None, 3]}
    assert columns_of(rows[:1], ["level"]) == {"level": [None]}  # a batch may lack columns of the dataset
    path.write_bytes(
        2 * ("\ufeff" + '{"prompt": "a"}\n\ufeff\n').encode()
    )  # two files of an editor that writes marks
    assert load_prompts(path) == [{"prompt": "a"}] * 2
    path.write_text('{"prompt": "old", "question": "a"}\n{"prompt": "older", "question": "b"}\n')
    with pytest.warns(UserWarning, match="'question' replaces the column 'prompt'"):
        assert load_prompts(path, prompt_column="question") == [{"prompt": "a"}, {"prompt": "b"}]
    with pytest.raises(InputError, match=r"no 'answer' among the columns.*question"):
        load_prompts(path, prompt_column="answer")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\n", ["is empty"]),
        ('{"prompt": "a"}\n{"prompt":\n', ["line 2: not valid JSON"]),
        (b'{"prompt": "a"}\r\n{"prompt": "\xe9"}\n', ["not valid JSON in UTF-8"]),
        ('["a"]\n', ["row 1", "list"]),
        ('{"prompt": "a"}\n{"question": "b"}\n', ["row 2", "'prompt'", "'question'"]),
        ('{"prompt": ""}\n', ["row 1", "non-empty text"]),
        ('{"prompt": 3}\n', ["row 1", "text", "3"]),
        ('{"prompt": []}\n', ["row 1", "list of messages", "[]"]),
        ('{"prompt": "a\\ud800"}\n', ["row 1", "half of a surrogate pair"]),
        ('{"prompt": [{"role": "user"}]}\n', ["row 1", "list of messages", "'content'"]),
        ('{"prompt": [{"role": "user", "content": ["a"]}]}\n', ["row 1", "list of messages", "['a']"]),
        ('{"prompt": "a"}\n{"prompt": "b", "completions": 3}\n', ["row 2", "'completions'"]),
    ],
)
def test_what_is_not_a_dataset_is_refused(tmp_path, text, words):
    path = tmp_path / "data.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError) as caught:
        load_prompts(path)
    assert all(word in str(caught.value) for word in ["data.jsonl", *words]), caught.value


def test_datasets_of_every_kind(tmp_path, monkeypatch):
    """The datasets library reads files, folders with splits, what it saved itself, and names on the Hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")  # not the user's cache
    datasets.disable_progress_bars()
    rows, other = datasets.Dataset.from_list(ROWS), datasets.Dataset.from_list([{"prompt": "test"}])
    for name in ("files", "empty"):
        (tmp_path / name).mkdir()
    for path in ("rows.parquet", "files/train-00000.parquet"):
        rows.to_parquet(tmp_path / path)
    other.to_parquet(tmp_path / "files" / "test-00000.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    rows.to_csv(tmp_path / "rows.csv")
    (tmp_path / "rows.json").write_text("\ufeff" + json.dumps(ROWS, indent=1))
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, ROWS)))
    rows.save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / "cache-1234.arrow").write_bytes(b"what map left there")
    datasets.DatasetDict(train=rows, test=other).save_to_disk(tmp_path / "both")
    for name in ("rows.parquet", "files", "rows.csv", "rows.json", "lines.json", "saved", "both"):
        found = load_prompts(tmp_path / name)
        assert [dict(row) for row in found] == ROWS
        assert columns_of([found[i] for i in (1, 1, 0)]) == {"answer": [2, 2, 1], "level": [None, None, "x"]}
    for name in ("files", "both"):
        assert [row["prompt"] for row in load_prompts(tmp_path / name, split="test")] == ["test"]
        assert [dict(row) for row in load_prompts(tmp_path / name, split="train[1:]")] == ROWS[1:]
    for name in ("rows.parquet", "rows.csv", "rows.json", "lines.json"):
        for split, part in (("train", ROWS), ("train[:1]", ROWS[:1]), ("train[50%:]", ROWS[1:])):
            assert [dict(row) for row in load_prompts(tmp_path / name, split=split)] == part
        with pytest.raises(InputError) as caught:
            load_prompts(tmp_path / name, split="test", subset="main", prompt_column="question")
        assert all(word in str(caught.value) for word in ("'test'", "'main'", "'question'"))
    (tmp_path / "rows.json").write_text(json.dumps([ROWS[0], "a"]))
    (tmp_path / "lines.json").write_text('[{"prompt": "a"},')
    (tmp_path / "broken.csv").write_text('prompt,answer\n"x,1\n')
    for name, options, words in (
        ("rows.csv", {"split": "train["}, "'train\\['"),
        ("files", {"prompt_column": "question"}, "no 'question' among the columns"),
        ("files", {"split": "nowhere"}, "nowhere"),
        ("both", {"split": "nowhere"}, "cannot be loaded: .*nowhere"),
        ("both", {"subset": "main"}, "cannot be loaded"),
        ("broken.parquet", {}, "cannot be loaded"),
        ("broken.csv", {}, "cannot be loaded: .*EOF inside string"),  # the error below datasets' own
        ("rows.json", {}, "row 2: expected a mapping of columns to values, got str"),
        ("lines.json", {}, "not valid JSON"),
        ("empty", {}, "cannot be loaded"),
    ):
        with pytest.raises(InputError, match=rf"{name}.*{words}"):
            load_prompts(tmp_path / name, **options)

    def load_dataset(name, subset, *, split):
        if subset is None:
            raise ValueError("Config name is missing. Please pick one among ['main']")
        return datasets.Dataset.from_list([{"prompt": f"{name} {subset} {split}"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_prompts("org/name", subset="main", split="test")[0] == {"prompt": "org/name main test"}
    assert load_prompts("org/name", subset="main")[0] == {"prompt": "org/name main train"}
    with pytest.raises(InputError, match=r"org/name: there is no such file.*pick one among"):
        load_prompts("org/name")
    with pytest.raises(InputError, match="dataset: got ''"):
        load_prompts("")
    for name in ("no/such/file", "prompts.jsonl", "prompts.csv", "./name"):
        with pytest.raises(InputError, match=f"there is no dataset file {name}"):
            load_prompts(name)


def test_a_digest_depends_on_rows_and_order(tmp_path, monkeypatch):
    class Opaque:
        """A value whose ``repr`` has an address."""

    def digest(rows):
        return Prompts(rows, [], []).digest

    (tmp_path / "moved.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    expected = digest(ROWS)
    for same in (
        datasets.Dataset.from_list(ROWS),
        load_prompts(tmp_path / "moved.jsonl"),
        [dict(reversed(row.items())) for row in ROWS],
    ):
        assert digest(same) == expected
    others = [ROWS[::-1], ROWS[:1], ROWS + ROWS[:1]]
    others += [[ROWS[0] | changed, ROWS[1]] for changed in ({"prompt": "b"}, {"answer": 2}, {"more": None})]
    assert len({expected, *map(digest, others)}) == 7
    # What JSON does not have: objects at any address, arrays in full, sets in any order (0 and 8 collide).
    long = np.arange(5000)
    for one, other, equal in (
        (Opaque(), Opaque(), True),
        (long, np.where(long == 2500, 0, long), False),
        ({0, 8}, {8, 0}, True),
    ):
        assert (digest([{"value": one}]) == digest([{"value": other}])) == equal


def test_order_is_a_new_permutation_in_every_epoch():
    straight = prompt_order(7, 1, 0, 42)
    assert all(sorted(straight[start : start + 7]) == [*range(7)] for start in range(0, 42, 7))
    assert straight[:7] != straight[7:14] and prompt_order(7, 2, 0, 42) != straight
    assert [i for start in range(0, 42, 6) for i in prompt_order(7, 1, start, 6)] == straight


def test_conversations_go_through_the_chat_template(tokenizer):
    chat = demo.make_tokenizer()
    chat.chat_template = CHATML
    question, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "He"}
    rows = [{"prompt": [question]}, {"prompt": "plain"}, {"prompt": [{**question, "name": None}, answer]}]
    encoded = prepare_prompts(chat, rows, "data", longest=None).tokens
    assert chat.batch_decode(encoded) == [
        "<|user|>hi<|end|><|assistant|>",
        "<|user|>plain<|end|><|assistant|>",
        "<|user|>hi<|end|><|assistant|>He",  # an answer that has begun is continued
    ]
    assert encoded[0].count(chat.eos_token_id) == 1
    brief = prepare_prompts(
        chat, rows, "data", longest=None, options=DataConfig(template_options={"brief": True})
    )
    assert chat.decode(brief.tokens[0]).endswith("<|assistant|>!")
    with pytest.raises(InputError, match=r"data, row 1: .* has no chat template"):
        prepare_prompts(tokenizer, rows, "data", longest=None)
    chat.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(InputError, match=r"data, row 2: .*no system role"):
        prepare_prompts(chat, [rows[1], rows[0]], "data", longest=None, options=BARE)


USER, OWN = ({"role": role, "content": role[0]} for role in ("user", "system"))


@pytest.mark.parametrize(
    ("options", "prompt", "expected"),
    [
        ({"system_prompt": "be {brief}"}, "hi", "<|system|>be {brief}<|end|><|user|>hi<|end|><|assistant|>"),
        ({"system_prompt": "s2"}, [USER], "<|system|>s2<|end|><|user|>u<|end|><|assistant|>"),
        ({"system_prompt": "s2"}, [OWN, USER], "<|system|>s<|end|><|user|>u<|end|><|assistant|>"),
        ({"prompt_template": "{prompt}"}, "hi", "hi"),
        ({"prompt_template": "Q: {prompt} {x}\nA:"}, "{hi}", "Q: {hi} {x}\nA:"),
        ({"prompt_template": "Q: {prompt}"}, [USER], "<|user|>u<|end|><|assistant|>"),
    ],
)
def test_what_a_model_is_asked(tokenizer, options, prompt, expected):
    chat, rows = demo.make_tokenizer(), [{"prompt": prompt, "answer": 1}]
    chat.chat_template = CHATML
    prompts = prepare_prompts(chat, rows, "data", longest=None, options=DataConfig(**options))
    assert chat.decode(prompts.tokens[0]) == expected
    assert prompts.rows is rows  # which reward functions get
    if "system_prompt" in options:
        with pytest.raises(InputError, match=r"data, row 1: .*system_prompt, but .* no chat template"):
            prepare_prompts(tokenizer, rows, "data", longest=None, options=DataConfig(**options))
        with pytest.raises(InputError, match=r"system_prompt must be null with prompt_template"):
            DataConfig(**options, prompt_template="{prompt}")
    with pytest.raises(InputError, match=r"prompt_template must be a text with \{prompt\}"):
        DataConfig(prompt_template="Q: {question}")


def with_special_tokens(template, **tokens):
    """Return a tokenizer whose post-processor adds the special tokens of a template to a text, $A."""
    own = demo.make_tokenizer()
    own.add_special_tokens(tokens)
    special = [(token, own.convert_tokens_to_ids(token)) for token in template.split() if token != "$A"]
    if special:
        own.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
    return own


@pytest.mark.parametrize(
    ("template", "prompt", "words"),
    [
        ("$A", "ab", None),
        ("$A <|end|>", "ab", "appends its end token"),
        ("$A <|end|>", "ab<|end|>", None),
        ("$A <|end|>", [{"role": "user", "content": "ab"}], None),
        ("$A", "<s>ab", None),
        ("<s> $A", "ab", None),
        ("<s> $A", "<s>ab", "with two <s>"),
    ],
)
def test_special_tokens_that_a_prompt_gets_are_checked(recwarn, template, prompt, words):
    own = with_special_tokens(template, bos_token="<s>")
    own.chat_template = "{{ messages[0].content }}" + own.eos_token
    prepare_prompts(own, [{"prompt": prompt}], "data", longest=None, options=BARE)
    found = [str(each.message) for each in recwarn if str(each.message).startswith("data: ")]
    assert len(found) == (words is not None) and all(words in text for text in found)


TEMPLATES = [CHATML, "[{{ messages[0].role }}] {{ messages[0].content }}\n[assistant] "]
TEMPLATES += ["USER: {{ messages[0].content }}{{ ' ASSISTANT:' if add_generation_prompt }}"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_prompt_templated_twice_is_warned_about(template):
    chat = demo.make_tokenizer()
    chat.chat_template = template
    message = [{"role": "user", "content": "hi"}]
    text = chat.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    for prompt, options, twice in (
        ("hi", None, False),
        (message, None, False),
        (text, None, True),
        ([message[0] | {"content": text}], None, True),
        (text, BARE, False),
    ):
        with warnings.catch_warnings(record=True, action="always") as found:
            prepare_prompts(chat, [{"prompt": "x"}, {"prompt": prompt}], "d", longest=None, options=options)
        assert any("have the chat template" in str(each.message) for each in found) == twice


@pytest.mark.parametrize("kind", [list, datasets.Dataset.from_list])
def test_prompts_are_checked_against_the_model(tokenizer, kind):
    rows = kind([{"prompt": "ab", "n": 1}, {"prompt": "abcdef", "n": 2}])
    prompts = prepare_prompts(tokenizer, rows, "data", longest=6, embedded=258)
    assert prompts.tokens == tokenizer(["ab", "abcdef"])["input_ids"]
    assert prompts.columns == ["n"] and [row["n"] for row in prompts.rows] == [1, 2]
    for options, words in (
        ({"longest": 5}, r"data, row 2: the prompt has 6 tokens.* 5 "),
        ({"longest": 0}, "rollout.max_new_tokens leaves no space in the model"),
        ({"longest": None, "embedded": 60}, r"data, row 1: the prompt has token \d+, .*embeds only 60"),
    ):
        with pytest.raises(InputError, match=words):
            prepare_prompts(tokenizer, rows, "data", **options)
    said: list[str] = []
    most = {"longest": 2, "say": said.append}
    prompts = prepare_prompts(tokenizer, rows, "data", options=DataConfig(max_prompt_tokens=2), **most)
    assert [dict(row) for row in prompts.rows] == [{"prompt": "ab", "n": 1}]
    assert (prompts.tokens, prompts.asked) == (tokenizer(["ab"])["input_ids"], ["ab"])
    assert said == ["data: 1 of 2 prompts are longer than data.max_prompt_tokens = 2 and are skipped"]
    with pytest.raises(InputError, match=r"data: all 2 prompts are longer than .*max_prompt_tokens = 1"):
        prepare_prompts(tokenizer, rows, "data", options=DataConfig(max_prompt_tokens=1), **most)
    with pytest.raises(InputError, match="row 1: the prompt tokenizes to nothing"):
        prepare_prompts(lambda text: {"input_ids": []}, rows, "data", longest=None)
