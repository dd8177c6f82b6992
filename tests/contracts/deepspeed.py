"""What publishing the slices of ZeRO 3 needs of DeepSpeed."""

from tests.contracts.contract import find, takes

takes("deepspeed:initialize", "model", "config")
find("deepspeed.runtime.engine:DeepSpeedEngine")
find("deepspeed:zero.GatheredParameters")
find("deepspeed.runtime.zero.partition_parameters:ZeroParamStatus")
