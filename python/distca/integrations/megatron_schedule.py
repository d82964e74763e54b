"""`tick_schedule`: the tick table of `distca.pipeline` as a forward-backward function of Megatron-core."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from distca.errors import DistcaError, InvalidArgumentError, refusals_told
from distca.integrations import megatron_names as names
from distca.integrations.megatron_ping_pong import in_halves
from distca.pipeline import CurrentTick, Ticks, Work


class DataWithTicks(Iterator[Any]):
    """The base class of the data iterator that `tick_schedule` takes: `PlannedBatches`."""

    @abstractmethod
    def begin(self) -> Ticks:
        """The ticks of the next iteration. Raises StopIteration at the end of the data."""

    @abstractmethod
    def positioned(self, chunks: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        """In `with`, these chunks of the model know the positions of the rows of a micro-batch."""


def tick_schedule(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
    p2p_communicator: Any = None,
    pg_collection: Any = None,
    force_all_reduce: bool = False,
) -> list[Any]:
    """A forward-backward function of Megatron-core, for the place of ``get_forward_backward_func()``'s result.

    All stages do the same phase in a tick, and share its core attention. Losses, their scaling, reduction of gradients
    and ``finalize_model_grads_func`` are Megatron's.

    Args:
        forward_step_func: as Megatron's. It gets the `PlannedBatches` as its data iterator, and passes
            ``data_iterator.packed_seq_params()`` to the model.
        data_iterator: `PlannedBatches`, for virtual stages also a list of the same one.
        model: the model, or the list of this rank's chunks of it.
        num_microbatches: as in the `PlannedBatches`.
        seq_length: rows of a micro-batch, unless ``config.variable_seq_lengths``.
        micro_batch_size: 1, because rows of several documents are packed.
        forward_only: as in the `PlannedBatches`.
        decoder_seq_length, collect_non_loss_data, first_val_step, force_all_reduce: as Megatron's.
        p2p_communicator, pg_collection: as Megatron's.
        adjust_tensor_shapes_fn: None.

    Returns:
        What the loss functions return, on the last stage.

    Raises:
        InvalidArgumentError: the arguments do not go with the plans.
        DistcaError: as in `distca.core_attention`.
        StopIteration: the data has ended.
    """
    batches = _planned(data_iterator)
    chunks = model if isinstance(model, list) else [model]
    ticks = batches.begin()
    config = names.get_model_config(chunks[0])
    group = names.pipeline_group() if p2p_communicator is None else p2p_communicator.pp_group
    [shape] = names.get_tensor_shapes(
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=decoder_seq_length,
        config=config,
        tp_group=names.tensor_group(),
        cp_group=names.context_parallel_group(),
    )
    with refusals_told(ticks.context):
        given = (num_microbatches, micro_batch_size, forward_only, len(chunks), adjust_tensor_shapes_fn)
        table = ticks.plans.table
        allowed = (table.microbatches, 1, not table.has_backward, table.chunks, None)
        if given != allowed:
            raise InvalidArgumentError(
                "tick_schedule: (num_microbatches, micro_batch_size, forward_only, chunks of the model, "
                f"adjust_tensor_shapes_fn) = {given}; with these PlannedBatches {allowed} is allowed"
            )
        _check_rows(ticks, config, decoder_seq_length or seq_length)
    iteration = _Iteration(ticks, chunks, config, p2p_communicator or names.P2PCommunicator(group, config), shape)
    if config.timers is not None:
        config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)

    def forward(work: Work, kept: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return names.forward_step(
            iteration.padded(forward_step_func),
            batches,
            chunks[work.chunk],
            num_microbatches,
            iteration.inputs.get(work),
            kept,
            config,
            1,
            collect_non_loss_data=collect_non_loss_data,
            is_first_microbatch=names.check_first_val_step(first_val_step, forward_only, work.microbatch == 0),
            current_microbatch=work.microbatch,
            vp_stage=work.chunk if len(chunks) > 1 else None,
            is_last_stage=table.position(ticks.plans.stage, work.chunk) == table.stages * table.chunks - 1,
        )

    try:
        with batches.positioned(chunks), in_halves(chunks, ticks):
            kept, tokens = iteration.run(forward)
    except Exception as error:
        if not isinstance(error, DistcaError):
            ticks.context.check()  # what a peer has told is why its tensors do not come
        raise
    if config.finalize_model_grads_func is not None and not forward_only:
        config.finalize_model_grads_func(
            chunks,
            tokens if config.calculate_per_token_loss else None,
            pg_collection=pg_collection,
            force_all_reduce=force_all_reduce,
        )
    if config.timers is not None:
        config.timers("forward-backward").stop()
    return kept


class _Iteration:
    """What the ticks of an iteration leave for each other on this rank."""

    def __init__(self, ticks: Ticks, chunks: list[Any], config: Any, p2p: Any, shape: Any) -> None:
        self.ticks, self.chunks, self.config, self.p2p, self.shape = ticks, chunks, config, p2p, shape
        self.inputs: dict[Work, torch.Tensor] = {}
        self._outputs: dict[Work, torch.Tensor] = {}
        self._gradients: dict[Work, torch.Tensor] = {}

    def padded(self, forward_step_func: Callable[..., Any]) -> Callable[..., Any]:
        """The function of the user, after which a shallow stage takes part in the steps that are left."""

        def run(*args: Any) -> tuple[Any, Any]:
            output, loss_func = forward_step_func(*args)
            # Each half has taken part by itself.
            padded = self.ticks.pad(output) if self.ticks.plans.halves is None else output
            if padded is not output:  # Megatron frees outputs, which must not be views
                padded = names.make_viewless_tensor(padded, requires_grad=padded.requires_grad, keep_graph=True)
            return padded, loss_func

        return run

    def run(self, forward: Callable[[Work, list[Any]], tuple[torch.Tensor, torch.Tensor]]) -> tuple[list[Any], Any]:
        """All ticks. Returns what the loss functions have returned, and the number of tokens."""
        kept: list[Any] = []
        tokens = torch.zeros([], dtype=torch.int, device=next(self.chunks[0].parameters()).device)
        table = self.ticks.plans.table
        sync = _GradientSync(self.config, len(self.chunks), self.ticks.plans.stage)
        if table.has_backward and table.chunks > 1 and self.config.param_sync_func is not None:
            _begin_gathering(self.config.param_sync_func, self.chunks)
        with sync, contextlib.closing(iter(self.ticks)) as ticks:
            for tick in ticks:
                work, made = tick.work, None
                if work is None:
                    tick.serve()
                elif tick.phase == "forward":
                    made, count = forward(work, kept)
                    tokens += count
                    if table.has_backward:
                        self._outputs[work] = made
                    else:
                        self.inputs.pop(work, None)
                else:
                    if work.microbatch == table.microbatches - 1:
                        sync.begin_last(work.chunk)
                    given = self.inputs.pop(work, None), self._outputs.pop(work), self._gradients.pop(work, None)
                    made = names.backward_step(self.chunks[work.chunk], *given, config=self.config)
                tick.check_complete()
                self._hand_over(tick, made)
        if table.has_backward:
            sync.reduce_rest(self.chunks)
        return kept, tokens

    def _hand_over(self, tick: CurrentTick, made: torch.Tensor | None) -> None:
        """Ends a tick: sends what it made to the stage that needs it, and receives what this stage needs."""
        plans, forward = self.ticks.plans, tick.phase == "forward"
        to = (plans.stage + (1 if forward else -1)) % plans.table.stages
        is_needed = plans.table.handed_to(tick.number, to) is not None
        coming = plans.table.handed_to(tick.number, plans.stage)
        exchange = self.p2p.send_forward_recv_forward if forward else self.p2p.send_backward_recv_backward
        received = exchange(made if is_needed else None, coming is not None, self.shape)
        if forward and is_needed and plans.table.has_backward:
            names.deallocate_output_tensor(made, self.config.deallocate_pipeline_outputs)
        if coming is not None:
            (self.inputs if forward else self._gradients)[coming] = received


def _begin_gathering(param_sync_func: Any, chunks: list[Any]) -> None:
    """Begins to gather the parameters of all chunks, as Megatron's interleaved schedule does."""
    functions = param_sync_func if isinstance(param_sync_func, list) else [param_sync_func] * len(chunks)
    for function, chunk in zip(functions, chunks, strict=True):
        function(chunk.parameters())


class _GradientSync:
    """Keeps Megatron's data parallelism from reducing gradients before the last micro-batch of each chunk.

    With ``grad_sync_func`` only the first stage reduces in its last backward. The others do so after all ticks. Chunks
    have their last backward at different times, therefore each has its own ``no_sync_func``.
    """

    def __init__(self, config: Any, num_chunks: int, stage: int) -> None:
        if num_chunks > 1 and config.no_sync_func is not None and not isinstance(config.no_sync_func, list):
            raise InvalidArgumentError(
                "tick_schedule: no_sync_func is one function; a list of one for each chunk is expected"
            )
        self._no_sync, self._reduce = (
            each if isinstance(each, list) else [each] * num_chunks
            for each in (config.no_sync_func, config.grad_sync_func)
        )
        self._stage = stage
        self._held: dict[int, Any] = {}

    def __enter__(self) -> None:
        for chunk, no_sync in enumerate(self._no_sync):
            self._held[chunk] = contextlib.nullcontext() if no_sync is None else no_sync()
            self._held[chunk].__enter__()

    def __exit__(self, *error: object) -> None:
        if any(error):
            for held in self._held.values():
                held.__exit__(None, None, None)

    def begin_last(self, chunk: int) -> None:
        """Called before backward of the chunk's last micro-batch."""
        if self._reduce[chunk] is None or self._stage == 0:
            self._held.pop(chunk).__exit__(None, None, None)

    def reduce_rest(self, chunks: list[Any]) -> None:
        """Reduces what was not reduced in backward."""
        for chunk, held in self._held.items():
            held.__exit__(None, None, None)
            self._reduce[chunk](chunks[chunk].parameters())


def _planned(data_iterator: Any) -> DataWithTicks:
    given = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    if not given or not isinstance(given[0], DataWithTicks) or any(each is not given[0] for each in given):
        raise InvalidArgumentError(
            "tick_schedule: data_iterator is not a PlannedBatches. What to change: pass PlannedBatches(data_iterator, "
            "config, context=, num_microbatches=) on all processes"
        )
    return given[0]


def _check_rows(ticks: Ticks, config: Any, rows: int) -> None:
    found = {ticks.plans.rows(number) for number in range(ticks.plans.table.microbatches)}
    if found != {rows} and not config.variable_seq_lengths:
        raise InvalidArgumentError(
            f"tick_schedule: micro-batches have {sorted(found)} rows by the lengths of their documents, and seq_length "
            f"is {rows}. What to change: count padding as a document, or set variable_seq_lengths"
        )
