"""Traces in, a verdict out: what ``compare``, ``isolate`` and ``diagnose`` say, put together.

``judge`` goes through a case, ``updates`` through its updates, each on the examples that it used,
and ``update`` through one of them: ``loop`` holds its gradient against the replay, ``sources`` has
what else tells the arms apart explained, and ``rows`` writes down what was measured.
"""
