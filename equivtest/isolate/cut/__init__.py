"""Microbatches inside a large batch: found in its tensors, and run one after the other.

Two ways to find them, for two things that are known. ``axes``: a rule from the shapes that copies
of one example have, which holds for any number of examples, and so for a module that is probed with
four and cut with a thousand. ``parts``: indices from the values that the microbatches have by
themselves at the same place, which also tells rows that are chosen, packed or put in turns.
"""
