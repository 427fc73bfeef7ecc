"""Configuration of a training run: nested, frozen, validated dataclasses.

Every option is documented once, in the ``help`` of its field; ``gspo train --help`` prints the same words.
A run is described by one YAML or TOML file and dotted overrides: ``rollout: {group_size: 8}`` and
``--rollout.group_size 8`` are the same thing (`config_file` reads them).
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

import gspo_kernels as gk
from gspo_kernels.trainer.input_errors import ConfigError
from gspo_kernels.trainer.recipes.options import (
    DAPOConfig,
    DistillationConfig,
    IGRPOConfig,
    TurnsConfig,
    VeriPOConfig,
)
from gspo_kernels.trainer.rewards.comparing import Method
from gspo_kernels.trainer.rollout import Sampling
from gspo_kernels.trainer.run.options import (
    BelowOne,
    Count,
    Finite,
    Natural,
    NotNegative,
    Positive,
    Section,
    Several,
    Share,
    coerce,
    near_matches,
    option,
)


@dataclass(frozen=True)
class RolloutConfig(Section, key="rollout"):
    """How completions are sampled."""

    prompts_per_rollout: Count = option(32, "prompts in one rollout")
    group_size: Several = option(8, "completions of each prompt, which advantages compare with each other")
    max_new_tokens: Count = option(256, "longest completion, in tokens; what is longer is truncated")
    temperature: Positive = option(1.0, "sampling temperature; the training log-probs use the same one")
    top_p: Share = option(1.0, "nucleus sampling; see keep_sampling_mask")
    top_k: Natural = option(0, "sample among the k most likely tokens; 0 means all")
    min_p: BelowOne = option(0.0, "sample tokens with this share of the likeliest one's probability; 0: all")
    keep_sampling_mask: bool = option(
        False, "train on log-probs among the tokens that top_p, top_k and min_p left, not among all"
    )
    batch_size: Count = option(256, "completions generated at once, by each process; memory and speed")
    truncated: Literal["keep", "mask"] = option(
        "keep", "completions without an end token: 'keep' trains on them, 'mask' leaves them out of the loss"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        plain = "left alone where top_p, top_k and min_p cut no token off"
        self.require(self.sampling().cuts or not self.keep_sampling_mask, "keep_sampling_mask", plain)

    def sampling(self) -> Sampling:
        """Return how rollouts are sampled."""
        cuts = self.top_p, self.top_k, self.min_p
        return Sampling(self.max_new_tokens, self.temperature, *cuts, return_mask=self.keep_sampling_mask)


@dataclass(frozen=True)
class EngineConfig(Section, key="engine"):
    """What samples: the trained model itself, or a vLLM server that gets its weights after every change."""

    url: str | None = option(None, "address of a vLLM server, as http://localhost:8000; none: no server")
    model: str | None = option(None, "name that the server gives the model; none: it serves only one")
    weights: str | None = option(
        None, "directory that the server sees as well, for weights on their way; none: the output"
    )
    timeout: Positive = option(1800.0, "seconds that the server may take for one completion, or to reload")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_address("url", "model", "weights")


@dataclass(frozen=True)
class UpdateConfig(Section, key="update"):
    """How the weights move. One step is one rollout and one optimizer update for each of its minibatches."""

    steps: Count = option(300, "rollouts in the whole run")
    minibatches: Count = option(4, "parts of a rollout, an update each; the first sees ratios of exactly 1")
    epochs: Count = option(1, "passes over a rollout; its order is drawn anew in each")
    micro_batch_tokens: Count = option(16384, "tokens per forward pass; changes memory and speed only")
    layout: Literal["packed", "padded", "shared_prefix"] = option(
        "packed",
        "'packed': one row without padding (quick with flash-attention); 'padded': one row per completion; "
        "'shared_prefix': one row per prompt, which is encoded once for all of its completions",
    )
    precision: Literal["fp32", "bf16"] = option(
        "fp32", "'fp32', or 'bf16': products in bfloat16, weights and logits in float32; sampling as well"
    )
    batch_invariant: bool = option(
        False, "the head's log-probs and gradients don't depend on what shares a micro-batch; layers' may"
    )
    gradient_checkpointing: bool = option(False, "compute activations again: less memory, a third slower")
    entropy_coef: Finite = option(0.0, "weight of the entropy bonus in the loss")
    learning_rate: Positive = option(1e-6, "AdamW's learning rate at the end of the warmup")
    warmup_updates: Natural = option(0, "optimizer updates over which the learning rate rises from 0")
    learning_rate_decay: Literal["none", "linear", "cosine"] = option(
        "none", "after the warmup: none, or to 0 at the last step, along a line or half a cosine"
    )
    weight_decay: NotNegative = option(0.0, "AdamW's weight decay")
    adam_beta1: BelowOne = option(0.9, "AdamW's beta1")
    adam_beta2: BelowOne = option(0.999, "AdamW's beta2")
    max_grad_norm: Annotated[float, Field(gt=0)] = option(1.0, "gradients are scaled down to this norm")


@dataclass(frozen=True)
class KLConfig(Section, key="kl"):
    """A penalty on the distance to the reference policy: the model as it was before training."""

    beta: NotNegative = option(0.0, "weight of the KL term; 0 leaves it out")
    estimator: Literal["k1", "k2", "k3"] = option("k3", "per token, of log-probs under policy and reference")


@dataclass(frozen=True)
class OffPolicyConfig(Section, key="off_policy"):
    """Weights for what the sampling engine computes otherwise than the trainer (TIS, MIS, IcePop, ...)."""

    level: Literal["none", "token", "sequence"] = option("none", "one weight for each token, or sequence")
    reduce: str = option(
        "mean", "tokens of a sequence become one by their 'mean', which fits GSPO, 'sum' or 'max' (k2 and k3)"
    )
    mode: str = option(
        "truncate",
        "outside the bounds weights are 'truncate'd, or become 0 ('mask'; 'icepop', the same for tokens; "
        "'sequence_mask', tokens' weights of whole sequences); 'k1', 'k2' and 'k3' reject by a divergence",
    )
    low: float | None = option(None, "lower bound of a weight or divergence; 0.5 for 'icepop'")
    high: float | None = option(
        None, "upper bound; without a lower one 2 for 'truncate', 5 for 'icepop', and to be given for others"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.level != "none":
            one = torch.zeros(1)
            try:
                self.weights(one, one, one == 0, torch.tensor([0, 1]))
            except ValueError as error:
                raise ConfigError(f"off_policy: {error}") from error

    def weights(
        self, old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, cu_seqlens: Tensor
    ) -> Tensor:
        """Return `gk.rollout_weights` of packed log-probs, [N]: [N], or [B] for one weight per sequence."""
        options = dataclasses.asdict(self)
        if self.mode == "truncate" and self.low is None and self.high is None:
            options["high"] = 2.0
        return gk.rollout_weights(
            old_logprobs, rollout_logprobs, loss_mask=loss_mask, cu_seqlens=cu_seqlens, **options
        )


@dataclass(frozen=True)
class LoraConfig(Section, key="lora"):
    """Train small adapters instead of the weights, through peft; the reference is the model without them."""

    rank: Natural = option(0, "rank of the adapters; 0 trains all weights")
    alpha: Count = option(32, "adapters are scaled by alpha / rank")
    target_modules: str = option("all-linear", "names of the layers that get one, by comma; or 'all-linear'")


@dataclass(frozen=True)
class ParallelConfig(Section, key="parallel"):
    """Which processes compute together; the others each have a part of the batch.

    None: as accelerate's ParallelismConfig says.
    """

    tensor: Count | None = option(
        None, "processes over which weight matrices are cut, the vocabulary too, by the model's tp_plan"
    )
    context: Count | None = option(
        None, "processes over which the tokens of a packed row are cut, for long sequences"
    )


@dataclass(frozen=True)
class ObjectiveConfig(Section, key="objective"):
    """Which policy loss is minimised."""

    name: str = option("GSPO", "name of the objective")
    options: Mapping[str, Any] = field(default_factory=dict, metadata={"help": "the objective's own fields"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.build()  # so that a wrong name or field fails before any work

    def build(self) -> Any:
        """Return the objective; fields that are not given keep the objective's defaults."""
        classes = trainable_objectives()
        if self.name not in classes:
            hint = f"{near_matches(self.name, classes)}; there are {', '.join(classes)}"
            raise ConfigError(f"objective.name: no objective {self.name!r}{hint}")
        cls = classes[self.name]
        known = {f.name for f in dataclasses.fields(cls) if f.init}
        for key in self.options:
            if key not in known:
                hint = f"{near_matches(key, known)}; it has {', '.join(sorted(known))}"
                raise ConfigError(f"unknown key objective.{key} for {self.name}{hint}")
        hints = typing.get_type_hints(cls)
        values = {key: coerce(value, hints[key], f"objective.{key}") for key, value in self.options.items()}
        try:
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"objective {self.name}: {error}") from error


@dataclass(frozen=True)
class DataConfig(Section, key="data"):
    """What of the datasets is used, and how a prompt becomes tokens."""

    split: str | None = option(None, "split of the training dataset, as 'train[:1000]'; files have none")
    eval_split: str | None = option(None, "split of the eval dataset")
    subset: str | None = option(None, "configuration of a dataset on the Hub")
    prompt_column: str = option("prompt", "column that holds the prompt: text, or a list of messages")
    too_long: Literal["error", "drop"] = option("error", "rows whose prompt leaves no room in the context")
    template_options: Mapping[str, Any] = field(
        default_factory=dict,
        metadata={"help": "arguments of the chat template, as JSON: '{\"enable_thinking\": false}'"},
    )


@dataclass(frozen=True)
class EvaluationConfig(Section, key="evaluation"):
    """How progress on the held-out prompts is measured: greedily, and sampled as in rollouts."""

    every: Count = option(25, "steps between two evaluations; one comes before training, one at its end")
    prompts: Count = option(256, "held-out prompts, from the start of the eval dataset")
    accuracy: str | None = option(None, "reward whose mean is shown as the accuracy; the first by default")


@dataclass(frozen=True)
class CheckpointConfig(Section, key="checkpoint"):
    """When the state of the run is saved."""

    every: Count = option(50, "steps between two checkpoints; there is always one at the end")
    keep: Count = option(2, "newest checkpoints that are kept")
    export: bool = option(False, "write into each checkpoint a model/ that from_pretrained loads, as well")


@dataclass(frozen=True)
class TrainConfig(Section):
    """One training run."""

    model: str = option("", "directory (or hub name) of the causal language model that is trained")
    attn_implementation: str | None = option(
        None, "attention of the model: sdpa, eager, flash_attention_2, flex_attention; transformers' choice"
    )
    dataset: str = option(
        "", "prompts: a jsonl or parquet file, a directory, a name on the Hub; other columns reach rewards"
    )
    eval_dataset: str | None = option(None, "prompts that are never trained on")
    reward: tuple[str, ...] = option(
        (), "reward function, 'module:function' or 'file.py:function', with '(name=value)'; may be repeated"
    )
    reward_weights: tuple[Finite, ...] | None = option(None, "one weight for each reward; all 1 if not given")
    reward_timeout: Positive | None = option(600.0, "seconds that a reward may take; none: no limit")
    reward_process: bool = option(
        False, "call every reward function in a process of its own, which can be stopped whatever it does"
    )
    advantages: Method = option("group_normalized", "how rewards become advantages")
    advantage_scale: Literal["group", "batch", "none"] = option(
        "group", "what group_normalized divides by: the 'group' or 'batch' deviation, or 'none'"
    )
    output: str = option("runs/gspo", "directory for metrics, checkpoints, the plot and the trained model")
    seed: Natural = option(0, "seed of every random choice")
    threads: Count | None = option(None, "PyTorch's CPU threads; for a tiny model 1 may be quickest")
    log_every: Count = option(10, "steps between two lines of output where there is no terminal")
    show_samples: Natural = option(3, "completions shown with their rewards after each evaluation")
    save_rollouts: bool = option(False, "keep every completion with its rewards and log-probs")
    rollouts_format: Literal["jsonl", "parquet"] = option("jsonl", "of the files of save_rollouts")
    trackers: tuple[str, ...] = option(
        (), "where metrics go besides metrics.jsonl: tensorboard, wandb, trackio, ...; may be repeated"
    )
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    off_policy: OffPolicyConfig = field(default_factory=OffPolicyConfig)
    veripo: VeriPOConfig = field(default_factory=VeriPOConfig)
    igrpo: IGRPOConfig = field(default_factory=IGRPOConfig)
    turns: TurnsConfig = field(default_factory=TurnsConfig)
    dapo: DAPOConfig = field(default_factory=DAPOConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        plain = self.advantages == "group_normalized" or self.advantage_scale == "group"
        self.require(plain, "advantage_scale", f"left alone with {self.advantages}")
        if self.reward_weights is not None and self.reward:
            each = f"one number for each of the {len(self.reward)} rewards"
            self.require(len(self.reward_weights) == len(self.reward), "reward_weights", each)
        rollout, update, turns = self.rollout, self.update, self.turns.count
        served = "above 0 beside engine.url: vLLM says what it could have drawn only of so many tokens"
        bounded = self.engine.url is None or not rollout.keep_sampling_mask or rollout.top_k > 0
        rollout.require(bounded, "top_k", served)
        either = "0 where turns.count is more than 1: either a draft or an environment's feedback is refined"
        self.igrpo.require(self.igrpo.drafts == 0 or turns == 1, "drafts", either)
        whole = "1 where turns.count is more than 1: the turns of a trajectory belong together"
        self.dapo.require(self.dapo.batches == 1 or turns == 1, "batches", whole)
        room = f"at most rollout.max_new_tokens ({rollout.max_new_tokens})"
        self.dapo.require(self.dapo.overlong_buffer <= rollout.max_new_tokens, "overlong_buffer", room)
        together = update.layout == "shared_prefix" or self.objective.build().coefficient_scope == "group"
        kind = ("prompts" if turns == 1 else "turns of prompts") if together else "completions"
        most = rollout.prompts_per_rollout * turns * (1 if together else rollout.group_size)
        update.require(update.minibatches <= most, "minibatches", f"at most the {most} {kind} of a rollout")
        self._check_distillation()
        if self.veripo.dpo_steps > 0:
            alone = (
                f"0 with kl.beta {self.kl.beta:g} and objective {self.objective.name}: DPO's reference is "
                "the policy that its phase began with, and there is none beside it for KL or an objective"
            )
            self.veripo.require(not self.needs_reference(), "dpo_steps", alone)
            self.of_dpo()

    def _check_distillation(self) -> None:
        options, built = self.distillation, self.objective.build()
        alone = "none with veripo.dpo_steps: DPO compares completions"
        for name in ("teacher", "url"):
            options.require(getattr(options, name) is None or self.veripo.dpo_steps == 0, name, alone)
        if options.teacher is not None:
            by_token = f"none with {self.objective.name}, which takes no advantages per token; GRPO does"
            options.require(built.takes_token_advantages, "teacher", by_token)
        if options.url is not None:
            rollout, bonus = self.rollout, self.update.entropy_coef
            plain, whole = rollout.temperature == 1.0, not rollout.keep_sampling_mask
            apart = built.coefficient_scope not in ("group", "batch")
            for fits, what in (
                (plain, "rollout.temperature 1, which is what vLLM's log-probs of given tokens are at"),
                (whole, "rollout.keep_sampling_mask off, as a server's log-probs know the whole vocabulary"),
                (bonus == 0, "update.entropy_coef 0, as the pass that has divergences has no entropy"),
                ("entropy" not in built.needs, "an objective that looks at no entropy"),
                (apart, f"another objective than {self.objective.name}, which looks at other sequences"),
            ):
                options.require(fits, "url", f"with {what}, or none")

    def needs_reference(self) -> bool:
        """Whether a term of the loss compares with the reference policy."""
        return self.kl.beta > 0 or "ref_logprobs" in self.objective.build().needs

    def of_dpo(self) -> TrainConfig:
        """Return what the DPO steps of ``veripo`` minimise; off-policy weights are about sampled completions.

        A `ConfigError` says that a minibatch would hold less than a group.
        """
        dpo = ObjectiveConfig("DPO", {"beta": self.veripo.beta, "min_gap": self.veripo.min_gap})
        try:
            return dataclasses.replace(
                self, objective=dpo, off_policy=OffPolicyConfig(), veripo=VeriPOConfig()
            )
        except ConfigError as error:
            raise ConfigError(f"veripo.dpo_steps: {error}") from error

    def warnings(self) -> list[str]:
        """Return what is allowed and probably not meant."""
        if self.update.minibatches * self.update.epochs > 1:
            return []
        if self.objective.build().coefficient_scope != "sequence":
            return []
        return [
            f"with one minibatch and one epoch every ratio of {self.objective.name} is exactly 1 and "
            "nothing is ever clipped: the only update after a rollout uses the weights that sampled it. "
            "Use 2 to 8 minibatches unless on-policy updates are meant"
        ]


def trainable_objectives() -> dict[str, Any]:
    """Return the registered objectives that this trainer can serve, by name.

    All but those that need terms which no rollout gives: coefficients or weights of single tokens.
    """
    classes: dict[str, Any] = {name: getattr(gk.objectives, name) for name in gk.objectives.__all__}
    given = {"ref_logprobs", "group_ids", "turn_ids", "entropy"}
    return {name: cls for name, cls in classes.items() if given.issuperset(cls.needs)}
