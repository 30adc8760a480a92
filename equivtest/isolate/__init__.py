"""The known sources of divergence: each is detected, isolated while it stays on, and explained.

``explaining`` looks for each source in the ``scene`` of an update and says what it found
(``explained``): what is left of the distance with each set of sources isolated (``remaining``), and
what share each has of it (``attribution``). A source of the forward has ``detect(scene, found)``,
which gives its ``isolation``:

=================  ================================================  ========================
source             isolated by                                       made of
=================  ================================================  ========================
``batchnorm``      statistics by microbatch in the large batch       ``normalising``, ``cut``
``dropout``        random numbers by example in both arms            ``random``
``coupling``       a module, the loss or collate by microbatch       ``probe``, ``cut``
``branch``         decisions of the split in the large batch         ``deciding``, ``cut``
=================  ================================================  ========================

Sources behind the forward are told from what the arms have given already: ``accumulator_dtype`` and
``reduction_order`` by the same addends in exact sums (``sums``, and ``loop_sums`` for both of
them), ``scaler_skip`` by imposing the skip of one arm on the other (``skip``).

``cut`` finds microbatches in the large batch and runs what is given on one after the other;
``probe`` runs a few examples to see which see each other, and where; ``random`` gives each example
its own numbers; ``skip`` says where an update overflows. ``places`` and ``calls`` name the modules
that a forward runs through.
"""
