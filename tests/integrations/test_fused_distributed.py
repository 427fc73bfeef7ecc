"""Gloo processes: DDP, FSDP2, tensor parallelism (also by transformers' tp_plan), context parallelism.

Under data parallelism results equal those of one process bit for bit, because halves and sums of two are
exact. Other cases are compared in fp64.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import gspo_kernels as gk
from gspo_kernels.integrations.errors import IntegrationError
from gspo_kernels.integrations.transformers import fuse_lm_head
from gspo_kernels.models.layouts import to_predictions, tokens_of_rank
from tests.draws import shifted_seed
from tests.forks import in_processes
from tests.integrations.tiny_models import tiny

peft = pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AttentionInterface, AutoModelForCausalLM  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402

SEQUENCES, LENGTH, PROMPT = 4, 9, 3
ADVANTAGES = torch.tensor([1.0, -0.7, 0.5, -1.2])


def rows(rank):
    """Return inputs and advantages of a rank's half of the batch."""
    ids = torch.randint(3, 96, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(shifted_seed(0)))
    half = slice(rank * SEQUENCES // 2, (rank + 1) * SEQUENCES // 2)
    labels = ids.clone()
    labels[:, :PROMPT] = -100
    return {"input_ids": ids[half], "labels": labels[half]}, ADVANTAGES[half]


def packed(inputs):
    """Return the same half as one packed row of two sequences."""
    cut = inputs["input_ids"].shape[1] * 2
    return {
        "input_ids": inputs["input_ids"].reshape(1, cut),
        "labels": inputs["labels"].reshape(1, cut),
        "cu_seqlens": torch.tensor([0, LENGTH, 2 * LENGTH], dtype=torch.int32),
    }


def step(model, inputs, advantages, **options):
    """Score, then run a loss and its backward. The loss is divided by the number of sequences of a half."""
    with torch.no_grad():
        old = model(**inputs, return_logprobs=True).logprobs
    same = model(**inputs, old_logprobs=old, advantages=advantages)
    assert float(same.metrics["ratio/min"]) == float(same.metrics["ratio/max"]) == 1.0
    offset = torch.linspace(-2e-3, 2e-3, old.numel()).view_as(old)
    out = model(
        **inputs, old_logprobs=old + offset, advantages=advantages, normalizer=SEQUENCES / 2, **options
    )
    out.loss.backward()
    return old, out


def differentiable_scores(model, inputs, advantages):
    """Compute a loss from log-probs that the module returned; its backward needs the head's weight again."""
    logprobs = model(**inputs, return_logprobs=True).logprobs
    counted = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100) != -100
    loss = gk.policy_loss(
        logprobs, None, advantages, loss_mask=counted, normalizer=SEQUENCES / 2, objective=gk.GRPO()
    ).loss
    loss.backward()
    return logprobs.detach(), loss


def mean_gradients(model, run, changed=lambda inputs: inputs):
    """Return this rank's results, and the gradients that data parallelism must give: the halves' mean."""
    results, sums = [], {}
    for rank in range(2):
        model.zero_grad()
        inputs, advantages = rows(rank)
        results.append(run(model, changed(inputs), advantages))
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                sums[name] = sums.get(name, 0) + parameter.grad
    return results[dist.get_rank()], {name: total / 2 for name, total in sums.items()}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(model, got, want, gradients):
    assert torch.equal(got[0], want[0]), "log-probs"
    loss = [x if isinstance(x, torch.Tensor) else x.loss for x in (got[1], want[1])]
    assert torch.equal(*loss), "loss"
    compared = 0
    for name, parameter in model.named_parameters():
        name = name.removeprefix("module.")
        if name in gradients:
            compared += 1
            assert torch.equal(whole(parameter.grad), gradients[name]), name
    assert compared == len(gradients) > 0


def shard(model, head_alone=False, **options):
    for layer in model.model.layers:
        fully_shard(layer, **options)
    if head_alone:
        fully_shard(model.lm_head, **options)
    fully_shard(model, **options)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return model


def data_parallel(name, wrap, run=step, changed=lambda inputs: inputs, adapted=lambda model: model):
    model = fuse_lm_head(adapted(tiny(name)))
    want, gradients = mean_gradients(copy.deepcopy(model), run, changed)
    model = wrap(model)
    inputs, advantages = rows(dist.get_rank())
    assert_same(model, run(model, changed(inputs), advantages), want, gradients)


def ddp():
    for name in ("Qwen3", "Qwen3-MoE"):
        data_parallel(name, lambda model: torch.nn.parallel.DistributedDataParallel(model))


def fsdp2():
    """Padded and packed rows, and a head that is sharded alone: its hooks gather it, also in the backward."""
    data_parallel("Qwen3", shard)
    data_parallel("Qwen3", shard, changed=packed)
    data_parallel("Qwen3 tied", shard)
    data_parallel("Phi, bias", shard)

    def alone(model):
        return shard(model, head_alone=True)

    data_parallel("Qwen3", alone)
    data_parallel("Qwen3", alone, lambda *a: step(*a, schedule="two_pass"))
    data_parallel("Qwen3", alone, differentiable_scores)


def fsdp2_lora():
    """Adapters in the backbone and a trained copy of the head work; a copy sharded by itself is refused."""

    config = peft.LoraConfig(
        target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False, r=4
    )

    def adapted(model):
        torch.manual_seed(shifted_seed(1))
        return peft.get_peft_model(model, config)

    def shard_all(model):
        shard(model.get_base_model())
        return fully_shard(model)

    data_parallel("Qwen3", shard_all, adapted=adapted)
    model = fuse_lm_head(adapted(tiny()))
    fully_shard(model.get_output_embeddings().modules_to_save["default"])
    with pytest.raises(IntegrationError, match="shard the lm_head with the root module"):
        model(**rows(dist.get_rank())[0], return_logprobs=True)


def fsdp2_bf16():
    """Old log-probs that the wrapper rounds are refused; unrounded, ratios of equal weights are exactly 1."""
    inputs, advantages = rows(dist.get_rank())
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    model = shard(fuse_lm_head(tiny()), mp_policy=policy)
    old, out = step(model, inputs, advantages)
    assert old.dtype == out.logprobs.dtype == torch.float32
    for refused in (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.bfloat16),
    ):
        model = shard(fuse_lm_head(tiny()), mp_policy=refused)
        rounded = model(**inputs, return_logprobs=True).logprobs.detach()
        with pytest.raises(IntegrationError, match="arrives as torch"):
            model(**inputs, old_logprobs=rounded, advantages=torch.ones(2))


def assert_close(name, got, want):
    """Check results of models in fp64; the bound is loose because their norms compute in fp32."""
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert (whole(got[key]) - value).norm() <= 1e-6 * value.norm(), (name, key)


def results(model, batches, **options):
    """Return log-probs of the batches, and the gradients of the mean of their losses."""
    fuse_lm_head(model).zero_grad()
    found = [step(model, *batch, **options) for batch in batches]
    assert not any(isinstance(out.loss, DTensor) for _, out in found)
    return {"log-probs": torch.cat([old.flatten() for old, _ in found])} | {
        name: whole(p.grad) / len(batches) for name, p in model.named_parameters() if p.grad is not None
    }


def attention_of_each_token(module, query, key, value, attention_mask, **options):
    """Replace transformers' attention, which would need the keys and values of other ranks."""
    return (query + value).transpose(1, 2).contiguous(), None


def context_parallel():
    """Each rank has tokens of every sequence. Queries depend on positions within sequences."""
    (inputs, advantages), group = rows(0), dist.group.WORLD
    row = packed(inputs)
    ids, cu_seqlens = row["input_ids"], row["cu_seqlens"]
    positions = torch.arange(LENGTH).repeat(2).unsqueeze(0)
    labels = to_predictions(row["labels"][0], cu_seqlens=cu_seqlens, fill=-100).unsqueeze(0)
    AttentionInterface.register("of each token", attention_of_each_token)
    own, offsets = tokens_of_rank(cu_seqlens, dist.get_rank(), 2)
    mine = {"input_ids": ids[:, own], "shift_labels": labels[:, own], "cu_seqlens": offsets}
    whole_row = {"input_ids": ids, "shift_labels": labels, "cu_seqlens": cu_seqlens}
    model, alone = (fuse_lm_head(tiny().double()) for _ in range(2))
    model.config._attn_implementation = alone.config._attn_implementation = "of each token"
    with torch.no_grad():
        old = alone(**whole_row, return_logprobs=True).logprobs
    old = old + torch.linspace(-2e-3, 2e-3, old.numel())
    here = {
        **mine,
        "position_ids": positions[:, own],
        "attention_mask": torch.ones(1, 1, len(own), len(own), dtype=torch.bool),  # ignored by this attention
        "parallel": gk.Parallel(cp_group=group),
    }
    found = []
    for each, given, before in ((model, here, old[:, own]), (alone, whole_row, old)):
        terms = {"old_logprobs": before, "advantages": advantages.to(old), "objective": gk.GRPO()}
        out = each(**given, **terms)
        out.loss.backward()
        gradients = {name: p.grad for name, p in each.named_parameters() if p.grad is not None}
        if each is model:
            for gradient in gradients.values():
                dist.all_reduce(gradient)
        found.append({"loss": out.loss.detach(), **gradients})
    assert_close("context parallel", *found)
    with pytest.raises(IntegrationError, match="position_ids: got None, expected each token's position"):
        model(**mine, parallel=here["parallel"], old_logprobs=None, advantages=advantages)


CASES = (ddp, fsdp2, fsdp2_lora, fsdp2_bf16, context_parallel)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_processes_equal_one(case):
    def work(rank):
        dist.init_process_group("gloo")
        case()

    in_processes(2, work)


# ------------------------------------------------------ models that transformers itself has sharded

MODELS = ("Qwen3", "Qwen3 tied", "Phi, bias")


def loaded(folder, name, **sizes):
    """Load a model; each rank reads its part."""
    return AutoModelForCausalLM.from_pretrained(
        folder / name, dtype=torch.float64, distributed_config=DistributedConfig(**sizes)
    ).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in MODELS:
        tiny(name).save_pretrained(folder / name)
    return folder


@pytest.mark.slow
def test_tp_plan_gives_the_numbers_of_one_process(folder):
    """A head with a sharded vocabulary is not gathered: each rank keeps the gradient of its shard."""

    def work(rank):
        for name in (*MODELS, "by hand"):
            if name == "by hand":
                name, model = "Qwen3", tiny().double()
                layout = ColwiseParallel(output_layouts=Replicate())
                parallelize_module(model.lm_head, init_device_mesh("cpu", (2,)), layout)
            else:
                model = loaded(folder, name, tp_size=2)
            inputs, advantages = rows(0)
            weight, logits = model.get_output_embeddings().weight, model(inputs["input_ids"]).logits
            for batch in ((inputs, advantages), (packed(inputs), advantages)):
                assert_close(name, results(model, [batch]), results(tiny(name).double(), [batch]))
            assert weight.placements == weight.grad.placements == (Shard(0),)
            assert weight.grad.to_local().shape[0] == weight.shape[0] // 2
            assert torch.equal(model(inputs["input_ids"]).logits, logits)

    in_processes(2, work)


@pytest.mark.slow
def test_tp_plan_and_fsdp2_together(folder):
    """Each half of the batch is on two ranks that share the vocabulary."""

    def work(rank):
        for name in ("Qwen3", "Qwen3 tied"):
            model = loaded(folder, name, tp_size=2, fsdp_size=2)
            assert model.get_output_embeddings().weight.device_mesh.ndim == 2
            assert all(isinstance(p, DTensor) for p in model.parameters())
            halves = [rows(0), rows(1)]
            got = results(model, [halves[rank // 2]])
            logprobs = [torch.empty_like(got["log-probs"]) for _ in range(4)]
            dist.all_gather(logprobs, got["log-probs"])
            assert torch.equal(logprobs[0], logprobs[1]) and torch.equal(logprobs[2], logprobs[3])
            got["log-probs"] = torch.cat(logprobs[::2])
            assert_close(name, got, results(tiny(name).double(), halves))

    in_processes(4, work)
