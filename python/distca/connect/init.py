"""`distca.init`: makes this process a rank of an attention group, over a transport that reaches the other ranks."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from distca import _C
from distca.arguments import is_whole
from distca.connect import hosts, nvshmem
from distca.connect.agreement import Terms, agree
from distca.connect.exchange import Exchange, gather_text, names_of, short
from distca.connect.fault_watch import FaultWatch
from distca.connect.open_files import check_open_files
from distca.connect.options import (
    attention_problem,
    chosen_attention,
    core_options,
    cpu_kernels,
    device_name,
    is_timeout,
    slot_bytes_of,
)
from distca.connect.place import Place, group_of, place_of
from distca.context import Context
from distca.errors import DistcaError, InvalidArgumentError, PeerDiedError, PeerLeftError, PeerTimeoutError
from distca.heads import LayerHeads, divided
from distca.planner.cost import CostModel
from distca.registry import open_contexts
from distca.trace.nsys import wanted as nsys_wanted
from distca.trace.trace import Link

_log = logging.getLogger("distca")
_TRANSPORTS = ("auto", "shm", "torch", "cuda-ipc", "nvshmem", "loopback")


def init(
    group: dist.ProcessGroup | None = None,
    *,
    transport: str = "auto",
    max_tokens: int,
    heads: LayerHeads,
    tensor_parallel: dist.ProcessGroup | dist.DeviceMesh | None = None,
    pipeline_parallel: dist.ProcessGroup | dist.DeviceMesh | None = None,
    heap_bytes: int | None = None,
    timeout: float = 600.0,
    name: str = "default",
    cost: CostModel | None = None,
    progress_thread: bool = False,
    link: Link | None = None,
    device: torch.device | str = "cpu",
    attention: str | None = None,
    put_ctas: int | None = None,
    nsys: bool | None = None,
) -> Context:
    """Makes this process a rank of an attention group. It is collective over the group and starts no process.

    Args:
        group: the ranks. The default is the whole world if ``torch.distributed`` is initialised, and otherwise this
            process alone, unless the environment's ``WORLD_SIZE`` says that others were started beside it.
        transport: how rows travel.
            - ``"shm"``: processes on one host.
            - ``"torch"``: processes on any hosts, by ``all_to_all_single`` over a gloo or NCCL group of its own with
              the same ranks. NCCL has not been run yet.
            - ``"cuda-ipc"``: GPUs of one host that reach each other's memory, or processes that share a GPU. The former
              has not been run yet.
            - ``"nvshmem"``: GPUs of any hosts; only processes that share a GPU have been run. Hosts also talk to each
              other over TCP, each at the address in the environment's ``DISTCA_HOST_ADDRESS``, or otherwise at its
              address in the network of ``MASTER_ADDR``.
            - ``"loopback"``: a group of one.
            - ``"auto"``: loopback for one rank. For more ranks on the CPU it is shm if all are on one host and
              otherwise torch; on CUDA it is cuda-ipc if all are on one host and otherwise nvshmem.
        max_tokens: the most rows that a rank's token tensor will have, the same on all ranks. With ``heads`` it sets
            the default size of the heap. It limits nothing else.
        heads: head shape and dtype of the attention layers, or a mapping from their windows to heads, as in `plans`;
            with ``tensor_parallel`` those of the whole model.
        tensor_parallel: the processes that share the heads of a layer with this one: its tensor group, or a mesh of
            one dimension, such as ``mesh["tp"]``. The call is then collective over all processes, and takes no
            ``group``: the context has all processes with the same rank in their tensor groups, and this one's part of
            the heads (`Heads.divided`). All these contexts may have one name. A fault in one is told to all.
        pipeline_parallel: the processes of this one's pipeline, in the order of the stages, as a group or a mesh of one
            dimension. They are in one context, and `Context.stages` says which of its ranks are which stage. This takes
            no ``group`` either.
        heap_bytes: size of the symmetric heap, which has two slots, the same on all ranks. The default
            (`default_heap_bytes`) is six times the rank's own rows of q, k, v, out and their gradients. Balanced
            batches of whole documents take a tenth of that; a document that is cut over many ranks may take more. A
            plan that needs more says how much, and ``distca plan --heap`` says it before anything runs. The CPU's heap
            takes pages only as they are used. For ``transport="nvshmem"``, but not where ``"auto"`` takes it, the
            environment's ``EXPERIMENT_NVSHMEM_BUFFER_SIZE_GB`` (in GiB) is the default if it is set. If some rank is
            reached over a network, nvshmem takes half as much again for rows on their way.
        timeout: seconds after which a silent peer that is alive is an error. The default is long, because peers compile
            and save checkpoints.
        name: the context's name. Several contexts may be open at once under different names.
        cost: the default cost model of the context's plans; visible pairs by default.
        progress_thread: with shm, copies rows on a thread of the context's own, so that they travel while this rank
            computes (`PingPong`). It pays where a core is free for that thread.
        link: emulates a network of that speed over shm or loopback, for tests and benchmarks.
        device: where the tensors are: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``. Steps on CUDA are queued on PyTorch's
            current stream and on one of the context's own. A fault there shows as NaN in what the steps return, and as
            an error of the next call or of `check`.
        attention: what computes attention on a GPU, the same on all ranks. ``"own"`` is this library's kernels,
            ``"flash"`` is ATen's flash attention. ``"auto"`` is own on compute capability 9.0, and flash on other GPUs,
            where the own kernels have not yet run. The default is the environment's ``DISTCA_ATTENTION``, or auto if
            that is not set. The CPU has one kernel. Of its instruction sets the group takes the weakest of those that
            its ranks would choose, or the one that ``DISTCA_CPU_ISA`` forces on some.
        put_ctas: on CUDA, the number of thread blocks that send rows. The default is as many as keep a link busy, by
            its bandwidth and latency.
        nsys: makes every operator of this context an NVTX range of its name (``distca::dispatch``), for Nsight Systems.
            Not yet run on a GPU. The default is on if the environment's ``ENABLE_NSYS`` is 1.

    Returns:
        The context, open until `Context.close`.

    Raises:
        DeviceError: the device, or NVTX, is not there.
        OperatingSystemError: the group takes more open files than this process may have.
        PeerDiedError, PeerTimeoutError: a rank has gone, or does not come within ``timeout``.
        InvalidArgumentError: an argument is wrong or differs between ranks, the name is in use, another rank is refused
            for such a reason of its own, ``torch.distributed`` is not initialised in one of several processes, ranks
            are on several hosts with ``"shm"``, there is no group with ``"torch"``, the heads cannot be divided, or
            tensor groups or pipelines do not cut all processes into equal parts.
    """
    everyone = _everyone(group, tensor_parallel, pipeline_parallel)
    is_part = not (tensor_parallel is None and pipeline_parallel is None)  # other contexts are made at the same time
    who = "global rank" if is_part else "rank"
    with ExitStack() as undo:
        with _told(everyone, timeout, who):
            _check_alone(transport, group, name, link)
            tensor, pipeline = (
                group_of("tensor_parallel", tensor_parallel),
                group_of("pipeline_parallel", pipeline_parallel),
            )
            if group is not None and (tensor or pipeline):
                raise InvalidArgumentError(
                    "init: group, and tensor_parallel or pipeline_parallel; with these the context's ranks follow from "
                    "all processes: leave out group"
                )
            if transport == "nvshmem" and heap_bytes is None:
                heap_bytes = nvshmem.heap_bytes_of_environment()
            cost = cost or CostModel()
            options = core_options(slot_bytes_of(max_tokens, heads, heap_bytes), timeout, cost)
        with _ranks(group, tensor, pipeline, timeout) as (place, group):
            num_ranks = len(place.global_ranks)
            everyone = everyone if is_part else group
            with _told(everyone, timeout, who):
                heads = divided(heads, place.tensor_ranks)
                options["slot_bytes"] = slot_bytes_of(max_tokens, heads, heap_bytes)
                _check_free(name)
                device, nsys = device_name(device), nsys_wanted(nsys)
                attention = chosen_attention(attention, device, heads)
                request = _Request(
                    group,
                    num_ranks,
                    transport,
                    name,
                    device,
                    attention,
                    put_ctas,
                    progress_thread,
                    link,
                    timeout,
                    options,
                )
                _check_together(request)
                kernels, kernel_problem = cpu_kernels(device)
                problem = kernel_problem or attention_problem(device, attention, heads)
            if everyone is not None and dist.get_world_size(everyone) > 1:
                kind, slot_bytes = device.partition(":")[0], options["slot_bytes"]
                terms = Terms(transport, kind, slot_bytes, attention, problem, kernels)
                isa, rank = agree(everyone, terms, timeout, who)
                request = replace(request, cpu_isa=isa)
                _log_kernel(
                    name, terms, isa, names_of([rank], None if place.is_of_all or is_part else place.global_ranks)
                )
            elif problem:
                raise InvalidArgumentError(f"init: {problem}")
            with place.named() if is_part else nullcontext():
                core, exchange = _connect(request, place)
            if exchange is not None:
                undo.callback(exchange.close)
            undo.callback(_C.remove_context, name)
        watch = None if tensor is None or place.tensor_ranks == 1 else FaultWatch(tensor, core, timeout)
        if watch is not None:
            undo.callback(watch.close)
        if watch is not None or not place.is_of_all:
            core.set_job([] if place.is_of_all else place.global_ranks, None if watch is None else watch.tell)
        emulation = None if link is None else _emulation()
        context = Context(
            core, heads, cost, exchange, place=place, watch=watch, nsys=nsys, emulation=emulation, timeout=timeout
        )
        undo.pop_all()
        return context


def _log_kernel(name: str, mine: Terms, isa: str, weakest: str) -> None:
    """Logs if the ranks agreed on another instruction set than this one would choose, because of the weakest rank."""
    if mine.cpu_kernels is not None and mine.cpu_kernels.choice != isa:
        _log.info(
            "context %r: this rank runs the CPU kernel %s in place of %s, because %s has %s",
            name,
            isa,
            mine.cpu_kernels.choice,
            weakest,
            isa,
        )


@contextmanager
def _ranks(
    group: dist.ProcessGroup | None,
    tensor: dist.ProcessGroup | None,
    pipeline: dist.ProcessGroup | None,
    timeout: float,
) -> Iterator[tuple[Place, dist.ProcessGroup | None]]:
    """This process's place, and a group of the context's ranks. Errors inside name global ranks if `group` is that."""
    if tensor or pipeline:
        place = place_of(tensor, pipeline, timeout)
        with place.group(timeout) as made:
            yield place, made
        return
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    place = Place.of_group(group)
    with place.named():
        yield place, group


def _everyone(group: Any, *parallel: Any) -> dist.ProcessGroup | None:
    """The processes that wait for this one, as far as the arguments tell."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    if group is None or any(given is not None for given in parallel):
        return dist.group.WORLD
    return group if isinstance(group, dist.ProcessGroup) else None


@contextmanager
def _told(group: dist.ProcessGroup | None, timeout: Any, who: str) -> Iterator[None]:
    """Tells the other ranks why this one cannot take part. They would wait for its terms otherwise."""
    try:
        yield
    except Exception as error:
        if group is not None and dist.get_world_size(group) > 1:
            problem = str(error).removeprefix("init: ")
            problem = problem if isinstance(error, DistcaError) else f"{type(error).__name__}: {problem}"
            with suppress(DistcaError):  # on this rank its own error is the one to raise
                agree(group, Terms("", "", 0, "", problem=problem), timeout if is_timeout(timeout) else 600.0, who)
        raise


@dataclass(frozen=True)
class _Request:
    """The arguments of `init` that say how to connect, and the options that all constructors of the core take."""

    group: dist.ProcessGroup | None
    num_ranks: int
    transport: str
    name: str
    device: str
    attention: str
    put_ctas: int | None
    progress_thread: bool
    link: Link | None
    timeout: float
    options: dict[str, Any]
    cpu_isa: str = ""
    """The instruction set of the CPU's kernel on which the ranks agree; empty if this rank chooses by itself."""

    @property
    def is_alone(self) -> bool:
        """Whether the group is this process alone, over loopback."""
        return self.num_ranks == 1 and self.transport in ("auto", "loopback")


def _check_alone(transport: str, group: object, name: object, link: Link | None) -> None:
    """Refuses arguments that are wrong by themselves."""
    if transport not in _TRANSPORTS:
        raise InvalidArgumentError(f"init: transport = {transport!r}; one of {', '.join(_TRANSPORTS)} is expected")
    if link is not None and transport == "torch":
        raise InvalidArgumentError("init: transport 'torch' has no link; use 'shm' to emulate one")
    if transport == "auto" and group is None and not (dist.is_available() and dist.is_initialized()):
        _check_not_launched()
    if not isinstance(name, str) or not name or not name.isprintable():
        raise InvalidArgumentError(f"init: name = {name!r}; a string of printable characters is expected")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise InvalidArgumentError(
            f"init: group is a {type(group).__name__}; a torch.distributed.ProcessGroup is expected, as new_group "
            "returns it"
        )


def _check_not_launched() -> None:
    """Refuses to make a group of this process alone where torchrun, or `launch`, has started others beside it."""
    started = os.environ.get("WORLD_SIZE", "1")
    if started.isdecimal() and int(started) > 1:
        raise InvalidArgumentError(
            f"init: the environment has WORLD_SIZE = {started}, as in one of several processes, and torch.distributed "
            "is not initialised: call torch.distributed.init_process_group before distca.init, or give "
            'transport="loopback" for a context of this process alone'
        )


def _check_free(name: str) -> None:
    if name in open_contexts:
        raise InvalidArgumentError(f"init: context {name!r} exists already; close it first, or choose another name")


def _check_together(r: _Request) -> None:
    """Refuses arguments that exclude each other, and a process that may not have the open files of the group."""
    if r.transport == "loopback" and r.num_ranks > 1:
        raise InvalidArgumentError(
            f"init: transport 'loopback' serves a group of one process, this group has {r.num_ranks}; use 'shm'"
        )
    if r.progress_thread and r.transport == "torch":
        raise InvalidArgumentError(
            "init: progress_thread works with 'shm' only; transport 'torch' exchanges all rows at once"
        )
    if r.transport == "torch" and r.group is None:
        raise InvalidArgumentError(
            "init: transport 'torch' exchanges rows over a process group; call torch.distributed.init_process_group "
            "first, or pass the group"
        )
    if r.transport in ("nvshmem", "cuda-ipc") and r.device == "cpu":
        raise InvalidArgumentError(f"init: transport {r.transport!r} moves rows between GPUs; give device='cuda'")
    if r.device != "cpu" and (r.transport in ("shm", "torch") or r.progress_thread or r.link is not None):
        raise InvalidArgumentError(
            f"init: device = {r.device!r} needs transport 'cuda-ipc', 'nvshmem' or, for one rank, 'loopback'; leave "
            "out progress_thread and link"
        )
    if (r.device, r.attention) == ("cpu", "flash") and not r.is_alone:
        raise InvalidArgumentError("init: attention = 'flash' on the CPU is for one rank over 'loopback'")
    if not isinstance(r.progress_thread, bool):
        raise InvalidArgumentError(f"init: progress_thread = {r.progress_thread!r}; True or False is expected")
    if r.put_ctas is not None and (not is_whole(r.put_ctas, 1) or r.device == "cpu"):
        raise InvalidArgumentError(
            f"init: put_ctas = {r.put_ctas!r} with device = {r.device!r}; at least 1 is allowed, and only on CUDA"
        )
    if r.num_ranks > 1:
        check_open_files(f"init: a group of {r.num_ranks} ranks", 2 * r.num_ranks + 8)


def _connect(r: _Request, place: Place) -> tuple[_C.Context, Exchange | None]:
    """The core's context over the transport that was asked for, or that `"auto"` stands for here."""
    made_by: Any = _C if r.link is None else _emulation()
    linked = {} if r.link is None else {"link": r.link.words}
    on_device: dict[str, Any] = {"device": r.device, "attention": r.attention, "put_blocks": r.put_ctas or 0}
    if r.is_alone:
        [core] = made_by.make_loopback(names=[r.name], **on_device, **linked, **r.options)
        return core, None
    if r.transport == "nvshmem":
        return _over_nvshmem(r)
    if r.group is not None and r.transport == "torch":
        return _over_torch(r.group, r, place)
    listener = _C.ShmListener()
    addresses = gather_text(listener.address, r.group, r.timeout) if r.group is not None else [listener.address]
    if r.group is not None and r.transport == "auto" and r.link is None and not _C.can_share_memory(addresses):
        return _over_torch(r.group, r, place) if r.device == "cpu" else _over_nvshmem(r)
    mesh: dict[str, Any] = {
        "listener": listener,
        "rank": dist.get_rank(r.group) if r.group is not None else 0,
        "addresses": addresses,
        "name": r.name,
        "connect_timeout": min(r.timeout, 120.0),
    }
    if r.device != "cpu":
        return _over_ipc(r, {**on_device, **mesh, **r.options}), None
    connect = functools.partial(made_by.connect_shm, progress_thread=r.progress_thread, cpu_isa=r.cpu_isa)
    return _on_all(r, mesh["connect_timeout"], functools.partial(connect, **linked, **mesh, **r.options)), None


def _on_all(r: _Request, seconds: float, connect: Callable[[], _C.Context]) -> _C.Context:
    """The context that `connect` makes, if it makes one on all ranks. Otherwise all raise the first cause.

    A rank waits for the others, which may still connect, for `seconds` more than the timeout.
    """
    if r.group is None or r.num_ranks == 1:
        return connect()
    made, cause = None, None
    try:
        made = connect()
    except Exception as error:
        cause = error
    echo = isinstance(cause, PeerDiedError | PeerLeftError | PeerTimeoutError)
    problem = "" if cause is None else f"{'echo' if echo else 'cause'} {type(cause).__name__}: {cause}"
    try:
        of_ranks = gather_text(short(problem), r.group, r.timeout + seconds)
    except DistcaError as error:
        if made is not None:
            _C.remove_context(r.name)
        raise cause or error from None
    failed = [(text.startswith("echo"), rank, text.partition(" ")[2]) for rank, text in enumerate(of_ranks) if text]
    if not failed:
        assert made is not None
        return made
    if made is not None:
        _C.remove_context(r.name)
    is_echo, rank, text = min(failed)
    if cause is not None and (not echo or is_echo):
        raise cause
    raise PeerLeftError(f"init: rank {rank} could not connect: {text}") from cause


def _emulation() -> ModuleType:
    """The module that makes contexts with a link. It is loaded only if a link is given."""
    from distca.testing import _emulation

    return _emulation


def _over_ipc(r: _Request, options: dict[str, Any]) -> _C.Context:
    """A context whose ranks open each other's memory, or an error on all of them."""
    is_made = False

    def connect() -> _C.Context:
        nonlocal is_made
        made = _C.connect_ipc(**options)
        is_made = True
        return made

    try:
        return nvshmem.on_all(r.group, r.timeout + options["connect_timeout"], "cuda-ipc", connect)
    except BaseException as error:
        if is_made:
            _C.remove_context(r.name)
        if isinstance(error.__cause__, DistcaError):  # what this rank itself met
            raise error.__cause__ from None
        raise


def _over_nvshmem(r: _Request) -> tuple[_C.Context, None]:
    return nvshmem.connect(r.group, r.device, r.attention, r.name, r.options, r.put_ctas), None


def _over_torch(group: dist.ProcessGroup, r: _Request, place: Place) -> tuple[_C.Context, Exchange]:
    exchange = Exchange(
        group, r.timeout, hosts.address_if_known(group, r.timeout), None if place.is_of_all else place.global_ranks
    )
    try:
        core = _C.make_torch(
            rank=dist.get_rank(group),
            num_ranks=r.num_ranks,
            all_to_all=exchange.all_to_all,
            abandon=exchange.abandon,
            name=r.name,
            cpu_isa=r.cpu_isa,
            **r.options,
        )
    except BaseException as error:
        exchange.abandon(type(error).__name__, str(error))  # the peers have connected and would wait
        raise
    return core, exchange
