"""Traces in, a verdict out.

``judge`` goes through a case update by update, ``update`` through one of them: ``arms`` has its
traces and runs the arms beside them as far as they are asked for. What an update is judged on:

* its gradient under comparisons A, B and C (``gradient``, ``split``, ``weights``), with what is
  rounding (``noise``, ``tolerance``), and why arms are apart that are both right (``sources``);
* its losses and buffers (``beside``), skips (``skips``), clips (``clip``, ``norm_clip``,
  ``value_clip``, ``by_hand``), and parameters that nobody trains (``held``);
* what the optimizer made of the gradient (``parameters``, ``optimizer``, ``average``), and that an
  update starts where the one before ended (``continuity``);
* what the plan promises (``planned``).

What is found has a ``cause``, is put in order and in words by ``telling``, and becomes a
``verdict`` of ``tables`` (made by ``rows``) and a ``card``; ``prose`` and ``figures`` say it.
"""
