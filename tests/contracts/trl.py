"""What deltawire.trl calls of TRL, and TRL of it."""

from deltawire.trl import BucketTransfer
from tests.contracts.contract import calls_only, find, takes

GRPO, DISTILLATION = "trl.experimental.async_grpo", "trl.experimental.async_distillation"
for package, module, trainer in (
    (GRPO, "async_grpo_trainer", "AsyncGRPOTrainer"),
    (DISTILLATION, "async_distillation_trainer", "AsyncDistillationTrainer"),
):
    takes(f"{package}:{trainer}.__init__", "weight_transfer", "rollout_worker", "processing_class", "peft_config")
    calls_only(f"{package}.{module}:WeightTransferProtocol", BucketTransfer)
    find(f"{package}.{module}:{trainer}._streaming_iter")
    takes(f"{package}.vllm_client:VLLMClient.__init__", "server_url", "server_timeout")
    find(f"{package}.vllm_client:VLLMClient.wait_for_server_ready")
find(f"{GRPO}.async_grpo_trainer:AsyncGRPOTrainer._sync_weight_merged")
find(f"{GRPO}.async_grpo_trainer:validate_lora_for_vllm_sync")
LOOP = f"{GRPO}.async_rollout_worker:_AsyncRolloutLoop"
takes(f"{LOOP}._post", "path", "payload")
takes(f"{LOOP}._generate_one", "group_id")
takes(f"{LOOP}._score_group", "group")
find(f"{LOOP}._retry")
find(f"{LOOP}.run")
find(f"{GRPO}.async_rollout_worker:AsyncRolloutWorker._loop_cls")
takes(f"{GRPO}.async_rollout_worker:AsyncRolloutWorker.update_model_version", "model_version")
find("deltawire.engines.trl_worker")
