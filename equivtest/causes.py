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

    @property
    def quiet(self) -> bool:
        """The numbers are right: it stands in a note and not among the findings."""
        return self in (Kind.COST, Kind.LOG)


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

    @property
    def happened(self) -> str:
        """The first sentence of the prose."""
        first, stop, _ = self.prose.partition(". ")
        return first + ("." if stop else "")

    @property
    def change(self) -> str:
        """The rest of the prose: how to see it and what to change."""
        return self.prose.partition(". ")[2]

    @classmethod
    def named(cls, name: str) -> Cause | None:
        """The cause of this name; None for a name of another version."""
        return next((cause for cause in cls if cause == name), None)

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
        "State moved without being declared: parameters, optimizer state or loss scale between "
        "updates, or an average of weights otherwise than once for each. Look for an optimizer "
        "that is built again, for code that edits its state or the model's, and for what calls "
        "update_parameters().",
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
    SKIP = (
        "differs.skip",
        "The loop skipped an update whose gradient is finite, or applied one that must be skipped, "
        "or moved state with an update that was skipped. Let the scaler decide, on every rank.",
    )

    # -- sources: what no loop can avoid

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

    # -- loss normalisation

    MEAN_OF_MEANS_ACCUM = (
        "norm.mean_of_means_accum",
        "Each microbatch was divided by its own count and the means were averaged over A, so "
        "short microbatches count too much. The weights differ from microbatch to microbatch "
        "and go as 1/count. Divide sums by the count of the whole group: (loss.total / "
        "group.count * rank.D).backward().",
    )
    LOCAL_DENOMINATOR_DP = (
        "norm.local_denominator_dp",
        "Each replica divided by its own count and the wrapper averaged over replicas, so "
        "replicas with few supervised elements count too much. The weights are alike within a "
        "replica and differ between them. All-reduce the count before the first backward and "
        "multiply by D: loss.total / group.count * rank.D.",
    )
    MEAN_OF_MEANS_BOTH = (
        "norm.mean_of_means_both",
        "Each microbatch was divided by its own count, and the means were averaged over "
        'accumulations and replicas, as torch\'s reduction="mean" does. The weights go as '
        '1/count in every cell. Use reduction="sum" and divide by the count of the whole group, '
        "all replicas: loss.total / group.count * rank.D.",
    )
    MISSING_WORLD_SIZE = (
        "norm.missing_world_size",
        "The loss was divided by the count of all replicas, and the wrapper averaged over them "
        "once more: the gradient is 1/D of the right one. Every weight is 1/D. Multiply the "
        "loss by D before backward: (loss.total / group.count * rank.D).backward().",
    )
    NON_AUTOGRAD_REDUCE = (
        "norm.non_autograd_reduce",
        "The loss was summed over the replicas by a collective that has no gradient, so its "
        "value is right and its gradient 1/D. Every weight is 1/D although the loss at backward "
        "is the global one; the events show the collective. Leave the sum to the wrapper: "
        "multiply the local share by D, and reduce loss.detach() for the log.",
    )
    DOUBLE_ACCUM_DIVISION = (
        "norm.double_accum_division",
        "The loss was divided by the number of accumulations once more than it should be: the "
        "gradient is 1/A of the right one. Every weight is 1/A. Divide once: by group.count, or "
        "by A where each microbatch gives a mean; trainers that divide by themselves want the "
        "loss undivided.",
    )
    MISSING_ACCUM_DIVISION = (
        "norm.missing_accum_division",
        "The means of the microbatches were added up and never divided by their number: the "
        "gradient is about A times too large. The weights are A where counts are equal, and go "
        "as 1/count where not. Write loss / A, or better loss.total / group.count * rank.D.",
    )
    MISSING_DIVISION = (
        "norm.missing_division",
        "The loss is a plain sum that nothing divides, so gradients grow with the number of "
        "supervised elements. Every weight is the group's count over D. Divide by that count, "
        "and multiply by D under an averaging wrapper: loss.total / group.count * rank.D.",
    )
    MISCOUNTED = (
        "norm.miscounted",
        "The denominator counts elements that are not in the loss (positions that the label "
        "shift removes, padding, ignored ones), so the gradient is too small. All weights are "
        "one number, N over N and the positions too many. Count what the loss sums over: "
        "(labels[:, 1:] != -100).sum().",
    )
    WEIGHT_DENOMINATOR_MISMATCH = (
        "norm.weight_denominator_mismatch",
        "Means over supervised elements were weighted by shares of examples, so examples with "
        "few elements count too much. The weights go as examples over supervised elements. "
        "Weigh each mean by the count that it was taken over, or divide sums: loss.total / "
        "group.count * rank.D.",
    )
    MEAN_OF_MEANS_SAMPLES = (
        "norm.mean_of_means_samples",
        "Microbatches or replicas with unequal numbers of examples were averaged as if they "
        "were equal. The weights go as 1/examples: those of the smaller ones are above 1. Weigh "
        "each mean by its number of examples, or divide sums: loss.total / group.count * "
        "rank.D.",
    )
    EMPTY_MICROBATCH = (
        "norm.empty_microbatch",
        "A microbatch without a supervised element was divided by its count of zero, and the "
        "NaN spread to every gradient. The evidence names the microbatch; its loss is NaN in "
        "the table of losses. Divide by group.count, or by max(count, 1); do not skip the "
        "microbatch, since other ranks wait for its reduction.",
    )
    SUM_CONVENTION = (
        "norm.sum_convention",
        "The loss is multiplied by D or m D by convention. All weights are that number. It is a "
        "choice and no mistake, but the learning rate has to be chosen with it, and changes "
        "whenever the number of replicas does: divide by rank.D to be free of that.",
        Kind.CONVENTION,
    )

    # -- synchronisation

    INVERTED_BOUNDARY = (
        "sync.inverted_boundary",
        "The reduction ran with another microbatch than the group's last: what came after it "
        "stayed on its own rank. Weights differ from rank to rank, and the events show the "
        "collective too early. Write: with nullcontext() if k == len(group) - 1 else "
        "model.no_sync().",
    )
    FLAG_AFTER_FORWARD = (
        "sync.flag_after_forward",
        "Whether to reduce was set between forward and backward, and DistributedDataParallel "
        "reads it in the forward: the reduction came with the wrong microbatch. The events show "
        "it there, and ranks differ. Set require_backward_grad_sync before the forward, or put "
        "the forward inside no_sync too.",
    )
    NEVER_SYNCHRONISED = (
        "sync.never",
        "No backward of the group reduced: each replica trains on its own examples. Weights are "
        "D on a rank's own microbatches and 0 on others, and the events show no collective. "
        "Call rank.model (the wrapper), not the inner module, and leave no_sync for the last "
        "microbatch.",
    )
    PARAM_REPLACED = (
        "sync.param_replaced",
        "A parameter was assigned after the model was wrapped, so the wrapper reduces the one "
        "that is gone. Only this tensor differs, on every rank by its own gradient. Replace "
        "parameters before wrapping (or wrap again): model = DistributedDataParallel(module); "
        "in-place changes such as weight.copy_() are safe.",
    )
    SOME_UNREDUCED = (
        "sync.some_unreduced",
        "Some parameters are never reduced, though others are: each replica trains them on its own "
        "examples. Look for parameters that the wrapper was told to ignore, and for those that a "
        "reduction by hand leaves out.",
    )
    STATIC_GRAPH = (
        "sync.static_graph",
        "static_graph=True and no_sync do not go together: torch stops, or leaves reductions "
        "out from the second update. The failure shows torch's assertion. Write "
        "DistributedDataParallel(module) without static_graph, or reduce with every microbatch.",
        Kind.ERROR,
    )
    EXTRA = (
        "sync.extra",
        "Every microbatch was reduced: the numbers are right, and the communication is A times "
        "what is needed. The events show a collective with each backward. Put the forward as "
        "well as the backward of all but the last microbatch inside: with model.no_sync().",
        Kind.COST,
    )

    # -- accumulation, hooks, windows

    ONLY_LAST = (
        "accum.only_last",
        "Gradients were cleared or overwritten within the group, so only what came after "
        "counts. Weights are 0 but for the last microbatches, and the events show zero_grad "
        "between backwards. Call optimizer.zero_grad() once per update: before the first "
        "microbatch, or after the update.",
    )
    STALE_CARRYOVER = (
        "accum.stale_carryover",
        "The gradient of an earlier group was not cleared and is in this one. The first update "
        "is right and each later one holds the sum of those before; the events show no "
        "zero_grad between them. Call optimizer.zero_grad() after every update, also after a "
        "skipped one.",
    )
    LEAK_BETWEEN_OPTIMIZERS = (
        "accum.leak_between_optimizers",
        "Gradients that one optimizer's backward, or an earlier group, left in another "
        "optimizer's parameters were not cleared. Only tensors of that optimizer differ. Call "
        "zero_grad() on every optimizer before its own backward, or model.zero_grad(), or "
        "freeze the other's parameters meanwhile.",
    )
    HOOK_MISSING_DIVISION = (
        "hook.missing_division",
        "The reduction sums over replicas and nobody divides: the gradient is D times the right "
        "one. Every weight is D, and a communication hook or an all_reduce by hand stands in "
        "the evidence. Divide there: bucket.buffer().div_(group.size()), since the wrapper "
        "leaves it to its hook.",
    )
    HOOK_DOUBLE_DIVISION = (
        "hook.double_division",
        "The reduced gradient was divided by D once more than it should be. Every weight is "
        "1/D, and a communication hook or an all_reduce by hand stands in the evidence. Divide "
        "once: either the bucket before the sum, or what comes back.",
    )
    HOOK_FP16_RANGE = (
        "hook.fp16_range",
        "The reduction runs in float16 and left its range: large sums became inf, small "
        "gradients 0. The evidence names the tensors. Divide before the sum "
        "(buffer.div_(group.size()).to(torch.float16)), or reduce in bfloat16 or float32.",
    )
    PARTIAL_DIVISOR = (
        "window.partial_divisor",
        "The last, shorter group was divided by the A of a full one, so its update is too "
        "small. Only that update differs, with every weight its microbatches over A. Divide by "
        "len(group), or better by group.count.",
    )
    TAIL_DROPPED = (
        "window.tail_dropped",
        "The microbatches that do not fill a group were never used. The loop has fewer updates "
        "than the plan, and the audit of examples names those missing. Run one more update for "
        'what is left, with its own denominator, or say last_group="drop" if that is meant.',
    )
    TAIL_LEAKS = (
        "window.tail_leaks",
        "What was left of one epoch was neither applied nor cleared, and joined the first group "
        "of the next. That update has microbatches of the epoch before in the audit of "
        "examples. Apply an update when the epoch ends (if (k + 1) % A == 0 or k + 1 == "
        "len(loader)), or zero_grad() there.",
    )
    MICRO_VS_UPDATE = (
        "count.micro_vs_update",
        "A horizon or limit counts microbatches where updates are meant. The loop ends A times "
        "too early, or the learning rates are those of a schedule A times as long. Count "
        "updates: total = epochs * ceil(microbatches / A).",
    )
    WRONG_DP_SIZE = (
        "count.wrong_dp_size",
        "The number of processes was taken for the number of replicas. Processes of one replica "
        "share their examples, so fewer are used than the count says. Take D from the "
        "data-parallel group: dist.get_world_size(rank.dp_group).",
    )

    # -- clip, mixed precision

    CLIP_MISSING = (
        "clip.missing",
        "The experiment clips and this loop did not: the gradient was beyond the bound at the "
        "update. Its norm stands in the evidence, and no clip stands between the last backward "
        "and the update among the events. Call clip_grad_norm_(rank.module.parameters(), "
        "rank.clip_norm) there (clip_grad_value_ for a clip by value), after unscale_.",
    )
    CLIP_PER_MICROBATCH = (
        "clip.per_microbatch",
        "The gradient was clipped after each backward and not once per update: early "
        "microbatches shrink each time. The events show a clip between backwards, and weights "
        "fall towards the first microbatch. Call clip_grad_norm_ once, after the last backward "
        "and after unscale_.",
    )
    CLIP_BEFORE_UNSCALE = (
        "clip.before_unscale",
        "The clip saw gradients that were still multiplied by the loss scale, so it shrank them "
        "to the bound over the scale. The events show the clip and no unscale before it. Call "
        "scaler.unscale_(optimizer) right before clip_grad_norm_.",
    )
    CLIP_BEFORE_SYNC = (
        "clip.before_sync",
        "Each rank clipped its own gradient before the reduction, so large replicas count too "
        "little. The events show the clip before the last collective. Reduce first, then clip "
        "the average: the last backward outside no_sync, then clip_grad_norm_.",
    )
    SCALE_DIFFERS = (
        "amp.scale_differs",
        "Ranks multiplied their loss by different scales, and one sum holds them all. The loss "
        "scales stand in the evidence by rank. Build the scaler alike on every rank, and let "
        "all ranks see the same overflow: all-reduce found_inf before scaler.update().",
    )
    UNSCALE_PER_MICRO = (
        "amp.unscale_per_micro",
        "Gradients were unscaled after each microbatch: torch's scaler raises at the second "
        "time, a hand-written one divides early microbatches again and again. Weights then fall "
        "by the scale from one microbatch to the one before. Call unscale_ once, after the last "
        "backward of the group.",
    )
    DOUBLE_UNSCALE = (
        "amp.double_unscale",
        "The gradient was divided by the loss scale twice. Every weight is 1/scale. Leave the "
        "division to scaler.step(optimizer), or call scaler.unscale_(optimizer), after which it "
        "does not divide again; do not divide by hand.",
    )
    SCALE_CHANGES_INSIDE_GROUP = (
        "amp.scale_changes_inside_group",
        "The loss scale changed between microbatches of one group, and one division is for all "
        "of them. The scales by microbatch stand in the evidence, and weights go with them. "
        "Call scaler.update() once per update, after scaler.step(optimizer).",
    )
    NOT_APPLIED = (
        "prec.not_applied",
        "The forward does not run in the precision of the case. The dtypes seen in it are not "
        "those of autocast. Enter it around forward and loss: with rank.autocast(): loss = "
        "rank.loss(rank.model, batch).",
    )
    NONFINITE = (
        "prec.nonfinite",
        "The gradient is not finite, and the update was applied all the same. The place says "
        "which microbatch it came from: one NaN or inf is in every parameter after it. Let a "
        "GradScaler skip such updates (scaler.step, scaler.update), and look there for a "
        "division by zero.",
    )
    LOW_PRECISION_ACCUMULATOR = (
        "prec.low_precision_accumulator",
        "Gradients are added up over the microbatches in a lower dtype than the case promises. "
        "Every element of the gradient is a number that this dtype has, and small addends are "
        "lost: 256 + 1 is 256 in bfloat16. Keep the sums in float32: torch.zeros_like(p, "
        "dtype=torch.float32).",
    )
    LOW_PRECISION_REDUCE = (
        "prec.low_precision_reduce",
        "Gradients are reduced over the replicas in a lower dtype than the case promises. Every "
        "element of the reduced gradient is a number that this dtype has. Take the compressing "
        "hook off the wrapper and reduce in float32, or declare the precision that is meant.",
    )
    STEPS_ON_SKIP = (
        "sched.steps_on_skip",
        "The schedule moved with an update that the scaler skipped. The learning rate is one "
        "applied update ahead from there on. Move it only if the scale did not fall: if "
        "scaler.get_scale() >= scale: scheduler.step(), with scale = scaler.get_scale() taken "
        "before scaler.update().",
    )
    RANK_LOCAL_DECISION = (
        "skip.rank_local_decision",
        "Each rank decided by itself whether to skip the update. Some applied it and some did "
        "not, and their parameters have differed since. Decide together before the update: "
        "dist.all_reduce(skip, dist.ReduceOp.MAX, group=rank.dp_group).",
    )
    UPDATE_ON_ZERO = (
        "skip.update_on_zero",
        "A gradient that was not finite was replaced by numbers, and the update applied all the "
        "same. Parameters move by old moments, which decay, and the counters advance. Leave the "
        "whole update out: if not torch.isfinite(norm): optimizer.zero_grad(); continue.",
    )

    # -- optimizer and schedule, data, layers and losses, memory

    SCHED_PER_MICROBATCH = (
        "sched.per_microbatch",
        "The scheduler moves once per microbatch. The learning rates by update are those of a "
        "schedule that runs A times too fast, and scheduler events stand between the "
        "microbatches. Move scheduler.step() behind optimizer.step(), or announce "
        'scheduler_unit="microbatch" if that is meant.',
    )
    SCHED_PER_PROCESS = (
        "sched.per_process",
        "The scheduler moves D times per update. The learning rates by update are those of a "
        "schedule that runs D times too fast. Call scheduler.step() once per update on each "
        "rank; of a framework's wrapped scheduler, switch off what multiplies by the number of "
        "processes.",
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
        "The optimizer runs after every microbatch. The card counts A times as many updates as "
        "the plan, each of one microbatch. Leave the loop over the microbatches first: "
        "optimizer.step() and zero_grad() once per group, after the last backward.",
    )
    DECAY_PER_MICROBATCH = (
        "opt.decay_per_microbatch",
        "Parameters are decayed once per microbatch. Between two microbatches of a group each "
        "is multiplied by 1 - lr * weight_decay, so later forwards see other weights. Leave the "
        "decay to the optimizer's own update, once per group.",
    )
    COUNTER_FROZEN = (
        "opt.counter_frozen",
        'The optimizer never counts its updates. The "step" of its state stands still, and bias '
        "correction stays at that of the first update: Adam moves farther than lr. Advance it "
        'with each applied update: state["step"] += 1.',
    )
    EMA_PER_MICROBATCH = (
        "state.ema_per_microbatch",
        "The average of the weights moves once per microbatch. It runs ahead of, or adds up "
        "more of, what one move per update gives. Call average.update_parameters(model) once "
        "per applied update, behind optimizer.step().",
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
        "The sampler filled up the last group with examples that were already used. They count "
        "twice in the example audit, and too much in the gradient. Give the padding weight "
        "zero, or deal unequal shares: DistributedSampler(..., drop_last=True) drops the rest "
        "instead.",
    )
    DOUBLE_SHARDING = (
        "data.double_sharding",
        "The data was dealt to the replicas twice, and part of it is never seen. Each replica "
        "reads a share of its share. Shard once: either cut the dataset by rank, or use a "
        "DistributedSampler or a framework's prepared loader, not both.",
    )
    NOT_SHARDED = (
        "data.not_sharded",
        "Every replica reads the same examples. An update uses m * A different ones where the "
        "plan has m * A * D. Deal the data: DataLoader(data, sampler=DistributedSampler(data, "
        "num_replicas=rank.D, rank=rank.dp_rank)).",
    )
    EPOCH_NOT_SET = (
        "data.epoch_not_set",
        "Every epoch has the order of the first. The ids of the second epoch are those of the "
        "first, in the same order. Call sampler.set_epoch(epoch) before each epoch.",
    )
    SAME_MASK_ACROSS_REPLICAS = (
        "rng.same_mask_across_replicas",
        "Replicas draw the same random numbers. Their generators are in one state before the "
        "forward, so dropout masks repeat over the replicas. Seed alike to build the model and "
        "by rank to train it: torch.manual_seed(seed + rank.dp_rank).",
    )
    SAME_MASK_ACROSS_MICROBATCHES = (
        "rng.same_mask_across_microbatches",
        "Microbatches draw the same random numbers for other examples. Seed once, before the first "
        "forward, and leave the generators alone in the loop.",
    )
    MODE_CHANGED = (
        "mode.changed",
        "Modules ran in another mode than model() left them in: eval() turns dropout off and lets "
        "BatchNorm use its running statistics, train() does the opposite. Put the model back into "
        "the mode it is trained in before the first forward, after every evaluation.",
    )
    GATHER_NO_GRAD = (
        "loss.gather_no_grad",
        "Features are gathered from the replicas without a gradient. Each replica's own part "
        "alone trains the encoders: their gradients are 1/D of what is right, other tensors are "
        "right. Gather with a gradient (torch.distributed.nn.functional.all_gather).",
    )
    GATHER_DOUBLE = (
        "loss.gather_double",
        "Features are gathered with a gradient, which is multiplied by D once more. The "
        "encoders' gradients are D times what is right, other tensors are right. The gather "
        "sums over the replicas and the wrapper averages: leave the factor D out.",
    )
    DEFERRED_BACKWARD = (
        "mem.deferred_backward",
        "Losses are summed, and one backward runs per group. The numbers are right, and the "
        "graphs of A microbatches are held at once: see the peak by microbatch. Call (loss / "
        "group.count * rank.D).backward() for each microbatch.",
        Kind.COST,
    )
    KEPT_GRAPH = (
        "mem.kept_graph",
        "The graph of a microbatch is kept alive after its backward. The numbers are right, and "
        "memory grows with each microbatch. Detach what is kept for a log: "
        "losses.append(loss.detach()), or loss.item().",
        Kind.COST,
    )
    LOSS_FACTOR = (
        "log.loss_factor",
        "The loss that the loop reports has a factor that the loss of the update does not have. "
        "The gradients are right: only the curve is off. Report the sum over the group's count, "
        "without the A or D that backward needs.",
        Kind.LOG,
    )
