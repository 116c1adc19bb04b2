"""Loaded by ``import verl`` in every process (entry point group ``verl.plugins``).

Gives every run a weight channel of its own, takes logits of sampled tokens alone and log-probs of packed tokens in
chunks; the rest only in processes started for the CPU (``VERL_PLATFORM=cpu``).
"""

import importlib
import os
import traceback

try:
    importlib.import_module("verl.agentopsd.platform.weight_channel").install()
    importlib.import_module("verl.agentopsd.platform.action_logits").install()
    importlib.import_module("verl.agentopsd.platform.packed_logprobs").install()
except Exception:
    traceback.print_exc()  # verl logs a plugin's failure at debug level only
    raise

if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    try:
        importlib.import_module("verl.agentopsd.platform.cpu")  # registers itself
        importlib.import_module("verl.agentopsd.platform.patches").apply()
    except Exception:
        traceback.print_exc()  # verl logs a plugin's failure at debug level only
        raise
