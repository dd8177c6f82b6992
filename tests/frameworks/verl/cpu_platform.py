"""verl's platform for a machine without an accelerator, named by VERL_USE_EXTERNAL_MODULES: verl itself has none."""

from __future__ import annotations

from types import ModuleType

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform


class PlatformCPU(PlatformCUDA):
    device_name = "cpu"

    @property
    def device_module(self) -> ModuleType:
        return torch.cpu

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def empty_cache(self) -> None:
        pass

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def communication_backend_name(self) -> str:
        return "gloo"

    def is_ipc_supported(self) -> bool:
        return False


set_platform(PlatformCPU())
