"""Lets verl run on CPUs, for which it has no platform, but accepts one; for ``VERL_USE_EXTERNAL_MODULES``.

It must be imported before verl's workers are, in every process.
"""

import os

import torch
from verl.plugin.platform import set_platform
from verl.plugin.platform.platform_cuda import PlatformCUDA


class CPU:
    """torch.cpu, and what else verl asks of a device: its name, and memory, which is 0."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        values = {"mem_get_info": (0, 0), "get_device_name": "CPU"}
        return getattr(torch.cpu, name, lambda *_, **__: values.get(name, 0))


class PlatformCPU(PlatformCUDA):
    device_name, device_module = "cpu", CPU()

    def current_device(self):
        return torch.device("cpu")

    def communication_backend_name(self):
        return "gloo"


def init_process_group(backend, *, begin=torch.distributed.init_process_group, **options):
    """Begin with gloo. verl asks for it twice, once for CPUs and once for its device."""
    begin("gloo", **options)


torch.distributed.init_process_group = init_process_group
os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # the name under which engines are registered
set_platform(PlatformCPU())
