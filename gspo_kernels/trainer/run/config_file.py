"""Reading a configuration, strictly: YAML or TOML files, dotted overrides, and comparing two runs."""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml

from gspo_kernels.trainer.config import ObjectiveConfig, TrainConfig, trainable_objectives
from gspo_kernels.trainer.input_errors import ConfigError
from gspo_kernels.trainer.run.files import write_text
from gspo_kernels.trainer.run.options import near_matches

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_Config = TypeVar("_Config")

FREE_ON_RESUME = (
    *("model", "dataset", "eval_dataset", "output", "threads", "trackers", "log_every", "show_samples"),
    "save_rollouts",
    *("reward_timeout", "reward_process", "update.steps", "update.micro_batch_tokens", "rollout.batch_size"),
)
"""Keys that may change when a run is resumed, with all of ``evaluation``, ``checkpoint``, ``engine`` and
``parallel``."""


def options(cls: Any = TrainConfig, section: str = "") -> Iterator[tuple[str, str, Any, Any]]:
    """Yield ``(dotted key, help, default, type)`` of every option, in the order of their declaration."""
    hints = typing.get_type_hints(cls)
    prefix = f"{section}." if section else ""
    for leaf in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[leaf.name]):
            yield from options(hints[leaf.name], leaf.name)
        elif leaf.name == "options" and cls is ObjectiveConfig:
            yield from _objective_options(f"{section}.")
        else:
            default = None if leaf.default is dataclasses.MISSING else leaf.default
            yield f"{prefix}{leaf.name}", leaf.metadata["help"], default, hints[leaf.name]


def _objective_options(prefix: str) -> Iterator[tuple[str, str, Any, Any]]:
    classes = trainable_objectives()
    owners: dict[str, list[str]] = {}
    for name, cls in classes.items():
        for leaf in dataclasses.fields(cls):
            if leaf.init:
                owners.setdefault(leaf.name, []).append(name)
    for key, names in owners.items():
        whose = "every objective" if len(names) == len(classes) else ", ".join(names)
        yield f"{prefix}{key}", f"field of {whose}", None, typing.get_type_hints(classes[names[0]])[key]


def from_mapping(values: Mapping[str, Any], cls: type[_Config], section: str = "") -> _Config:
    """Build a config dataclass from nested mappings, as YAML gives them."""
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{section or 'the configuration'} must be a mapping of keys to values, got {values!r}"
        )
    prefix = f"{section}." if section else ""
    if cls is ObjectiveConfig:
        own = {key: value for key, value in values.items() if key != "name"}
        return cast(Any, cls)(name=values.get("name", "GSPO"), options=own)
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in hints:
            known = (name for name, *_ in options())
            raise ConfigError(f"unknown key {prefix}{key}{near_matches(f'{prefix}{key}', known)}")
        if dataclasses.is_dataclass(hints[key]):
            arguments[key] = from_mapping({} if value is None else value, cast(Any, hints[key]), key)
        else:
            arguments[key] = value
    return cls(**arguments)


def load_config(path: str | Path | None, overrides: Mapping[str, Any] | None = None) -> TrainConfig:
    """Read a YAML or TOML file and put dotted overrides on top; without a file the defaults are the start."""
    values: dict[str, Any] = {}
    if path is not None:
        path = Path(path)
        if not path.is_file():
            raise ConfigError(f"there is no configuration file {path}")
        form = "TOML" if path.suffix == ".toml" else "YAML"
        try:
            text = path.read_text(encoding="utf-8")
            values = (tomllib.loads(text) if form == "TOML" else yaml.safe_load(text)) or {}
        except (yaml.YAMLError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid {form}: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path} must hold a mapping of keys to values, got {type(values).__name__}")
    for dotted, value in (overrides or {}).items():
        section, _, key = dotted.rpartition(".")
        if section and values.get(section) is None:
            values[section] = {}
        target = values[section] if section else values
        if isinstance(target, dict):  # what else it may be is refused below
            target[key] = value
    return from_mapping(values, TrainConfig)


def to_mapping(config: TrainConfig) -> dict[str, Any]:
    """Return the nested mapping that `from_mapping` reads back as an equal config."""
    values = dataclasses.asdict(config)
    values["objective"] = {"name": config.objective.name, **config.objective.options}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def save_config(config: TrainConfig, path: Path) -> None:
    """Write the resolved configuration as YAML."""
    write_text(path, yaml.safe_dump(to_mapping(config), sort_keys=False))


def require_same_run(saved: TrainConfig, current: TrainConfig) -> None:
    """Raise a `ConfigError` if a run would go on with other settings than those it was started with."""
    before, now = flat(to_mapping(saved)), flat(to_mapping(current))
    changed = [
        f"{key}: {before.get(key)!r} -> {now.get(key)!r}"
        for key in {**before, **now}
        if before.get(key) != now.get(key)
        and key not in FREE_ON_RESUME
        and not key.startswith(("evaluation.", "checkpoint.", "engine.", "parallel."))
    ]
    if changed:
        raise ConfigError(f"a run cannot be resumed with other settings ({'; '.join(changed)})")


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by their dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return leaves
