"""Frameworks that are missing or too old for an adapter."""

import importlib
import re
import sys
from importlib.metadata import PackageNotFoundError

import pytest

import gspo_kernels as gk
from gspo_kernels.integrations import errors, skyrl
from gspo_kernels.integrations.backends.shared import Replacements
from gspo_kernels.integrations.errors import IntegrationError


def integration(name, function, *arguments):
    """Return a call of an adapter's function that imports the adapter only when called."""
    return lambda: getattr(importlib.import_module(f"gspo_kernels.integrations.{name}"), function)(*arguments)


@pytest.mark.parametrize(
    ("installed", "says"), [("0.1.0", "version 0.1.0 is installed, this"), (None, "not installed, this")]
)
@pytest.mark.parametrize(
    ("needed", "call"),
    [
        ("transformers>=5.1", integration("transformers", "fuse_lm_head", None)),
        ("trl>=1.16", integration("trl", "FusedGRPOTrainer")),
        ("trl>=1.16", integration("backends.trl", "install")),
        ("verl>=0.9.1", integration("verl", "register", "mine", gk.GSPO())),
        ("verl>=0.9.1", integration("backends.verl", "install")),
        ("skyrl>=0.3", integration("skyrl", "register_all")),
        ("skyrl>=0.3", integration("skyrl", "register", "mine", gk.GSPO())),
        ("skyrl>=0.3", integration("backends.skyrl", "install")),
        ("torchtitan>=0.3", integration("backends.torchtitan", "install")),
        ("some-framework>=1", Replacements("some-framework", {}).install),
    ],
)
def test_missing_or_old_frameworks_are_refused(installed, says, needed, call, monkeypatch):
    def version(name):
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(errors, "version", version)
    extras = ["trl>=1.16; extra == 'trl'", "transformers>=5.1", "verl>=0.9.1; extra == 'verl'", "peft"]
    extras += [
        "skyrl>=0.3; python_version >= '3.11' and extra == 'skyrl'",
        "torchtitan>=0.3",
        "some-framework>=1",
    ]
    monkeypatch.setattr(errors, "requires", lambda name: extras)
    skyrl._utilities.cache_clear()
    # The TRL adapter checks the version when it is imported.
    monkeypatch.delitem(sys.modules, "gspo_kernels.integrations.trl", raising=False)
    with pytest.raises(IntegrationError, match=f"^[a-z-]+: {says} integration needs {re.escape(needed)}"):
        call()
