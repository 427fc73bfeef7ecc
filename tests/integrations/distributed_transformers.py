"""One of two gloo processes: ``python -m integrations.distributed_transformers RANK STORE RESULT`` in tests/.

Every case compares this process's share of the work with the same done here alone, bit for bit: halves and
sums of two are exact.
"""

import copy
import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gspo_kernels as gk
from gspo_kernels.integrations.errors import IntegrationError
from gspo_kernels.integrations.layouts import to_predictions, tokens_of_rank
from gspo_kernels.integrations.transformers import fuse_lm_head
from tests.accuracy import Spread, assert_as_exact
from tests.draws import shifted_seed
from tests.integrations.tiny_models import tiny

SEQUENCES, LENGTH, PROMPT = 4, 9, 3
ADVANTAGES = torch.tensor([1.0, -0.7, 0.5, -1.2])


def rows(rank):
    """This process's half of the batch."""
    ids = torch.randint(3, 96, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(shifted_seed(0)))
    half = slice(rank * SEQUENCES // 2, (rank + 1) * SEQUENCES // 2)
    labels = ids.clone()
    labels[:, :PROMPT] = -100
    return {"input_ids": ids[half], "labels": labels[half]}, ADVANTAGES[half]


def packed(inputs):
    """The same half as one packed row; ranks have sequences of different lengths."""
    cut = inputs["input_ids"].shape[1] * 2
    return {
        "input_ids": inputs["input_ids"].reshape(1, cut),
        "labels": inputs["labels"].reshape(1, cut),
        "cu_seqlens": torch.tensor([0, LENGTH, 2 * LENGTH], dtype=torch.int32),
    }


def step(model, inputs, advantages, **options):
    """Score, then one backward of a loss that is a half's share of the mean over the whole batch."""
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
    """The loss of log-probs that came out of the module: its backward needs the head's weight again."""
    logprobs = model(**inputs, return_logprobs=True).logprobs
    counted = torch.nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100) != -100
    loss = gk.policy_loss(
        logprobs, None, advantages, loss_mask=counted, normalizer=SEQUENCES / 2, objective=gk.GRPO()
    ).loss
    loss.backward()
    return logprobs.detach(), loss


def mean_gradients(model, run, changed=lambda inputs: inputs):
    """What data parallelism must give: the mean of both halves' gradients; and this rank's results."""
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
    data_parallel("Qwen3", shard)
    data_parallel("Qwen3 tied", shard)
    data_parallel("Phi, bias", shard)


def fsdp2_head_alone():
    """The head is sharded by itself and gathered by its own hooks, also in the backward if that needs it."""

    def alone(model):
        return shard(model, head_alone=True)

    data_parallel("Qwen3", alone)
    data_parallel("Qwen3", alone, lambda *a: step(*a, schedule="two_pass"))
    data_parallel("Qwen3", alone, differentiable_scores)


def fsdp2_packed():
    data_parallel("Qwen3", shard, changed=packed)


def fsdp2_lora():
    """Adapters in the backbone and a trained copy of the head; a wrapped unit of its own is refused."""
    import peft

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
    try:
        model(**rows(dist.get_rank())[0], return_logprobs=True)
    except IntegrationError as error:
        assert "shard the lm_head with the root module" in str(error), error
    else:
        raise AssertionError("a head that its own hooks do not gather was not refused")


def fsdp2_bf16():
    """Rounding by the wrapper is refused; without it ratios of the same weights are exactly 1."""
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
        try:
            model(**inputs, old_logprobs=rounded, advantages=torch.ones(2))
        except IntegrationError as error:
            assert "arrives as torch.bfloat16" in str(error), error
        else:
            raise AssertionError("terms rounded to bf16 were not refused")


def tensor_parallel():
    """A head whose vocabulary is split is not gathered: its gradient stays where it is, and is as exact."""
    for name in ("Qwen3", "Phi, bias", "Qwen3 tied"):
        model = fuse_lm_head(tiny(name))
        inputs, advantages = rows(0)
        alone, exact = copy.deepcopy(model), copy.deepcopy(model).double()
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(model.lm_head, mesh, ColwiseParallel(output_layouts=Replicate()))
        if name == "Qwen3 tied":
            layout = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
            parallelize_module(model.model.embed_tokens, mesh, layout)
            model.lm_head.weight = model.model.embed_tokens.weight
        assert model.lm_head.weight.placements == (Shard(0),)
        logits = model(input_ids=inputs["input_ids"]).logits
        found = {}
        for which, each in (("split", model), ("alone", alone), ("exact", exact)):
            old, out = step(each, inputs, advantages)
            gradients = {name: p.grad for name, p in each.named_parameters() if p.grad is not None}
            assert not isinstance(out.loss, DTensor)
            found[which] = {"old": old, "log-probs": out.logprobs, **gradients}
        weight = model.lm_head.weight.grad
        assert weight.placements == (Shard(0),) and weight.to_local().shape[0] == weight.shape[0] // 2
        for name, truth in found["exact"].items():
            errors = [(whole(found[which][name]).double() - truth).flatten() for which in ("split", "alone")]
            spread = Spread.of([errors[1]], by_row=False)
            assert_as_exact(name, errors[:1], spread, [truth], torch.finfo(torch.float32).eps)
        assert torch.equal(model(input_ids=inputs["input_ids"]).logits, logits)


def gathered_attention(cu_seqlens):
    """Attention of this rank's tokens over the keys and values of both ranks, for transformers."""
    from torch.distributed.nn.functional import all_gather

    shares, whole = [tokens_of_rank(cu_seqlens, rank, 2)[0] for rank in (0, 1)], int(cu_seqlens[-1])
    mine, every = shares[dist.get_rank()], torch.cat(shares)
    sequence = torch.bucketize(torch.arange(whole), cu_seqlens[1:], right=True)
    mask = (sequence[mine][:, None] == sequence[every]) & (every <= mine[:, None])

    def gathered(x):
        parts = all_gather(torch.nn.functional.pad(x, (0, 0, 0, whole - len(mine))))
        return torch.cat([part[:, :, : len(share)] for part, share in zip(parts, shares, strict=True)], 2)

    def attend(module, query, key, value, attention_mask, scaling=None, **options):
        keys, values = gathered(key), gathered(value)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, mask, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    return attend


def context_parallel():
    """Each rank has tokens of every sequence, and attention that gathers the others' keys and values."""
    from transformers import AttentionInterface

    (inputs, advantages), group = rows(0), dist.group.WORLD
    row = packed(inputs)
    ids, cu_seqlens = row["input_ids"], row["cu_seqlens"]
    positions = torch.arange(LENGTH).repeat(2).unsqueeze(0)
    labels = to_predictions(row["labels"][0], cu_seqlens=cu_seqlens, fill=-100).unsqueeze(0)
    AttentionInterface.register("gathered", gathered_attention(cu_seqlens))
    own, offsets = tokens_of_rank(cu_seqlens, dist.get_rank(), 2)
    mine = {"input_ids": ids[:, own], "shift_labels": labels[:, own], "cu_seqlens": offsets}
    whole_row = {"input_ids": ids, "shift_labels": labels, "cu_seqlens": cu_seqlens}
    model = fuse_lm_head(tiny())
    alone, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    model.config._attn_implementation = "gathered"
    with torch.no_grad():
        old = alone(**whole_row, return_logprobs=True).logprobs
    old = old + torch.linspace(-2e-3, 2e-3, old.numel())
    found = {}
    here = {
        **mine,
        "position_ids": positions[:, own],
        "attention_mask": torch.ones(1, 1, len(own), len(own), dtype=torch.bool),  # which nobody reads
        "parallel": gk.Parallel(cp_group=group),
    }
    for which, each, given, before in (
        ("parts", model, here, old[:, own]),
        ("alone", alone, whole_row, old),
        ("exact", exact, whole_row, old.double()),
    ):
        out = each(**given, old_logprobs=before, advantages=advantages.to(before.dtype), objective=gk.GRPO())
        out.loss.backward()
        gradients = [p.grad for p in each.parameters() if p.grad is not None]
        if which == "parts":
            for gradient in gradients:
                dist.all_reduce(gradient)
        found[which] = torch.cat([out.loss.detach().view(1), *(x.flatten() for x in gradients)])
    truth = found["exact"]
    errors = [found[which].double() - truth for which in ("parts", "alone")]
    spread = Spread.of([errors[1]], by_row=False)
    assert_as_exact("loss and gradients", errors[:1], spread, [truth], torch.finfo(torch.float32).eps)
    try:
        parallel = gk.Parallel(cp_group=group)
        model(**mine, parallel=parallel, return_logprobs=False, old_logprobs=None, advantages=advantages)
    except IntegrationError as error:
        assert "position_ids: got None, expected where in their sequences" in str(error), error
    else:
        raise AssertionError("positions that nobody gave were made up")


CASES = (
    ddp,
    fsdp2,
    fsdp2_head_alone,
    fsdp2_packed,
    fsdp2_lora,
    fsdp2_bf16,
    tensor_parallel,
    context_parallel,
)


def main(rank, store, result):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    said = {}
    for case in CASES:
        try:
            case()
            said[case.__name__] = ""
        except Exception:
            said[case.__name__] = traceback.format_exc()
        dist.barrier()
    Path(result).write_text(json.dumps(said))
    dist.destroy_process_group()
    # gloo's threads have been seen to abort a process that was done while its interpreter was taken down
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
