"""``gspo doctor``: frameworks, their versions, and whether an adapter serves them."""

import re

import torch

from gspo_kernels import doctor
from gspo_kernels.integrations import errors

EXTRAS = ["transformers>=5.1", "trl>=1.16; extra == 'trl'", "verl>=0.9.1; extra == 'verl'", "skyrl>=0.3"]
EXTRAS += ["torchtitan>=0.3; extra == 'torchtitan'"]
NAMES = ("transformers", "trl", "verl", "skyrl", "torchtitan")


def lines(monkeypatch, **versions):
    """Return each framework's line if ``versions`` are installed."""

    def version(name):
        found = versions.get(name)
        if found is None:
            raise doctor.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(errors, "version", version)
    monkeypatch.setattr(errors, "requires", lambda name: EXTRAS)
    text = doctor.report()
    assert "{" not in text and ("no CUDA device" in text) != torch.cuda.is_available()
    return {name: re.search(rf"^  {name} +(.*)$", text, flags=re.MULTILINE)[1] for name in NAMES}


def test_versions_are_judged_by_the_extras(monkeypatch):
    """Every framework has a line, with the supported version if the installed one is not."""
    for line in lines(monkeypatch).values():
        assert re.match(r"not installed +integration for [><=.,0-9]+: pip ", line), line
    found = lines(monkeypatch, transformers="99.0", trl="1.15.0", verl="99.0", skyrl="0.5.0")
    for name, served in (("transformers", True), ("verl", True), ("trl", False), ("skyrl", True)):
        assert ("not supported" in found[name]) != served, found[name]
    assert "pip install 'gspo_kernels[trl]'" in found["trl"]
