"""What the callback and the names of checkpoints need of transformers."""

from tests.contracts.contract import find, takes

for event in ("on_train_begin", "on_step_end", "on_log", "on_train_end", "on_init_end"):
    takes(f"transformers:TrainerCallback.{event}", "args", "state", "control", "kwargs")
find("transformers.trainer_callback:CallbackHandler")
takes("transformers:Trainer.__init__", "callbacks", "processing_class")
find("transformers:AutoModelForCausalLM.from_config")
find("deltawire.trl")
find("deltawire.huggingface")
