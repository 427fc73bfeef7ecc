"""For ``VERL_USE_EXTERNAL_MODULES``: importing this module installs our kernels behind verl."""

from gspo_kernels.integrations.backends import verl

verl.install()
