"""Faults of the simulator."""

from faults.fault import Fault

NETWORK = "tests/simulator/test_network.py"
SIMULATE = "tests/simulator/test_simulate.py"
READING = "tests/simulator/test_reading.py"
COMMAND = "tests/apps/test_simulate_command.py"
DEVICE = "tests/simulator/test_device.py"
PROFILE = "tests/apps/test_profile_command.py"
ROOM = "python/distca/simulator/"

FAULTS = [
    Fault(
        "a port serves the work of the latest sender alone",
        ROOM + "network.py",
        "ends = sorted_work.cumsum(-1).add_(sorted_starts.unsqueeze(-2))",
        "ends = sorted_work + sorted_starts.unsqueeze(-2)",
        (NETWORK,),
    ),
    Fault(
        "a port forgets the messages of the call before",
        ROOM + "network.py",
        "self.into = torch.where(receives, received, into).reshape(-1)",
        "self.into = into.reshape(-1)",
        (NETWORK,),
    ),
    Fault(
        "credit between nodes takes no time",
        ROOM + "network.py",
        "there = None if credits is None else credits + self._between.link.latency",
        "there = None if credits is None else credits",
        (NETWORK,),
    ),
    Fault(
        "a ring begins when its first rank has come",
        ROOM + "network.py",
        "begin = starts[groups].amax(-1)",
        "begin = starts[groups].amin(-1)",
        (NETWORK,),
    ),
    Fault(
        "a ring carries a rank's own part too",
        ROOM + "network.py",
        "travels = num_bytes * (size - 1) / size",
        "travels = num_bytes",
        (NETWORK,),
    ),
    Fault(
        "results come home in backward with the bytes of forward",
        ROOM + "work.py",
        'Traffic.of(traffic.get(f"{phase}_{direction}", nothing).reshape(homes, homes), per_node)',
        'Traffic.of(traffic.get(f"forward_{direction}", nothing).reshape(homes, homes), per_node)',
        (SIMULATE,),
    ),
    Fault(
        "attention of backward takes the time of forward",
        ROOM + "work.py",
        "model = device.cost(phase)",
        'model = device.cost("forward")',
        (SIMULATE,),
    ),
    Fault(
        "a stage of 1F1B runs all its forwards first",
        ROOM + "one_f_one_b.py",
        "ahead = min(micro_batches, stages - stage - 1)",
        "ahead = micro_batches",
        (SIMULATE,),
    ),
    Fault(
        "documents are dealt to the chunk with most attention",
        ROOM + "strategies/variable_chunks.py",
        "heapq.heapreplace(heap, (pairs + length * (length + 1) // 2, tokens + length, number))",
        "heapq.heapreplace(heap, (pairs - length * (length + 1) // 2, tokens + length, number))",
        (SIMULATE,),
    ),
    Fault(
        "the MLP has two matrices",
        ROOM + "dense.py",
        "(inner, hidden), (inner, hidden)",
        "(inner, hidden)",
        (SIMULATE,),
    ),
    Fault(
        "backward of a product takes the rate of forward",
        ROOM + "device.py",
        "(self.backward_tflops or self.tflops) * 1e12",
        "self.tflops * 1e12",
        (DEVICE,),
    ),
    Fault(
        "a part takes the time of its smallest size",
        ROOM + "device.py",
        "if x <= points[0][0]:",
        "if x >= points[0][0]:",
        (DEVICE, READING),
    ),
    Fault(
        "gradients come together without being added",
        ROOM + "dense.py",
        "before + Seconds(0.0, 3 * sums)",
        "before",
        (DEVICE,),
    ),
    Fault(
        "a rank that copies rows does not wait for credit",
        ROOM + "machine.py",
        "self.wait_until(self.network.granted(granted, work.inward), call)",
        "self.wait_until(granted, call)",
        (DEVICE,),
    ),
    Fault(
        "a rank that copies rows computes meanwhile",
        ROOM + "machine.py",
        'self._advance("copy", self.now + seconds, call)',
        'self._advance("copy", self.now, call)',
        (DEVICE,),
    ),
    Fault(
        "results are taken out of the arena in no time",
        ROOM + "machine.py",
        "self._copy(step.work.homeward.received, call)",
        "self._copy(0 * step.work.homeward.received, call)",
        (DEVICE,),
    ),
    Fault(
        "a ring takes the link's bandwidth whatever is known of its size",
        ROOM + "setup.py",
        "if not self.collectives:",
        "if True:",
        (DEVICE,),
    ),
    Fault(
        "an optimizer that is not sharded takes a share of the weights",
        ROOM + "case.py",
        "weights = self.stage_weights / (self.parallelism.homes if sharded else 1)",
        "weights = self.stage_weights / self.parallelism.homes",
        (DEVICE,),
    ),
    Fault(
        "messages of one byte have their rows",
        ROOM + "network.py",
        "if self.signal_only:",
        "if False:",
        (DEVICE,),
    ),
    Fault(
        "a profile is that of the first rank",
        "python/distca/apps/profile/cluster.py",
        "return statistics.mean(of_ranks) if isinstance(first, float) else first",
        "return first",
        (PROFILE,),
    ),
    Fault(
        "a piece goes backward before the next goes forward",
        "python/distca/apps/profile/layers.py",
        "for piece, of_piece in zip(reversed(pieces), reversed(gradients), strict=True):",
        "for piece, of_piece in zip(pieces[:1], gradients[:1], strict=True):",
        (PROFILE,),
    ),
    Fault(
        "ping-pong runs without halves",
        ROOM + "strategies/ping_pong.py",
        "return Ticking(case, ping_pong=True)",
        "return Ticking(case, ping_pong=False)",
        (SIMULATE,),
    ),
    Fault(
        "a table of a cluster may have unknown keys",
        ROOM + "reading.py",
        "unknown = sorted(set(content) - set(fields))",
        "unknown = sorted(set(content) - set(content))",
        (READING,),
    ),
    Fault(
        "a model that does not fit the memory is simulated",
        ROOM + "simulate.py",
        "if case.state_bytes > cluster.device.memory:",
        "if case.state_bytes > 1e3 * cluster.device.memory:",
        (READING, COMMAND),
    ),
    Fault(
        "results are not marked as modelled",
        ROOM + "simulate.py",
        'return {"kind": "modelled", **values, "memory": dataclasses.asdict(self.memory)}',
        'return {"kind": "measured", **values, "memory": dataclasses.asdict(self.memory)}',
        (COMMAND,),
    ),
]
