"""Causes from evidence: what a loop did that its plan does not say.

Comparisons leave findings in general terms (``differs.gradient``, …). A family of causes looks at
what was observed, predicts what its cause would make of it, and where the prediction holds it names
the cause and says which findings that accounts for. What no cause accounts for keeps its general
name.

All families

* ``diagnosis``       what a family says: a cause, its evidence, the findings that it accounts for
* ``evidence``        what families look at
* ``naming``          all families, and what is left of the findings
* ``errors``          what torch itself stops at

The gradient, from its microbatches to the update

* ``roots``           by what each loss was weighed before its backward
* ``path``            what operations on ``.grad`` make of that
* ``prediction``      the gradient that both give, and one thing beside
* ``extras``          which things that may be
* ``weighing``        the search: what the gradient is made of; ``by_example``, of examples where
                      microbatches do not tell
* ``route``           causes on the path; ``factor``, of a factor on all of it; ``some_tensors``, of
                      what some parameters alone show
* ``normalisation``   what the loss is divided by; ``forms``, the ways that people have
* ``gradient``        the family that names what these read

Sums and clips, played on what the loop added

* ``addends``         the microbatches' own gradients, and their sums in a low dtype
* ``precision``       sums in a low dtype
* ``clamping``        clips by value that come too early
* ``clip``            clips at the wrong time
* ``nonfinite``       where a gradient that is not finite comes from
* ``gathering``       features gathered over the replicas

Schedule, optimizer, state

* ``schedule``        what moves a schedule that is off; ``moves``, how often it may be called
* ``expected``        what the experiment's optimizers and schedules would do
* ``horizon``         a schedule whose horizon is longer
* ``counter``         an optimizer that never counts
* ``decay``           decay by hand, per microbatch
* ``per_microbatch``  an update per microbatch
* ``skip``            ranks that decide apart
* ``state``           an average of the weights

Examples, random numbers, modes, costs, logs

* ``reading``         the order in which a loop read its examples
* ``data``            what a loader deals wrongly
* ``windows``         what became of the end of an epoch
* ``randomness``      random numbers that forwards share
* ``modes``           modules in another mode
* ``memory``          costs: communication and memory
* ``logs``            what the loop reports as its loss
"""
