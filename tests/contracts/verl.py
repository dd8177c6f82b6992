"""What verl's checkpoint engine is called with."""

from tests.contracts.contract import find, takes

engine = find("deltawire.frameworks.verl:DeltawireEngine")
# it checks the hook where it is made
engine(1, run="memory://contract")
takes("verl.checkpoint_engine:CheckpointEngineManager.__init__", "config")
takes("verl.workers.engine_workers:ActorRolloutRefWorker.update_weights", "global_steps", "mode")
find("verl.checkpoint_engine:CheckpointEngineManager.update_weights")
find("verl.workers.config:CheckpointEngineConfig")
