"""A run whose processes share the model: pipeline stages, tensor ranks, and data ranks inside each stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig, PreTrainedModel

from distca.apps.common.memory_log import UNWATCHED
from distca.apps.common.options import ConfigError
from distca.apps.train.checkpoint import Trained, on_rank_0
from distca.apps.train.config import TrainConfig
from distca.apps.train.data import Batches
from distca.apps.train.export import export_run
from distca.apps.train.iterations import Shape, planned_iterations
from distca.apps.train.model import check_plans, checkpoint_activations, model_config, with_weights, without_weights
from distca.apps.train.optimizer import make_optimizer
from distca.apps.train.pipelined import Iteration, PipelinedModel
from distca.apps.train.split import Split, deal_layers, ranges_of
from distca.apps.train.stages import attention_of_stages, check_can_be_cut, check_has_layers, common_scores, keep
from distca.apps.train.step import BALANCED, INSIDE_STAGES, UNBALANCED
from distca.apps.train.tensor_parallel import share, tensor_plan
from distca.apps.train.ticks_report import PICTURE, draw_ticks, paragraphs
from distca.apps.train.tracing import TRACED_STEPS
from distca.connect.init import init
from distca.context import Context
from distca.errors import InvalidArgumentError
from distca.heads import Heads
from distca.integrations import hf
from distca.integrations.hf_limits import examine
from distca.pipeline import TickTime
from distca.trace.trace import Trace


class SplitRun:
    """A run whose processes share the model.

    Attributes:
        trained: what training changes on this process.
        model: this process's part of the model of transformers.
    """

    def __init__(self, config: TrainConfig, vocabulary: int) -> None:
        self._config, self._split = config, Split.of(config)
        split = self._split
        shape, checkpoint = model_config(config, vocabulary)
        whole = without_weights(config, shape)
        text = shape.get_text_config()
        self._heads, windows = _heads_of(text, config), hf.windows_of(text)
        layers = check_split(config, whole)
        scale, softcap = common_scores(whole, config.how_split)
        plan = tensor_plan(whole, split.tensor, self._heads) if split.tensor > 1 else {}
        mine = [layer for of_chunk in ranges_of(layers, split.stage, split.chunks) for layer in of_chunk]

        def cut(model: PreTrainedModel) -> None:
            if config.checkpoint_activations:
                checkpoint_activations(model)
            keep(model, mine, first=split.has_first, last=split.has_last)

        self.model = with_weights(config, shape, checkpoint, cut)
        partial = share(self.model, plan, split.mesh["tp"]) if plan else []
        attention = attention_of_stages(whole, layers, split.chunks)
        of_model = Shape(self._heads, windows, layers, attention, split.chunks)
        tied = bool(whole.all_tied_weights_keys)
        self._part = PipelinedModel(self.model, split, of_model, config, partial, tied, scale, softcap)
        optimizer, schedule = make_optimizer(self.model, config)
        self.trained = Trained(
            self.model, optimizer, schedule, clip_norm=config.clip_norm, shared=self._part, dtype=config.torch_dtype
        )
        self.data_rank, self.data_ranks = split.data_rank, split.data
        self.compared: Sequence[str] = (INSIDE_STAGES, UNBALANCED) if split.stages > 1 else (UNBALANCED,)

    def context(self) -> Context:
        """Makes the context of the run. It is collective."""
        config, mesh = self._config, self._split.mesh
        return init(
            max_tokens=config.most_rows,
            heads=self._heads,
            tensor_parallel=mesh["tp"] if self._split.tensor > 1 else None,
            pipeline_parallel=mesh["pp"],
            timeout=config.timeout,
            nsys=config.nsys,
        )

    @contextmanager
    def steps(self, batches: Batches, context: Context, how: str) -> Iterator[Iterator[Iteration]]:
        """The work of all steps, planned ahead. `how` is one of the ways in distca.apps.train.step."""
        config, shape = self._config, self._part.shape
        balance = "stages" if how == INSIDE_STAGES else how != UNBALANCED and config.balance == "on"
        with planned_iterations(config, batches, context, shape, balance=balance) as planned:
            work = (Iteration(self._part, of_step, plans, context) for of_step, plans in planned)
            yield self._kept(work) if how == BALANCED else work

    def _kept(self, iterations: Iterable[Iteration]) -> Iterator[Iteration]:
        """The same iterations. The last one is kept for the report, and the last one that is traced."""
        for number, iteration in enumerate(iterations):
            self._last = iteration
            if number < TRACED_STEPS:
                self._traced = iteration
            yield iteration

    def losses(self, batches: Batches, context: Context) -> tuple[torch.Tensor, int]:
        """The sum of this process's losses over the batches, and the number of targets of all, by forward alone."""
        loss_sum, num_targets = torch.zeros(()), 0
        balance = self._config.balance == "on"
        with planned_iterations(
            self._config, batches, context, self._part.shape, balance=balance, backward=False
        ) as planned:
            for of_step, plans in planned:
                loss_sum += self._part.run(plans, of_step, context, 1.0, UNWATCHED)[0]
                num_targets += sum(batch.num_targets for batch in of_step)
        return loss_sum, num_targets

    def export(self, run_dir: Path, folder: Path) -> None:
        """Writes the model of the run's last checkpoint to a folder. It is collective."""
        on_rank_0(lambda: export_run(run_dir, folder))

    def report(self, run_dir: Path, traces: Sequence[Trace]) -> list[str]:
        """As `Parallelism.report`."""
        everyone: list[Sequence[TickTime]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, list(self._traced.times))
        if not traces:
            return paragraphs(self._last.plans, picture=False)
        drawn = draw_ticks(run_dir / PICTURE, self._traced.plans, everyone, traces)
        return paragraphs(self._last.plans, picture=drawn)

    def notes(self) -> list[str]:
        """What a user should know of the run."""
        return []


def _heads_of(text: PreTrainedConfig, config: TrainConfig) -> Heads:
    """The heads of all layers of a language model, which share the steps of a tick."""
    try:
        heads = hf.heads_of(text, config.torch_dtype)
    except InvalidArgumentError as error:
        raise ConfigError(f"{config.how_split}: {error}") from error
    if not isinstance(heads, Heads):
        raise ConfigError(f"{config.how_split}: the model's layers differ in their heads, by window: {dict(heads)}")
    return heads


def check_split(config: TrainConfig, whole: PreTrainedModel) -> list[int]:
    """The layers of each stage's chunks.

    Args:
        config: the options of the run.
        whole: the whole model, whose tensors may be on the meta device.

    Raises:
        ConfigError: the model cannot be shared in this way. The message names the option and what is allowed.
    """
    check_plans(whole, config)
    text = whole.config.get_text_config()
    heads = _heads_of(text, config)
    if config.pipeline > 1 or config.fsdp:
        check_can_be_cut(whole, config.how_split)
    check_has_layers(whole, config.how_split)
    if config.tensor > 1:
        tensor_plan(whole, config.tensor, heads)
        for name, module in examine(whole).recurrent.items():
            raise ConfigError(
                f"--tensor is {config.tensor}, but {name} ({type(module).__name__}) carries a state from row to row: "
                "tensor ranks do not share such modules"
            )
    common_scores(whole, config.how_split)
    num_layers, least = text.num_hidden_layers, config.pipeline * config.chunks
    if num_layers % config.chunks:
        raise ConfigError(f"--chunks is {config.chunks}, must divide the model's {num_layers} layers")
    given = config.stage_layers()
    if given is not None:
        if sum(given) * config.chunks != num_layers:
            times = f" times --chunks {config.chunks}" if config.chunks > 1 else ""
            raise ConfigError(
                f"--layers-per-stage is {config.layers_per_stage}, {sum(given)} layers{times}, must be the model's "
                f"{num_layers}"
            )
        return given
    if num_layers < least:
        times = f" times --chunks {config.chunks}" if config.chunks > 1 else ""
        raise ConfigError(
            f"--pipeline is {config.pipeline}{times}: {least} chunks of layers, but the model has {num_layers} layers"
        )
    layer = sum(one.numel() for one in whole.base_model.layers[0].parameters())
    head = whole.get_output_embeddings().weight.numel()
    return deal_layers(num_layers, config.pipeline, chunks=config.chunks, layer=layer, head=head)


def check_before_start(config: TrainConfig, vocabulary: int) -> None:
    """Raises ConfigError if the model cannot be shared as the options say. It needs no other process."""
    whole = without_weights(config, model_config(config, vocabulary)[0])
    attention_of_stages(whole, check_split(config, whole), config.chunks)
