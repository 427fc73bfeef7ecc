"""The torchtitan recipe inside torchtitan: its packing, its trainer's step, its model and FSDP2."""

import asyncio
import importlib
import importlib.util
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests.cases import generator
from tests.forks import in_processes

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed", allow_module_level=True)

VOCABULARY, CLIP = 2048, (0.02, 0.03)


@pytest.fixture(scope="module")
def recipe():
    """Import the recipe with a bare `torchtitan.experiments.rl`, which imports vLLM, and stubs of Monarch."""
    with pytest.MonkeyPatch.context() as patch:
        root = importlib.util.find_spec("torchtitan").submodule_search_locations[0]
        package = ModuleType("torchtitan.experiments.rl")
        package.__path__ = [str(Path(root, "experiments", "rl"))]
        patch.setitem(sys.modules, package.__name__, package)
        actors = SimpleNamespace(
            Actor=type("Actor", (), {}), concurrent_endpoint=lambda f: f, current_rank=None
        )
        for name, module in (("monarch", ModuleType("monarch")), ("monarch.actor", actors)):
            patch.setitem(sys.modules, name, module)
        patch.setitem(sys.modules, "torchstore", ModuleType("torchstore"))
        yield importlib.import_module("examples.frameworks.torchtitan")


def make_batch(recipe, dp=1):
    """Return torchtitan's training batch of seven samples, and the samples."""
    types = importlib.import_module("torchtitan.experiments.rl.types")
    config = importlib.import_module("torchtitan.experiments.rl.components.batcher").BatchConfig
    rng, samples = generator(2), []
    for i, (prompt, response) in enumerate(((3, 5), (2, 9), (1, 4), (4, 2), (2, 13), (5, 3), (1, 1))):
        n = prompt + response
        mask = [False] * prompt + [t % 4 != 2 for t in range(response)]  # a tool's output in between
        logprobs = (-7.6 + 0.05 * i - 0.15 + 0.01 * torch.randn(n, generator=rng)).tolist()
        if i == 1:
            logprobs[-1] = float("nan")
        samples.append(
            types.TrainingSample(
                min_policy_version=0, max_policy_version=0, rollout_id=types.RolloutTurnID(0, i, 0),
                token_ids=torch.randint(VOCABULARY, (n,), generator=rng).tolist(), loss_mask=mask,
                logprobs=[logprobs[t] * mask[t] if mask[t] else 0.0 for t in range(n)],
                advantage=[(1.0 - 0.6 * (i % 3)) * mask[t] for t in range(n)],
            )
        )  # fmt: skip
    batcher = recipe.SequenceBatcher.Config(batch=config(local_batch_size=1, seq_len=16)).build(
        num_prompts_per_train_step=1, dp_degree=dp, pad_id=0
    )
    group = types.TrainingSampleGroup(group_id=0, training_samples=samples, metrics=[])
    return batcher.add_training_samples(training_sample_group=group), samples


def make_model(recipe):
    """Return a model of torchtitan's layers with the recipe's loss behind its lm_head, and the loss."""
    linear = importlib.import_module("torchtitan.models.common.linear").Linear
    rng = generator(3)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(VOCABULARY, 8)
            self.lm_head = linear.Config(in_features=8, out_features=VOCABULARY).build()
            with torch.no_grad():
                for each in self.parameters():
                    each.copy_(0.3 * torch.randn(each.shape, generator=rng))

        def get_attention_masks(self, positions):
            return None

        def forward(self, tokens, attention_masks=None, positions=None):
            return torch.tanh(self.embedding(tokens) + 0.1 * positions.unsqueeze(-1))

    model, loss = Model(), recipe.GSPOLoss.Config(clip_low=CLIP[0], clip_high=CLIP[1]).build()
    loss.set_lm_head(model.lm_head)
    return model, loss


def run_step(model, loss, batch, rank=0):
    """Run torchtitan's own `forward_backward` on every micro-batch. Return its metrics."""
    trainer = importlib.import_module("torchtitan.experiments.rl.actors.trainer").PolicyTrainer
    actor = SimpleNamespace(
        policy_version=0, model_parts=[model], dp_rank=rank, device="cpu", loss_fn=loss,
        train_context=nullcontext,
        reduce_forward_backward_metrics=lambda *, sum_reduced_metrics, max_reduced_metrics: (
            sum_reduced_metrics | max_reduced_metrics
        ),
    )  # fmt: skip
    return [
        asyncio.run(trainer.forward_backward(actor, each, batch.num_global_valid_tokens))
        for each in batch.microbatches
    ]


def formula(model, samples):
    """Return GSPO's loss over tokens, its gradients and its clipped share, sample by sample in fp64."""
    embedding, weight = (p.detach().double().requires_grad_() for p in model.parameters())
    total, count, clipped = 0.0, 0, 0
    for sample in samples:
        ids = torch.tensor(sample.token_ids)
        old = torch.tensor(sample.logprobs[1:]).double()
        mask = torch.tensor(sample.loss_mask[1:]) & old.isfinite()
        hidden = torch.tanh(embedding[ids[:-1]] + 0.1 * torch.arange(len(old)).unsqueeze(1))
        logp = (hidden @ weight.T).log_softmax(-1).gather(1, ids[1:].unsqueeze(1)).squeeze(1)
        if not mask.any():
            continue
        ratio = (logp - old)[mask].mean().exp()
        a, n = torch.tensor(sample.advantage[1:])[mask][0].double(), int(mask.sum())
        bounded = ratio.clamp(1 - CLIP[0], 1 + CLIP[1])
        total, count = total - n * torch.minimum(ratio * a, bounded * a), count + n
        clipped += n * bool((ratio * a > bounded * a) if a else False)
    loss = total / count
    return loss.detach(), torch.autograd.grad(loss, (embedding, weight)), clipped / count


def assert_near(got, want):
    assert (got.double() - want).norm() <= 1e-5 * want.norm()


def test_torchtitan_trainer_step(recipe):
    """Several samples of a row keep their own ratios; micro-batches add up."""
    batch, samples = make_batch(recipe)
    assert len(batch.microbatches) > 1
    assert any((each.labels < 0).any() for (each,) in batch.microbatches)
    model, loss = make_model(recipe)
    metrics = run_step(model, loss, batch)
    want, grads, clipped = formula(model, samples)
    assert sum(each["loss/mean"].item() for each in metrics) == pytest.approx(want.item(), rel=1e-5)
    assert sum(each["loss/ratio_clipped_frac"].item() for each in metrics) == pytest.approx(clipped)
    assert 0 < clipped < 1
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert_near(parameter.grad, grad)


def test_torchtitan_fsdp(recipe):
    """Two data-parallel ranks, with the lm_head and the model sharded."""
    batch, samples = make_batch(recipe, dp=2)
    _, grads, _ = formula(make_model(recipe)[0], samples)

    def over_ranks(rank):
        dist.init_process_group("gloo")
        model, loss = make_model(recipe)
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        fully_shard(model.lm_head, mesh=mesh)
        fully_shard(model, mesh=mesh)
        run_step(model, loss, batch, rank)
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            # gloo has the mean over ranks alone, where torchtitan sets the sum
            assert_near(2 * parameter.grad.full_tensor(), grad)

    in_processes(2, over_ranks)


def test_torchtitan_other_heads_are_refused(recipe):
    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    loss = recipe.GSPOLoss.Config().build()
    with pytest.raises(ValueError, match=r"lm_head: got .*Scaled"):
        loss.set_lm_head(Scaled(4, 5))
