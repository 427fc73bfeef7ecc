"""Writes GSM8K as verl reads it: ``python prepare.py FOLDER`` makes train.parquet and test.parquet.

verl's repository has the same as examples/data_preprocess/gsm8k.py; its wheel doesn't.
"""

import sys
from pathlib import Path

import datasets

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def to_row(example: dict, index: int, split: str) -> dict:
    """Return a row for verl, whose reward for this ``data_source`` is 1 for the right number after "####"."""
    answer = example["answer"].split("#### ")[1].replace(",", "")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{example['question']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index},
    }


def main(folder: str, dataset: str = "openai/gsm8k") -> None:
    """Write both splits of ``dataset``, a name on the Hub or a folder laid out like it, into ``folder``."""
    for split in ("train", "test"):
        examples = datasets.load_dataset(dataset, "main", split=split)
        rows = examples.map(
            to_row, with_indices=True, fn_kwargs={"split": split}, remove_columns=examples.column_names
        )
        rows.to_parquet(Path(folder, f"{split}.parquet"))


if __name__ == "__main__":
    main(*sys.argv[1:])
