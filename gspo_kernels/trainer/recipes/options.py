"""Options of the recipes, one section each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gspo_kernels.trainer.run.options import (
    Count,
    Natural,
    NotNegative,
    Positive,
    Section,
    ZeroToOne,
    option,
)


@dataclass(frozen=True)
class VeriPOConfig(Section, key="veripo"):
    """Steps of the objective and steps of DPO in turn, over pairs that a verifier makes (VerIPO)."""

    grpo_steps: Count = option(20, "steps with the configured objective before each phase of DPO")
    dpo_steps: Natural = option(0, "steps of DPO then, each on one of the last rollouts; 0: no DPO at all")
    verifier: str | None = option(None, "reward function that ranks completions for DPO; else the run's own")
    reward_weight: NotNegative = option(1.0, "weight of the run's own reward beside the verifier")
    min_gap: NotNegative = option(0.0, "scores of a pair differ by more than this")
    beta: Positive = option(0.1, "DPO's beta: how firmly it holds to the policy that its phase began with")

    def __post_init__(self) -> None:
        super().__post_init__()
        most = f"from 0 to veripo.grpo_steps ({self.grpo_steps}): each takes one rollout of that phase"
        self.require(self.dpo_steps <= self.grpo_steps, "dpo_steps", most)
        ranked = self.reward_weight > 0 or self.verifier is not None
        self.require(ranked, "reward_weight", "above 0 where there is no veripo.verifier")
        used = self.verifier is None or self.dpo_steps > 0
        self.require(used, "dpo_steps", "above 0 where there is a veripo.verifier")

    def compares(self, step: int) -> bool:
        """Whether this step of the run, from 1, is one of DPO."""
        return self._place(step) >= self.grpo_steps

    def keeps(self, step: int) -> bool:
        """Whether a step of DPO will take the rollout of this step."""
        return self.grpo_steps - self.dpo_steps <= self._place(step) < self.grpo_steps

    def rollouts_until(self, step: int) -> int:
        """Return how many of the steps up to this one sample."""
        phases, rest = divmod(step, self.grpo_steps + self.dpo_steps)
        return phases * self.grpo_steps + min(rest, self.grpo_steps)

    def _place(self, step: int) -> int:
        return (step - 1) % (self.grpo_steps + self.dpo_steps)


@dataclass(frozen=True)
class IGRPOConfig(Section, key="igrpo"):
    """Update on refinements of the best of several drafts, which goes into the prompt (iGRPO)."""

    drafts: Natural = option(0, "completions of a prompt of which the best goes into it as a draft; 0: off")
    template: str = option(
        "{prompt}\n\nThe best of several earlier answers:\n{draft}\n\nWrite a better answer.",
        "what the policy then completes; {prompt} is the prompt, or the last message of the user",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("{prompt}", "{draft}"):
            self.require(name in self.template, "template", f"a text with {name} in it")


@dataclass(frozen=True)
class DAPOConfig(Section, key="dapo"):
    """What DAPO changes besides its objective: dynamic sampling, and a soft penalty on length."""

    batches: Count = option(
        1,
        "most batches of rollout.prompts_per_rollout prompts that a rollout samples until it has as many "
        "groups whose rewards differ; 1: no dynamic sampling",
    )
    metric: str | None = option(
        None, "reward that must differ within a group for that, as the accuracy; else the weighted sum"
    )
    overlong_buffer: Natural = option(
        0, "last tokens before rollout.max_new_tokens over which the reward falls linearly; 0: no penalty"
    )
    overlong_penalty: Positive = option(1.0, "what a completion of rollout.max_new_tokens loses")

    def __post_init__(self) -> None:
        super().__post_init__()
        used = self.metric is None or self.batches > 1
        self.require(used, "batches", "above 1 where there is a dapo.metric")


@dataclass(frozen=True)
class DistillationConfig(Section, key="distillation"):
    """Learn from what a teacher says of what the policy sampled (on-policy distillation)."""

    teacher: str | None = option(
        None, "directory (or hub name) of a model with the same tokenizer, which scores every completion"
    )
    url: str | None = option(
        None, "address of a vLLM server with the teacher: the loss gets the divergence over its top_k ids"
    )
    model: str | None = option(None, "name that the server gives the teacher; none: it serves only one")
    top_k: Count = option(20, "ids that the server compares over; its --max-logprobs is at least that")
    beta: ZeroToOne = option(
        0.0, "divergence over these ids: 0 forward KL, 1 reverse KL, between them Jensen-Shannon"
    )
    add_tail: bool = option(True, "compare what the ids leave as one more column; else only among the ids")
    coef: Positive = option(
        1.0, "weight of the advantages: the teacher's log-probs minus the policy's; or of the divergence"
    )
    reward_coef: NotNegative = option(
        0.0, "weight of the rewards' advantages beside it; 0: rewards are measured and not trained on"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        used = self.teacher is not None or self.url is not None
        self.require(
            used or self.reward_coef == 0, "reward_coef", "0 where there is no distillation.teacher or url"
        )
        self.require(self.teacher is None or self.url is None, "url", "none beside a distillation.teacher")
        self.require_address("url", "model", "top_k", "beta", "add_tail")


@dataclass(frozen=True)
class TurnsConfig(Section, key="turns"):
    """Several turns on the same task with an environment's feedback between, each its own group (TL-GRPO)."""

    count: Count = option(1, "turns on each prompt, each with rollout.group_size completions; 1: off")
    feedback: str | None = option(
        None,
        "function f(prompts, completions, rewards, **columns) -> list[str] that says what the policy reads "
        "after a turn; 'module:function' or 'file.py:function', called like a reward",
    )
    keep: Literal["first", "best"] = option(
        "first", "completion that stays in the history: the 'first', as good as a random one, or the 'best'"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given = (self.feedback is not None) == (self.count > 1)
        self.require(given, "feedback", "given where turns.count is at least 2, and only there")
