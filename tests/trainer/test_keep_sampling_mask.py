"""Training among what the sampler could have drawn: in every log-prob, run, file and restart."""

import json
from dataclasses import replace

import pytest
import torch
from pyarrow import parquet

import gspo_kernels as gk
from gspo_kernels.bits import columns
from gspo_kernels.trainer.config import TrainConfig
from gspo_kernels.trainer.engines.embedded import TransformersEngine
from gspo_kernels.trainer.input_errors import ConfigError, EngineError
from gspo_kernels.trainer.recipes.samples import experience_of
from gspo_kernels.trainer.rollout import Sampling, SamplingMask, Segment, join_segments
from gspo_kernels.trainer.rows.policy import Policy
from gspo_kernels.trainer.run.config_file import from_mapping
from gspo_kernels.trainer.run.metrics import read_metrics
from tests.draws import shifted_seed
from tests.trainer.conftest import ids_of, small_config, tiny_qwen3
from tests.trainer.recipes.test_recipes import Scripted
from tests.trainer.test_trainer import make_trainer, same, weights
from tests.trainer.test_updates import (
    TEMPERATURE,
    B,
    assert_same_gradients,
    make_config,
    make_experience,
    make_updater,
    plain_gradients,
    record_steps,
    wide,
)

TOP_P = {"top_p": 0.9, "max_new_tokens": 6}
KEPT = TOP_P | {"keep_sampling_mask": True}


def peaked(tokenizer):
    """So that there is something to cut off, and something left to draw from."""
    return tiny_qwen3(tokenizer, initializer_range=0.1)


def outside(logprobs, old_logprobs, lengths):
    """Share of the sequences whose ratio leaves GSPO's range."""
    differences = (logprobs - old_logprobs).split(lengths)
    ratios = torch.stack([each.mean() for each in differences]).exp()
    return float(((ratios < 1 - 3e-4) | (ratios > 1 + 4e-4)).float().mean())


def test_with_equal_weights_no_sequence_leaves_the_clip_range(tmp_path, tokenizer, rows, reward):
    for layout in ("packed", "padded", "shared_prefix"):
        config = small_config(tmp_path, rollout=KEPT, update={"layout": layout})
        trainer = make_trainer(tokenizer, rows, reward, config, model=peaked(tokenizer))
        trainer.step = 1
        experience, _ = trainer.rollout()
        everything = [torch.arange(len(experience.completions))]
        shares = {}
        for name, given in (("with", experience), ("without", replace(experience, masks=None))):
            logprobs = trainer.updater.score(trainer.updater.policy, given, everything).logprobs
            shares[name] = outside(logprobs, experience.rollout_logprobs, experience.lengths)
        print(
            f"{layout}: outside of the clip range {shares['without']:.0%}, with the mask {shares['with']:.0%}"
        )
        assert shares["with"] == 0.0 < shares["without"]


@pytest.mark.parametrize("layout", ["packed", "padded", "shared_prefix"])
def test_gradients_are_those_of_the_softmax_over_the_kept_ids(tokenizer, layout):
    """Policy term, KL to a reference over the same sets, and entropy; some tokens with any id."""
    experience, generator = make_experience(), torch.Generator().manual_seed(shifted_seed(3))
    masks = []
    for completion in experience.completions:
        sets = [{int(token), *torch.randint(258, (9,), generator=generator).tolist()} for token in completion]
        sets[0] = set() if len(sets) > 2 else sets[0]
        masks.append(SamplingMask.of([sorted(each) for each in sets]))
    experience = replace(experience, masks=masks)
    options = {
        "update": {"layout": layout, "micro_batch_tokens": 14, "entropy_coef": 0.01},
        "kl": {"beta": 0.1},
    }
    config, reference = make_config("GSPO", wide("GSPO"), **options), tiny_qwen3(tokenizer, seed=1)
    wrapped = Policy(reference, layout=layout, temperature=TEMPERATURE)
    updater, found = make_updater(tokenizer, config, reference=wrapped), []
    record_steps(updater, found)
    updater.update(experience)
    assert_same_gradients(found, plain_gradients(tokenizer, config, experience, reference))
    assert len(masks) == B


def test_a_mask_is_what_was_drawn_from(tokenizer):
    """The sets of `gk.sampling_mask`; log-probs among them are those that the engine gave."""
    model, prompts = peaked(tokenizer).eval(), tokenizer(["ab", "hello", "c", "ab"] * 4)["input_ids"]
    engine = TransformersEngine(model, list(range(60)), tokenizer.pad_token_id, batch_size=5)
    for rules in ({"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.3}, {"top_p": 0.9, "top_k": 50, "min_p": 0.05}):
        sampling = Sampling(6, 0.8, **rules, return_mask=True)
        found = engine.generate(prompts, sampling, seeds=range(16))
        plain = engine.generate(prompts, replace(sampling, return_mask=False), seeds=range(16))
        assert plain[0].mask is None and ids_of(plain) == ids_of(found)
        sizes = torch.cat([each.mask.counts for each in found])
        assert 1 <= sizes.min() <= sizes.max() < 258 and len({len(ids) for ids in ids_of(found)}) > 1
        agree = []
        for prompt, each in zip(prompts, found, strict=True):
            with torch.no_grad():
                row = torch.tensor([prompt + each.ids.tolist()])
                logits = model(row).logits[0, len(prompt) - 1 : -1].float()
            kept = each.mask.bitmask(258)
            again = gk.token_logprobs(logits, each.ids, temperature=0.8, kept_mask=kept).logprobs
            torch.testing.assert_close(again, each.logprobs, atol=1e-5, rtol=1e-5)
            agree.append(kept == gk.sampling_mask(logits, temperature=0.8, **rules))
        assert torch.cat(agree).float().mean() > 0.99  # a pass of other shapes may round beyond an edge


def test_masks_of_tokens_one_after_the_other():
    mask = SamplingMask.of([[3, 40], [], [0]])
    assert mask.to_lists() == [[3, 40], [], [0]] and mask.first(1).to_lists() == [[3, 40]]
    assert SamplingMask.joined([mask, mask.first(2)]).to_lists() == [[3, 40], [], [0], [3, 40], []]
    kept = columns(mask.bitmask(41), 41)
    assert [row.nonzero().flatten().tolist() for row in kept] == [[3, 40], list(range(41)), [0]]
    turns = [Segment([7], mask=SamplingMask.of([[7, 8]])), Segment([1, 2], sampled=False)]
    assert join_segments(turns, True).mask.to_lists() == [[7, 8], [], []]
    assert join_segments([*turns, Segment([3])], True).mask is None
    with pytest.raises(ValueError, match="mask: got 1 for 2 tokens"):
        Segment([7, 8], mask=mask.first(1))


def test_runs_with_and_without_the_mask(tmp_path, tokenizer, rows, reward, capsys):
    """Mismatch is rounding with it and warned of once without; files hold the sets; restart bit for bit."""
    found = {}
    sections = {"update": {"learning_rate": 1e-2}, "off_policy": {"level": "token"}}
    for name, rollout in (("with", KEPT), ("without", TOP_P)):
        options = sections | {"rollout": rollout, "save_rollouts": True, "rollouts_format": "parquet"}
        config = small_config(tmp_path / name, **options)
        found[name] = make_trainer(tokenizer, rows, reward, config, model=peaked(tokenizer))
        found[name].train()
        said = capsys.readouterr().out
        steps = [each for each in read_metrics(tmp_path / name / "metrics.jsonl") if each["step"] > 0]
        cut = 1.0 - steps[0]["mismatch/ratio"]
        if name == "with":
            assert "cuts off" not in said and max(each["mismatch/mean"] for each in steps) < 1e-5
        else:
            assert 0.02 < cut < 0.1 and said.count(f"sampling cuts off {cut:.1%} of the probability") == 1
            assert "rollout.keep_sampling_mask" in said
        for record in parquet.read_table(tmp_path / name / "rollouts" / "step_000001.parquet").to_pylist():
            kept = record["sampling_mask"]
            assert (kept is None) == (name == "without")
            assert kept is None or all(t in ids for t, ids in zip(record["token_ids"], kept, strict=True))
    assert not same(weights(found["with"].model), weights(found["without"].model))

    def part(steps, resume):
        options = sections | {"rollout": KEPT, "update": sections["update"] | {"steps": steps}}
        trainer = make_trainer(
            tokenizer, rows, reward, small_config(tmp_path / "part", **options), model=peaked(tokenizer)
        )
        trainer.train(resume=resume)
        return trainer

    part(2, False)
    assert same(weights(part(4, True).model), weights(found["with"].model))
    changed = small_config(tmp_path / "part", **sections, rollout=TOP_P)
    with pytest.raises(ConfigError, match=r"rollout\.keep_sampling_mask: True -> False"):
        make_trainer(tokenizer, rows, reward, changed).train(resume=True)


def test_what_is_refused(tmp_path, tokenizer, rows, reward):
    with pytest.raises(ConfigError, match=r"rollout\.keep_sampling_mask must be left alone where top_p"):
        from_mapping({"rollout": {"keep_sampling_mask": True}}, TrainConfig)
    served = {"engine": {"url": "http://localhost:1"}, "rollout": {"top_p": 0.9, "keep_sampling_mask": True}}
    with pytest.raises(ConfigError, match=r"rollout\.top_k must be above 0 beside engine\.url"):
        from_mapping(served, TrainConfig)
    config = small_config(tmp_path, rollout=KEPT)
    trainer = make_trainer(
        tokenizer, rows, reward, config, engine=Scripted(tokenizer, lambda text, copy: "abc")
    )
    trainer.step = 1
    with pytest.raises(EngineError, match="Scripted does not say what it could have drawn"):
        trainer.rollout()


def test_dpo_compares_in_the_whole_vocabulary(tmp_path, tokenizer, rows, reward):
    veripo = {"grpo_steps": 1, "dpo_steps": 1, "min_gap": 0.0}
    config = small_config(tmp_path, rollout=KEPT, veripo=veripo, update={"minibatches": 1})
    trainer = make_trainer(tokenizer, rows, reward, config, model=peaked(tokenizer))
    trainer.step = 1
    experience, _ = trainer.rollout()
    assert experience.masks is not None
    assert [kept.masks for kept in trainer.recipe.kept] == [None]
    lines = [json.loads(json.dumps(record)) for record in trainer.recipe.records()]
    assert all(len(line["sampling_mask"]) == len(line["token_ids"]) for line in lines)
    rewarded = trainer.recipe.recipe.last
    assert experience_of(rewarded, 4, torch.zeros(12), torch.device("cpu")).masks is not None
