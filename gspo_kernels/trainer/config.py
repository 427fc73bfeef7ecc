"""Configuration of a training run: every option, documented once.

``gspo train --help`` prints the same words. A YAML file and dotted overrides describe a run: ``rollout:
{group_size: 8}`` and ``--rollout.group_size 8`` are equivalent. pydantic checks the values. This module does
not import torch, to report wrong keys without delay.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError


class InputError(ValueError):
    """An error in what the user passed; the message names it, and no work was lost."""


def reason(error: BaseException) -> str:
    """Return the message of an error and of its cause on one line."""
    errors = [error] if error.__cause__ is None else [error, error.__cause__]
    return ": ".join(" ".join((str(each) or repr(each)).split()).rstrip(".") for each in errors)


def option(default: Any, help: str, **bounds: Any) -> Any:
    """Return an option with its default, one line of documentation and pydantic's bounds (ge, gt, le, lt)."""
    return Field(default, description=help, **bounds)


class Section(BaseModel):
    """Frozen options, converted to their annotated types; an `InputError` names a wrong key."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InputError(_sentence(type(self), error)) from None

    # Lets pydantic validate nested sections itself, which gives errors the whole dotted key.
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
    def _wrap_single_values(cls, value: Any, info: Any) -> Any:
        """Convert a single value to a list of one; refuse booleans where pydantic would take 1 or 0."""
        hint = cls.model_fields[info.field_name].annotation
        kinds = {getattr(part, "__origin__", part) for part in (hint, *typing.get_args(hint))}
        if isinstance(value, bool) and kinds & {int, float}:
            raise PydanticCustomError("number", "Input should be a number")
        return (value,) if tuple in kinds and isinstance(value, str | int | float) else value

    def require(self, condition: bool, name: str, expected: str) -> None:
        """Raise a `ValueError` with an option's name and value unless the condition is true."""
        if not condition:
            raise ValueError(f"{name} must be {expected}, got {getattr(self, name)!r}")


Size = Annotated[int, Field(ge=1)] | Literal["auto"]
Directory = Annotated[str, AfterValidator(lambda path: str(Path(path).absolute()))]
Source = Annotated[
    str, AfterValidator(lambda name: str(Path(name).absolute()) if Path(name).exists() else name)
]
"""Local paths become absolute, because a reward may change the working directory."""


class DataConfig(Section):
    """Which rows of the datasets are used, and how a prompt becomes tokens."""

    split: str | None = option(None, "split of the dataset, such as 'train[:1000]'; a file is 'train'")
    eval_split: str | None = option(None, "split of the eval dataset, such as 'test[:256]'")
    subset: str | None = option(None, "configuration of a dataset on the Hub")
    prompt_column: str = option("prompt", "column of the prompts: texts, or lists of messages")
    system_prompt: str | None = option(None, "first message of conversations without a system message")
    prompt_template: str | None = option(None, "text around {prompt}, replaces the chat template of texts")
    max_prompt_tokens: int | None = option(None, "longest prompt in tokens; longer ones are skipped", ge=1)
    template_options: dict[str, Any] = option({}, "chat template's arguments: '{enable_thinking: false}'")

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        if self.prompt_template is not None:
            self.require("{prompt}" in self.prompt_template, "prompt_template", "a text with {prompt} in it")
            expected = "null with prompt_template, which replaces the chat template"
            self.require(self.system_prompt is None, "system_prompt", expected)
        return self


class RolloutConfig(Section):
    """How completions are sampled."""

    prompts_per_rollout: int = option(32, "prompts in one rollout", ge=1)
    group_size: int = option(8, "completions of each prompt, compared by the advantages", ge=2)
    max_new_tokens: int = option(256, "longest completion in tokens; longer ones are truncated", ge=1)
    temperature: float = option(1.0, "sampling temperature, also used when scoring", gt=0)
    top_p: float = option(1.0, "nucleus sampling; see keep_sampling_mask", gt=0, le=1)
    top_k: int = option(0, "number of most likely tokens to sample from; 0: all", ge=0)
    keep_sampling_mask: bool = option(False, "log-probs over ids kept by top_p and top_k; not with vLLM")
    batch_size: Size = option("auto", "completions generated at a time; auto: 256, CPUs 64, or what fits")
    truncated: Literal["keep", "mask"] = option("keep", "train on completions without an end token, or mask")


class EngineConfig(Section):
    """What samples: the trained model itself, or vLLM, which gets the weights after every update."""

    url: str | None = option(None, "vLLM server, such as http://localhost:8000; local: vLLM in this process")
    weights: Directory | None = option(None, "directory that passes weights to a server; null: the output")
    memory: float = option(0.4, "share of the GPU's memory for a local vLLM", gt=0, le=1)

    @model_validator(mode="after")
    def _check(self) -> EngineConfig:
        if self.url is None or self.url == "local":
            self.require(self.weights is None, "weights", "null where engine.url is not a server")
        else:
            parts = urlsplit(self.url)
            is_address = parts.scheme in ("http", "https") and bool(parts.netloc) and parts.path in ("", "/")
            self.require(is_address, "url", "local, or an address as http://localhost:8000 without a path")
        return self


class UpdateConfig(Section):
    """How the weights are updated: a step is one rollout, with one optimizer update per minibatch."""

    steps: int = option(300, "rollouts in the whole run", ge=1)
    minibatches: int = option(4, "optimizer updates per rollout; the ratios of the first are 1", ge=1)
    epochs: int = option(1, "passes over a rollout", ge=1)
    micro_batch_tokens: Size = option("auto", "tokens per forward pass; auto: 16384, CPUs 4096, or what fits")
    precision: Literal["auto", "fp32", "bf16"] = option("auto", "dtype of matmuls; weights stay fp32")
    gradient_checkpointing: bool = option(False, "recompute activations: less memory, a third slower")
    entropy_coef: float = option(0.0, "weight of the entropy bonus in the loss")
    learning_rate: float = option(1e-6, "AdamW's learning rate after the warmup", gt=0)
    warmup_updates: int = option(0, "optimizer updates of linear warmup from 0", ge=0)
    learning_rate_decay: Literal["none", "linear", "cosine"] = option("none", "decay to 0 at the last step")
    weight_decay: float = option(0.0, "AdamW's weight decay", ge=0)
    max_grad_norm: float = option(1.0, "gradient clipping norm", gt=0, allow_inf_nan=True)


class ObjectiveConfig(Section):
    """Which policy loss is minimized; its own fields are options too, such as --objective.clip_low 3e-4."""

    model_config = ConfigDict(extra="allow")

    name: str = option("GSPO", "name of the objective")
    centering: int = option(0, "most likely ids per token for score centering; 0: off", ge=0, le=512)


class KLConfig(Section):
    """A penalty on the distance to the reference policy, the model before training."""

    beta: float = option(0.0, "weight of the KL term; 0: off", ge=0)


class OffPolicyConfig(Section):
    """Weights that correct for differences between sampling and training (TIS, MIS, IcePop, ...)."""

    level: Literal["none", "token", "sequence"] = option("none", "weights per token or sequence; none: off")
    mode: str = option("truncate", "use of the bounds: truncate, mask, icepop, sequence_mask, k1, k2, k3")
    low: float | None = option(None, "lower bound of a weight or divergence; icepop: 0.5 if null")
    high: float | None = option(None, "upper bound; truncate: 2 if both are null, icepop: 5 if null")


class LoraConfig(Section):
    """Train LoRA adapters; the reference is the model without them."""

    rank: int = option(0, "rank of the adapters; 0: train all weights", ge=0)
    alpha: int = option(32, "adapters are scaled by alpha / rank", ge=1)
    target_modules: tuple[str, ...] = option(
        ("all-linear",), "adapted modules, such as q_proj v_proj; all-linear: not the head"
    )


class EvaluationConfig(Section):
    """How often the eval prompts are completed, greedily and sampled as in rollouts."""

    every: int = option(25, "steps between evaluations; also before the first and at the last", ge=1)


class CheckpointConfig(Section):
    """When the state of the run is saved."""

    every: int = option(50, "steps between checkpoints; also at the last step", ge=1)
    keep: int = option(2, "number of checkpoints that are kept", ge=1)


Method = Literal[
    "group_normalized",
    "leave_one_out",
    "optimal_baseline",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gdpo",
]
"""Functions of `gk.advantages` that compare the completions of a group."""


_OFF_POLICY = ("off_policy.mode", "off_policy.low", "off_policy.high")


class TrainConfig(Section):
    """One training run."""

    model: Source = option("", "model to train: directory or name on the Hub")
    attn_implementation: str | None = option(None, "sdpa or flash_attention_2; null: transformers' choice")
    dataset: Source = option("", "prompts: jsonl, csv, parquet, directory or name on the Hub")
    eval_dataset: Source | None = option(None, "prompts that are never trained on")
    reward: tuple[str, ...] = option((), "reward functions: module:function or file.py:function(name=value)")
    reward_weights: tuple[float, ...] | None = option(None, "one weight per reward; null: all 1")
    advantages: Method = option("group_normalized", "how rewards become advantages")
    output: Directory = option(
        "runs/gspo", "directory of everything that the run writes", validate_default=True
    )
    seed: int = option(0, "seed of all random numbers", ge=0)
    save_rollouts: bool = option(False, "save every completion with its rewards and log-probs")
    trackers: tuple[str, ...] = option((), "trackers of the metrics: tensorboard, wandb, trackio, ...")
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

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        """Check options that depend on each other."""
        masks, cuts = self.rollout.keep_sampling_mask, self.rollout.top_p < 1 or self.rollout.top_k > 0
        centers, off_policy = self.objective.centering > 0, self.off_policy.level != "none"
        for key, wrong, expected in (
            ("rollout.keep_sampling_mask", masks and not cuts, "false without top_p and top_k"),
            ("rollout.keep_sampling_mask", cuts and centers and not masks, "true with objective.centering"),
            ("engine.url", masks and self.engine.url, "null with rollout.keep_sampling_mask"),
            ("off_policy.level", centers and off_policy, "none with objective.centering"),
            ("update.entropy_coef", centers and self.update.entropy_coef, "0 with objective.centering"),
        ):
            if wrong:
                raise ValueError(f"{key} must be {expected}, got {flat(self.model_dump())[key]!r}")
        return self

    def check_unused(self) -> None:
        """Raise an `InputError` for options of a run that are set, but have no effect."""
        for unused, without, *keys in (
            (self.off_policy.level == "none", "off_policy.level", *_OFF_POLICY),
            (self.lora.rank == 0, "lora.rank", "lora.alpha", "lora.target_modules"),
            (self.engine.url != "local", "engine.url local", "engine.memory"),
        ):
            if unused:
                self.require_defaults(keys, f"without {without}")

    def require_defaults(self, keys: Iterable[str], why: str) -> None:
        """Raise an `InputError` that names the first of these options that is set, but has no effect."""
        values, defaults = (flat(each.model_dump()) for each in (self, type(self).model_construct()))
        for key in keys:
            if values[key] != defaults[key]:
                raise InputError(f"{key} must be {defaults[key]!r} {why}, got {values[key]!r}")


def from_mapping(values: Any, cls: Any = TrainConfig) -> Any:
    """Return the configuration of nested mappings, such as those of a YAML file."""
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


FREE_ON_RESUME = {"model", "dataset", "eval_dataset", "data.eval_split", "output", "save_rollouts"}
FREE_ON_RESUME |= {"trackers", "update.steps", "update.micro_batch_tokens", "rollout.batch_size"}
"""Keys that may change when a run is resumed, as may all of ``evaluation``, ``checkpoint`` and ``engine``.

With a decay of the learning rate, ``update.steps`` may not. ``dataset`` and ``model`` may be moved, because
digests of rows and weights are compared.
"""


def changed_settings(saved: TrainConfig, current: TrainConfig) -> list[str]:
    """Return ``"key: before -> now"`` for the changed settings that affect a resumed run."""
    before, now = flat(saved.model_dump(mode="json")), flat(current.model_dump(mode="json"))
    decay = saved.update.learning_rate_decay  # other steps change its factors of the steps already taken
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
    """Refuse a directory of adapters, and a text that is neither a directory nor a name on the Hub."""
    if not path:
        raise InputError("model: got '', expected a directory, or a model on the Hub as 'organization/name'")
    if (Path(path) / "adapter_config.json").is_file():
        expected = "expected a full model, as peft's merge_and_unload() makes one"
        raise InputError(f"model {path!r} cannot be loaded: the directory has adapters; {expected}")
    if not Path(path).is_dir() and not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path):
        missing = "there is no such directory, and a model on the Hub is called 'organization/name'"
        raise InputError(f"model {path!r} cannot be loaded: {missing}")


def replaced(config: Any, section: str, **values: Any) -> Any:
    """Return the configuration with new values of some options of a section."""
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
    # pydantic appends the failed member of a union, such as constrained-int
    names = [str(part) for part in first["loc"] if not re.match(r"constrained-|literal\[", str(part))]
    key, message = ".".join(names), first["msg"].replace("Input should be", "must be")
    if first["type"] == "extra_forbidden":
        return f"unknown key {key}{near_matches(key, flat(cls().model_dump()))}"
    if first["type"] == "value_error":
        return f"{key}{'.' if key else ''}{first['ctx']['error']}"
    return f"{key} {message}, got {first['input']!r:.80}"
