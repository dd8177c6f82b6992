"""Imported by a process that forks replicas: libraries are loaded and kernels compiled before a replica starts."""

from __future__ import annotations

import tempfile

import numpy as np

import deltawire as dw


def rehearse() -> None:
    """Publish and apply a few small versions."""
    weights = {"weight": np.zeros((64, 64), np.uint16)}
    live = {"weight": np.zeros((64, 64), np.uint16)}
    with tempfile.TemporaryDirectory() as folder:
        with dw.Publisher(folder, encoding="packed") as publisher:
            for step in range(3):
                weights["weight"].reshape(-1)[step::97] += np.uint16(1)
                publisher.publish(weights).result(60)
        replica = dw.Replica(folder, heartbeat=0)
        for version in range(3):
            replica.sync(live, version)


rehearse()
