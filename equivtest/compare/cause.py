"""What a verdict can name, each with prose: what happened, how to see it here, what to change."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """A named way in which a case is beside its plan; the value is what ``expect`` takes."""

    prose: str

    def __new__(cls, value: str, prose: str) -> Cause:
        member = str.__new__(cls, value)
        member._value_ = value
        member.prose = prose
        return member

    GRADIENT = (
        "differs.gradient",
        "The accumulated, reduced gradient is not the one that the plan's microbatches give. The "
        "tensors beyond tolerance and the weight found on each microbatch show where; look at what "
        "the loss is divided by, at what is cleared and when, and at which backward reduces.",
    )
    RANKS = (
        "differs.ranks",
        "The replicas do not hold the same gradients, parameters or buffers where they must. Check "
        "that the last backward of a group reduces, on every rank, through the wrapped model.",
    )
    PARAMETERS = (
        "differs.parameters",
        "The parameters after the update are not what the experiment's optimizer makes of this "
        "gradient and state. Check the optimizer's class and flags, and for code that writes to "
        "parameters beside it.",
    )
    STATE = (
        "differs.state",
        "State moved between updates without being declared: parameters, optimizer state or loss "
        "scale at the start of an update are not those at the end of the one before. Look for an "
        "optimizer that is built again, and for code that edits its state.",
    )
    HYPERPARAMETERS = (
        "differs.hyperparameters",
        "The optimizer's param_groups are not the experiment's at this point of its schedule. "
        "Compare learning rate, weight decay and the scheduler's unit.",
    )
    COUNTERS = (
        "differs.counters",
        "The loop ran another number of microbatches or updates than the plan has, or a state "
        "counter did not advance by one per applied update. Run one update for each group and "
        "use every microbatch in it.",
    )
    CLIP = (
        "differs.clip",
        "The clipped gradient is not what the experiment's bound makes of the gradient before it. "
        "Check the bound, which parameters are clipped (of a norm: together), and that the clip "
        "follows unscale.",
    )
    CLIP_MISSING = (
        "clip.missing",
        "The experiment clips, and the gradient is beyond the bound at the update: it was not "
        "clipped there. Call clip_grad_norm_ (clip_grad_value_, where the experiment clips by "
        "value) after the last backward, and after unscale_.",
    )
    BUFFERS = (
        "differs.buffers",
        "Buffers are not what the plan's forwards and the broadcasts that were seen make of them. "
        "Look for forwards beside the plan's, and for code that writes to buffers.",
    )
    LOSS = (
        "differs.loss",
        "The loss of the microbatches is not that of the same examples in the reference. Compare "
        "the loop's loss and inputs with the experiment's.",
    )
    EXAMPLES = (
        "differs.examples",
        "The forward received other examples than the plan deals to this replica. Feed each of "
        "the group's batches once.",
    )
    NOT_APPLIED = (
        "prec.not_applied",
        "The dtypes seen in the forward are not the precision's: the forward does not run under "
        "autocast. Enter rank.autocast() around the forward and the loss.",
    )
    NONFINITE = (
        "prec.nonfinite",
        "The gradient is not finite and the update was applied all the same. Use a scaler that "
        "skips such updates, or find the microbatch with no supervised element.",
    )
    SKIP = (
        "differs.skip",
        "The loop skipped an update whose gradient is finite, or applied one that must be skipped, "
        "or moved state with an update that was skipped. Let the scaler decide, on every rank.",
    )
    BATCHNORM = (
        "source.batchnorm",
        "BatchNorm takes its statistics from a microbatch where the large batch takes them from "
        "all of its examples. It is no mistake of the loop: keep the microbatch size when you "
        "compare runs, freeze the statistics, or use a normalisation by example (GroupNorm); "
        "SyncBatchNorm takes away what D does, not what A does. Running statistics move once a "
        "microbatch too: with a momentum they forget sooner.",
    )
    DROPOUT = (
        "source.dropout",
        "The forward draws random numbers, and a split draws others than the large batch. It is no "
        "mistake of the loop and there is nothing to change: compare runs by their means over "
        "seeds, or with p=0 number by number.",
    )
    COUPLING = (
        "source.coupling",
        "Examples see each other in the model, the loss or collate, and a split shows each of them "
        "fewer others. It is no mistake of the loop, but microbatch size is a hyperparameter then: "
        "keep it, gather across microbatches and replicas, or mask what leaks (through padding, "
        "look also at collate and at slices that treat the longest example otherwise).",
    )
    BRANCH = (
        "source.branch",
        "Rounding decides a branch (the sign before a ReLU, a tie of a maximum) that the large "
        "batch decides the other way. It is no mistake of the loop: the values are the same to the "
        "last bits, the gradient jumps there.",
    )
    ACCUMULATOR_DTYPE = (
        "source.accumulator_dtype",
        "Gradients are added up in the low dtype that this precision promises, which loses small "
        "addends. It is no mistake of the loop: keep gradients in float32 if the sum over many "
        "microbatches matters.",
    )
    REDUCTION_ORDER = (
        "source.reduction_order",
        "The sum over microbatches and replicas rounds in the order in which it is taken, beyond "
        "what its number of terms allows. It is no mistake of the loop: the same terms, added "
        "exactly, are within tolerance.",
    )
    SCALER_SKIP = (
        "source.scaler_skip",
        "A gradient overflowed at this loss scale in one arm and not in the other, and the scaler "
        "skipped the update in one of them. It is no mistake of the loop: start from a lower "
        "scale, or compare from the first update that both apply.",
    )


def is_source(cause: str) -> bool:
    """The name is of a known source of divergence, which is no fault of the loop."""
    return cause.startswith("source.")
