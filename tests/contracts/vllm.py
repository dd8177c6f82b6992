"""What the plugin needs of vLLM, and vLLM's trainer API of its engine."""

from tests.contracts.contract import find, takes

TRANSFER = "vllm.distributed.weight_transfer"
takes(f"{TRANSFER}.factory:WeightTransferEngineFactory.register_engine", "name", "module_path_or_cls", "class_name")
takes(f"{TRANSFER}.factory:WeightTransferTrainerFactory.trainer_init", "init_info", "client", "source")
for name in ("init_transfer_engine", "start_weight_update", "finish_weight_update", "receive_weights", "shutdown"):
    find(f"{TRANSFER}.base:WeightTransferEngine.{name}")
takes(f"{TRANSFER}.clients:HTTPVLLMWeightSyncClient.__init__", "base_url")
find("vllm.v1.worker.worker_base:WorkerBase")
for name in ("reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache", "set_weight_version", "collective_rpc"):
    find(f"vllm.v1.engine.core:EngineCore.{name}")
find("vllm.v1.engine.core:EngineCoreProc._process_engine_step")
find("vllm.v1.core.sched.scheduler:Scheduler.schedule")
find("vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info")
find("vllm.model_executor.model_loader.reload.sanitize:restore_layer_refs")
find("vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm")
takes("vllm.lora.request:LoRARequest", "lora_name", "lora_int_id", "lora_path")
find("deltawire.engines.vllm.worker")
find("deltawire.engines.vllm.endpoint")
find("deltawire.engines.vllm.core")
find("deltawire.frameworks.vllm_trainer:require_hook")()
