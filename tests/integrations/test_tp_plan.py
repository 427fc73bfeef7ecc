"""Models that transformers itself has cut over ranks: ``tp_plan``, alone and along with FSDP2."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from gspo_kernels.integrations.transformers import fuse_lm_head
from tests.accuracy import Spread, assert_as_exact
from tests.forks import in_processes
from tests.integrations.distributed_transformers import packed, rows, step, whole
from tests.integrations.tiny_models import tiny

MODELS = ("Qwen3", "Qwen3 tied", "Phi, bias")


def loaded(folder, name, **sizes):
    """The model, of which each rank reads its part."""
    return AutoModelForCausalLM.from_pretrained(
        folder / name, dtype=torch.float32, distributed_config=DistributedConfig(**sizes)
    ).eval()


def results(model, batches, **options):
    """Log-probs of the batches, and the gradients of their losses' mean."""
    fuse_lm_head(model)
    old = [step(model, *batch, **options)[0].double() for batch in batches]
    return {"log-probs": torch.cat([each.flatten() for each in old])} | {
        name: whole(p.grad).double() / len(batches) for name, p in model.named_parameters()
    }


def judge(got, whole_model, batches):
    """As exact as the model in one process."""
    alone = results(copy.deepcopy(whole_model), batches)
    exact = results(copy.deepcopy(whole_model).double(), batches)
    assert got.keys() == exact.keys()
    # all of a model's gradients together: each sum over ranks has roundings of its own
    for names in (["log-probs"], [name for name in got if name != "log-probs"]):
        flat = [torch.cat([each[name].flatten() for name in names]) for each in (got, alone, exact)]
        spread = Spread.of([flat[1] - flat[2]], by_row=False)
        eps = torch.finfo(torch.float32).eps
        assert_as_exact(", ".join(names), [flat[0] - flat[2]], spread, [flat[2]], eps)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in MODELS:
        tiny(name).save_pretrained(folder / name)
    return folder


@pytest.mark.slow
def test_tp_plan_gives_the_numbers_of_one_process(folder):
    def work(rank):
        for name in MODELS:
            model = loaded(folder, name, tp_size=2)
            assert model.get_output_embeddings().weight.placements == (Shard(0),)
            inputs, advantages = rows(0)
            for batch in ((inputs, advantages), (packed(inputs), advantages)):
                model.zero_grad()
                judge(results(model, [batch]), tiny(name), [batch])
            gradient = model.get_output_embeddings().weight.grad
            assert gradient.placements == (Shard(0),)

    in_processes(2, work)


@pytest.mark.slow
def test_tp_plan_and_fsdp2_together(folder):
    """Two halves of the batch, each on two ranks that share the vocabulary."""

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
            judge(got | {"log-probs": torch.cat(logprobs[::2])}, tiny(name), halves)

    in_processes(4, work)
