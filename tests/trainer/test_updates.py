"""Updates: gradients against fp64 autograd for every objective, layout and term; work that is left out."""

import copy
import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import gspo_kernels as gk
from gspo_kernels.core.bits import columns
from gspo_kernels.models.rows import packed_row, tree_row
from gspo_kernels.off_policy import SamplingMask
from gspo_kernels.trainer.config import InputError, UpdateConfig
from gspo_kernels.trainer.model import Policy, add_adapters, make_policies
from gspo_kernels.trainer.update import (
    Batch,
    Updater,
    learning_rate_factor,
    make_objective,
    needs_reference,
    read,
    trainable_objectives,
)
from tests.draws import shifted_seed
from tests.fake_gpu import FakeGpu
from tests.trainer.conftest import (
    make_accelerator,
    merged_config,
    nothing_in_single_precision,
    plain_logits,
    same,
    tiny_qwen3,
    weights,
)

B, C, SIZE, TEMPERATURE = 12, 5, 3, 0.7


def make_batch(seed=0):
    generator = torch.Generator().manual_seed(shifted_seed(seed))

    def tokens(length):
        return torch.randint(10, 60, (length,), generator=generator)

    group_ids = torch.arange(B) // SIZE
    prompts = [tokens(1 + 2 * group) for group in range(B // SIZE)]
    completions = [tokens(1 + row % C) for row in range(B)]
    masks = [torch.ones(len(completion), dtype=torch.bool) for completion in completions]
    masks[2][:] = False  # one completion does not count
    masks[4][0] = False  # nor does one token of another completion
    mask = torch.cat(masks)
    advantages = torch.randn(B, generator=generator)
    advantages[::SIZE].abs_().add_(1.0)  # every group has both signs, and successes beyond REAL's 0.5
    advantages[1::SIZE].abs_().neg_()
    return Batch(
        [prompts[group] for group in group_ids.tolist()],
        completions,
        advantages,
        mask,
        group_ids,
        torch.where(mask, -4 + 0.3 * torch.randn(len(mask), generator=generator), 0.0),
    )


def padded(batch, values):
    """Lay packed values out as rows, [B, C]."""
    return pad_sequence(values.split([len(completion) for completion in batch.completions]), True)


def make_config(name="GSPO", objective=None, **sections):
    values = {
        "update": {"minibatches": 2, "learning_rate": 1e-3},
        "rollout": {"prompts_per_rollout": B // SIZE, "group_size": SIZE, "temperature": TEMPERATURE},
        "objective": {"name": name, **(objective or {})},
    }
    return merged_config(values, sections)


def make_policy(model, config):
    checkpointing = config.update.gradient_checkpointing
    return Policy(model, temperature=config.rollout.temperature, checkpointing=checkpointing)


def build(tokenizer, config, **changes):
    """Return the model, with random adapters if the config has some, and a context that switches them off."""
    model = tiny_qwen3(tokenizer, **changes)
    if config.lora.rank == 0:
        return model, nullcontext
    adapted = add_adapters(model, config.lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.02)  # larger weights would show rounding
    return model, adapted.disable_adapter


def make_updater(tokenizer, config, reference=None, layout=packed_row):
    """Return an updater of a model with dropout, which must stay off."""
    model, adapters_off = build(tokenizer, config, attention_dropout=0.5)
    policy, accelerator = make_policy(model.train(), config), make_accelerator(config.update.precision)
    policy.layout = layout

    def without_adapters(*inputs, **options):
        with adapters_off():
            return policy(*inputs, **options)

    return Updater(
        accelerator, config, policy, make_policy(reference, config) if reference else without_adapters
    )


def record_steps(updater, found):
    """Replace the optimizer step by one that scales all weights by 1.02; append gradients to ``found``."""

    def step(measured):
        parameters = dict(updater.policy.named_parameters())
        found.append({name: p.grad.clone() for name, p in parameters.items() if p.grad is not None})
        with torch.no_grad():
            for p in parameters.values():
                p.mul_(1.02)
        updater.optimizer.zero_grad()
        updater.scheduler.step()
        return read(measured)

    updater._optimizer_step = step


def plain_scores(model, batch, rows):
    """Return log-probs and entropies, [b, C], from the model's own logits, one sequence at a time."""
    logprobs, entropy = [], []
    for row in rows.tolist():
        prompt, completion = batch.prompts[row], batch.completions[row]
        with nothing_in_single_precision() if model.dtype == torch.float64 else nullcontext():
            logits = plain_logits(model, prompt, completion)
        if batch.masks is not None:
            kept = columns(batch.masks[row].bitmask(logits.shape[1]), logits.shape[1])
            logits = logits.masked_fill(~kept, -1e30)
        logp = torch.log_softmax(logits / TEMPERATURE, -1)
        logprobs.append(logp.gather(-1, completion.unsqueeze(-1)).squeeze(-1))
        entropy.append(-(logp.exp() * logp).sum(-1))
    room = torch.zeros(C, dtype=model.dtype)  # pads all rows to C positions
    return [pad_sequence([*each, room], True)[:-1] for each in (logprobs, entropy)]


def plain_centering(model, batch, rows, objective):
    """Return what centering adds to a token mean with truncated ratios, from a sequence's own logits."""
    q_of, ids_of = (x.split(batch.lengths) for x in (batch.centering.logprobs, batch.centering.ids))
    loss = 0.0
    for row in rows.tolist():
        logits = plain_logits(model, batch.prompts[row], batch.completions[row])
        if batch.masks is not None:
            kept = columns(batch.masks[row].bitmask(logits.shape[1]), logits.shape[1])
            logits = logits.masked_fill(~kept, -1e30)
        log_p = torch.log_softmax(logits / TEMPERATURE, -1)
        for t in batch.loss_masks_on_host[row].nonzero()[:, 0].tolist():
            ids, q = (x[row][t][ids_of[row][t] >= 0] for x in (ids_of, q_of))
            q, p = q.to(log_p.dtype).exp(), log_p[t, ids].detach().exp()
            weight = (p / q).clamp(objective.min_ratio, objective.max_ratio)
            alpha = (1 - q.sum()) / (1 - p.sum())
            rest = alpha * (1 / alpha).clamp(objective.min_ratio, objective.max_ratio)
            loss = loss + batch.advantages[row] * ((q * weight - rest * p) * log_p[t, ids]).sum()
    return loss / batch.counted[rows].sum()


def plain_gradients(tokenizer, config, batch, reference, dtype):
    """Return what `record_steps` keeps, by autograd of log-softmax and `policy_loss` of whole minibatches."""
    (model, adapters_off), objective = build(tokenizer, config), make_objective(config)
    model, reference = model.to(dtype), reference and copy.deepcopy(reference).to(dtype)
    mask = padded(batch, batch.loss_mask)
    updater = make_updater(tokenizer, config)
    everything = torch.arange(B)
    with torch.no_grad():
        old, _ = plain_scores(model, batch, everything)
        if config.objective.centering:
            old = padded(batch, batch.rollout_logprobs).to(dtype)
        with adapters_off():
            ref = plain_scores(reference or model, batch, everything)[0] if needs_reference(config) else None
    found = []
    for number, (rows, _, _) in enumerate(updater._minibatches(batch, 0)):
        terms = {
            "loss_mask": mask[rows],
            "entropy_coef": config.update.entropy_coef,
            "kl_beta": config.kl.beta,
        }
        if ref is not None:
            terms["ref_logprobs"] = ref[rows]
        if "group_ids" in objective.needs or objective.aggregation == "prompt_mean":
            terms["group_ids"] = batch.group_ids[rows]
        if "turn_ids" in objective.needs:
            terms["turn_ids"] = torch.zeros(len(rows), C, dtype=torch.int64)
        if config.off_policy.level != "none":
            options = {"level": config.off_policy.level, "high": config.off_policy.high or 2.0}
            sampled = padded(batch, batch.rollout_logprobs).to(dtype)
            weights = gk.rollout_weights(old, sampled, loss_mask=mask, **options)
            terms["rollout_weights"] = weights[rows]
        if hasattr(objective, "seed"):
            objective = replace(objective, seed=number)
        logprobs, entropy = plain_scores(model, batch, rows)
        advantages = batch.advantages[rows].to(dtype)
        loss = gk.policy_loss(
            logprobs, old[rows], advantages, entropy=entropy, objective=objective, **terms
        ).loss
        if config.objective.centering:
            loss = loss + plain_centering(model, batch, rows, objective)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(loss, list(trained.values()))
        found.append(dict(zip(trained, gradients, strict=True)))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.02)
    return found


def assert_exact_gradients(tokenizer, config, batch, layout=packed_row):
    """Check that errors against fp64 autograd are about those of fp32 autograd; return metrics."""
    other = needs_reference(config) and config.lora.rank == 0
    reference = tiny_qwen3(tokenizer, seed=1) if other else None
    updater, found = make_updater(tokenizer, config, reference, layout), []
    record_steps(updater, found)
    metrics = updater.update(batch)
    exact, plain = (
        plain_gradients(tokenizer, config, batch, reference, dtype)
        for dtype in (torch.float64, torch.float32)
    )
    assert len(found) == len(exact) > 1
    for ours, theirs, truth in zip(found, plain, exact, strict=True):
        assert ours.keys() == {f"model.{name}" for name in truth}
        whole = torch.stack([gradient.norm() for gradient in truth.values()]).norm()
        assert whole > 0
        for name, gradient in truth.items():
            error, usual = (ours[f"model.{name}"] - gradient).norm(), (theirs[name] - gradient).norm()
            assert error <= 2 * usual + 4 * torch.finfo(torch.float32).eps * whole, name
    return metrics


def wide(name):
    """Return options that keep most sequences inside the clip range after weights change by 2 %."""
    fields = trainable_objectives()[name].__dataclass_fields__
    options = {field: 0.9 for field in ("clip_low", "clip_high") if field in fields}
    return options | ({"aggregation_constant": 7} if name == "DrGRPO" else {})


def kinds_of_objectives():
    """Return the name of the first objective for each way in which a loss depends on a batch."""
    kinds = {}
    for name, cls in trainable_objectives().items():
        needs = (*sorted(cls.needs), cls.advantages_are, cls.zero_advantage_is_inactive, hasattr(cls, "seed"))
        kinds.setdefault((cls.coefficient_scope, cls.level, *needs), name)
    return kinds.values()


CASES = {name: {"name": name, "update": {"micro_batch_tokens": 14}} for name in kinds_of_objectives()} | {
    "shared prefix in parts": {"layout": tree_row, "update": {"micro_batch_tokens": 9}},
    "masks": {"masks": True, "kl": {"beta": 0.1}, "update": {"entropy_coef": 0.01, "micro_batch_tokens": 14}},
    "masks and shared prefix": {"masks": True, "layout": tree_row, "update": {"micro_batch_tokens": 14}},
    "adapters and their reference": {
        "lora": {"rank": 2},
        "kl": {"beta": 0.1},
        "update": {"micro_batch_tokens": 20, "gradient_checkpointing": True},
    },
    "token weights": {"off_policy": {"level": "token"}, "update": {"epochs": 2, "minibatches": 3}},
    "sequence weights": {"off_policy": {"level": "sequence", "high": 1.01}},
    "entropy of pairs": {"name": "REBEL", "update": {"entropy_coef": 0.01}},
    "kl of groups": {"name": "EGSW", "kl": {"beta": 0.1}, "update": {"micro_batch_tokens": 20}},
    "token mean": {"objective": {"aggregation": "token_mean", "clip_high": 0.9}, "update": {"epochs": 2}},
    "prompt mean": {
        "objective": {"aggregation": "prompt_mean", "clip_high": 0.9},
        "update": {"micro_batch_tokens": 14},
    },
    "prompt mean of the batch": {"name": "M2PO", "objective": {"aggregation": "prompt_mean"}},
    "sum": {"objective": {"aggregation": "sum", "clip_high": 0.9}},
    "constant": {"name": "GRPO", "objective": {"aggregation": "constant", "aggregation_constant": 7}},
}


def with_masks(batch):
    """Add masks of each token's id and some others; at a few tokens all ids."""
    generator, masks = torch.Generator().manual_seed(shifted_seed(3)), []
    for completion in batch.completions:
        others = torch.randint(258, (len(completion), 9), generator=generator).tolist()
        sets = [sorted({token, *more}) for token, more in zip(completion.tolist(), others, strict=True)]
        masks.append(SamplingMask.of([[], *sets[1:]] if len(sets) > 2 else sets))
    return replace(batch, masks=masks)


@pytest.mark.parametrize("masks", [False, True], ids=["all tokens", "masks"])
def test_centering_is_a_term_of_every_update(tokenizer, masks, monkeypatch):
    """Ratios are to the sampler's log-probs, so nothing is scored before."""
    K, batch = 3, make_batch()
    generator = torch.Generator().manual_seed(shifted_seed(8))
    batch = with_masks(batch) if masks else batch
    sets = (
        [each for mask in batch.masks for each in mask.to_lists()] if masks else [[]] * len(batch.loss_mask)
    )
    ids = [
        torch.tensor(each or range(258))[torch.randperm(len(each) or 258, generator=generator)[:K]]
        for each in sets
    ]
    ids = pad_sequence(ids, batch_first=True, padding_value=-1)
    ids[4, -1] = -1
    q = torch.rand(len(ids), K, generator=generator).mul(0.3).log().masked_fill(ids < 0, math.nan)
    wrong = ~batch.loss_mask
    ids[wrong], q[wrong] = 10**6, math.nan
    batch = replace(batch, centering=gk.ScoreCentering(ids, q))
    monkeypatch.setattr(Updater, "_score", None)
    options = {"centering": K, "min_ratio": 0.5, "max_ratio": 1.5}
    config = make_config("CISPO", options, update={"micro_batch_tokens": 14, "epochs": 2})
    metrics = assert_exact_gradients(tokenizer, config, batch)
    assert 0 < metrics["entropy"] < 6 and not any(name.startswith("mismatch/") for name in metrics)
    for missing in ("centering", "rollout_logprobs"):
        with pytest.raises(InputError, match=r"objective\.centering: the engine returns no log-probs"):
            make_updater(tokenizer, config).update(replace(batch, **{missing: None}))


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_objective_row_and_term(tokenizer, case):
    """Gradients in small micro-batches are those of whole minibatches by autograd."""
    batch, options = make_batch(), dict(CASES[case])
    name = options.pop("name", "GSPO")
    if trainable_objectives()[name].advantages_are == "levels":
        batch.advantages[:] = torch.tensor([1, 2, 3, 2, 1, 2, 1, 1, 2, 3, 2, 1]).float()
    if options.pop("masks", False):
        batch = with_masks(batch)
    layout = options.pop("layout", packed_row)
    config = make_config(name, options.pop("objective", wide(name)), **options)
    metrics = assert_exact_gradients(tokenizer, config, batch, layout)
    assert metrics["minibatch_1/ratio/max"] == pytest.approx(1.0, abs=1e-6)
    assert 0 < metrics["entropy"] < 6


def test_bf16_computes_in_bf16_and_steps_in_fp32(tokenizer):
    batch, found = make_batch(), {}
    for precision in ("fp32", "bf16"):
        config = make_config(update={"precision": precision, "learning_rate": 1e-7, "minibatches": 1})
        updater, gradients = make_updater(tokenizer, config), []
        record_steps(updater, gradients)
        updater.update(batch)
        found[precision] = torch.cat([g.flatten() for g in gradients[0].values()])
        updater = make_updater(tokenizer, config)
        before = weights(updater.policy)
        updater.update(batch)
        assert all(p.dtype == torch.float32 for p in updater.policy.parameters())
        # AdamW's first step is as large as the learning rate, far below the spacing of bf16 weights.
        assert all((p - before[name]).abs().max() > 0 for name, p in updater.policy.named_parameters())
    difference = (found["bf16"] - found["fp32"]).norm() / found["fp32"].norm()
    assert 1e-4 < difference < 0.1


def test_a_bf16_reference_scores_the_same(tokenizer):
    config = make_config(update={"precision": "bf16"}, kl={"beta": 0.1})
    model = tiny_qwen3(tokenizer, tie_word_embeddings=False)
    accelerator = make_accelerator("bf16")
    _, policy, reference = make_policies(model, tokenizer, config, accelerator, needs_reference=True)
    updater = Updater(accelerator, config, policy, reference)
    linear = [m.weight for m in reference.modules() if isinstance(m, torch.nn.Linear)]
    assert [w.dtype for w in linear] == [torch.bfloat16] * (len(linear) - 1) + [torch.float32]  # the head
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    batch = make_batch()
    scores = [updater.score(each, batch) for each in (updater.policy, reference)]
    assert torch.equal(scores[0].logprobs, scores[1].logprobs) and scores[0].logprobs.abs().max() > 1


def test_the_entropy_is_over_all_scored_tokens(tokenizer):
    batch, config = make_batch(), make_config(update={"minibatches": 3, "micro_batch_tokens": 14})
    updater = make_updater(tokenizer, config)
    with torch.no_grad():
        for p in updater.policy.parameters():
            p.mul_(5)  # entropies differ
    scored = updater.score(updater.policy, batch).entropy[batch.loss_mask].double()
    updater._optimizer_step = read  # the weights stay
    metrics = updater.update(batch)
    assert metrics["entropy"] == pytest.approx(float(scored.mean()), rel=1e-6)
    by_minibatch = [metrics[f"minibatch_{n}/entropy"] for n in (1, 2, 3)]
    assert metrics["entropy"] != pytest.approx(sum(by_minibatch) / 3, rel=1e-4)  # of unequal sizes
    batch.advantages.zero_()
    assert math.isnan(updater.update(batch)["entropy"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU")
@pytest.mark.parametrize("idle", [False, True])
def test_one_sync_for_each_optimizer_step(tokenizer, monkeypatch, idle):
    """Beyond that: for loss mask and advantages at the start, and for what the sampler's gap is, at the end.
    clip_grad_norm_ moves the norm to the device on which it is, which a fake GPU counts. Without gradients
    the norm is on the CPU.
    """
    pytest.importorskip("triton")
    updater, gpu = make_updater(tokenizer, make_config(update={"minibatches": 1})), FakeGpu(monkeypatch)
    batch, properties = make_batch(), SimpleNamespace(total_memory=2**33)
    batch.advantages.mul_(not idle)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    with gpu:
        updater.update(batch)
    steps = updater.updates
    to_the = {"copy to the device": 1, "copy to the host": 3} if idle else {"copy to the host": 3 + steps}
    assert steps == 1 and gpu.looks == {"tolist": steps + 2, "index by mask": 1, **to_the}


@pytest.mark.parametrize(("sections", "scored"), [({}, 6), ({"off_policy": {"level": "token"}}, 12)])
def test_the_first_minibatch_needs_no_old_logprobs(tokenizer, monkeypatch, sections, scored):
    """Its loss scores it, with ratios of exactly 1, unless rollout weights need the log-probs before."""
    updater, seen = make_updater(tokenizer, make_config(**sections)), []
    inner = updater.policy.forward

    def spy(prompts, completions, terms=None, mask=None):
        seen.extend([] if terms else completions)
        return inner(prompts, completions, terms, mask)

    monkeypatch.setattr(updater.policy, "forward", spy)
    batch = make_batch()
    batch.loss_mask[batch.places(torch.tensor([2]))[0]] = True
    metrics = updater.update(batch)
    assert len(seen) == scored
    assert metrics["minibatch_1/ratio/min"] == metrics["minibatch_1/ratio/max"] == 1.0
    assert metrics["minibatch_1/clip_fraction/low"] == metrics["minibatch_1/clip_fraction/high"] == 0.0
    assert metrics["ratio/max"] == max(1.0, metrics["minibatch_2/ratio/max"]) and metrics["ratio/min"] < 1.0
    assert 0 < metrics["mismatch/mean"] < metrics["mismatch/max"]


def test_what_weights_leave_of_a_batch_is_measured(tokenizer):
    batch = make_batch()
    off_policy = {"level": "token", "mode": "mask", "low": 0.15, "high": 1.5}
    unweighted = make_updater(tokenizer, make_config()).update(batch)
    assert not any(name.startswith("weights/") for name in unweighted)
    updater = make_updater(tokenizer, make_config(off_policy=off_policy))
    sampled = batch.rollout_logprobs.clone()
    sampled[::3] -= 3.0  # ratios far outside of both bounds
    sampled[1::3] += 3.0
    batch = replace(batch, rollout_logprobs=sampled.clamp(max=-0.01))
    ratios = (updater.score(updater.policy, batch).logprobs.double() - batch.rollout_logprobs.double()).exp()
    batch.advantages[3] = 0.0  # so that row 3 needs no old log-probs
    active = batch.loss_mask.index_fill(0, batch.places(torch.tensor([3])), False)
    ratios, gaps = ratios[active], ratios[active].log().abs()
    weights = torch.where((ratios >= 0.15) & (ratios <= 1.5), ratios, 0.0)
    assert (weights != ratios).any()
    metrics = updater.update(batch)
    for name in ("mean", "min", "max"):
        assert metrics[f"weights/{name}"] == pytest.approx(float(getattr(weights, name)()), rel=1e-5)
    for name, expected in (("mean", gaps.mean()), ("max", gaps.max()), ("ratio", ratios.mean())):
        assert metrics[f"mismatch/{name}"] == pytest.approx(float(expected), rel=1e-5)
    assert 0 < metrics["weights/gradient_norm"] != 1.0 and metrics["weights/mean"] > 0
    nothing = updater.update(replace(batch, loss_mask=batch.loss_mask & False))
    assert all(math.isnan(nothing[f"mismatch/{name}"]) for name in ("mean", "max", "ratio"))
    with pytest.raises(InputError, match=r"off_policy\.level: the engine returns no log-probs"):
        updater.update(replace(batch, rollout_logprobs=None))


def test_epochs_draw_their_order_again(tokenizer):
    batch = make_batch()
    updater = make_updater(tokenizer, make_config(update={"epochs": 4}))
    rows, again, other = (
        [part.rows.tolist() for part in updater._minibatches(batch, step)] for step in (1, 1, 2)
    )
    assert [len(part) for part in rows] == [6] * 8
    assert sorted(rows[0] + rows[1]) == sorted(rows[2] + rows[3]) == list(range(B))
    assert len({tuple(part) for part in rows}) > 4
    assert again == rows and other != rows
    by_prompt = make_config(objective={"aggregation": "prompt_mean"})
    grouped = [make_updater(tokenizer, each) for each in (make_config("DPO"), by_prompt, make_config())]
    for part in (part for each in grouped for part in each._minibatches(batch, 1)):
        assert all(count == SIZE for count in batch.group_ids[part.rows].unique(return_counts=True)[1])
    many = make_updater(tokenizer, make_config(update={"minibatches": 5}))._minibatches(batch, 1)
    assert [len(part.rows) for part in many] == [3, 3, 2, 2, 2]  # more than groups


def test_log_probs_that_a_batch_brings_are_used(tokenizer):
    """A batch may bring old log-probs of another policy, and those of a reference that is not loaded."""
    batch = make_batch()
    config = make_config(kl={"beta": 0.1}, update={"minibatches": 1})
    updater = make_updater(tokenizer, config, reference=tiny_qwen3(tokenizer, seed=1))
    old = updater.score(updater.policy, batch, 0).logprobs
    given = replace(batch, old_logprobs=old - 0.25, ref_logprobs=old - 0.5)
    metrics = make_updater(tokenizer, config, reference=tiny_qwen3(tokenizer, seed=2)).update(given)
    assert metrics["ratio/min"] == pytest.approx(math.exp(0.25), rel=1e-5)
    assert metrics["kl/ref"] == pytest.approx(math.exp(-0.5) - 1 + 0.5, rel=1e-4)


def test_completions_without_advantage_cost_nothing(tokenizer, monkeypatch):
    """The gradient does not change: the divisor also counts rows that are not run."""
    batch, norms = make_batch(), []
    batch.advantages[:6] = 0.0
    counted = B - 1
    for sections, expected in (
        ({}, 6),
        ({"update": {"entropy_coef": 1e-12}}, counted),
        ({"kl": {"beta": 1e-12}}, counted),
        ({"name": "DRO"}, counted),
    ):
        updater, seen = make_updater(tokenizer, make_config(**sections)), set()
        inner = updater.policy.forward

        def spy(prompts, completions, *rest, seen=seen, inner=inner):
            seen.update(map(id, completions))
            return inner(prompts, completions, *rest)

        monkeypatch.setattr(updater.policy, "forward", spy)
        norms.append(updater.update(batch)["minibatch_1/grad_norm"])
        assert len(seen) == expected
    assert norms[:2] == pytest.approx(norms[1:3], rel=1e-3)


def test_gradients_are_clipped_to_a_norm(tokenizer, monkeypatch):
    """Gradients are never scaled up; the metric is the norm before scaling."""
    norms, used = [], []
    for allowed in (math.inf, 1e9, 1e-3):
        updater = make_updater(tokenizer, make_config(update={"minibatches": 1, "max_grad_norm": allowed}))

        def spy(parameters=updater.policy.parameters):
            used.append(float(torch.nn.utils.get_total_norm([p.grad for p in parameters()])))

        monkeypatch.setattr(updater.optimizer, "step", spy)
        norms.append(updater.update(make_batch())["grad_norm"])
    assert norms[0] > 1e-2 and norms == pytest.approx([norms[0]] * 3, rel=1e-5)
    assert used == pytest.approx([norms[0], norms[0], 1e-3], rel=1e-4)


def test_updates_that_are_not_finite_are_skipped(tokenizer):
    wide = {"clip_low": 0.5, "clip_high": 0.5}  # clipped sequences would have no gradient
    updater = make_updater(tokenizer, make_config(objective=wide))
    batch, before = make_batch(), weights(updater.policy)
    batch.advantages[0] = torch.inf
    metrics = updater.update(batch)
    assert sorted(metrics[f"minibatch_{n}/updates_left_out"] for n in (1, 2)) == [0.0, 1.0]
    assert all(torch.isfinite(p).all() for p in updater.policy.parameters())
    assert not same(before, weights(updater.policy))


def test_the_learning_rate_follows_its_schedule():
    cosine = [0.5 + 0.5 * math.cos(math.pi * part / 5) for part in range(6)]
    falls = {"none": [1.0] * 6, "linear": [1.0, 0.8, 0.6, 0.4, 0.2, 0.0], "cosine": cosine}
    for decay, expected in falls.items():
        options = {"steps": 2, "minibatches": 2, "epochs": 2, "warmup_updates": 3}
        config = UpdateConfig(**options, learning_rate_decay=decay)
        rates = [learning_rate_factor(update, config) for update in range(9)]
        assert rates == pytest.approx([0.25, 0.5, 0.75, *expected])


@pytest.mark.parametrize("name", ["GSPO", "DPO"])
def test_idle_minibatches_do_not_dilute_metrics(tokenizer, name):
    """Only one group of four has a gradient; the metrics are those of its minibatch."""
    batch = make_batch()
    alone = batch.group_ids == 3
    batch = replace(
        batch,
        advantages=torch.where(alone, torch.arange(B) % SIZE + 0.0, 0.0),
        loss_mask=batch.loss_mask & batch.by_token(alone) if name == "DPO" else batch.loss_mask,
        ref_logprobs=torch.full_like(batch.rollout_logprobs, -5.0) if name == "DPO" else None,
    )
    updater = make_updater(tokenizer, make_config(name, update={"minibatches": 4, "warmup_updates": 99}))
    active = []
    for step in range(3):  # in each of which the group is in another minibatch
        metrics = updater.update(batch, step)
        active += [n for n in range(1, 5) if metrics[f"minibatch_{n}/grad_norm"] > 0]
        for key in ("loss", "entropy", "ratio/mean", "ratio/min", "grad_norm", "learning_rate"):
            assert metrics[key] == metrics[f"minibatch_{active[-1]}/{key}"]
        assert metrics["entropy"] > 4 and metrics["loss"] != 0
        assert metrics["learning_rate"] == pytest.approx(1e-5 * (4 * step + active[-1]))
        assert ("clip_fraction/after_first" in metrics) == (active[-1] > 1)
    assert len(active) == 3 and 1 in active and {*active} != {1}
