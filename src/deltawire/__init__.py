"""deltawire: the weights of a model in training, on every server that samples from it, through nothing but a bucket.

publisher = dw.Publisher("s3://runs/wordle")      # trainer
publisher.publish(model)

replica = dw.Replica("s3://runs/wordle")          # anywhere else
replica.sync(model)
"""

from .api import decode, encode
from .core.errors import DeltawireError
from .replica import Replica
from .trainer import Published, Publisher, PublishHandle

__all__ = ["DeltawireError", "PublishHandle", "Published", "Publisher", "Replica", "decode", "encode"]

__version__ = "0.1.0"
