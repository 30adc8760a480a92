"""What a verdict can name, each with prose: what happened, how to see it here, what to change."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """What naming a cause means for the status."""

    FAULT = "fault"
    SOURCE = "source"
    """Explained: no loop can avoid it."""
    CONVENTION = "convention"
    """Explained: a choice, named and not condemned."""
    COST = "cost"
    """The numbers are right: equivalent, with a note."""
    LOG = "log"
    """Only what the loop reports is off: equivalent, with a note."""
    ERROR = "error"
    """torch itself stops: error, and the message names the cause."""


class Cause(StrEnum):
    """A named way in which a case is beside its plan; the value is what ``expect`` takes.

    Attributes:
        kind: what it means for the status.
        prose: what happened, in the first sentence; then how to see it here and what to change.
    """

    kind: Kind
    prose: str

    def __new__(cls, value: str, prose: str, kind: Kind = Kind.FAULT) -> Cause:
        member = str.__new__(cls, value)
        member._value_ = value
        member.prose = prose
        member.kind = kind
        return member

    # -- in general terms

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
        Kind.SOURCE,
    )
    DROPOUT = (
        "source.dropout",
        "The forward draws random numbers, and a split draws others than the large batch. It is no "
        "mistake of the loop and there is nothing to change: compare runs by their means over "
        "seeds, or with p=0 number by number.",
        Kind.SOURCE,
    )
    COUPLING = (
        "source.coupling",
        "Examples see each other in the model, the loss or collate, and a split shows each of them "
        "fewer others. It is no mistake of the loop, but microbatch size is a hyperparameter then: "
        "keep it, gather across microbatches and replicas, or mask what leaks (through padding, "
        "look also at collate and at slices that treat the longest example otherwise).",
        Kind.SOURCE,
    )
    BRANCH = (
        "source.branch",
        "Rounding decides a branch (the sign before a ReLU, a tie of a maximum) that the large "
        "batch decides the other way. It is no mistake of the loop: the values are the same to the "
        "last bits, the gradient jumps there.",
        Kind.SOURCE,
    )
    ACCUMULATOR_DTYPE = (
        "source.accumulator_dtype",
        "Gradients are added up in the low dtype that this precision promises, which loses small "
        "addends. It is no mistake of the loop: keep gradients in float32 if the sum over many "
        "microbatches matters.",
        Kind.SOURCE,
    )
    REDUCTION_ORDER = (
        "source.reduction_order",
        "The sum over microbatches and replicas rounds in the order in which it is taken, beyond "
        "what its number of terms allows. It is no mistake of the loop: the same terms, added "
        "exactly, are within tolerance.",
        Kind.SOURCE,
    )
    SCALER_SKIP = (
        "source.scaler_skip",
        "A gradient overflowed at this loss scale in one arm and not in the other, and the scaler "
        "skipped the update in one of them. It is no mistake of the loop: start from a lower "
        "scale, or compare from the first update that both apply.",
        Kind.SOURCE,
    )

    # -- Loss normalisation

    MEAN_OF_MEANS_ACCUM = (
        "norm.mean_of_means_accum",
        "Each microbatch divides by its own count and the means are averaged over the "
        "accumulations. Divide each microbatch's sum by the count of the whole group "
        "(group.count), known before its first forward.",
    )
    LOCAL_DENOMINATOR_DP = (
        "norm.local_denominator_dp",
        "Each replica divides by its own count, and the wrapper averages over replicas. All- "
        "reduce the count before the first backward and multiply by D, which the wrapper divides "
        "by.",
    )
    MEAN_OF_MEANS_BOTH = (
        "norm.mean_of_means_both",
        "Each microbatch divides by its own count, and the means are averaged over accumulations "
        "and replicas. Divide each microbatch's sum by the count of the whole group, over all "
        "replicas, and multiply by D.",
    )
    MISSING_WORLD_SIZE = (
        "norm.missing_world_size",
        "The loss is divided by the count of all replicas, and the wrapper averages over them "
        "once more. Multiply the loss by D, or divide by the count per replica that the group has "
        "on average.",
    )
    NON_AUTOGRAD_REDUCE = (
        "norm.non_autograd_reduce",
        "The loss was reduced over the replicas by a collective without a gradient: its value is "
        "the global loss, its gradient 1/D of it. Leave the sum to the wrapper, multiply the "
        "local sum by D, and reduce a detached copy for the log.",
    )
    DOUBLE_ACCUM_DIVISION = (
        "norm.double_accum_division",
        "The loss is divided by the number of accumulations once more than it should be. Divide "
        "once: by the count of the group, or by A where each microbatch gives a mean of equal "
        "counts.",
    )
    MISSING_ACCUM_DIVISION = (
        "norm.missing_accum_division",
        "The means of the microbatches are added up and never divided by their number. Divide by "
        "A, or better divide each microbatch's sum by the count of the whole group.",
    )
    MISSING_DIVISION = (
        "norm.missing_division",
        "The loss is summed and divided by no count. Divide each microbatch's sum by the count of "
        "the whole group, and multiply by D under an averaging wrapper.",
    )
    MISCOUNTED = (
        "norm.miscounted",
        "The denominator counts elements that are not in the loss (positions that the label shift "
        "removes, padding, ignored ones). Count what the loss sums over: the targets after the "
        "shift that are not ignored.",
    )
    WEIGHT_DENOMINATOR_MISMATCH = (
        "norm.weight_denominator_mismatch",
        "Means over supervised elements are weighted by shares of examples. Weigh a mean by the "
        "count that it was taken over, or divide sums by the group's count.",
    )
    MEAN_OF_MEANS_SAMPLES = (
        "norm.mean_of_means_samples",
        "Replicas or microbatches with unequal numbers of examples count alike. Weigh each mean "
        "by its number of examples, or divide sums by the group's.",
    )
    EMPTY_MICROBATCH = (
        "norm.empty_microbatch",
        "A microbatch without a supervised element was divided by its count of zero. Divide by "
        "the group's count, or by max(count, 1), and keep the microbatch in the reduction.",
    )
    SUM_CONVENTION = (
        "norm.sum_convention",
        "The loss is multiplied by D or m D by convention. It is a choice: the learning rate has "
        "to be chosen with it, and changes with the number of replicas.",
        Kind.CONVENTION,
    )

    # -- Synchronisation

    INVERTED_BOUNDARY = (
        "sync.inverted_boundary",
        "The reduction runs with another microbatch than the last one of the group. Leave no_sync "
        "for the last microbatch of the group, not for the first.",
    )
    FLAG_AFTER_FORWARD = (
        "sync.flag_after_forward",
        "Whether to reduce was set between forward and backward, and DistributedDataParallel "
        "reads it in the forward. Put the forward inside no_sync as well, or set the flag before "
        "it.",
    )
    NEVER_SYNCHRONISED = (
        "sync.never",
        "No backward of the group reduces: each replica keeps its own gradient. Call the wrapped "
        "model (rank.model), not the inner one, and leave no_sync for the last microbatch.",
    )
    PARAM_REPLACED = (
        "sync.param_replaced",
        "A parameter was replaced after the model was wrapped: the wrapper reduces the one that "
        "is gone. Change parameters before wrapping, or wrap again; in-place changes are safe.",
    )
    STATIC_GRAPH = (
        "sync.static_graph",
        "static_graph=True and no_sync do not go together. Leave static_graph out, or reduce with "
        "every microbatch.",
        Kind.ERROR,
    )
    EXTRA = (
        "sync.extra",
        "Every microbatch was reduced: the value is right, the communication A times what is "
        "needed. Put forward and backward of all microbatches but the last inside no_sync.",
        Kind.COST,
    )

    # -- Accumulation, hooks, windows

    ONLY_LAST = (
        "accum.only_last",
        "Gradients are cleared or overwritten within the group: only the last microbatch counts. "
        "Clear once per update, after it or before the first microbatch.",
    )
    STALE_CARRYOVER = (
        "accum.stale_carryover",
        "The gradient of an earlier group was not cleared and is in this one. Call zero_grad once "
        "for every update, for every parameter, also after a skipped one.",
    )
    LEAK_BETWEEN_OPTIMIZERS = (
        "accum.leak_between_optimizers",
        "The backward for one optimizer leaves gradients in parameters of another. Clear the "
        "other optimizer's gradients before its own backward, or freeze its parameters meanwhile.",
    )
    HOOK_MISSING_DIVISION = (
        "hook.missing_division",
        "The reduction sums over replicas and is not divided by D. Divide by D in the "
        "communication hook, or by hand after the all-reduce.",
    )
    HOOK_DOUBLE_DIVISION = (
        "hook.double_division",
        "The reduced gradient is divided by D once more than it should be. Divide once: the "
        "bucket of a communication hook, or the average of an all-reduce, may be divided already.",
    )
    HOOK_FP16_RANGE = (
        "hook.fp16_range",
        "The reduction runs in float16 and leaves its range. Divide before the sum, reduce in "
        "bfloat16 or float32.",
    )
    PARTIAL_DIVISOR = (
        "window.partial_divisor",
        "The last, shorter group was divided by the A of a full one. Divide by the number of "
        "microbatches that the group has, or by its count.",
    )
    TAIL_DROPPED = (
        "window.tail_dropped",
        "The examples that do not fill a group were never used. Run one more update for what is "
        'left, or say last_group="drop" if that is meant.',
    )
    TAIL_LEAKS = (
        "window.tail_leaks",
        "What is left of one epoch was neither applied nor cleared and joins the first group of "
        "the next. Apply an update at the end of the epoch, or clear the gradients there.",
    )
    MICRO_VS_UPDATE = (
        "count.micro_vs_update",
        "A counter or horizon counts microbatches where updates are meant. Count applied updates: "
        "horizons, stops and logs all change by A otherwise.",
    )
    WRONG_DP_SIZE = (
        "count.wrong_dp_size",
        "The number of processes was taken for the number of replicas. Take D from the data- "
        "parallel process group: processes that share examples are one replica.",
    )

    # -- Clip, mixed precision

    CLIP_PER_MICROBATCH = (
        "clip.per_microbatch",
        "The gradient is clipped after each backward, and not once per update. Clip once, after "
        "the last backward of the group and after unscale_.",
    )
    CLIP_BEFORE_UNSCALE = (
        "clip.before_unscale",
        "The clip saw gradients that were still multiplied by the loss scale. Call "
        "scaler.unscale_(optimizer) before the clip.",
    )
    CLIP_BEFORE_SYNC = (
        "clip.before_sync",
        "Each rank clipped its own gradient before the reduction. Reduce first, then clip the "
        "average.",
    )
    SCALE_DIFFERS = (
        "amp.scale_differs",
        "Ranks multiply their loss by different scales. Build the scaler alike on every rank and "
        "let all ranks see the same overflow.",
    )
    UNSCALE_PER_MICRO = (
        "amp.unscale_per_micro",
        "Gradients were unscaled after each microbatch, so that early ones are divided several "
        "times. Unscale once, after the last backward of the group.",
    )
    DOUBLE_UNSCALE = (
        "amp.double_unscale",
        "The gradient was divided by the loss scale twice. Unscale once: scaler.step() does it "
        "where unscale_() was not called.",
    )
    SCALE_CHANGES_INSIDE_GROUP = (
        "amp.scale_changes_inside_group",
        "The loss scale changed between microbatches of one group. Call scaler.update() once per "
        "update.",
    )
    LOW_PRECISION_ACCUMULATOR = (
        "prec.low_precision_accumulator",
        "Gradients are added up in a lower dtype than the case promises. Keep the sum in float32, "
        "or in the dtype of the parameters.",
    )
    LOW_PRECISION_REDUCE = (
        "prec.low_precision_reduce",
        "Gradients are reduced over replicas in a lower dtype than the case promises. Reduce in "
        "float32, or declare the precision that is meant.",
    )
    STEPS_ON_SKIP = (
        "sched.steps_on_skip",
        "The update was skipped and the schedule moved all the same. Move the scheduler only if "
        "the scale did not fall, or count attempted updates.",
    )
    RANK_LOCAL_DECISION = (
        "skip.rank_local_decision",
        "Each rank decided by itself whether to skip the update. Reduce the decision over the "
        "ranks before the update.",
    )
    UPDATE_ON_ZERO = (
        "skip.update_on_zero",
        "A gradient that is not finite was replaced by numbers and the update applied all the "
        "same. Skip the update: moments decay and counters advance otherwise.",
    )

    # -- Optimizer and schedule, data, layers and losses, memory

    SCHED_PER_MICROBATCH = (
        "sched.per_microbatch",
        "The scheduler moves once per microbatch. Call scheduler.step() once per applied update, "
        'or announce scheduler_unit="microbatch".',
    )
    SCHED_PER_PROCESS = (
        "sched.per_process",
        "The scheduler moves D times per update. Call it once per update on each rank; a wrapped "
        "scheduler may multiply by the number of processes.",
    )
    SCHED_BEFORE_UPDATE = (
        "sched.before_update",
        "The scheduler moves before the update that it should follow, and the first value of the "
        "schedule is never used. Call optimizer.step() first and scheduler.step() after it.",
    )
    SCHED_NEVER = (
        "sched.never",
        "The schedule never moves: every update runs with its first value. Call scheduler.step() "
        "once per applied update, on the scheduler of the optimizer that runs.",
    )
    SCHED_WRONG_UNIT = (
        "sched.wrong_unit",
        "The scheduler moves in another unit than the experiment announces. Move it in that unit, "
        "or announce the one that is meant (scheduler_unit).",
    )
    UPDATE_PER_MICROBATCH = (
        "opt.update_per_microbatch",
        "The optimizer runs after every microbatch. Run it once per group, after the last "
        "backward.",
    )
    DECAY_PER_MICROBATCH = (
        "opt.decay_per_microbatch",
        "Parameters are decayed once per microbatch. Leave the decay to the optimizer's update.",
    )
    COUNTER_FROZEN = (
        "opt.counter_frozen",
        "The optimizer's state never counts its updates. Advance the counter of the state with "
        "each applied update: bias correction depends on it.",
    )
    EMA_PER_MICROBATCH = (
        "state.ema_per_microbatch",
        "The average of the weights moves once per microbatch. Update the average once per "
        "applied update.",
    )
    EMA_BEFORE_UPDATE = (
        "state.ema_before_update",
        "The average of the weights takes up the weights before the update: it is one update "
        "behind. Call update_parameters() after optimizer.step().",
    )
    EMA_NEVER = (
        "state.ema_never",
        "The average of the weights never moves. Call update_parameters() once per applied update.",
    )
    PADDING_DUPLICATES = (
        "data.padding_duplicates",
        "The sampler padded the data with examples that were already in it. Weigh what is padded "
        "by zero, or let the last group be shorter.",
    )
    DOUBLE_SHARDING = (
        "data.double_sharding",
        "The data was dealt to replicas twice, and part of it is never seen. Shard once: in the "
        "sampler or in the loader.",
    )
    NOT_SHARDED = (
        "data.not_sharded",
        "Every replica reads the same examples. Deal the data over replicas, with a "
        "DistributedSampler for example.",
    )
    EPOCH_NOT_SET = (
        "data.epoch_not_set",
        "The order of the second epoch is that of the first. Call sampler.set_epoch(epoch) at the "
        "start of each epoch.",
    )
    SAME_MASK_ACROSS_REPLICAS = (
        "rng.same_mask_across_replicas",
        "Replicas draw the same random numbers. Seed by rank for what must differ over replicas, "
        "and alike only for what must be the same.",
    )
    SAME_MASK_ACROSS_MICROBATCHES = (
        "rng.same_mask_across_microbatches",
        "Microbatches draw the same random numbers for other examples. Seed once, before the first "
        "forward, and leave the generators alone in the loop.",
    )
    GATHER_NO_GRAD = (
        "loss.gather_no_grad",
        "Features are gathered from the replicas without a gradient: only the own part trains the "
        "encoder. Gather with torch.distributed.nn.functional.all_gather, or put the own features "
        "back into the gathered ones and multiply by D.",
    )
    GATHER_DOUBLE = (
        "loss.gather_double",
        "Features are gathered with a gradient and the loss is multiplied by D once more. "
        "Multiply by D or sum the gradients in the gather, not both.",
    )
    DEFERRED_BACKWARD = (
        "mem.deferred_backward",
        "Losses are summed and one backward runs per group: the graphs of A microbatches are held "
        "at once. Call backward for each microbatch.",
        Kind.COST,
    )
    KEPT_GRAPH = (
        "mem.kept_graph",
        "The graph of a microbatch is kept alive after its backward. Detach what is kept: "
        "loss.detach(), output.detach(), or .item() for a log.",
        Kind.COST,
    )
    LOSS_FACTOR = (
        "log.loss_factor",
        "The loss that the loop reports carries a factor that the loss of the update does not. "
        "Report the sum over the group's count; the gradients are right.",
        Kind.LOG,
    )


def kind_of(cause: str) -> Kind:
    """Kind of the cause of this name."""
    return next(known.kind for known in Cause if known == cause)
