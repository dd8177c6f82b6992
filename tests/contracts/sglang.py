"""What the plugin needs of SGLang."""

from tests.contracts.contract import find

find("sglang.srt.plugins.hook_registry:HookRegistry")
find("sglang.srt.plugins.hook_registry:HookType")
find("sglang.srt.entrypoints.http_server:app")
find("sglang.srt.managers.io_struct:PauseGenerationReqInput")
find("sglang.srt.managers.io_struct:ContinueGenerationReqInput")
find("sglang.srt.managers.io_struct:DumperControlReqOutput")
find("sglang.srt.lora.lora_registry:LoRARef")
find("sglang.srt.entrypoints.openai.serving_base:OpenAIServingBase")
find("sglang.srt.model_loader.utils:set_default_torch_dtype")
find("sglang.srt.runtime_context:get_parallel")
find("deltawire.engines.sglang.core")
find("deltawire.engines.sglang.endpoint")
find("deltawire.engines.sglang.engine")
