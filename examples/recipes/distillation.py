"""On-policy distillation (Thinking Machines, 2025): a better model scores what the policy samples.

    python -m examples.recipes.distillation config.yaml --objective.name GRPO --recipe.teacher DIR

The advantage of a token is the teacher's log-prob minus the policy's (`gk.advantages.reverse_kl`), so the
objective must take advantages per token, as GRPO does. Rewards are measured and shown. Their advantages,
times ``recipe.reward_coef``, are added if this coefficient is above 0.

The teacher must have the policy's tokenizer. ``recipe.teacher`` is a directory or a name on the Hub: the
teacher is loaded next to the policy, frozen, sharded as the policy is, and scores at the policy's temperature
and with its sampling masks. Or a vLLM server has the teacher (``vllm serve DIR``), and ``recipe.url`` is the
server's address. A server scores at temperature 1 over its whole vocabulary, so ``rollout.temperature`` must
be 1 and ``rollout.keep_sampling_mask`` off.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from pydantic import model_validator
from torch import Tensor

import gspo_kernels as gk
from gspo_kernels.cli import run
from gspo_kernels.trainer.config import InputError, Section, TrainConfig, option
from gspo_kernels.trainer.loop import GSPOTrainer
from gspo_kernels.trainer.model import frozen_policy, load_tokenizer
from gspo_kernels.trainer.processes import map_shares
from gspo_kernels.trainer.rollout import Rollout
from gspo_kernels.trainer.update import Batch
from gspo_kernels.trainer.vllm import VLLMServer


class Options(Section):
    """Options of distillation."""

    teacher: str | None = option(None, "directory, or name on the Hub, of a model with the same tokenizer")
    url: str | None = option(None, "address of a vLLM server that has the teacher, as http://localhost:8000")
    coef: float = option(1.0, "weight of the teacher's advantages", gt=0)
    reward_coef: float = option(
        0.0, "weight of the rewards' advantages next to them; 0: not trained on", ge=0
    )


class Config(TrainConfig):
    """A run with a teacher."""

    recipe: Options = Options()

    @model_validator(mode="after")
    def _check_teacher(self) -> Config:
        recipe, rollout = self.recipe, self.rollout
        if recipe.reward_coef == 0:
            self.require_defaults(["advantages"], "without recipe.reward_coef")
        if recipe.url is not None and rollout.temperature != 1.0:
            raise ValueError(f"rollout.temperature must be 1 with recipe.url, got {rollout.temperature:g}")
        if recipe.url is not None and rollout.keep_sampling_mask:
            raise ValueError("rollout.keep_sampling_mask must be false with recipe.url, got True")
        return self


class Distillation(GSPOTrainer):
    """A trainer that learns from a teacher's log-probs.

    It raises an `InputError` if the objective takes no advantages per token, if the tokenizers differ, or if
    the teacher's server can't be used.
    """

    config: Config

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        recipe = self.config.recipe
        if (recipe.teacher is None) == (recipe.url is None):
            raise InputError("give either recipe.teacher or recipe.url")
        if not self.updater.objective.takes_token_advantages:
            name = self.config.objective.name
            raise InputError(f"objective.name: {name} takes no advantages per token; GRPO does")
        self.teacher = self.server = None
        if recipe.teacher is not None:
            if load_tokenizer(recipe.teacher).get_vocab() != self.tokenizer.get_vocab():
                raise InputError(f"recipe.teacher: {recipe.teacher} has another tokenizer than the policy")
            self.teacher = frozen_policy(recipe.teacher, self.config, self.accelerator)
        else:
            self.server = VLLMServer(recipe.url)
            probe = "2 + 2 is 4. Is it? Yes!\n"  # tokenizers cut this text in different ways
            request = {"model": self.server.model, "prompt": probe, "add_special_tokens": False}
            theirs = self.server.ask("/tokenize", request)["tokens"]
            if theirs != self.tokenizer.encode(probe, add_special_tokens=False):
                raise InputError(f"recipe.url: {self.server.name} has another tokenizer than the policy")

    def rollout(self) -> Rollout:
        """Sample as the base class does; `compare` adds metrics of the teacher."""
        return super().rollout()._replace(metrics={})

    def compare(self, rollout: Rollout) -> Batch:
        """Return the batch with advantages per token: the teacher's, plus the rewards' times their weight."""
        batch, recipe = super().compare(rollout), self.config.recipe
        mask = batch.loss_mask
        # Completions whose rewards give no advantage are scored as well.
        every = replace(batch, advantages=torch.ones_like(batch.advantages))
        policy = self.updater.score(self.updater.policy, every, self.step).logprobs
        teacher = self.teacher_logprobs(every).to(policy.device)
        advantages = gk.advantages.reverse_kl(policy, teacher, loss_mask=mask, coef=recipe.coef)
        distance = float(advantages.sum() / recipe.coef / mask.sum().clamp(min=1))
        rollout.metrics["distillation/reverse_kl"] = -distance
        advantages += recipe.reward_coef * batch.by_token(batch.advantages)
        return replace(batch, advantages=advantages, old_logprobs=policy)

    def teacher_logprobs(self, batch: Batch) -> Tensor:
        """Return [N] fp32 log-probs of the completions' tokens by the teacher, in nats."""
        if self.teacher is not None:
            return self.updater.score(self.teacher, batch, self.step).logprobs
        sequences = [p.tolist() + c.tolist() for p, c in zip(batch.prompts, batch.completions, strict=True)]

        def share(rows: list[int]) -> list[Tensor]:
            with ThreadPoolExecutor(self.batch_size.value) as pool:
                scored = list(pool.map(self.ask, (sequences[row] for row in rows)))
            return [each[-len(batch.completions[row]) :] for row, each in zip(rows, scored, strict=True)]

        parts = map_shares(len(sequences), share)
        return torch.cat([each for part in parts for each in part])

    def ask(self, sequence: list[int]) -> Tensor:
        """Return the server's log-probs of all tokens of a sequence but the first."""
        assert self.server is not None
        request = {"model": self.server.model, "prompt": sequence, "max_tokens": 1, "prompt_logprobs": 0}
        answer = self.server.ask("/v1/completions", request)
        try:
            scored = zip(answer["choices"][0]["prompt_logprobs"][1:], sequence[1:], strict=True)
            logprobs = torch.tensor([float(each[str(token)]["logprob"]) for each, token in scored])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise InputError(f"{self.server.name} gave no log-prob for each token: {error!r}") from error
        if not (logprobs <= 0).all():
            raise InputError(f"{self.server.name} gave log-probs that are not numbers of at most 0")
        return logprobs


if __name__ == "__main__":
    raise SystemExit(run(Distillation, Config))
