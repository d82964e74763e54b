"""Contexts: a rank's membership in an attention group."""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from distca import _C, hosts, nvshmem
from distca import nsys as ranges
from distca.agreement import Terms, agree
from distca.arguments import check_type, is_number, is_whole
from distca.cost import CostModel
from distca.errors import DeviceError, InvalidArgumentError, refusals_told
from distca.exchange import Exchange, gather_text
from distca.heads import Heads
from distca.open_files import check_open_files
from distca.recording import Recording
from distca.trace import Link, Trace, from_core

_log = logging.getLogger("distca")
_EXTENT_ALIGNMENT = 64
_LEAST_HEAP = 8 << 20  # pages of the CPU's heaps are taken as they are used, and GPUs have as much to spare
_TRANSPORTS = ("auto", "shm", "torch", "cuda-ipc", "nvshmem", "loopback")
_loopback_groups = itertools.count()
_contexts: dict[str, Context] = {}
SLOTS = 2
"""Steps that may be under way at once: the heap is divided into as many slots."""
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Context:
    """One rank's membership in an attention group, with its heap and step counter. Made by :func:`init`.

    Attributes:
        name: its name in the process's registry, which ``core_attention`` takes.
        rank, num_ranks: this rank, and the ranks of the group.
        transport: name of the transport in use.
        device: where its tensors are.
        attention: what computes attention, in words.
        plan_independent: whether out, lse and dq of a row have the same bits whatever the plan and the number of ranks;
            on a GPU dq only where it is asked to be deterministic.
        slot_bytes: bytes of one slot's arena: the capacity that plans must keep to.
        heads: the head shape it was made for.
        cost: the cost model that its plans are made with.
        nsys: whether its operators are NVTX ranges.
    """

    def __init__(
        self,
        core: _C.Context,
        heads: Heads,
        cost: CostModel,
        exchange: Exchange | None = None,
        *,
        nsys: bool = False,
    ) -> None:
        self._core: _C.Context | None = core
        self._exchange = exchange
        self.name: str = core.name
        self.rank = core.rank
        self.num_ranks = core.num_ranks
        self.transport = core.transport
        self.device = core.device
        self.attention, self.plan_independent = core.attention(
            heads.q, heads.kv, heads.dim, heads.value_dim, heads.dtype_number
        )
        self.slot_bytes = core.slot_bytes
        self._last_step = 0
        self.heads = heads
        self.cost = cost
        self.nsys = nsys
        self._callers: dict[int, tuple[int | str | None, int | None]] | None = None  # of traced steps
        self.backward_steps: weakref.WeakSet[Any] = weakref.WeakSet()  # those under way of distca.steps
        _contexts[self.name] = self
        _log.info(
            "context %r: rank %d of %d over %s on %s, a heap of %s bytes, attention by %s",
            self.name,
            self.rank,
            self.num_ranks,
            self.transport,
            self.device,
            f"{SLOTS * self.slot_bytes:,}",
            self.attention,
        )

    @property
    def step(self) -> int:
        """Steps taken so far; forward and backward of a call are one each."""
        return self._last_step if self._core is None else self._core.step

    def abandon(self, step: int, why: str = "") -> None:
        """Says that this rank will not finish a step that it has dispatched, unless it has; `why` ends the message.

        A fault: this context is poisoned and the peers are told, so that they do not wait.
        """
        if self._core is not None:
            self._core.abandon(step, why)

    def check(self) -> None:
        """Raises the fault that this rank has met, if any; waits for nothing.

        For steps on a GPU, which are queued: what goes wrong there is reported by the next call, or by this.

        Raises:
            PeerDiedError, PeerLeftError, PeerTimeoutError, PlanMismatchError: the fault.
            ContextPoisonedError: one reported before.
        """
        if self._core is not None:
            self._core.check()

    def record(self, *, headroom: float = 2.0, rounds: int = 2) -> Recording:
        """Steps inside ``with context.record() as recording`` are recorded, to be done again and again with new plans.

        For contexts whose steps are queued: on CUDA (with ``attention="own"``; not yet run on a GPU),
        or on threads that stand for a GPU's streams (`loopback` with ``streams``). All else that PyTorch does inside is
        done at once, and once; unless a CUDA graph is captured, of which the recorded steps then are a part::

            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph), context.record() as recording:
                loss = step_of_training()
            recording.replan(plans)  # before each launch
            graph.replay()

        Keep recording and context as long as the graph. Ranks of one process that share a GPU meet (at a barrier) after
        they have recorded, for making the recording's memory may wait for the whole device.

        Args:
            headroom: the room in the tables of each operation, over what the plans inside need, 1 to 1000. Above 1, and
                where that is little, there is room for 256 elements.
            rounds: in how many rounds results may come home to this rank, 1 to 1000, where the plans inside have fewer.

        Raises:
            InvalidArgumentError: on entering: over transports whose steps are the host's, while another recording is
                open or a step under way. On leaving: where a step was dispatched and not collected, or there is none.
        """
        return Recording(self, headroom, rounds)

    def start_trace(self) -> None:
        """From now on this rank's steps are recorded, until `stop_trace`; see `take_trace`.

        By the host's clock: of steps on a GPU, which are queued, it is when they were queued.
        """
        if self._core is not None:
            self._callers = {}
            self._core.set_trace(True)
            self.take_trace()

    def stop_trace(self) -> None:
        """Ends what `start_trace` has begun; what was not taken is dropped."""
        if self._core is not None:
            self._core.set_trace(False)
            self.take_trace()
            self._callers = None

    def note_caller(self, step: int, layer: int | str | None, half: int | None = None) -> None:
        """Says for the trace, if there is one, which layer and which half of ping-pong a step of attention is of."""
        if self._callers is not None:
            self._callers[step] = layer, half

    def take_trace(self) -> Trace:
        """What was recorded since `start_trace`, or since the call before. Not while a step runs on another thread."""
        if self._core is None:
            return Trace(self.rank, [], [])
        callers = self._callers or {}
        if self._callers is not None:
            self._callers = {}
        recorded = self._core.take_trace(), self._core.take_transfers(), self._core.take_copies()
        return from_core(self.rank, *recorded, callers)

    def close(self) -> None:
        """Leaves the group and frees the heap. May be called again."""
        if _contexts.get(self.name) is self:
            del _contexts[self.name]
            _C.remove_context(self.name)
            self._last_step = self.step
            self._core = None  # the last reference but that of a step under way
            if self._exchange is not None:
                self._exchange.close()
            _log.info("context %r: closed after %d steps", self.name, self._last_step)

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Context({self.name!r}, rank {self.rank} of {self.num_ranks}, {self.transport})"


def check() -> None:
    """Raises the first fault that a context of this process has met; waits for nothing. See `Context.check`.

    Steps on a GPU are queued: after ``torch.cuda.synchronize()`` this says whether what they returned may be used.
    """
    for context in list(_contexts.values()):
        context.check()


def get_context(name: str = "default") -> Context | None:
    """The open context of that name, or None."""
    return _contexts.get(name)


def find_context(context: Context | str) -> Context | None:
    """The context, or the open one of that name. Raises InvalidArgumentError for anything else."""
    if isinstance(context, Context):
        return context
    if not isinstance(context, str):
        raise InvalidArgumentError(
            f"context is a {type(context).__name__}; a distca.Context, or the name of one, is expected"
        )
    return _contexts.get(context)


def collective(function: _Function) -> _Function:
    """A function with a keyword argument `context`, each call of which is collective, also one that is refused."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        context = kwargs.get("context", "default")
        with refusals_told(find_context(context)):
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


@atexit.register
def _close_all() -> None:
    """A process that ends in good order leaves its groups; only one that dies looks dead to its peers."""
    for context in list(_contexts.values()):
        context.close()


def init(
    group: dist.ProcessGroup | None = None,
    *,
    transport: str = "auto",
    max_tokens: int,
    heads: Heads,
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
    """Makes this process a rank of an attention group. Collective over the group; starts no process.

    Args:
        group: the ranks; by default all of ``torch.distributed`` where that is initialised, else this process alone.
        transport: ``"shm"`` (processes on one host), ``"torch"`` (processes on any hosts: ``all_to_all_single`` over a
            gloo or NCCL group of its own with the same ranks; NCCL has not yet been run), ``"cuda-ipc"`` (GPUs of one
            host that reach each other's memory, or processes that share a GPU; not yet run on a GPU), ``"nvshmem"``
            (GPUs of any hosts; not yet run on a GPU), ``"loopback"`` (a group of one), or ``"auto"``, which is loopback
            for a single rank; for tensors on the CPU shm where all ranks are on one host, else torch; on CUDA
            cuda-ipc where all ranks are on one host, else nvshmem. With nvshmem hosts also talk to each other over TCP,
            each at its address in the network of ``MASTER_ADDR`` or the one in its environment's
            ``DISTCA_HOST_ADDRESS``.
        max_tokens: the most rows this rank's token tensor will have; with ``heads`` it sets the heap's default size.
        heads: head shape and dtype of the attention layers.
        heap_bytes: size of the symmetric heap, the same on all ranks; two slots. By default `default_heap_bytes`, six
            times the rank's own rows of q, k, v, out and their gradients: balanced batches of whole documents take a
            tenth of that, a document that is cut over many ranks may take more. A plan that needs more says how much,
            and ``distca plan --heap`` says it before anything runs. On the CPU pages are taken as they are used. With
            ``"nvshmem"`` the environment's ``EXPERIMENT_NVSHMEM_BUFFER_SIZE_GB`` (in GiB) takes its place where it is
            not given, and half as much again is taken for rows on their way where a rank is reached over a network.
        timeout: seconds after which a living but silent peer is an error. Long by default: peers compile and save.
        name: several contexts may live at once, each under its own name.
        cost: cost model of the plans.
        progress_thread: with shm, copy rows on a thread of the context's own, so that they travel while this rank
            computes (`PingPong`). Worth it where there is a core to spare for it.
        link: emulates a network of that speed over shm or loopback, for tests and benchmarks.
        device: where the tensors are: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``; CUDA was not yet run on a GPU. Steps are
            queued there on PyTorch's current stream and one of the context's own: a fault is NaN in what they return
            and an error of the next call, or of `check`.
        attention: what computes attention on a GPU, the same on all ranks: ``"own"``, the library's kernels for compute
            capability 9.0, not yet verified on a GPU; ``"flash"``, ATen's flash attention; or ``"auto"``, which is
            flash until own kernels are verified. None: as the environment's ``DISTCA_ATTENTION`` says, by default
            auto. The CPU has one kernel.
        put_ctas: on CUDA, the thread blocks that send rows, which attention does without; by default as many as keep a
            link busy, by its bandwidth and latency.
        nsys: makes every operator of this context an NVTX range of its name (``distca::dispatch``), for Nsight Systems;
            not yet run on a GPU. None: where the environment's ``ENABLE_NSYS`` is 1.

    Raises:
        DeviceError: for a device or NVTX that is not there.
        OperatingSystemError: where the group takes more open files than this process may have.
        PeerDiedError, PeerTimeoutError: where a rank is gone, or does not come within ``timeout``.
        InvalidArgumentError: for wrong arguments, a name in use, arguments that differ between ranks, ranks on
            several hosts with ``"shm"``, or no group with ``"torch"``.
    """
    if transport not in _TRANSPORTS:
        raise InvalidArgumentError(f"init: transport = {transport!r}; one of {', '.join(_TRANSPORTS)} is expected")
    if link is not None and transport == "torch":
        raise InvalidArgumentError("init: transport 'torch' has no link; use 'shm' to emulate one")
    device = _device_name(device)
    nsys = ranges.wanted(nsys)
    if not isinstance(name, str):
        raise InvalidArgumentError(f"init: name = {name!r}; a string is expected")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise InvalidArgumentError(
            f"init: group is a {type(group).__name__}; a torch.distributed.ProcessGroup, as of new_group, is expected"
        )
    if name in _contexts:
        raise InvalidArgumentError(f"init: context {name!r} exists already; close it first, or choose another name")
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    num_ranks = dist.get_world_size(group) if group is not None else 1
    if transport == "loopback" and num_ranks > 1:
        raise InvalidArgumentError(
            f"init: transport 'loopback' serves a group of one process, this group has {num_ranks}; use 'shm'"
        )
    if progress_thread and transport == "torch":
        raise InvalidArgumentError("init: progress_thread is for 'shm'; transport 'torch' exchanges rows all at once")
    if transport == "torch" and group is None:
        raise InvalidArgumentError(
            "init: transport 'torch' exchanges rows over a process group; call torch.distributed.init_process_group "
            "first, or pass the group"
        )
    if transport in ("nvshmem", "cuda-ipc") and device == "cpu":
        raise InvalidArgumentError(f"init: transport {transport!r} moves rows between GPUs; give device='cuda'")
    if device != "cpu" and (transport in ("shm", "torch") or progress_thread or link is not None):
        raise InvalidArgumentError(
            f"init: device = {device!r} goes with transport 'cuda-ipc', 'nvshmem' or, for one rank, 'loopback', and "
            "without progress_thread and link"
        )
    attention = _C.chosen_attention(attention, device)
    if (device, attention) == ("cpu", "flash") and (num_ranks > 1 or transport not in ("auto", "loopback")):
        raise InvalidArgumentError("init: attention = 'flash' on the CPU is for one rank over 'loopback'")
    if put_ctas is not None and (put_ctas < 1 or device == "cpu"):
        raise InvalidArgumentError(f"init: put_ctas = {put_ctas} with device = {device!r}; at least 1, on CUDA")
    if num_ranks > 1:
        check_open_files(f"init: a group of {num_ranks} ranks", 2 * num_ranks + 8)
    cost = cost or CostModel()
    if transport == "nvshmem" and heap_bytes is None:
        heap_bytes = nvshmem.heap_bytes_of_environment()
    options = _core_options(_slot_bytes(max_tokens, heads, heap_bytes), timeout, cost)
    words = None if link is None else link.words
    problem = _attention_problem(device, attention, heads)
    if group is not None and num_ranks > 1:
        agree(group, Terms(transport, device.partition(":")[0], options["slot_bytes"], attention, problem), timeout)
    elif problem:
        raise InvalidArgumentError(f"init: {problem}")
    if transport in ("auto", "loopback") and num_ranks == 1:
        core = _C.make_loopback(
            names=[name],
            link=words,
            device=device,
            attention=attention,
            streams=device != "cpu",
            put_blocks=put_ctas or 0,
            **options,
        )[0]
        return Context(core, heads, cost, nsys=nsys)
    if transport == "nvshmem":
        return Context(nvshmem.connect(group, device, attention, name, options, put_ctas), heads, cost, nsys=nsys)
    if group is not None and transport == "torch":
        return _over_torch(group, name, heads, cost, options, nsys)
    listener = _C.ShmListener()
    rank = dist.get_rank(group) if group is not None else 0
    addresses = gather_text(listener.address, group, timeout) if group is not None else [listener.address]
    if group is not None and transport == "auto" and link is None and not _C.share_memory(addresses):
        if device != "cpu":
            return Context(nvshmem.connect(group, device, attention, name, options, put_ctas), heads, cost, nsys=nsys)
        return _over_torch(group, name, heads, cost, options, nsys)
    mesh: dict[str, Any] = {
        "listener": listener,
        "rank": rank,
        "addresses": addresses,
        "name": name,
        "connect_timeout": min(timeout, 120.0),
    }
    if device != "cpu":
        core = _C.connect_ipc(device=device, attention=attention, put_blocks=put_ctas or 0, **mesh, **options)
    else:
        core = _C.connect_shm(progress_thread=progress_thread, link=words, **mesh, **options)
    return Context(core, heads, cost, nsys=nsys)


def _over_torch(
    group: dist.ProcessGroup, name: str, heads: Heads, cost: CostModel, options: dict[str, Any], nsys: bool
) -> Context:
    timeout = options["timeout"]
    exchange = Exchange(group, timeout, hosts.address_if_known(group, timeout))
    core = _C.make_torch(
        rank=dist.get_rank(group),
        num_ranks=dist.get_world_size(group),
        all_to_all=exchange.all_to_all,
        abandon=exchange.abandon,
        name=name,
        **options,
    )
    return Context(core, heads, cost, exchange, nsys=nsys)


def loopback(
    num_ranks: int,
    *,
    max_tokens: int,
    heads: Heads,
    heap_bytes: int | None = None,
    timeout: float = 600.0,
    cost: CostModel | None = None,
    reorder_seed: int | None = None,
    progress_thread: bool = False,
    link: Link | None = None,
    device: torch.device | str = "cpu",
    attention: str | None = None,
    replay: tuple[CostModel, CostModel] | None = None,
    streams: bool = False,
    hosts: int = 1,
) -> list[Context]:
    """Makes a whole group in this process, for tests; each context must be used from a thread of its own.

    On CUDA the ranks share a GPU, and each must work on a stream of its own (``with torch.cuda.stream(...)``), for on a
    common one they would wait for each other. Autograd runs the backward of all threads' graphs on a GPU in one thread,
    where ranks would wait for each other for ever: run them under
    ``torch.autograd.set_multithreading_enabled(False)``.

    Args:
        num_ranks: number of ranks.
        max_tokens, heads, heap_bytes, timeout, cost, device, attention: as for :func:`init`.
        reorder_seed: delays and reorders puts in an order drawn from this seed.
        progress_thread: as for :func:`init`, though nothing else is shared memory between processes here.
        link: emulates a network of that speed.
        replay: what forward and backward of attention cost, with ``unit_ns``; attention is not computed then, but every
            rank sleeps as long, so that schedules of many ranks run on few cores. Rows travel; what comes out is
            whatever was in memory.
        streams: queue every step on two threads a rank that stand for a GPU's streams, as steps on CUDA always are,
            instead of running it in the calling thread. ``reorder_seed``, ``progress_thread``, ``link`` and ``replay``
            do not go with it.
        hosts: on the CPU with ``streams``: ranks stand for those of so many hosts, on which they lie in turn. Between
            hosts rows are packed and carried by a thread that stands for a network.

    Raises:
        InvalidArgumentError: for wrong arguments, or such that do not go together.
    """
    device = _device_name(device)
    if streams or device != "cpu":
        if (reorder_seed, link, replay, progress_thread) != (None, None, None, False):
            raise InvalidArgumentError(
                "loopback: steps that are queued on streams have no reorder_seed, progress_thread, link or replay"
            )
        streams = True
    if hosts != 1 and not (streams and device == "cpu"):
        raise InvalidArgumentError(f"loopback: hosts = {hosts} goes with streams, on the CPU")
    attention = _C.chosen_attention(attention, device)
    if problem := _attention_problem(device, attention, heads):
        raise InvalidArgumentError(f"loopback: {problem}")
    group = next(_loopback_groups)
    cost = cost or CostModel()
    cores = _C.make_loopback(
        names=[f"loopback/{group}/{rank}" for rank in range(num_ranks)],
        reorder_seed=reorder_seed,
        progress_thread=progress_thread,
        link=None if link is None else link.words,
        device=device,
        attention=attention,
        replay=None if replay is None else _replayed(*replay),
        streams=streams,
        hosts=hosts,
        **_core_options(_slot_bytes(max_tokens, heads, heap_bytes), timeout, cost),
    )
    return [Context(core, heads, cost) for core in cores]


def _replayed(forward: CostModel, backward: CostModel) -> tuple[_C.CostModel, float, _C.CostModel, float]:
    if forward.unit_ns is None or backward.unit_ns is None:
        raise InvalidArgumentError("loopback: replay takes cost models that were measured: unit_ns is None")
    return forward.core, forward.unit_ns, backward.core, backward.unit_ns


def _attention_problem(device: str, attention: str, heads: Heads) -> str:
    """Why the own kernels, if they are chosen, do not compute there; empty where they do."""
    if device == "cpu" or attention != "own":
        return ""
    shape = heads.q, heads.kv, heads.dim, heads.value_dim, heads.dtype_number
    problem = _C.own_attention_problem(*shape, int(device.removeprefix("cuda:")))
    return problem and f"attention = 'own': {problem}"


def _device_name(device: torch.device | str) -> str:
    """``"cpu"``, or ``"cuda:"`` and the number of a device that is there."""
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgumentError(f"init: device = {device!r}; {error}") from None
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgumentError(f"init: device = {str(device)!r}; cpu and cuda are supported")
    if device.type == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        raise DeviceError(f"init: device = {str(device)!r}, but PyTorch finds no CUDA device here")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise DeviceError(f"init: device = {str(device)!r}; there are {torch.cuda.device_count()}")
    return f"cuda:{index}"


def _core_options(slot_bytes: int, timeout: float, cost: CostModel) -> dict[str, Any]:
    """What every transport's constructor in ``_C`` takes."""
    if not is_number(timeout, 0.0, float("inf")):
        raise InvalidArgumentError(f"init: timeout = {timeout!r}; a number of seconds is expected")
    check_type("init", "cost", cost, CostModel, 'distca.CostModel.load("pairs")')
    return {
        "slot_bytes": slot_bytes,
        "timeout": float(timeout),
        "cost": cost.core,
    }


def default_heap_bytes(max_tokens: int, heads: Heads) -> int:
    """The heap of a rank of so many tokens, in bytes, where no other size is asked for.

    Six times its own rows of q, k, v, out and their gradients (at least 8 MiB), whatever the number of ranks.
    """
    row_bytes = 2 * (heads.q + heads.kv) * (heads.dim + heads.value_dim) * heads.dtype.itemsize
    return max(6 * max_tokens * row_bytes, _LEAST_HEAP)


def _slot_bytes(max_tokens: int, heads: Heads, heap_bytes: int | None) -> int:
    """Bytes of one slot, of the heap that is asked for or the default one."""
    if not is_whole(max_tokens, 1):
        raise InvalidArgumentError(f"init: max_tokens = {max_tokens!r}; at least 1 is expected")
    check_type("init", "heads", heads, Heads, "distca.Heads(q=8, kv=2, dim=64)")
    if heap_bytes is None:
        heap_bytes = default_heap_bytes(max_tokens, heads)
    if not is_whole(heap_bytes, 1):
        raise InvalidArgumentError(f"init: heap_bytes = {heap_bytes!r}; a number of bytes is expected")
    slot_bytes = heap_bytes // SLOTS // _EXTENT_ALIGNMENT * _EXTENT_ALIGNMENT
    if slot_bytes <= 0:
        raise InvalidArgumentError(f"init: heap_bytes = {heap_bytes}; at least {SLOTS * _EXTENT_ALIGNMENT} are needed")
    return slot_bytes
