"""The fused head: scores, loss and gradients as by the logits path; adapters; packed rows; errors."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import gspo_kernels as gk
from gspo_kernels.distributed.groups import Parallel
from gspo_kernels.integrations import hooks, transformers
from gspo_kernels.integrations.errors import IntegrationError
from gspo_kernels.integrations.transformers import fuse_lm_head, unfuse_lm_head
from tests import oracle
from tests.draws import shifted_seed
from tests.fake_gpu import FakeGpu
from tests.integrations.tiny_models import MODELS, largest_allocation, tiny
from tests.trainer.conftest import (
    LIMIT,
    ROPES,
    model_of_varying_rope,
    nothing_in_single_precision,
    stretch_rope,
)

pytest.importorskip("transformers", reason="transformers is not installed")

IGNORED, T, PROMPT = -100, 10, 4
TEMPERATURE, SCORE = 0.7, {"return_logprobs": True}


def batch(seed=0):
    """Return left-padded prompts with completions; one is padded on the right, and one has a hole."""
    ids = torch.randint(3, 96, (4, T), generator=torch.Generator().manual_seed(shifted_seed(seed)))
    attention_mask, labels = torch.ones(4, T, dtype=torch.int64), ids.clone()
    labels[:, :PROMPT] = IGNORED
    for row, padding in enumerate((3, 0, 1, 2)):
        attention_mask[row, :padding] = 0
    attention_mask[1, -2:] = 0
    labels[1, -2:] = labels[2, PROMPT + 2] = IGNORED
    return {"input_ids": ids, "attention_mask": attention_mask}, labels


def shifted(labels):
    return nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def scores_of(logits, targets):
    """Return log-probs and entropy of the tokens that the last T positions predict."""
    return oracle.token_logprobs(logits[:, -T:] / TEMPERATURE, targets, targets != IGNORED)


def terms_of(logprobs):
    """Return terms of a loss: ratios on both sides of GSPO's clip range, a KL term, and rollout weights."""
    noise = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(shifted_seed(0)))
    return {
        "old_logprobs": logprobs.detach() + torch.tensor([2e-4, -3e-3, 2e-3, -1e-4]).unsqueeze(1),
        "advantages": torch.tensor([1.0, -0.7, 0.5, -1.2]).to(logprobs),
        "ref_logprobs": logprobs.detach() + 0.1 * noise,
        "rollout_weights": torch.tensor([1.0, 0.5, 1.5, 0.8]).to(logprobs),
        "kl_beta": 0.05,
        "objective": gk.GSPO(),
    }


def from_logits(model, inputs, targets):
    """Return the oracle's log-probs, entropy and loss from the model's own logits, and the loss's terms."""
    outputs = model(**inputs)
    logprobs, entropy = scores_of(outputs.logits, targets)
    terms = terms_of(logprobs)
    old, advantages, objective = (terms[n] for n in ("old_logprobs", "advantages", "objective"))
    rest = {name: terms[name] for name in ("ref_logprobs", "rollout_weights", "kl_beta")}
    loss = oracle.policy_loss(logprobs, old, advantages, targets != IGNORED, objective, **rest)
    if getattr(outputs, "aux_loss", None) is not None:
        loss = loss + model.config.router_aux_loss_coef * outputs.aux_loss
    return logprobs, entropy, loss, terms


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for n, p in model.named_parameters()
        if p.requires_grad
    }


def adapted(model, **options):
    """Return the model with a LoRA of PEFT."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(shifted_seed(1))
    options = {"r": 4, "init_lora_weights": False, "target_modules": ["q_proj", "v_proj"], **options}
    return peft.get_peft_model(model, peft.LoraConfig(**options))


ADAPTERS = {"LoRA, frozen head": {}, "LoRA, trained head": {"modules_to_save": ["lm_head"]}}


@pytest.mark.parametrize("name", [*MODELS, *ADAPTERS])
def test_values_and_gradients_equal_the_logits_path(name):
    """In fp64, for fused losses with several schedules, and for a loss of differentiable log-probs."""

    def close(got, want):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)

    model = tiny("Qwen3" if name in ADAPTERS else name)
    if name in ADAPTERS:
        model = adapted(model, **ADAPTERS[name])
    if name == "Qwen3-MoE":
        model.set_experts_implementation("eager")  # the grouped product has no fp64
    model.double()
    inputs, labels = batch()
    targets = shifted(labels)
    with nothing_in_single_precision():
        logprobs, entropy, loss, terms = from_logits(model, inputs, targets)
        want = gradients(model, loss)
        assert all(each.abs().max() > 1e-5 for each in want.values())
        if name in ADAPTERS:
            assert any("lm_head" in n for n in want) == (name == "LoRA, trained head")
        fuse_lm_head(model)
        call = {**inputs, "shift_labels": targets, "temperature": TEMPERATURE}
        scored = model(**call, return_logprobs=True, return_entropy=True)
        assert isinstance(scored, transformers.FusedLMOutput) and scored.logits is None is scored.loss
        close((scored.logprobs, scored.entropy), (logprobs, entropy))
        for options in ({}, {"schedule": "two_pass"}, {"max_chunk_bytes": 96 * 8 * 5}):
            out = model(**call, **terms, **options)
            close((out.loss, out.logprobs), (loss, logprobs))
            close(gradients(model, out.loss), want)
        if scored.aux_loss is None:
            separate = gk.policy_loss(scored.logprobs, **terms, loss_mask=targets != IGNORED).loss
            close(gradients(model, separate), want)


def test_labels_are_shifted_shift_labels_take_a_mask():
    model = fuse_lm_head(tiny())
    inputs, labels = batch()
    terms = terms_of(model(**inputs, labels=labels, return_logprobs=True).logprobs)
    want = model(**inputs, labels=labels, **terms)
    targets = inputs["input_ids"].roll(-1, dims=1)
    got = model(**inputs, shift_labels=targets, loss_mask=shifted(labels) != IGNORED, **terms)
    assert torch.equal(got.loss, want.loss) and torch.equal(got.logprobs, want.logprobs)


def test_the_same_weights_have_a_ratio_of_exactly_one():
    for name in ("Qwen3", "Gemma2, softcap", "Qwen3-MoE"):
        model = fuse_lm_head(tiny(name).bfloat16())
        inputs, labels = batch()
        with torch.inference_mode():
            old = model(**inputs, labels=labels, return_logprobs=True).logprobs
        assert old.dtype == torch.float32
        out = model(**inputs, labels=labels, old_logprobs=old, advantages=torch.ones(4))
        assert float(out.metrics["ratio/min"]) == float(out.metrics["ratio/max"]) == 1.0
        out.loss.backward()


def test_calls_without_our_arguments_are_the_model_s():
    model = tiny()
    inputs, labels = batch()
    call = {**inputs, "labels": labels, "ignore_index": IGNORED}
    before, signature = model(**call), inspect.signature(model.forward)
    prompt = {n: v[:2, :5] for n, v in inputs.items()}
    generated = model.generate(**prompt, do_sample=False, max_new_tokens=3)
    assert fuse_lm_head(model) is model and fuse_lm_head(model) is model
    after = model(**call)
    assert torch.equal(after.logits, before.logits) and torch.equal(after.loss, before.loss)
    assert inspect.signature(model.forward) == signature
    assert torch.equal(model.generate(**prompt, do_sample=False, max_new_tokens=3), generated)
    model(**inputs, labels=labels, return_logprobs=True)
    assert torch.equal(model(**inputs).logits, before.logits)  # a fused call leaves the head as it was
    unfuse_lm_head(unfuse_lm_head(model))
    assert [type(each) for each in model.modules()] == [type(each) for each in tiny().modules()]
    assert vars(model).keys() == vars(tiny()).keys()


def test_logits_are_never_built():
    model = tiny(vocab_size=4096)
    ids = torch.randint(3, 4096, (4, 64), generator=torch.Generator().manual_seed(shifted_seed(0)))
    logits_bytes, advantages = ids.numel() * 4096 * 4, torch.tensor([1.0, -1.0, 2.0, -2.0])
    assert largest_allocation(lambda: model(ids).logits.sum().backward()) >= logits_bytes
    fuse_lm_head(model)
    call = {"labels": ids, "max_chunk_bytes": logits_bytes // 8}
    old = model(ids, **call, return_logprobs=True).logprobs.detach()
    for run in (
        lambda: model(ids, **call, return_logprobs=True),
        lambda: model(ids, **call, old_logprobs=old, advantages=advantages).loss.backward(),
    ):
        assert largest_allocation(run) <= logits_bytes // 4


# ------------------------------------------------------ checkpointing, autocast, packed rows


@pytest.mark.parametrize("fp32_head", [False, True])
@pytest.mark.parametrize("name", ["Qwen3", "Gemma2, softcap", "Qwen3-MoE"])
def test_bf16_autocast(name, fp32_head):
    """Logits from bf16 operands are not rounded; an fp32 head does not round its operands, either."""
    model = tiny(name)
    inputs, labels = batch()
    targets, head = shifted(labels), model.get_output_embeddings()

    def exact(hidden):
        operands = (hidden, head.weight) if fp32_head else (hidden.bfloat16(), head.weight.bfloat16())
        return nn.functional.linear(*(each.double() for each in operands))

    with torch.autocast("cpu", torch.bfloat16):
        head.forward = exact
        logprobs, _, loss, terms = from_logits(model, inputs, targets)
        want = gradients(model, loss)
        del head.forward
        terms = {n: v.float() if isinstance(v, torch.Tensor) else v for n, v in terms.items()}
        fuse_lm_head(model, fp32_head=fp32_head)
        out = model(**inputs, shift_labels=targets, temperature=TEMPERATURE, **terms)
        got = gradients(model, out.loss)
    torch.testing.assert_close(out.logprobs.double(), logprobs, rtol=1e-6, atol=1e-5)
    for each in want:
        # Both round the backbone's gradients to bf16; the worst errors of forty draws are 0.02 and 0.004.
        bound = 2.0**-4 if each != "lm_head.weight" else 2.0**-6
        assert (got[each] - want[each]).norm() <= bound * want[each].norm(), each


def test_a_head_in_fp32_of_a_model_in_bf16():
    model = tiny().bfloat16()
    model.lm_head.float()
    with torch.no_grad():
        model.lm_head.weight += 1e-3 * torch.randn(96, 32)  # values that bf16 cannot represent
    model.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
    inputs, labels = batch()
    want, _ = scores_of(model(**inputs).logits.double(), shifted(labels))
    got = fuse_lm_head(model)(**inputs, labels=labels, return_logprobs=True, temperature=TEMPERATURE).logprobs
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


def packed_batch():
    """Return four sequences in one row, one of them empty, and the same as padded rows."""
    lengths = (5, 0, 7, 4)
    ids = torch.randint(3, 96, (1, sum(lengths)), generator=torch.Generator().manual_seed(shifted_seed(0)))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    attention_mask = (torch.arange(7) < torch.tensor(lengths).unsqueeze(1)).long()
    padded = torch.zeros(4, 7, dtype=torch.int64).masked_scatter(attention_mask.bool(), ids)
    return ids, cu_seqlens, padded, attention_mask


@pytest.mark.parametrize(
    ("name", "attention"), [("Qwen3", "sdpa"), ("Qwen3", "eager"), ("Gemma2, softcap", "eager")]
)
def test_packed_rows_equal_padded_ones(name, attention):
    model = fuse_lm_head(tiny(name, attn_implementation=attention)).double()
    temperature = torch.tensor([0.7, 1.0, 1.3, 2.0]).double()
    ids, cu_seqlens, padded, attention_mask = packed_batch()
    inside = attention_mask.bool()
    rows = {"input_ids": padded, "attention_mask": attention_mask, "temperature": temperature}
    rows["labels"] = padded.masked_fill(~inside, IGNORED)
    row = {"input_ids": ids, "labels": ids, "cu_seqlens": cu_seqlens, "temperature": temperature}
    with nothing_in_single_precision():
        want = model(**rows, return_logprobs=True).logprobs
        got = model(**row, return_logprobs=True).logprobs
        assert got.shape == ids.shape
        torch.testing.assert_close(got[0], want[inside])
        positions = torch.cat([torch.arange(n) for n in cu_seqlens.diff().tolist()]).unsqueeze(0)
        assert torch.equal(model(**row, position_ids=positions, return_logprobs=True).logprobs, got)
        terms = terms_of(want)
        of_padded = model(**rows, **terms)
        for per_token in ("old_logprobs", "ref_logprobs"):
            terms[per_token] = terms[per_token][inside].unsqueeze(0)
        of_packed = model(**row, **terms)
        assert of_packed.logprobs.shape == ids.shape
        torch.testing.assert_close(of_packed.metrics, of_padded.metrics)
        torch.testing.assert_close(of_packed.loss, of_padded.loss)
        grads = [gradients(model, each.loss) for each in (of_packed, of_padded)]
        torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-10)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU")
def test_a_packed_row_s_offsets_may_be_on_the_host(monkeypatch):
    pytest.importorskip("triton")
    gpu, model = FakeGpu(monkeypatch), fuse_lm_head(tiny("Qwen3"))
    ids, cu_seqlens, *_ = packed_batch()
    given = {"loss_mask": (ids % 3 != 0).float(), "cu_seqlens": cu_seqlens}
    terms = {"old_logprobs": None, "advantages": torch.tensor([1.0, -0.7, 0.5, -1.2])}
    terms |= {"input_ids": ids, "shift_labels": ids, "max_chunk_bytes": 2**20}
    with gpu:
        want = model(**terms, **given)  # the first call checks how the model packs
        gpu.looks.clear()
        looks = [model(**terms, **given), dict(gpu.looks)][1]
        gpu.looks.clear()
        got = model(**terms, **{name: gpu.host(value) for name, value in given.items()})
    assert gpu.looks == looks
    assert torch.equal(got.loss, want.loss) and torch.equal(got.logprobs, want.logprobs)


@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Qwen3VL"])
def test_positions_on_several_axes(family):
    """M-RoPE: an image of four patches has rows and columns, whose positions count back within a sequence."""
    import transformers as library

    head = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.3}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    text = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, **head}
    tokens = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    vision |= {} if family == "Qwen2_5_VL" else {"deepstack_visual_indexes": []}
    config = {"text_config": text | tokens | {"rope_parameters": rope}, "vision_config": vision}
    torch.manual_seed(shifted_seed(0))
    model = getattr(library, f"{family}ForConditionalGeneration")(
        getattr(library, f"{family}Config")(**config)
    ).eval()
    image = torch.tensor([[2, 2, 2, 2], [2, 2, 3, 3], [2, 3, 2, 3]])
    axes = torch.cat([torch.arange(2).expand(3, 2), image, torch.arange(4, 8).expand(3, 4)], 1).unsqueeze(1)
    counted = torch.arange(10).view(1, 1, 10)
    ids = torch.randint(3, 90, (2, 1, 10), generator=torch.Generator().manual_seed(shifted_seed(0)))
    with torch.no_grad():
        want = torch.cat(
            [
                oracle.token_logprobs(model(x, position_ids=axes).logits, shifted(x), shifted(x) > 0)[0]
                for x in ids
            ],
            1,
        )
        fuse_lm_head(model)
        row = {"input_ids": torch.cat([*ids], 1), "return_logprobs": True}
        row["labels"] = row["input_ids"]
        got = [model(x, position_ids=axes, labels=x, **SCORE).logprobs for x in ids]
        torch.testing.assert_close(torch.cat(got, 1).double(), want.double(), rtol=0, atol=1e-5)
        row["cu_seqlens"] = torch.tensor([0, 10, 20], dtype=torch.int32)
        for positions in (axes, torch.cat([counted, axes])):
            got = model(**row, position_ids=torch.cat([positions] * 2, -1)).logprobs
            torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=1e-5)
        as_text = model(**row).logprobs
        assert torch.equal(model(**row, position_ids=torch.cat([counted[0]] * 2, -1)).logprobs, as_text)
        assert not torch.allclose(as_text, got)
        with pytest.raises(
            IntegrationError, match=r"got shape \(2, 1, 20\), expected \(1, 20\) or \(3, 1, 20\)"
        ):
            model(**row, position_ids=torch.cat([axes[:2]] * 2, -1))
        del row["cu_seqlens"]
        with pytest.raises(IntegrationError, match="position_ids: restart within a row"):
            model(**row, position_ids=torch.cat([axes] * 2, -1))


def test_a_packed_row_s_hidden_states_may_be_a_dtensor(group_of_one):
    """As where ranks have cut the norms by tokens."""
    model = fuse_lm_head(tiny())
    ids, cu_seqlens, *_ = packed_batch()
    call = {"labels": ids, "cu_seqlens": cu_seqlens, **SCORE}
    want = model(ids, **call).logprobs
    model = copy.deepcopy(model)  # its first packed call is checked, too
    mesh = DeviceMesh.from_group(group_of_one, "cpu")
    wrap = lambda module, inputs, output: DTensor.from_local(output, mesh, [Replicate()])  # noqa: E731
    model.model.norm.register_forward_hook(wrap)
    assert torch.equal(model(ids, **call).logprobs, want)


@pytest.mark.parametrize("kind", list(ROPES))
def test_rope_frequencies_that_depend_on_lengths(kind, group_of_one):
    """Such sequences are not packed, padded rows are warned about, and no earlier call counts."""
    model = fuse_lm_head(model_of_varying_rope(kind))
    long = torch.randint(3, 60, (1, 3 * LIMIT), generator=torch.Generator().manual_seed(shifted_seed(0)))
    call = {"input_ids": long[:, : 2 * LIMIT], "labels": long[:, : 2 * LIMIT], **SCORE}
    scores = model(**call).logprobs
    model(long, labels=long, **SCORE)
    assert torch.equal(model(**call).logprobs, scores)
    for lengths in ((LIMIT - 2, 2), (2 * LIMIT,)):  # too short to matter, and one sequence
        row = long[:, : sum(lengths)]
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        got = model(row, labels=row, cu_seqlens=cu_seqlens, **SCORE).logprobs
        want = [model(each, labels=each, **SCORE).logprobs for each in row.split(lengths, 1)]
        torch.testing.assert_close(got, torch.cat(want, 1), rtol=0, atol=1e-5)
    refused = rf"the RoPE of \w+ \({kind}\) takes its frequencies from the largest.*beyond {LIMIT} tokens"
    with pytest.raises(IntegrationError, match=f"cu_seqlens: {refused}"):
        model(long, labels=long, cu_seqlens=torch.tensor([0, 5, 3 * LIMIT]), **SCORE)
    shared = {**UPDATE, "advantages": torch.ones(1), "parallel": Parallel(cp_group=group_of_one)}
    with pytest.raises(IntegrationError, match=f"parallel: {refused}"):
        model(long, shift_labels=long, position_ids=torch.arange(3 * LIMIT)[None], **shared)
    hooks.warn_once.cache_clear()
    with pytest.warns(UserWarning, match="log-probs depend on padding"):
        model(long.expand(2, -1), labels=long.expand(2, -1), **SCORE)


def test_the_check_of_packing_looks_at_far_positions():
    model = fuse_lm_head(stretch_rope(tiny()))
    ids, cu_seqlens, *_ = packed_batch()
    with pytest.raises(IntegrationError, match=r"cu_seqlens: Qwen3.* differ from those of the sequences"):
        model(ids, labels=ids, cu_seqlens=cu_seqlens, **SCORE)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("opt", {"ffn_dim": 32, "word_embed_proj_dim": 32}, r"cu_seqlens: OPT.* differ from those of the"),
        ("bloom", {"n_head": 2, "n_layer": 2}, "takes no position_ids"),
    ],
)
def test_models_that_mix_packed_sequences_are_refused(family, options, message):
    model = fuse_lm_head(tiny(family, **options).train())
    ids, cu_seqlens, *_ = packed_batch()
    for more in ({}, {"cu_seq_lens_q": None}):  # the second call is refused as well
        with pytest.raises(IntegrationError, match=message):
            model(ids, labels=ids, cu_seqlens=cu_seqlens, return_logprobs=True, **more)
    assert all(module.training for module in model.modules())


# ------------------------------------------------------ refusals, outputs, versions

UPDATE = {"old_logprobs": None, "advantages": torch.ones(4)}
IDS = batch()[0]["input_ids"]
PACKED = {"input_ids": IDS.view(1, -1), "labels": IDS.view(1, -1), "cu_seqlens": torch.tensor([0, 20, 40])}
REFUSED = [
    ({**SCORE}, "labels, shift_labels: expected exactly one"),
    ({**SCORE, "labels": IDS, "shift_labels": IDS}, "labels, shift_labels: expected exactly one"),
    ({"labels": IDS, "temperature": 0.5}, "advantages: missing, while 'temperature' is passed"),
    ({"labels": IDS, "advantages": torch.ones(4)}, "old_logprobs: missing"),
    ({"labels": IDS, **SCORE, "kl_beta": 0.1}, "kl_beta: goes with a policy call"),
    ({"labels": IDS, "return_logprobs": 1}, "return_logprobs: got int"),
    ({"labels": IDS.float(), **SCORE}, "labels: got torch.float32"),
    ({"labels": IDS[0], **SCORE}, r"labels: got shape \(10,\), expected \[B, T\]"),
    ({"labels": IDS[:, 1:], **SCORE}, r"hidden: got shape \(4, 10, 32\)"),
    ({"labels": IDS, **UPDATE, "old_logprobs": torch.zeros(4, 9)}, r"old_logprobs: got shape \(4, 9\)"),
    ({"labels": IDS, **UPDATE, "loss_mask": torch.ones(4, T)}, "loss_mask: belongs to the tokens that"),
    (
        {"labels": IDS, **UPDATE, "old_logprobs": torch.zeros(4, T).bfloat16()},
        "old_logprobs: arrives as torch.bfloat16",
    ),
    ({"labels": IDS, **UPDATE, "router_aux_loss_coef": 0.1}, "router_aux_loss_coef: the forward computed no"),
    ({"labels": IDS, **SCORE, "return_dict": False}, "return_dict: got False, expected True"),
    ({"labels": IDS, **SCORE, "logits_to_keep": 2}, "logits_to_keep: a fused call"),
    ({"labels": IDS, **UPDATE, "rollout_weight": torch.ones(4)}, "rollout_weight: .*mean 'rollout_weights'"),
    ({"labels": IDS, **SCORE, "old_log_probs": None}, "old_log_probs: .*mean 'old_logprobs'"),
    ({"labels": IDS, **UPDATE, "softcap": 3.0}, "softcap: not an argument of a fused call"),
    ({"labels": IDS, **SCORE, "logit_scale": 0.5}, "logit_scale: not an argument of a fused call"),
    ({"labels": IDS, **UPDATE, "num_items_in_batch": 40}, "num_items_in_batch: .*normalizer="),
    (
        {"labels": IDS, **SCORE, "position_ids": torch.tensor([[0, 1, 2, 3, 4] * 2])},
        "position_ids: restart within a row",
    ),
    ({"labels": IDS, **SCORE, "cu_seqlens": torch.tensor([0, 40])}, r"expected \[1, N\] with cu_seqlens"),
    ({**PACKED, **SCORE, "attention_mask": torch.ones(1, 40)}, "cu_seqlens: with a 2-D attention_mask"),
    ({**PACKED, **SCORE, "use_cache": True}, "cu_seqlens: with a 2-D attention_mask or use_cache"),
    ({**PACKED, **SCORE, "position_ids": torch.arange(40).unsqueeze(0)}, "position_ids: do not restart"),
    ({**PACKED, **SCORE, "temperature": torch.ones(3)}, r"temperature: got shape \(3,\)"),
    ({**PACKED, **SCORE, "cu_seqlens": torch.tensor([0, 20, 39])}, "cu_seqlens: ends at 39"),
]


def test_wrong_calls_name_the_argument(group_of_one):
    model = fuse_lm_head(tiny())
    shared = Parallel(cp_group=group_of_one)
    of_ranks = [
        ({"labels": IDS, **UPDATE, "parallel": shared}, "labels: the next token may be on another rank"),
        (
            {"labels": IDS, **UPDATE, "parallel": Parallel(tp_group=group_of_one)},
            "tp_group: not supported by a fused call",
        ),
        ({"labels": IDS, **SCORE, "parallel": shared}, "parallel: goes with a policy call"),
    ]
    for arguments, message in REFUSED + of_ranks:
        with pytest.raises((TypeError, ValueError), match=message):
            model(**{"input_ids": IDS, **arguments})
    assert model(IDS).logits.shape == (4, T, 96)


def test_the_model_s_own_arguments_reach_its_forward():
    model, seen = fuse_lm_head(tiny()), []
    want, own = model(IDS, labels=IDS, **SCORE).logprobs, model.forward

    def forward(input_ids=None, softcap=None, advantage=None, **kwargs):
        seen.append({"softcap": softcap, "advantage": advantage, **kwargs})
        return own(input_ids, **{name: value for name, value in kwargs.items() if name != "position_ids"})

    model.forward = forward
    positions = torch.arange(T).expand(4, T)
    given = {"softcap": 1.5, "advantage": 2.0, "num_items_in_batch": 40, "token_type_ids": IDS}
    given |= {"num_logits_to_keep": 0, "cu_seq_lens_q": None, "position_ids": positions}
    assert torch.equal(model(IDS, labels=IDS, **SCORE, **given).logprobs, want)
    assert all(seen[0][name] is value for name, value in given.items())


def test_a_packed_row_of_a_forward_with_few_arguments():
    model, (ids, cu_seqlens, *_) = tiny(), packed_batch()

    class Few(type(model)):
        def forward(self, input_ids, attention_mask=None, position_ids=None):
            return super().forward(input_ids, attention_mask, position_ids)

    sequence = torch.arange(4).repeat_interleave(cu_seqlens.diff())
    row = {"input_ids": ids, "labels": ids, "cu_seqlens": cu_seqlens, **SCORE}
    row["attention_mask"] = (sequence.unsqueeze(1) == sequence).tril().view(1, 1, len(sequence), -1)
    want = fuse_lm_head(model)(**row).logprobs
    model.__class__ = Few
    assert torch.equal(fuse_lm_head(model)(**row).logprobs, want)


def test_heads_that_are_not_understood_are_refused():
    quantized = tiny()
    quantized.lm_head.weight = nn.Parameter(torch.zeros(96, 32, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(IntegrationError, match=r"torch.uint8 weight"):
        fuse_lm_head(quantized)
    dora = {"target_modules": ["lm_head"], "use_dora": True}
    with pytest.raises(IntegrationError, match="lm_head carries a variant of LoRA"):
        fuse_lm_head(adapted(tiny(), **dora))
    model = adapted(fuse_lm_head(tiny()), **dora)  # the adapter is added after fusing
    with pytest.raises(IntegrationError, match="lm_head carries a variant of LoRA"):
        model(IDS, labels=IDS, **SCORE)


def test_prompt_learning_is_refused():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    for kind in ("PromptTuning", "PromptEncoder", "PrefixTuning"):
        config = getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", num_virtual_tokens=3)
        for plain in (tiny(), fuse_lm_head(tiny())):
            model = peft.get_peft_model(plain, config)
            for function in (fuse_lm_head, transformers.lm_head_of):
                with pytest.raises(IntegrationError, match=f"model: {kind}Config is prompt learning"):
                    function(model)
        # the prompt is added after fusing: padded rows have a cache, or labels for virtual tokens
        names = "past_key_values: got a cache" if kind == "PrefixTuning" else "cu_seqlens: ends at 40"
        with pytest.raises(ValueError, match=names):
            model(**PACKED, **SCORE)


def test_models_that_are_not_causal_are_refused():
    import transformers as library

    config = library.T5Config(vocab_size=96, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16)
    for model in (library.T5ForConditionalGeneration(config), tiny().model):
        with pytest.raises(IntegrationError, match="not a causal language model"):
            fuse_lm_head(model)
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    for name, family, options in (
        ("BertForMaskedLM", "Bert", {}),
        ("BertLMHeadModel", "Bert", {}),
        ("DebertaV2ForMaskedLM", "DebertaV2", {}),
        ("Gemma3ForCausalLM", "Gemma3Text", {"use_bidirectional_attention": True}),
    ):
        config = getattr(library, f"{family}Config")(vocab_size=96, **small, **options)
        with pytest.raises(IntegrationError, match=f"model: {name} is bidirectional"):
            fuse_lm_head(getattr(library, name)(config))
    fuse_lm_head(library.BertLMHeadModel(library.BertConfig(vocab_size=96, is_decoder=True, **small)))


def test_the_weight_of_the_auxiliary_loss():
    model = fuse_lm_head(tiny("Qwen3-MoE"))
    inputs, labels = batch()
    call = {**inputs, "labels": labels, **UPDATE}
    own, without = model(**call), model(**call, router_aux_loss_coef=0.0)
    assert torch.equal(own.aux_loss, model(**inputs, labels=labels).aux_loss)
    torch.testing.assert_close(own.loss, without.loss + 0.1 * own.aux_loss)
    assert torch.equal(model(**inputs, labels=labels, **SCORE).aux_loss, own.aux_loss)
    assert model(**call, output_router_logits=False).aux_loss is None


def test_outputs_go_through_accelerate_and_pickle():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    inputs, labels = batch()
    model = fuse_lm_head(tiny())
    with torch.autocast("cpu", torch.bfloat16):
        want = model(**inputs, labels=labels, **UPDATE)
    out = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(model)(
        **inputs, labels=labels, **UPDATE
    )
    assert isinstance(out, transformers.FusedLMOutput) and out.logits is None
    assert torch.equal(out.loss, want.loss) and torch.equal(out.logprobs, want.logprobs)
    assert {n: float(v) for n, v in out.metrics.items()} == {n: float(v) for n, v in want.metrics.items()}
    again = pickle.loads(pickle.dumps(transformers.FusedLMOutput(logprobs=want.logprobs.detach())))
    assert torch.equal(again.logprobs, want.logprobs) and "loss" not in again
