#!/usr/bin/env python3
"""Builds the tiny ALFWorld model from nothing but games and a scripted player.

    OMP_NUM_THREADS=1 python scripts/build_tiny_model.py --out build/tiny

1. counts where things are in the train games (the expert's prior),
2. trains a tokenizer on expert play,
3. clones the expert: prompts without skill are followed by a clumsy player, prompts with skill by a clean one,
4. plays held-out games with and without skill and writes the checkpoint with its card.

About 45 minutes on one core. The result depends on the games, the seed and the token budget, not on the clock.
"""

import sys

from tiny_model.build import main

if __name__ == "__main__":
    sys.exit(main(__doc__))
