"""Rollouts against hand-made cases: masks, padding, the layout for training, how tokens are drawn."""

import pytest
import torch

from gspo_kernels.trainer.models import IGNORED
from gspo_kernels.trainer.rollout import Completions, Sampling, completion_mask, left_pad, sample_completions

from .conftest import tiny_qwen3

END, OTHER_END, PAD = 9, 8, 0


@pytest.mark.parametrize(
    ("ids", "mask", "finished"),
    [
        ([1, 2, END, PAD], [1, 1, 1, 0], True),  # ended early
        ([1, 2, 3, END], [1, 1, 1, 1], True),  # ended in the last place
        ([1, 2, 3, 4], [1, 1, 1, 1], False),  # truncated
        ([END, PAD, PAD, PAD], [1, 0, 0, 0], True),  # empty text
        ([END, END, END, END], [1, 0, 0, 0], True),  # padded with the end token
        ([1, OTHER_END, END, PAD], [1, 1, 0, 0], True),  # the first of several end tokens
        ([1, PAD, 2, END], [1, 1, 1, 1], True),  # a padding token that was sampled
    ],
)
def test_completion_mask(ids, mask, finished):
    got_mask, got_finished = completion_mask(torch.tensor([ids]), [END, OTHER_END])
    assert got_mask.int().tolist() == [mask]
    assert got_finished.tolist() == [finished]


def test_left_padding():
    ids, mask = left_pad([[1, 2, 3], [4]], PAD)
    assert ids.tolist() == [[1, 2, 3], [PAD, PAD, 4]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def hand_made() -> Completions:
    prompt_ids, prompt_mask = left_pad([[1, 2, 3], [4], [5, 6]], PAD)
    completion_ids = torch.tensor([[7, END, PAD, PAD], [1, 2, END, PAD], [END, PAD, PAD, PAD]])
    return Completions(prompt_ids, prompt_mask, completion_ids, *completion_mask(completion_ids, [END]))


def test_inputs_are_cut_to_the_rows_and_labels_are_shifted():
    input_ids, attention_mask, labels = hand_made().inputs(torch.tensor([1, 2]))
    assert input_ids.tolist() == [[PAD, 4, 1, 2, END], [5, 6, END, PAD, PAD]]
    assert attention_mask.tolist() == [[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert labels.tolist() == [[1, 2, END], [END, IGNORED, IGNORED]]
    # position P - 1 + t predicts labels[t], that is the token one place later
    P = input_ids.shape[1] - labels.shape[1]
    counted = labels != IGNORED
    assert torch.equal(input_ids[:, P:][counted], labels[counted])


def test_token_lists_have_no_padding():
    assert hand_made().token_lists() == [[7, END], [1, 2, END], [END]]


def sample(model, tokenizer, prompts, sampling, batch_size=64):
    encoded = tokenizer(prompts)["input_ids"]
    end = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    return sample_completions(model, encoded, sampling, end_ids=[end], pad_id=pad, batch_size=batch_size)


def test_greedy_completions_do_not_depend_on_padding_or_batches(model, tokenizer):
    prompts = ["a", "hello", "xyz", "abcdefg"]
    together = sample(model, tokenizer, prompts, Sampling(6, temperature=0.0)).token_lists()
    in_pairs = sample(model, tokenizer, prompts, Sampling(6, temperature=0.0), batch_size=2).token_lists()
    alone = [sample(model, tokenizer, [p], Sampling(6, temperature=0.0)).token_lists()[0] for p in prompts]
    assert together == in_pairs == alone
    # and are what the model itself finds most likely
    ids = tokenizer(["hello"])["input_ids"][0]
    for expected in alone[1]:
        found = model(torch.tensor([ids])).logits[0, -1].argmax().item()
        assert found == expected
        ids.append(found)


def test_batches_that_end_early_are_filled_with_padding(tokenizer):
    model = tiny_qwen3(tokenizer, tie_word_embeddings=False)
    with torch.no_grad():
        model.model.norm.weight.zero_()  # all logits are equal, so greedy decoding takes token 0 ...
    completions = sample(model, tokenizer, ["a", "b"], Sampling(4, temperature=0.0))
    assert completions.completion_ids.tolist() == [[0] * 4] * 2
    assert completions.finished.tolist() == [False, False]
    completions = sample_completions(
        model, [[1], [2]], Sampling(4, temperature=0.0), end_ids=[0], pad_id=7, batch_size=1
    )  # ... which is the end token here
    assert completions.completion_ids.tolist() == [[0, 7, 7, 7]] * 2
    assert completions.token_lists() == [[0], [0]]


def test_the_models_own_generation_defaults_are_set_aside(model, tokenizer):
    torch.manual_seed(0)
    plain = sample(model, tokenizer, ["ab"] * 16, Sampling(6)).completion_ids
    model.generation_config.top_k = 1
    model.generation_config.temperature = 0.1
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.max_length = 3
    torch.manual_seed(0)
    again = sample(model, tokenizer, ["ab"] * 16, Sampling(6)).completion_ids
    assert torch.equal(plain, again)
    assert model.generation_config.top_k == 1, "the model keeps its own defaults"


def test_temperature_and_top_k_reach_the_sampler(model, tokenizer):
    def distinct(sampling):
        torch.manual_seed(0)
        return len({tuple(ids) for ids in sample(model, tokenizer, ["ab"] * 32, sampling).token_lists()})

    assert distinct(Sampling(4, top_k=1)) == 1
    assert distinct(Sampling(4, temperature=1e-4)) == 1
    assert distinct(Sampling(4)) > 16
