"""The fused head: loss, scores and gradients of the logits path; adapters; packed rows; refusals."""

import copy
import inspect
import pickle
from dataclasses import replace
from importlib import metadata

import pytest
import torch
from torch import nn

import gspo_kernels as gk
from gspo_kernels.integrations import errors, transformers
from gspo_kernels.integrations.errors import IntegrationError
from gspo_kernels.integrations.transformers import LMHead, fuse_lm_head, unfuse_lm_head
from gspo_kernels.parallel.groups import Parallel
from tests import oracle
from tests.accuracy import Spread, assert_as_exact, differences
from tests.draws import shifted_seed
from tests.integrations.tiny_models import MODELS, tiny
from tests.trainer.test_batch import nothing_in_single_precision

pytest.importorskip("transformers", reason="transformers is not installed")

IGNORED = -100
LEFT, PROMPT, COMPLETION = (3, 0, 1, 2), 4, 6
T = PROMPT + COMPLETION


def batch(seed=0, vocabulary=96):
    """Left-padded prompts, completions with padding on the right and a hole in one of them."""
    generator = torch.Generator().manual_seed(shifted_seed(seed))
    ids = torch.randint(3, vocabulary, (4, T), generator=generator)
    attention_mask = torch.ones(4, T, dtype=torch.int64)
    labels = ids.clone()
    labels[:, :PROMPT] = IGNORED
    for row, padding in enumerate(LEFT):
        attention_mask[row, :padding] = 0
    attention_mask[1, -2:] = 0
    labels[1, -2:] = IGNORED
    labels[2, PROMPT + 2] = IGNORED
    return {"input_ids": ids, "attention_mask": attention_mask}, labels


def shifted(labels):
    return nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def terms_of(model, inputs, labels, seed=0):
    """Old log-probs such that ratios lie on both sides of GSPO's range, with a KL term beside them."""
    generator = torch.Generator().manual_seed(shifted_seed(seed))
    with torch.no_grad():
        logprobs, _ = logprobs_of(model(**inputs).logits.double(), labels)
    offsets = torch.tensor([2e-4, -3e-3, 2e-3, -1e-4]).unsqueeze(1)
    noise = 0.1 * torch.randn(logprobs.shape, generator=generator)
    return {
        "old_logprobs": (logprobs + offsets).float(),
        "advantages": torch.tensor([1.0, -0.7, 0.5, -1.2]),
        "ref_logprobs": (logprobs + noise).float(),
        "kl_beta": 0.05,
        "objective": gk.GSPO(),
    }


def logprobs_of(logits, labels):
    target = shifted(labels)
    return oracle.token_logprobs(logits, target, target != IGNORED)


def from_logits(model, inputs, labels, terms, dtype=torch.float32):
    """Loss by the oracle from the model's own logits; with fp64 the head's product and all after it are fp64.

    The backbone is the same in both, so that what is compared is the head and the loss.
    """
    head = model.get_output_embeddings()
    before = head.forward

    def precise(hidden):
        given = [hidden, head.weight] if head.bias is None else [hidden, head.weight, head.bias]
        if torch.is_autocast_enabled("cpu"):  # it rounds what a product takes, but leaves fp64 alone
            given = [each.to(torch.get_autocast_dtype("cpu")) for each in given]
        return nn.functional.linear(*(each.to(dtype) for each in given))

    head.forward = precise if dtype == torch.float64 else before
    outputs = model(**inputs)
    head.forward = before
    target = shifted(labels)
    logprobs, _ = logprobs_of(outputs.logits.to(dtype), labels)
    given = {n: v.to(dtype) if isinstance(v, torch.Tensor) else v for n, v in terms.items()}
    old, advantages, objective = (given.pop(n) for n in ("old_logprobs", "advantages", "objective"))
    loss = oracle.policy_loss(logprobs, old, advantages, target != IGNORED, objective, **given)
    if getattr(outputs, "aux_loss", None) is not None:
        loss = loss + model.config.router_aux_loss_coef * outputs.aux_loss
    return loss


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {"loss": loss.detach()} | {
        n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for n, p in model.named_parameters()
        if p.requires_grad
    }


SEEDS = range(12)


def assert_within_budget(got, plain, truth, times=2.0, eps=None):
    """Lists of {name: tensor}, one for each problem; ``eps`` is that of the results unless given.

    The backward through the model carries the same roundings of a few log-probs into every element of every
    gradient, so that a problem is one draw, however many rows its gradients have.
    """
    for name in truth[0]:
        exact, ours, theirs = ([each[name] for each in kind] for kind in (truth, got, plain))
        spread = replace(Spread.of(differences(theirs, exact), by_row=exact[0].ndim > 1), rows=1.0)
        rounding = torch.finfo(ours[0].dtype).eps if eps is None else eps
        assert_as_exact(name, differences(ours, exact), spread, exact, rounding, times)


def compared(model, terms=None, options=({},)):
    """(fused, from logits in fp32, from logits in fp64): loss and gradients of the same problems.

    ``fused`` has the list once for each of ``options``.
    """
    problems = [batch(seed) for seed in SEEDS]
    given = [terms_of(model, *problem) | (terms or {}) for problem in problems]
    plain, truth = (
        [gradients(model, from_logits(model, *p, t, dtype)) for p, t in zip(problems, given, strict=True)]
        for dtype in (torch.float32, torch.float64)
    )
    fuse_lm_head(model)
    got = [
        [
            gradients(model, model(**inputs, labels=labels, **t, **each).loss)
            for (inputs, labels), t in zip(problems, given, strict=True)
        ]
        for each in options
    ]
    return got, plain, truth


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_all_gradients_equal_the_logits_path(name):
    model = tiny(name)
    (got,), plain, truth = compared(model)
    assert all(each.abs().sum() > 0 for each in got[0].values())
    assert_within_budget(got, plain, truth)
    for name in truth[0]:
        wrong = [{name: each[name] * (1 + 2.0**-16)} for each in got]
        with pytest.raises(AssertionError, match=name):
            assert_within_budget(wrong, *([{name: each[name]} for each in kind] for kind in (plain, truth)))


def test_other_objectives_and_schedules_go_through():
    options = ({"schedule": "two_pass"}, {"max_chunk_bytes": 96 * 4 * 5}, {"skip_inactive": "none"})
    every, plain, truth = compared(tiny(), {"objective": gk.GRPO()}, options)
    for got in every:
        assert_within_budget(got, plain, truth)


@pytest.mark.parametrize("name", ["Qwen3", "Gemma2, softcap", "Phi, bias"])
def test_scores_are_the_log_softmax_at_the_position_that_predicts(name):
    model = tiny(name)
    inputs, labels = batch()
    want, want_entropy = logprobs_of(model(**inputs).logits / 0.7, labels)
    fuse_lm_head(model)
    scored = model(**inputs, labels=labels, return_logprobs=True, return_entropy=True, temperature=0.7)
    assert isinstance(scored, transformers.FusedLMOutput) and scored.logits is None and scored.loss is None
    torch.testing.assert_close(scored.logprobs, want)
    torch.testing.assert_close(scored.entropy, want_entropy)
    again = model(**inputs, shift_labels=shifted(labels), return_logprobs=True, temperature=0.7)
    assert torch.equal(again.logprobs, scored.logprobs) and again.entropy is None


def test_scores_carry_the_gradient_of_a_loss_on_log_probs():
    model = tiny()
    inputs, labels = batch()
    terms = terms_of(model, inputs, labels)
    fuse_lm_head(model)
    direct = model(**inputs, labels=labels, schedule="two_pass", **terms)
    want = gradients(model, direct.loss)
    logprobs = model(**inputs, labels=labels, return_logprobs=True).logprobs
    assert torch.equal(logprobs, direct.logprobs)
    loss = gk.policy_loss(logprobs, **terms, loss_mask=shifted(labels) != IGNORED).loss
    for name, value in gradients(model, loss).items():
        assert torch.equal(value, want[name]), name


def test_shift_labels_take_a_mask_and_labels_do_not():
    model = fuse_lm_head(tiny())
    inputs, labels = batch()
    terms = terms_of(model, inputs, labels)
    want = model(**inputs, labels=labels, **terms)
    targets = inputs["input_ids"].roll(-1, dims=1)
    got = model(**inputs, shift_labels=targets, loss_mask=shifted(labels) != IGNORED, **terms)
    assert torch.equal(got.loss, want.loss)
    with pytest.raises(IntegrationError, match="loss_mask: belongs to the tokens that positions predict"):
        model(**inputs, labels=labels, loss_mask=labels != IGNORED, **terms)


def test_the_same_weights_have_a_ratio_of_exactly_one():
    for name in ("Qwen3", "Gemma2, softcap", "Qwen3-MoE"):
        model = fuse_lm_head(tiny(name).bfloat16())
        inputs, labels = batch()
        old = model(**inputs, labels=labels, return_logprobs=True).logprobs.detach()
        assert old.dtype == torch.float32
        metrics = model(**inputs, labels=labels, old_logprobs=old, advantages=torch.ones(4)).metrics
        assert float(metrics["ratio/min"]) == float(metrics["ratio/max"]) == 1.0


def test_calls_without_our_arguments_are_the_models_own():
    model = tiny()
    inputs, labels = batch()
    before = model(**inputs, labels=labels, ignore_index=IGNORED)
    signature = inspect.signature(model.forward)
    prompt = {n: v[:2, :5] for n, v in inputs.items()}
    generated = model.generate(**prompt, do_sample=False, max_new_tokens=3)
    assert fuse_lm_head(model) is model and fuse_lm_head(model) is model
    after = model(**inputs, labels=labels, ignore_index=IGNORED)
    assert torch.equal(after.logits, before.logits) and torch.equal(after.loss, before.loss)
    assert inspect.signature(model.forward) == signature
    assert torch.equal(model.generate(**prompt, do_sample=False, max_new_tokens=3), generated)
    model(**inputs, labels=labels, return_logprobs=True)
    assert torch.equal(model(**inputs).logits, before.logits)  # nothing is left behind in the head
    unfuse_lm_head(unfuse_lm_head(model))
    assert "forward" not in model.__dict__ and "forward" not in model.lm_head.__dict__


def test_a_copy_is_fused_and_independent():
    model = fuse_lm_head(tiny())
    inputs, labels = batch()
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.lm_head.weight.zero_()
    scores = copied(**inputs, labels=labels, return_logprobs=True).logprobs
    counted = shifted(labels) != IGNORED
    torch.testing.assert_close(scores[counted], torch.full((int(counted.sum()),), -torch.tensor(96.0).log()))
    assert not torch.equal(model(**inputs, labels=labels, return_logprobs=True).logprobs, scores)


def test_a_forward_that_the_instance_had_before_is_called_and_restored():
    model = tiny()
    own, calls = model.forward, []

    def counted(*args, **kwargs):
        calls.append(kwargs)
        return own(*args, **kwargs)

    model.forward = counted
    inputs, labels = batch()
    fuse_lm_head(model)(**inputs, labels=labels, return_logprobs=True)
    assert len(calls) == 1
    fused = model.forward
    model.forward = counted
    with pytest.raises(IntegrationError, match="patched again"):
        unfuse_lm_head(model)
    model.forward = fused
    assert unfuse_lm_head(model).forward is counted


def largest_allocation(function):
    """Bytes of the largest block that any operator allocated."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as run:
        function()
    return max(event.self_cpu_memory_usage for event in run.events())


def test_logits_are_never_built():
    vocabulary, width = 4096, 64
    model = tiny(vocab_size=vocabulary)
    ids = torch.randint(3, vocabulary, (4, width), generator=torch.Generator().manual_seed(shifted_seed(0)))
    logits_bytes, advantages = ids.numel() * vocabulary * 4, torch.tensor([1.0, -1.0, 2.0, -2.0])
    rows = []
    own = model.lm_head.forward
    model.lm_head.forward = lambda hidden: rows.append(hidden.shape[:-1].numel()) or own(hidden)
    assert largest_allocation(lambda: model(ids).logits.sum().backward()) >= logits_bytes
    assert rows.pop() == ids.numel()
    fuse_lm_head(model)
    chunk = {"max_chunk_bytes": logits_bytes // 8}

    def score():
        return model(ids, labels=ids, return_logprobs=True, **chunk).logprobs

    def update():
        model(ids, labels=ids, old_logprobs=old, advantages=advantages, **chunk).loss.backward()

    old = score().detach()
    assert rows == [1]  # the head's product of one row was compared, once
    assert largest_allocation(score) <= logits_bytes // 4
    assert largest_allocation(update) <= logits_bytes // 4
    assert rows == [1]


# ------------------------------------------------------ adapters, checkpointing, autocast, packed rows


def adapted(model, **options):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(shifted_seed(1))
    config = peft.LoraConfig(
        r=4, init_lora_weights=False, **{"target_modules": ["q_proj", "v_proj"], **options}
    )
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize(
    "options", [{}, {"modules_to_save": ["lm_head"]}], ids=["frozen head", "trained head"]
)
def test_lora(options):
    model = adapted(tiny(), **options)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert any("lm_head" in n for n in trained) == bool(options)
    (got,), plain, truth = compared(model)
    assert {*got[0]} == trained | {"loss"}
    assert_within_budget(got, plain, truth)


def test_without_the_adapter_the_head_is_the_original_one():
    inputs, labels = batch()
    base = tiny()
    want, _ = logprobs_of(base(**inputs).logits, labels)
    model = fuse_lm_head(adapted(base, modules_to_save=["lm_head"]))
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_()
    with model.disable_adapter():
        reference = model(**inputs, labels=labels, return_logprobs=True).logprobs
    torch.testing.assert_close(reference, want)
    assert not torch.allclose(model(**inputs, labels=labels, return_logprobs=True).logprobs, want)


def test_gradient_checkpointing_changes_no_bit():
    inputs, labels = batch()
    model = fuse_lm_head(tiny())
    terms = terms_of(model, inputs, labels)
    want = gradients(model, model(**inputs, labels=labels, **terms).loss)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    got = gradients(model, model(**inputs, labels=labels, **terms).loss)
    assert all(torch.equal(value, want[name]) for name, value in got.items())


@pytest.mark.parametrize("name", ["Qwen3", "Gemma2, softcap", "Qwen3-MoE"])
def test_bf16_autocast(name):
    """Truth: an fp64 product of hidden states and weight in bf16; plain PyTorch rounds its logits to bf16."""
    with torch.autocast("cpu", torch.bfloat16):
        (got,), plain, truth = compared(tiny(name))
    names = {"loss", "lm_head.weight"}
    ends = [[{n: each[n] for n in names & each.keys()} for each in kind] for kind in (got, plain, truth)]
    assert_within_budget(*ends, times=0.1)
    # the backbone rounds the gradient that reaches it to bf16: what differs least may differ by one rounding
    assert_within_budget(got, plain, truth, times=0.1, eps=torch.finfo(torch.bfloat16).eps)


def test_fp32_heads():
    model = tiny().bfloat16()
    model.lm_head.float()
    with torch.no_grad():
        model.lm_head.weight += 1e-3 * torch.randn(96, 32)  # not what bf16 can hold
    model.lm_head.forward = lambda hidden: nn.functional.linear(hidden.float(), model.lm_head.weight)
    (got,), plain, truth = compared(model)
    assert_within_budget(got, plain, truth)
    inputs, labels = batch()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(**inputs, labels=labels, return_logprobs=True).logprobs
        fuse_lm_head(model, fp32_head=True)
        kept = model(**inputs, labels=labels, return_logprobs=True).logprobs
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(**inputs).last_hidden_state.detach()
    want, _ = logprobs_of(hidden.double() @ model.lm_head.weight.detach().double().T, labels)
    torch.testing.assert_close(kept.double(), want, atol=1e-6, rtol=0)
    assert (rounded - want).abs().max() > 1e-4


def packed_batch(seed=0):
    """Three sequences in one row, one of them empty; and the same as padded rows."""
    lengths = (5, 0, 7, 4)
    ids = torch.randint(3, 96, (1, sum(lengths)), generator=torch.Generator().manual_seed(shifted_seed(seed)))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    padded, attention_mask = torch.zeros(4, 7, dtype=torch.int64), torch.zeros(4, 7, dtype=torch.int64)
    for i, length in enumerate(lengths):
        padded[i, :length] = ids[0, cu_seqlens[i] : cu_seqlens[i + 1]]
        attention_mask[i, :length] = 1
    return ids, cu_seqlens, padded, attention_mask


@pytest.mark.parametrize(
    ("name", "attention"), [("Qwen3", "sdpa"), ("Qwen3", "eager"), ("Gemma2, softcap", "eager")]
)
def test_packed_rows_equal_padded_ones(name, attention):
    model = fuse_lm_head(tiny(name, attention=attention))
    temperature = torch.tensor([0.7, 1.0, 1.3, 2.0])
    options = {"return_logprobs": True, "temperature": temperature}
    terms = {"advantages": torch.tensor([1.0, 2.0, -1.0, 0.5]), "temperature": temperature}
    precise, kinds = copy.deepcopy(model).double(), ([], [], [])
    for seed in SEEDS:
        # other tokens each time: errors of the same activations would be one draw, however often counted
        ids, cu_seqlens, padded, attention_mask = packed_batch(seed)
        inside = attention_mask.bool()
        rows = {"input_ids": padded, "attention_mask": attention_mask}
        rows["labels"] = padded.masked_fill(~inside, IGNORED)
        want = model(**rows, **options).logprobs
        got = model(ids, labels=ids, cu_seqlens=cu_seqlens, **options).logprobs
        assert got.shape == ids.shape
        torch.testing.assert_close(got[0], want[inside])
        rng = torch.Generator().manual_seed(shifted_seed(seed))
        old = want.detach() + 1e-3 * torch.randn(want.shape, generator=rng)
        by_rows = model(**rows, old_logprobs=old, **terms)
        with nothing_in_single_precision():
            truth = precise(**rows, old_logprobs=old.double(), **terms)
        out = model(ids, labels=ids, old_logprobs=old[inside].unsqueeze(0), cu_seqlens=cu_seqlens, **terms)
        assert out.logprobs.shape == ids.shape
        for key, value in by_rows.metrics.items():
            torch.testing.assert_close(out.metrics[key], value, msg=key)
        for kind, one, loss in zip(
            kinds, (model, model, precise), (out.loss, by_rows.loss, truth.loss), strict=True
        ):
            kind.append(gradients(one, loss))
    assert_within_budget(*kinds)


def test_packed_sequences_do_not_see_each_other():
    """Other tokens before and after a sequence change nothing in it: not with positions, nor without."""
    model = fuse_lm_head(tiny())
    ids, cu_seqlens, *_ = packed_batch()
    positions = torch.cat([torch.arange(n) for n in cu_seqlens.diff().tolist()]).unsqueeze(0)
    other = ids.clone()
    other[0, :5] = 3
    other[0, 12:] = 4
    options = {"cu_seqlens": cu_seqlens, "return_logprobs": True}
    want = model(ids, labels=ids, position_ids=positions, **options).logprobs
    for given in ({}, {"position_ids": positions}):
        assert torch.equal(model(ids, labels=ids, **given, **options).logprobs, want)
        got = model(other, labels=other, **given, **options).logprobs
        torch.testing.assert_close(got[0, 5:12], want[0, 5:12])
        assert not torch.allclose(got[0, :5], want[0, :5])


@pytest.mark.parametrize("name", ["OPT", "GPT-OSS"])
def test_models_whose_packed_sequences_would_see_each_other_are_refused(name):
    if name == "OPT":
        model = tiny("OPT", ffn_dim=32, word_embed_proj_dim=32)
    else:
        model = tiny("GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=16, attention="eager")
    fuse_lm_head(model.train())
    ids, cu_seqlens, *_ = packed_batch()
    for _ in range(2):  # not only in the first call
        with pytest.raises(IntegrationError, match="packed sequences see each other"):
            model(ids, labels=ids, cu_seqlens=cu_seqlens, return_logprobs=True)
    assert all(module.training for module in model.modules())


def test_a_model_without_positions_is_refused_packed():
    model = fuse_lm_head(tiny("Bloom", n_head=2, n_layer=2))
    ids, cu_seqlens, *_ = packed_batch()
    with pytest.raises(IntegrationError, match="takes no position_ids"):
        model(ids, labels=ids, cu_seqlens=cu_seqlens, return_logprobs=True)


# ------------------------------------------------------ refusals, outputs, versions

SCORE = {"return_logprobs": True}
UPDATE = {"old_logprobs": None, "advantages": torch.ones(4)}
IDS = batch()[0]["input_ids"]
PACKED = {"input_ids": IDS.view(1, -1), "labels": IDS.view(1, -1), "cu_seqlens": torch.tensor([0, 20, 40])}


@pytest.fixture(scope="module")
def refusing():
    return fuse_lm_head(tiny())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({**SCORE}, "labels, shift_labels: expected exactly one"),
        ({**SCORE, "labels": IDS, "shift_labels": IDS}, "labels, shift_labels: expected exactly one"),
        ({"labels": IDS, "old_logprobs": None}, "advantages: missing, while 'old_logprobs' is passed"),
        ({"labels": IDS, "temperature": 0.5}, "advantages: missing, while 'temperature' is passed"),
        ({"labels": IDS, "advantages": torch.ones(4)}, "old_logprobs: missing"),
        ({"labels": IDS, **SCORE, **UPDATE}, "advantages: goes with a policy call"),
        ({"labels": IDS, **SCORE, "kl_beta": 0.1}, "kl_beta: goes with a policy call"),
        ({"labels": IDS, "return_logprobs": 1}, "return_logprobs: got int"),
        ({"labels": IDS.float(), **SCORE}, "labels: got torch.float32"),
        ({"labels": IDS[0], **SCORE}, r"labels: got shape \(10,\), expected \[B, T\]"),
        ({"labels": IDS[:, 1:], **SCORE}, r"hidden: got shape \(4, 10, 32\)"),
        (
            {"labels": IDS, **UPDATE, "old_logprobs": torch.zeros(4, T - 1)},
            r"old_logprobs: got shape \(4, 9\)",
        ),
        ({"labels": IDS, **UPDATE, "loss_mask": torch.ones(4, T)}, "loss_mask: belongs to the tokens"),
        (
            {"labels": IDS, **UPDATE, "old_logprobs": torch.zeros(4, T, dtype=torch.bfloat16)},
            "old_logprobs: arrives as torch.bfloat16",
        ),
        (
            {"labels": IDS, **UPDATE, "router_aux_loss_coef": 0.1},
            "router_aux_loss_coef: the forward computed no",
        ),
        ({"labels": IDS, **SCORE, "return_dict": False}, "return_dict: a fused call"),
        ({"labels": IDS, **SCORE, "logits_to_keep": 2}, "logits_to_keep: a fused call"),
        (
            {"labels": IDS, **SCORE, "position_ids": torch.tensor([[0, 1, 2, 3, 4] * 2])},
            "position_ids: restart within a row",
        ),
        ({"labels": IDS, **SCORE, "cu_seqlens": torch.tensor([0, 40])}, r"expected \[1, N\] with cu_seqlens"),
        ({**PACKED, **SCORE, "attention_mask": torch.ones(1, 40)}, "cu_seqlens: with a 2-D attention_mask"),
        ({**PACKED, **SCORE, "use_cache": True}, "cu_seqlens: with a 2-D attention_mask or use_cache"),
        ({**PACKED, **SCORE, "position_ids": torch.arange(40).unsqueeze(0)}, "position_ids: do not restart"),
        ({**PACKED, **SCORE, "temperature": torch.ones(3)}, r"temperature: got shape \(3,\)"),
    ],
)
def test_wrong_calls_name_the_argument(refusing, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        refusing(**{"input_ids": IDS, **arguments})
    assert "forward" not in refusing.lm_head.__dict__


def test_ranks_that_share_sequences_need_shifted_labels(refusing, group_of_one):
    shared = Parallel(cp_group=group_of_one)
    with pytest.raises(IntegrationError, match="labels: the next one may lie on another rank of cp_group"):
        refusing(input_ids=IDS, labels=IDS, **UPDATE, parallel=shared)
    with pytest.raises(ValueError, match="tp_group: a fused call can't use it"):
        refusing(input_ids=IDS, labels=IDS, **UPDATE, parallel=Parallel(tp_group=group_of_one))
    with pytest.raises(IntegrationError, match="parallel: goes with a policy call"):
        refusing(input_ids=IDS, labels=IDS, **SCORE, parallel=shared)


@pytest.mark.parametrize("name", ["Gemma2, softcap", "Granite, divides", "Cohere, multiplies"])
def test_logits_that_are_changed_in_an_unknown_way_are_refused(monkeypatch, name):
    model = fuse_lm_head(tiny(name))
    blind = LMHead(model.lm_head.weight, None, 1.0, None)
    monkeypatch.setattr(transformers, "lm_head_of", lambda model: blind)
    for _ in range(2):
        with pytest.raises(IntegrationError, match="changes logits after the lm_head"):
            model(IDS, labels=IDS, return_logprobs=True)


def test_a_head_that_is_more_than_its_weight_is_refused():
    class Gated(nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden) * hidden.mean(-1, keepdim=True)

    model = tiny()
    model.lm_head = Gated(32, 96, bias=False)
    with pytest.raises(IntegrationError, match="Gated, is not the product"):
        fuse_lm_head(model)(IDS, labels=IDS, return_logprobs=True)


def test_models_that_are_no_causal_language_models_are_refused():
    import transformers as transformers_library
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=96, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16)
    for model in (T5ForConditionalGeneration(config), tiny().model):
        with pytest.raises(IntegrationError, match="no causal language model"):
            fuse_lm_head(model)
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    for name in ("BertForMaskedLM", "BertLMHeadModel", "DebertaV2ForMaskedLM", "Gemma3ForCausalLM"):
        family, bidirectional = name[: name.index("For" if "For" in name else "LM")], {}
        if family == "Gemma3":
            family, bidirectional = "Gemma3Text", {"use_bidirectional_attention": True}
        config = getattr(transformers_library, f"{family}Config")(vocab_size=96, **small, **bidirectional)
        with pytest.raises(IntegrationError, match=f"model: {name} is bidirectional"):
            fuse_lm_head(getattr(transformers_library, name)(config))
    decoder = transformers_library.BertConfig(vocab_size=96, is_decoder=True, **small)
    fuse_lm_head(transformers_library.BertLMHeadModel(decoder))
    quantized = tiny()
    quantized.lm_head.weight = nn.Parameter(torch.zeros(96, 32, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(IntegrationError, match=r"torch.uint8 weight"):
        fuse_lm_head(quantized)


def test_the_weight_of_the_auxiliary_loss():
    model = fuse_lm_head(tiny("Qwen3-MoE"))
    inputs, labels = batch()
    call = {
        **inputs,
        "labels": labels,
        "old_logprobs": None,
        "advantages": torch.tensor([1.0, 2.0, 3.0, 4.0]),
    }
    with_own, without = model(**call), model(**call, router_aux_loss_coef=0.0)
    own = model(**inputs, labels=labels)
    assert torch.equal(with_own.aux_loss, own.aux_loss)
    torch.testing.assert_close(with_own.loss, without.loss + 0.1 * own.aux_loss)
    assert torch.equal(model(**inputs, labels=labels, return_logprobs=True).aux_loss, own.aux_loss)
    assert model(**call, output_router_logits=False).aux_loss is None


def test_outputs_go_through_accelerate_and_pickle():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate.state import AcceleratorState

    inputs, labels = batch()
    model = fuse_lm_head(tiny())
    with torch.autocast("cpu", torch.bfloat16):
        want = model(**inputs, labels=labels, old_logprobs=None, advantages=torch.ones(4))
    AcceleratorState._reset_state(reset_partial_state=True)
    prepared = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    out = prepared(**inputs, labels=labels, old_logprobs=None, advantages=torch.ones(4))
    AcceleratorState._reset_state(reset_partial_state=True)
    assert isinstance(out, transformers.FusedLMOutput) and out.logits is None
    assert torch.equal(out.loss, want.loss) and torch.equal(out.logprobs, want.logprobs)
    assert {n: float(v) for n, v in out.metrics.items()} == {n: float(v) for n, v in want.metrics.items()}
    scored = model(**inputs, labels=labels, return_logprobs=True)
    again = pickle.loads(pickle.dumps(transformers.FusedLMOutput(logprobs=scored.logprobs.detach())))
    assert torch.equal(again.logprobs, scored.logprobs) and "loss" not in again


@pytest.mark.parametrize("version", [None, "4.57.1"])
def test_a_missing_or_unsupported_transformers(monkeypatch, version):
    def installed(name):
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(errors, "version", installed)
    said = "not installed" if version is None else "version 4.57.1 is installed"
    with pytest.raises(
        IntegrationError, match=f"^transformers: {said}, this adapter needs transformers>=5.0,<6"
    ):
        fuse_lm_head(tiny())
