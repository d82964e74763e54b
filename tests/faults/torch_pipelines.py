"""Faults of the schedule of ticks in torch.distributed.pipelining."""

from faults.fault import Fault

SCHEDULE = "tests/integrations/test_torch_pipelining.py"
FILE = "python/distca/integrations/torch_pipelining.py"

FAULTS = [
    Fault(
        "stages without work do not serve in PyTorch's runtime",
        FILE,
        "            self._ticks.current.serve()",
        "            pass",
        (SCHEDULE,),
    ),
    Fault(
        "nobody asks whether the last tick of a schedule is over",
        FILE,
        "            next(self._iteration, None)",
        "            pass",
        (SCHEDULE,),
    ),
    Fault(
        "a schedule keeps the actions of its first table",
        FILE,
        "        if self._table == list(table):",
        "        if self._table:",
        (SCHEDULE,),
    ),
    Fault(
        "a schedule evaluates with backward",
        FILE,
        "[each for each in order if each.computation_type.name in _EVALUATION]",
        "order",
        (SCHEDULE,),
    ),
    Fault(
        "errors of stages are told as PyTorch's",
        FILE,
        "            if isinstance(error.__cause__, DistcaError):",
        "            if isinstance(error, DistcaError):",
        (SCHEDULE,),
    ),
    Fault(
        "a rank that waits for tensors is not told why",
        FILE,
        "                ticks.context.check()",
        "                pass",
        (SCHEDULE,),
    ),
    Fault(
        "stages connect though one rank is missing",
        FILE,
        "        self._agreed = False",
        "        self._agreed = True",
        (SCHEDULE,),
    ),
    Fault(
        "ticks may be run twice",
        FILE,
        "        if ticks is self._ticks:",
        "        if ticks is None:",
        (SCHEDULE,),
    ),
    Fault(
        "the stages may be other processes than those of the plans",
        FILE,
        "        if pipeline != self._processes:",
        "        if len(pipeline) != len(self._processes):",
        (SCHEDULE,),
    ),
    Fault(
        "stages may come in any order",
        FILE,
        "        if found != expected:",
        "        if set(found) != set(expected):",
        (SCHEDULE,),
    ),
    Fault(
        "micro-batches may have any number of rows",
        FILE,
        "[n for n in rows if all(n not in each.shape for each in tensors)]",
        "[n for n in rows if not all(each.shape for each in tensors)]",
        (SCHEDULE,),
    ),
    Fault(
        "stages may hand over tensors without gradients",
        FILE,
        "if any(each.dtype.is_floating_point > each.requires_grad for each in tensors):",
        "if not tensors:",
        (SCHEDULE,),
    ),
    Fault(
        "a schedule trains without gradients",
        FILE,
        "if table.has_backward != backward or torch.is_grad_enabled() < backward:",
        "if table.has_backward != backward:",
        (SCHEDULE,),
    ),
    Fault(
        "a name that PyTorch lacks is found out later",
        FILE,
        "        return [attrgetter(name)(owner) for name in names]",
        "        return [attrgetter(name)(owner) for name in names[:5]]",
        (SCHEDULE,),
    ),
]
