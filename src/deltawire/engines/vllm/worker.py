"""The weight-transfer backend `deltawire` of vLLM. It creates the `Rank` of each worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.utils.torch_utils import set_default_torch_dtype

from ...errors import Misconfigured
from ..live import Rank
from . import NEXT_STEP, named
from .drafts import draft_has_own
from .guard import problems_of, require_host
from .hooks import has_powers_of_two, hooked_layers


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing: the endpoint plugin has the configuration."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    run: str = ""
    version: int | None = None


class DeltawireTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not named():
            # without the endpoint plugin it would always serve the weights it started with, and look healthy
            raise Misconfigured(
                f"the weight-transfer back end is deltawire, but nothing here follows a run: {NEXT_STEP}"
            )
        super().__init__(*args, **kwargs)
        parallel = self.parallel_config
        self.rank = Rank(
            self.model,
            parallel.data_parallel_index * parallel.world_size + parallel.rank,
            problems=lambda model: problems_of(model, self.vllm_config),
            hooks=lambda model: hooked_layers(model, has_powers_of_two(self.vllm_config.model_config.hf_config)),
            loading=self._loading,
            host=_host,
        )
        self.rank.draft_has_own = draft_has_own(self.vllm_config)

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """What vLLM sets while it loads weights and processes them."""
        config = self.vllm_config
        with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
            yield

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def finish_weight_update(self) -> None:
        pass

    def receive_weights(self, update_info: UpdateInfo) -> None:
        raise RuntimeError(
            "deltawire updates all ranks as one: POST /update_weights to a server that was started with "
            "VLLM_PLUGINS=deltawire; a single worker cannot do it"
        )

    def shutdown(self) -> None:
        pass


def _host() -> str:
    """The address at which vLLM's processes on other nodes reach those on this one: VLLM_HOST_IP, if it is set."""
    from vllm.utils.network_utils import get_ip

    return require_host(str(get_ip()))
