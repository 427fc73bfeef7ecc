"""Configuration of a training run: every option, documented once.

``gspo train --help`` prints the same words. A run is described by a YAML file and dotted overrides:
``rollout: {group_size: 8}`` and ``--rollout.group_size 8`` are the same thing. pydantic checks the values.
Nothing here imports torch, so that wrong keys are answered at once.
"""

from __future__ import annotations

import difflib
import re
import traceback
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError


class InputError(ValueError):
    """Something given to the trainer cannot be used; the message names it, and no work was lost."""


def reason(error: BaseException) -> str:
    """Return an error's whole message on one line, and that of the error that caused it."""
    errors = [error] if error.__cause__ is None else [error, error.__cause__]
    return ": ".join(" ".join((str(each) or repr(each)).split()).rstrip(".") for each in errors)


def place_of(error: BaseException, function: Any) -> str:
    """Return `` (file, line n)``, the last line in the function's file that was running; "" if none was."""
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    return f" ({inside[-1].filename}, line {inside[-1].lineno})" if inside else ""


def option(default: Any, help: str, **bounds: Any) -> Any:
    """Return an option with its default, one line of documentation and pydantic's bounds (ge, gt, le, lt)."""
    return Field(default, description=help, **bounds)


class Section(BaseModel):
    """Frozen options: values become what their annotations say, or an `InputError` names the key."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InputError(_sentence(type(self), error)) from None

    # pydantic validates nested sections itself then, and its errors have the whole dotted key.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="before")
    @classmethod
    def _drop_unset(cls, values: Any) -> Any:
        """Let None and an empty text keep the default of an option; a dash in a key is an underscore."""
        if not isinstance(values, Mapping):
            return values
        named = {str(key).replace("-", "_"): value for key, value in values.items()}
        return {k: v for k, v in named.items() if k not in cls.model_fields or v not in (None, "")}

    @field_validator("*", mode="before")
    @classmethod
    def _read_as_yaml(cls, value: Any, info: Any) -> Any:
        """Take one value for a list of one; refuse true and false where pydantic would take 1 and 0."""
        hint = cls.model_fields[info.field_name].annotation
        kinds = {getattr(part, "__origin__", part) for part in (hint, *typing.get_args(hint))}
        if isinstance(value, bool) and kinds & {int, float}:
            raise PydanticCustomError("number", "Input should be a number")
        return (value,) if tuple in kinds and isinstance(value, str | int | float) else value

    def require(self, condition: bool, name: str, expected: str) -> None:
        """Raise an error that names an option and its value unless the condition is true."""
        if not condition:
            raise ValueError(f"{name} must be {expected}, got {getattr(self, name)!r}")


Size = Annotated[int, Field(ge=1)] | Literal["auto"]


class DataConfig(Section):
    """What of the datasets is used, and how a prompt becomes tokens."""

    split: str | None = option(None, "split of the training dataset, as 'train[:1000]'; a file is 'train'")
    eval_split: str | None = option(None, "split of the eval dataset")
    subset: str | None = option(None, "configuration of a dataset on the Hub")
    prompt_column: str = option("prompt", "column that holds the prompt: text, or a list of messages")
    system_prompt: str | None = option(None, "first message of conversations that have no system message")
    prompt_template: str | None = option(None, "text around {prompt}, in place of a text's chat template")
    max_prompt_tokens: int | None = option(None, "leave out prompts that are longer", ge=1)
    template_options: dict[str, Any] = option(
        {}, "arguments of the chat template: '{enable_thinking: false}'"
    )

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        if self.prompt_template is not None:
            self.require("{prompt}" in self.prompt_template, "prompt_template", "a text with {prompt} in it")
            expected = "left out with prompt_template, which replaces the chat template"
            self.require(self.system_prompt is None, "system_prompt", expected)
        return self


class RolloutConfig(Section):
    """How completions are sampled."""

    prompts_per_rollout: int = option(32, "prompts in one rollout", ge=1)
    group_size: int = option(8, "completions of each prompt, which advantages compare", ge=2)
    max_new_tokens: int = option(256, "longest completion in tokens; longer ones are truncated", ge=1)
    temperature: float = option(1.0, "of sampling; training log-probs use the same one", gt=0)
    top_p: float = option(1.0, "nucleus sampling; see keep_sampling_mask", gt=0, le=1)
    top_k: int = option(0, "sample among the k most likely tokens; 0: all", ge=0)
    keep_sampling_mask: bool = option(False, "train on log-probs among the tokens that could be drawn")
    batch_size: Size = option("auto", "completions generated at once; auto: 256, 64 on CPUs, fewer if needed")
    truncated: Literal["keep", "mask"] = option("keep", "completions without an end token; mask: no loss")

    @model_validator(mode="after")
    def _check(self) -> RolloutConfig:
        if self.top_p == 1 and self.top_k == 0:
            plain = "false where top_p and top_k cut no token off"
            self.require(not self.keep_sampling_mask, "keep_sampling_mask", plain)
        return self


class EngineConfig(Section):
    """What samples: the trained model itself, or vLLM, which gets its weights after every change."""

    url: str | None = option(None, "a vLLM server, as http://localhost:8000; or local: vLLM in this process")
    weights: str | None = option(
        None, "directory for weights on their way to a server, the output by default; or nccl"
    )
    memory: float = option(0.4, "share of the GPU's memory for a local vLLM", gt=0, le=1)

    @model_validator(mode="after")
    def _check(self) -> EngineConfig:
        if self.url is None or self.url == "local":
            self.require(self.weights is None, "weights", "left out where engine.url names no server")
        else:
            parts = urlsplit(self.url)
            is_address = parts.scheme in ("http", "https") and bool(parts.netloc) and parts.path in ("", "/")
            self.require(is_address, "url", "local, or an address as http://localhost:8000 without a path")
        return self

    @field_validator("weights")
    @classmethod
    def _absolute(cls, path: str | None) -> str | None:
        return path if path in (None, "nccl") else str(Path(path).absolute())


class UpdateConfig(Section):
    """How the weights move. A step is one rollout and one optimizer update for each of its minibatches."""

    steps: int = option(300, "rollouts in the whole run", ge=1)
    minibatches: int = option(
        4, "parts of a rollout, an update each; the first has ratios of exactly 1", ge=1
    )
    epochs: int = option(1, "passes over a rollout", ge=1)
    micro_batch_tokens: Size = option(
        "auto", "tokens per forward pass; auto: 16384, 4096 on CPUs, fewer if needed"
    )
    precision: Literal["auto", "fp32", "bf16"] = option(
        "auto", "of products: bf16 on GPUs that have it, else fp32; weights and logits stay in fp32"
    )
    gradient_checkpointing: bool = option(False, "recompute activations: less memory, a third slower")
    entropy_coef: float = option(0.0, "weight of the entropy bonus in the loss")
    learning_rate: float = option(1e-6, "AdamW's learning rate after the warmup", gt=0)
    warmup_updates: int = option(0, "optimizer updates over which the learning rate rises from 0", ge=0)
    learning_rate_decay: Literal["none", "linear", "cosine"] = option("none", "to 0 at the last step")
    max_grad_norm: float = option(1.0, "gradients are scaled down to this norm", gt=0, allow_inf_nan=True)


class ObjectiveConfig(Section):
    """Which policy loss is minimised; its fields follow by name: --objective.clip_low 3e-4."""

    model_config = ConfigDict(extra="allow")

    name: str = option("GSPO", "name of the objective")
    centering: int = option(0, "most likely ids per token that centre its score; 0: off", ge=0, le=512)


class KLConfig(Section):
    """A penalty on the distance to the reference policy: the model as it was before training."""

    beta: float = option(0.0, "weight of the KL term; 0 leaves it out", ge=0)


class OffPolicyConfig(Section):
    """Weights for what the sampling engine computes otherwise than the trainer (TIS, MIS, IcePop, ...)."""

    level: Literal["none", "token", "sequence"] = option("none", "one weight for each token, or sequence")
    mode: str = option("truncate", "outside the bounds: truncate, mask, icepop, sequence_mask, k1, k2, k3")
    low: float | None = option(None, "lower bound of a weight or divergence; 0.5 for icepop")
    high: float | None = option(None, "upper bound; without a lower one 2 for truncate, 5 for icepop")


class LoraConfig(Section):
    """Train small adapters of all linear layers but the head; the reference is the model without them."""

    rank: int = option(0, "rank of the adapters; 0 trains all weights", ge=0)
    alpha: int = option(32, "adapters are scaled by alpha / rank", ge=1)


class EvaluationConfig(Section):
    """How progress on the held-out prompts is measured: greedily, and sampled as in rollouts."""

    every: int = option(25, "steps between two evaluations; one comes first, one at the end", ge=1)
    prompts: int = option(256, "held-out prompts, from the start of the eval dataset", ge=1)


class CheckpointConfig(Section):
    """When the state of the run is saved."""

    every: int = option(50, "steps between two checkpoints; there is always one at the end", ge=1)
    keep: int = option(2, "newest checkpoints that are kept", ge=1)


Method = Literal[
    "group_normalized",
    "leave_one_out",
    "optimal_baseline",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gdpo",
]
"""Advantages of the library that compare the completions of a group."""


class TrainConfig(Section):
    """One training run."""

    model: str = option("", "directory, or name on the Hub, of the causal language model to train")
    attn_implementation: str | None = option(None, "sdpa or flash_attention_2; transformers' choice")
    dataset: str = option("", "prompts: jsonl, parquet, directory or Hub name; columns reach rewards")
    eval_dataset: str | None = option(None, "prompts that are never trained on")
    reward: tuple[str, ...] = option((), "'module:function' or 'file.py:function', with '(name=value)'")
    reward_weights: tuple[float, ...] | None = option(None, "one weight for each reward; all 1")
    reward_timeout: float | None = option(None, "seconds that a call of a reward may take", gt=0)
    advantages: Method = option("group_normalized", "how rewards become advantages")
    output: str = option(
        "runs/gspo",
        "directory for metrics, checkpoints, the plot and the trained model",
        validate_default=True,
    )
    seed: int = option(0, "seed of every random choice", ge=0)
    save_rollouts: bool = option(False, "keep every completion with its rewards and log-probs")
    trackers: tuple[str, ...] = option((), "where metrics go as well: tensorboard, wandb, trackio, ...")
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    update: UpdateConfig = UpdateConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    kl: KLConfig = KLConfig()
    off_policy: OffPolicyConfig = OffPolicyConfig()
    lora: LoraConfig = LoraConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @field_validator("model", "dataset", "eval_dataset", "output")
    @classmethod
    def _absolute(cls, path: str | None, info: Any) -> str | None:
        """Make local paths absolute, because a reward may change the working directory."""
        local = path and (info.field_name == "output" or Path(path).exists())
        return str(Path(path or "").absolute()) if local else path

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.engine.url is not None and self.rollout.keep_sampling_mask and self.rollout.top_k == 0:
            raise ValueError("rollout.top_k must be above 0 with engine.url and keep_sampling_mask, got 0")
        rollout, masks = self.rollout, self.rollout.keep_sampling_mask
        cuts = rollout.top_p < 1 or rollout.top_k > 0
        for key, fits, expected in (
            ("off_policy.level", self.off_policy.level == "none", "none (the objective weighs tokens)"),
            ("update.entropy_coef", self.update.entropy_coef == 0, "0"),
            ("rollout.keep_sampling_mask", masks or not cuts, "true where top_p or top_k cut"),
            ("engine.url", not masks or self.engine.url in (None, "local"), "local where masks are kept"),
        ):
            if self.objective.centering and not fits:
                raise ValueError(f"{key} must be {expected} with objective.centering")
        return self


def from_mapping(values: Any, cls: Any = TrainConfig) -> Any:
    """Return the configuration of nested mappings, as YAML gives them."""
    if not isinstance(values, Mapping):
        raise InputError(f"the configuration must be a mapping of keys to values, got {values!r:.80}")
    return cls(**{str(key): value for key, value in values.items()})


def load_config(path: str | Path, cls: Any = TrainConfig) -> Any:
    """Read the configuration in a YAML file."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"there is no configuration file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid YAML: {error}") from error
    return from_mapping(values or {}, cls)


def near_matches(key: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean ...?)"`` with the known keys and sections close to ``key``, or ``""``."""
    names, last = [*known], key.rsplit(".", 1)[-1]
    ends = {name: name.rsplit(".", 1)[-1] for name in names}
    same = [n for n, end in ends.items() if last in (end, "".join(word[0] for word in end.split("_")))]
    spelled = {name.lower(): name for name in (*names, *(name.rpartition(".")[0] for name in names))}
    similar = difflib.get_close_matches(key.lower(), spelled, n=3, cutoff=0.6)
    close = dict.fromkeys([*same, *(spelled[name] for name in similar)])
    return f" (did you mean {' or '.join([*close][:3])}?)" if close else ""


FREE_ON_RESUME = {"model", "dataset", "eval_dataset", "output", "save_rollouts", "reward_timeout"}
FREE_ON_RESUME |= {"trackers", "update.steps", "update.micro_batch_tokens", "rollout.batch_size"}
"""Keys that may change when a run is resumed, with all of ``evaluation``, ``checkpoint`` and ``engine``.
Under a decay of the learning rate ``update.steps`` may not."""


def changed_settings(saved: TrainConfig, current: TrainConfig) -> list[str]:
    """Return ``"key: before -> now"`` for the settings that matter to a run that goes on."""
    before, now = flat(saved.model_dump(mode="json")), flat(current.model_dump(mode="json"))
    decay = saved.update.learning_rate_decay  # with other steps it would have been another one until now
    free = FREE_ON_RESUME - (set() if decay == "none" else {"update.steps"})
    why = {"update.steps": f", where the {decay} decay ends"}
    return [
        f"{key}: {before.get(key)!r} -> {now.get(key)!r}{why.get(key, '')}"
        for key in before | now
        if before.get(key) != now.get(key)
        and key not in free
        and not key.startswith(("evaluation.", "checkpoint.", "engine."))
    ]


def check_model_path(path: str) -> None:
    """Refuse what is neither a directory nor looks like a model's name on the Hub, and adapters alone."""
    if not path:
        raise InputError("model: got '', expected a directory, or a model on the Hub as 'organization/name'")
    if (Path(path) / "adapter_config.json").is_file():
        expected = "expected a full model, as peft's merge_and_unload() makes one"
        raise InputError(f"model {path!r} cannot be loaded: the directory has adapters; {expected}")
    if not Path(path).is_dir() and not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path):
        missing = "there is no such directory, and a model on the Hub is called 'organization/name'"
        raise InputError(f"model {path!r} cannot be loaded: {missing}")


def replaced(config: Any, section: str, **values: Any) -> Any:
    """Return the configuration with other values of some options of a section."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by their dotted keys; an empty mapping is a leaf."""
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        is_section = isinstance(value, Mapping) and value
        leaves |= flat(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": value}
    return leaves


def _sentence(cls: Any, error: ValidationError) -> str:
    """Return the first of pydantic's errors as one sentence with the dotted key."""
    first = error.errors()[0]
    # pydantic adds which member of a union failed, as constrained-int
    names = [str(part) for part in first["loc"] if not re.match(r"constrained-|literal\[", str(part))]
    key, message = ".".join(names), first["msg"].replace("Input should be", "must be")
    if first["type"] == "extra_forbidden":
        return f"unknown key {key}{near_matches(key, flat(cls().model_dump()))}"
    if first["type"] == "value_error":
        return f"{key}{'.' if key else ''}{first['ctx']['error']}"
    return f"{key} {message}, got {first['input']!r:.80}"
