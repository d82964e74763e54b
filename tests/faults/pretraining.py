"""Faults of `pretrain_llama.py`."""

from faults.fault import Fault

TESTS = ("tests/apps/test_pretrain.py",)
FOLDER = "python/distca/apps/pretrain/"

FAULTS = [
    Fault(
        "a process of a pretraining run starts another one to save",
        FOLDER + "checkpoints.py",
        "    filesystem_async._results_queue = queue.SimpleQueue()\n",
        "",
        TESTS,
    ),
    Fault(
        "PyTorch's error of a damaged checkpoint is not caught",
        FOLDER + "checkpoints.py",
        "_FAILURES = (Exception, CheckpointException)",
        "_FAILURES = (Exception,)",
        TESTS,
    ),
    Fault(
        "other ranks wait for the first one, which could not write",
        FOLDER + "checkpoints.py",
        "        except Exception as error:\n            told",
        "        except OSError as error:\n            told",
        TESTS,
    ),
    Fault(
        "RoPE of another Llama is taken for that of Llama 3.1",
        FOLDER + "shapes.py",
        "if float(rope[name]) != of_megatron:",
        "if False:",
        TESTS,
    ),
    Fault(
        "two runs write into one folder",
        "python/distca/apps/common/run_lock.py",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        TESTS,
    ),
    Fault(
        "every data rank trains on the same slots",
        FOLDER + "data.py",
        "start * micro_batches * count + rank // context, None, count)",
        "start * micro_batches * count, None, count)",
        TESTS,
    ),
    Fault(
        "documents are cut where a slot is full alone",
        FOLDER + "data.py",
        "for begin in range(0, length, longest)",
        "for begin in range(0, length, length)",
        TESTS,
    ),
    Fault(
        "the last token of a document has a target",
        FOLDER + "data.py",
        '"loss_mask": (targets != NO_TARGET).float(),',
        '"loss_mask": torch.ones_like(targets).float(),',
        TESTS,
    ),
    Fault(
        "a resumed run begins its documents anew",
        FOLDER + "run.py",
        "self._micro_batches(self._corpus, self._start)",
        "self._micro_batches(self._corpus, 0)",
        TESTS,
    ),
    Fault(
        "the learning rate of a resumed run begins anew",
        FOLDER + "run.py",
        "        self._schedule.step(increment=state.step)\n",
        "",
        TESTS,
    ),
    Fault(
        "Megatron's interleaved schedule sends forward and backward in one batch",
        FOLDER + "shapes.py",
        "batch_p2p_comm=options.vpp_size == 1,\n        overlap_p2p_comm=options.vpp_size > 1,",
        "batch_p2p_comm=True,",
        TESTS,
    ),
    Fault(
        "attention of a micro-batch counts each pair once",
        FOLDER + "shapes.py",
        "12.0 * self.layers * width * float((positions.double() + 1).sum())",
        "6.0 * self.layers * width * float((positions.double() + 1).sum())",
        TESTS,
    ),
    Fault(
        "ranks that share a slot tell parts of documents as whole ones",
        FOLDER + "data.py",
        "told = [(self._slot << 32 | number, begin, end) for number, begin, end in segments]",
        "told = [(self._place << 32 | number, 0, end - begin) for number, begin, end in segments]",
        ("tests/apps/test_pretrain.py::test_a_slot_may_lie_on_several_ranks",),
    ),
    Fault(
        "keys of a shared document are those up to its end",
        FOLDER + "context_parallel.py",
        "documents.places[document][:end]",
        "documents.places[document]",
        TESTS,
    ),
    Fault(
        "gradients of gathered keys stay on their rank",
        FOLDER + "context_parallel.py",
        "dist.reduce_scatter(mine, parts, group=documents.group)",
        "mine = parts[documents.rank]",
        TESTS,
    ),
    Fault(
        "RoPE of an evaluation takes rows of training too",
        FOLDER + "batches.py",
        "lambda: self._positions.pop() if self._positions else None",
        'lambda: None if self._current is None else self._current["position_ids"][0]',
        TESTS,
    ),
    Fault(
        "ping-pong of a pretraining run is left out where attention is Megatron's",
        FOLDER + "options.py",
        'if self.ping_pong and self.attention != "distca":',
        'if self.ping_pong and self.attention == "flash":',
        TESTS,
    ),
    Fault(
        "a damaged line of a pretraining log is left out",
        FOLDER + "log.py",
        "except (ValueError, TypeError, KeyError):",
        "except (ValueError, TypeError):",
        TESTS,
    ),
    Fault(
        "a pretraining run goes on without its distributed optimizer",
        FOLDER + "run.py",
        '            "distributed_optimizer",\n',
        "",
        TESTS,
    ),
    Fault(
        "a mistake that a launched rank finds is a failure",
        "python/distca/apps/common/options.py",
        "(isinstance(error, RankError) and error.mistake)",
        "(isinstance(error, RankError) and error.rank < 0)",
        TESTS,
    ),
]
