"""Starts Python worker processes as copies of one that has imported everything already.

A run on one machine has seven worker processes; each would import torch, transformers, verl and Ray anew: seconds of
processor time and hundreds of MiB each. Instead one process (:mod:`.server`) imports them once. Ray and
``multiprocessing`` start :mod:`.launcher` where they would start Python; it asks the server for a fork, hands over its
arguments, environment and files, and stands for the fork until that ends. :mod:`.preload` starts the server.
"""
