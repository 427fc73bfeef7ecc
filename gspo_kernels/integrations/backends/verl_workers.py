"""For ``VERL_USE_EXTERNAL_MODULES``: to import this is to install our kernels behind verl."""

from gspo_kernels.integrations.backends import verl

verl.install()
