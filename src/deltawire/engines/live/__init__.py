"""What engines with ranks share that follow a run: vLLM and SGLang each add a thin adapter (`Engine` in engine.py).

placement   checkpoint coordinates → views of runtime storage, traced through the model's own loader
learn       what post-load hooks rearrange, learned by running them on copies
shard       one rank's weights through that map: read, write, take back, prove (device, _rows: on a GPU)
decode      a delta as seen from one rank in host memory
decoder     the process that decodes a delta once, for ranks on GPUs; moves: what it cuts for each of them
layout      all ranks together
guard       what makes patching wrong although bytes look right
rank        what one rank does, when told to
node        the ranks of one node, which share files and a decoder; other nodes are called over TCP
target      all ranks as one target of a replica: stage, swap, or reload
engine      what a target needs of the engine: calls to ranks, the swap between two steps, a pause, a name
swap        what the schedulers of all engines do in a swap; salts of the prefix cache
messages    what these processes ask of each other; channel: how it gets there; arrays: files in memory that they
            share; turns: threads that yield to a loop
follower    a replica and that target, in the HTTP server: pin, state, naming the version
adapters    versions of adapters beside the base weights: followed, loaded, lent to requests, dropped
endpoint    routes, metrics and the follower's thread; samples: versions on completions; tested: versions of engines
            that were run
launch      `deltawire serve --engine …`: write a version to a folder, then start the engine; supervise: wait for it
"""
