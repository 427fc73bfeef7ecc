"""Who trains in the suite ``training``: the bundled trainer, TRL's with and without our loss, a plain loop.

Each takes a setting, a model and ``turns``, which it tells where a step begins and what of it is the rollout.
All train with GSPO, AdamW and a constant learning rate in fp32; all completions have the same length, because
the token that would end them is not in the model's vocabulary.
"""

from __future__ import annotations

import functools
import importlib.util
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import plain_loop
from benchmarks.registry import Missing, contestant

OURS = "ours, {} rows"


@dataclass(frozen=True)
class Setting:
    """A model and the shape of a training step.

    Attributes:
        V, H, layers: the model's vocabulary, width and depth.
        prompt, completion: tokens of each.
        prompts, group: prompts of a step, and completions of each.
        flat: how many of the prompts have the same reward for all of their completions.
        minibatches, epochs: optimizer updates of a step are their product.
        learning_rate, max_grad_norm: AdamW's, and what gradients are scaled down to.
        given: completions are those of ``given_completion`` instead of samples.
    """

    V: int
    H: int
    layers: int
    prompt: int
    completion: int
    prompts: int = 10
    group: int = 8
    flat: int = 0
    minibatches: int = 5
    epochs: int = 1
    learning_rate: float = 1e-6
    max_grad_norm: float = 1.0
    given: bool = False

    @property
    def updates(self) -> int:
        """Optimizer updates of a step."""
        return self.minibatches * self.epochs

    @property
    def tokens(self) -> int:
        """Completion tokens of a step."""
        return self.prompts * self.group * self.completion


class Finished(Exception):
    """No further step is wanted."""


class Turns:
    """Clocks steps and what of them is the rollout; ``wait`` says whether another step is wanted."""

    def __init__(self, wait: Callable[[dict[str, Any] | None], bool]) -> None:
        self.wait = wait
        self.tokens = self.updates = 0
        self._began: float | None = None
        self._rollout = 0.0

    def begin(self) -> None:
        """End the step before, and wait for the next one's turn.

        Raises:
            Finished: there is none.
        """
        done = None
        if self._began is not None:
            both = time.perf_counter() - self._began
            done = {
                "seconds": {"rollout": self._rollout, "update": both - self._rollout, "both": both},
                "tokens": self.tokens,
                "updates": self.updates,
            }
        if not self.wait(done):
            raise Finished
        self.tokens = self.updates = 0
        self._rollout, self._began = 0.0, time.perf_counter()

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """What happens inside is part of the rollout: completions and rewards."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._rollout += time.perf_counter() - start


def make_tokenizer(V: int) -> Any:
    """A tokenizer of words "w1", "w2", ...; id 0 pads, and a model of V words never says the end token, V."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0} | {f"w{i}": i for i in range(1, V)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )


def make_model(setting: Setting) -> Any:
    """A Qwen3 with random weights, the same for everyone, wide enough for log-probs to differ."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    H = setting.H
    config = Qwen3Config(
        vocab_size=setting.V, hidden_size=H, intermediate_size=3 * H, num_hidden_layers=setting.layers,
        num_attention_heads=max(1, H // 32), num_key_value_heads=max(1, H // 64), head_dim=32,
        max_position_embeddings=setting.prompt + setting.completion, initializer_range=0.1,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def make_prompts(setting: Setting) -> list[str]:
    """Words drawn at random; no two prompts begin alike. Every step takes all of them."""
    rng = random.Random(0)
    firsts = rng.sample(range(1, setting.V), setting.prompts)
    return [
        " ".join(f"w{i}" for i in (first, *rng.choices(range(1, setting.V), k=setting.prompt - 1)))
        for first in firsts
    ]


def make_reward(setting: Setting, turns: Turns) -> Callable[..., list[float]]:
    """A reward that is as good as random, but for the first ``flat`` prompts, whose is 0."""
    flat = set(make_prompts(setting)[: setting.flat])

    def reward(
        prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: Any
    ) -> list[float]:
        turns.tokens += sum(map(len, completion_ids))
        pairs = zip(prompts, completion_ids, strict=True)
        return [0.0 if prompt in flat else sum(ids) % 997 / 996 for prompt, ids in pairs]

    return reward


def given_completions(setting: Setting, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Tokens that follow from a prompt and from how often it was there before."""
    seen: Counter[int] = Counter()
    found = []
    for prompt in prompts:
        first = prompt[0]
        rng = random.Random(1000 * first + seen[first])
        seen[first] += 1
        found.append(rng.choices(range(1, setting.V), k=setting.completion))
    return found


# --- this package


class _Given:
    """An engine that returns the given completions."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def generate(self, prompts: list[list[int]], sampling: Any) -> Any:
        from gspo_kernels.trainer.rollout import Completion

        return [Completion(torch.tensor(ids), False) for ids in given_completions(self.setting, prompts)]


def _ours(layout: str, setting: Setting, model: Any, turns: Turns) -> None:
    from gspo_kernels.trainer import GSPOTrainer, TrainConfig
    from gspo_kernels.trainer.config import CheckpointConfig, EvaluationConfig, RolloutConfig, UpdateConfig

    class Timed(GSPOTrainer):
        def take_step(self, signals: Sequence[int] = ()) -> None:
            turns.begin()
            super().take_step(signals)

        def rollout(self) -> Any:
            with turns.rollout():
                return super().rollout()

    never = 10**9
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            output=f"{folder}/run",
            rollout=RolloutConfig(
                prompts_per_rollout=setting.prompts,
                group_size=setting.group,
                max_new_tokens=setting.completion,
            ),
            update=UpdateConfig(
                steps=never,
                minibatches=setting.minibatches,
                epochs=setting.epochs,
                shared_prefix=layout == "shared_prefix",
                learning_rate=setting.learning_rate,
                max_grad_norm=setting.max_grad_norm,
            ),
            evaluation=EvaluationConfig(every=never),
            checkpoint=CheckpointConfig(every=never),
        )
        Timed(
            model,
            make_tokenizer(setting.V),
            make_reward(setting, turns),
            [{"prompt": prompt} for prompt in make_prompts(setting)],
            config=config,
            engine=_Given(setting) if setting.given else None,
        ).train()


def _load_ours(layout: str, device: torch.device) -> Callable[..., None]:
    return functools.partial(_ours, layout)


for _layout in ("packed", "shared_prefix"):
    contestant(OURS.format(_layout), "training", precision="float32", ours=True)(
        functools.partial(_load_ours, _layout)
    )


# --- plain PyTorch


def _plain(setting: Setting, model: Any, turns: Turns) -> None:
    def sample(prompt_ids: Tensor, prompt_mask: Tensor) -> Tensor:
        given = given_completions(setting, prompt_ids.tolist())
        return torch.cat([prompt_ids, torch.tensor(given)], 1)

    plain_loop.train(
        model,
        make_tokenizer(setting.V),
        make_prompts(setting),
        make_reward(setting, turns),
        prompts_per_step=setting.prompts,
        group=setting.group,
        max_new_tokens=setting.completion,
        minibatches=setting.minibatches,
        epochs=setting.epochs,
        learning_rate=setting.learning_rate,
        max_grad_norm=setting.max_grad_norm,
        turns=turns,
        sample=sample if setting.given else None,
    )


@contestant("plain PyTorch loop", "training")
def _load_plain(device: torch.device) -> Callable[..., None]:
    return _plain


# --- TRL


def _trl(fused: bool, setting: Setting, model: Any, turns: Turns) -> None:
    import warnings

    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    kind = GRPOTrainer
    if fused:
        from gspo_kernels.integrations.trl import FusedGRPOTrainer

        kind = FusedGRPOTrainer

    class Timed(kind):  # type: ignore[misc, valid-type]
        def _generate(self, prompts: Any) -> Any:
            with turns.rollout():
                return super()._generate(prompts)

        def _calculate_rewards(self, *inputs: Any) -> Any:
            with turns.rollout():
                return super()._calculate_rewards(*inputs)

    class Boundary(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step % setting.updates == 0:
                turns.begin()

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        prompt_ids = trainer.processing_class(prompts)["input_ids"]
        completion_ids = given_completions(setting, prompt_ids)
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = GRPOConfig(
            folder, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
            save_strategy="no", disable_tqdm=True, max_steps=10**9, lr_scheduler_type="constant",
            learning_rate=setting.learning_rate, max_grad_norm=setting.max_grad_norm,
            num_generations=setting.group,
            per_device_train_batch_size=setting.prompts * setting.group // setting.minibatches,
            steps_per_generation=setting.minibatches, num_iterations=setting.epochs, shuffle_dataset=False,
            max_completion_length=setting.completion, loss_type="grpo",
            importance_sampling_level="sequence", epsilon=plain_loop.CLIP_LOW,
            epsilon_high=plain_loop.CLIP_HIGH,
        )  # fmt: skip
        trainer = Timed(
            model,
            make_reward(setting, turns),
            arguments,
            # repeated, because a new epoch takes TRL some time
            train_dataset=Dataset.from_dict({"prompt": make_prompts(setting) * 100}),
            processing_class=make_tokenizer(setting.V),
            callbacks=[Boundary()],
            rollout_func=rollout if setting.given else None,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def _load_trl(fused: bool, device: torch.device) -> Callable[..., None]:
    if importlib.util.find_spec("trl") is None:
        raise Missing("trl is not installed")
    return functools.partial(_trl, fused)


contestant("TRL GRPOTrainer", "training")(functools.partial(_load_trl, False))
contestant("TRL, ours inside (FusedGRPOTrainer)", "training", precision="float32", ours=True)(
    functools.partial(_load_trl, True)
)
