"""What is beside the plan, and what is rounding; and the words and tables of a verdict.

``arms`` has the traces of one update and runs the arms beside them as far as they are asked for.
What an update is judged on (``equivtest.judging`` puts it together):

* its gradient under comparisons A, B and C (``gradient``, ``split``, ``weights``), with what is
  rounding (``noise``, ``tolerance``);
* its losses and buffers (``beside``), skips (``skips``), clips (``clip``, ``norm_clip``,
  ``value_clip``, ``by_hand``), and parameters that nobody trains (``held``);
* what the optimizer made of the gradient (``parameters``, ``optimizer``, ``implementation``,
  ``average``), and that an update starts where the one before ended (``continuity``);
* what the plan promises (``planned``).

What is found has a ``cause``, is put in order and in words by ``telling``, and becomes a
``verdict`` of ``tables`` and a ``card``; ``prose`` and ``figures`` say it.
"""
