"""The training of the lesson: shoal's small GPT, with gradients that gloo averages. Start it with

torchrun --nproc-per-node=2 train.py --out run
"""

import sys

from shoal.train.worker import main

if __name__ == "__main__":
    sys.exit(main(["grammar", "--set", "sync.inside=gloo", "--set", "train.steps=100", *sys.argv[1:]]))
