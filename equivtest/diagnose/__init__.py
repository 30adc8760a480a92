"""Causes from evidence: what a loop did that its plan does not say.

Comparisons leave findings in general terms (``differs.gradient``, …). A family of causes looks at
what was observed, predicts what its cause would make of it, and where the prediction holds it names
the cause and says which findings that accounts for. What no cause accounts for keeps its general
name.

* ``diagnosis``   what a family says: a cause, its evidence, the findings that it accounts for
* ``evidence``    what families look at
* ``naming``      all families, and what is left of the findings
* one module per family
"""
