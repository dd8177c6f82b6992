from __future__ import annotations

import torch

# models this small are only slowed down by threads that wait for each other
torch.set_num_threads(1)
