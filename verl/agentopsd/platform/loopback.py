"""Keeps a run without a GPU on this machine: Ray, and everything that asks Ray for an address, binds to 127.0.0.1."""

from __future__ import annotations

import os

VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def loopback_only() -> None:
    """Makes the next local ``ray.init`` of this process use the loopback address.

    Ray replaces a ``_node_ip_address`` of 127.0.0.1 by the machine's own address and listens on all interfaces, except
    where clusters are switched off, as they are on macOS and Windows: switch them off here. Ray reads the variable
    when it is imported, which has happened.
    """
    from ray._private import ray_constants

    os.environ[VARIABLE] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
