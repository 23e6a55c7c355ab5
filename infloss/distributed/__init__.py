"""The losses of a batch that is spread over the ranks of a process group.

A call walks: losses.py (the door) -> ranks.py (who shares the batch) -> header.py (do they agree?)
-> graph.py (the autograd Function) -> ring.py or gather.py (how S is covered) -> exchange.py (how
blocks travel).
"""
