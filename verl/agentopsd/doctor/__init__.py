"""``python -m verl.agentopsd.doctor``: what can be checked before a run, and a plan of its memory and time.

One file per subject; each has a function that takes the configuration and returns findings. ``cost.py`` is pure
arithmetic and imports nothing of this package but ``shapes.py`` and ``gpus.py``.
"""
