"""Add-ons for training frameworks: each hands a framework's weights to a `Publisher`, by public names of both.

verl            the checkpoint engine `deltawire`, and a manager that waits for rollout servers
vllm_trainer    vLLM's trainer API: the trainer engine `deltawire`
swift           ms-swift's callback `deltawire`
megatron        where the parameters of a rank lie in the checkpoint, to publish them as shards
servers         wait until servers have a version
"""
