"""Loaded by ``import verl`` in every process (entry point group ``verl.plugins``).

Does nothing unless the process was started for the CPU (``VERL_PLATFORM=cpu``).
"""

import os

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    from verl.agentopsd.platform import cpu, patches

    patches.apply()
