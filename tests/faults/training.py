"""Faults of the trainer."""

from faults.fault import Fault

FAULTS = [
    # ---- training
    Fault(
        "labels are not shifted",
        "python/distca/apps/train/data.py",
        "content[first + 1 : last + 1]",
        "content[first:last]",
        ("tests/apps/test_train.py::test_every_row_has_the_next_byte_of_its_document_as_target_across_all_cuts",),
    ),
    Fault(
        "the loss of a rank is a mean over its own share of targets",
        "python/distca/apps/train/step.py",
        "(loss_sum * (dist.get_world_size() / max(num_targets, 1))).backward()",
        "(loss_sum / max(num_targets, 1)).backward()",
        ("tests/integrations/test_hf.py::test_two_ranks_have_the_loss_and_gradients_of_one_process_with_sdpa",),
    ),
    Fault(
        "the gradient of a micro-batch is that of its own mean loss",
        "python/distca/apps/train/micro_batches.py",
        "yield batch, num_targets, number == size",
        "yield batch, batch.num_targets * size, number == size",
        ("tests/apps/test_train_reference.py",),
    ),
    Fault(
        "ranks do not add up the gradients of all micro-batches",
        "python/distca/apps/train/step.py",
        "over_ranks=micro_batch.last",
        "over_ranks=False",
        ("tests/apps/test_train_features.py",),
    ),
    Fault(
        "gradients are not clipped",
        "python/distca/apps/train/step.py",
        "_number(clip_grad_norm_(trained.model.parameters(), trained.clip_norm))",
        "gradient_norm(trained.model)",
        ("tests/apps/test_train_reference.py",),
    ),
    Fault(
        "norms decay with the other weights",
        "python/distca/apps/train/optimizer.py",
        '{"params": vectors, "weight_decay": 0.0}',
        '{"params": vectors}',
        ("tests/apps/test_train_reference.py",),
    ),
    Fault(
        "documents that are held out are trained on",
        "python/distca/apps/train/corpus.py",
        "return parts[0], parts[1]",
        "return self, parts[1]",
        ("tests/apps/test_train_features.py::test_documents_are_held_out_by_the_seed_and_not_trained_on",),
    ),
    Fault(
        "a rank that takes its weights from rank 0 has rotary frequencies of its own",
        "python/distca/apps/train/model.py",
        "    for (module, name), value in shared[0].items():\n",
        "    for (module, name), value in beside.items():\n",
        ("tests/apps/test_train_export.py",),
    ),
    Fault(
        "attention of a checkpointed layer runs again",
        "python/distca/apps/train/model.py",
        '{"use_reentrant": False, "context_fn": save_core_attention}',
        '{"use_reentrant": False}',
        ("tests/apps/test_train_features.py::test_attention_of_a_checkpointed_layer_runs_once",),
    ),
    Fault(
        "a resumed run reads its documents from the start",
        "python/distca/apps/train/data.py",
        "itertools.islice(packed, self._start, max(self._start, self._steps))",
        "itertools.islice(packed, self._steps - self._start)",
        (
            "tests/apps/test_train_checkpoint.py::test_a_resumed_run_takes_the_same_steps_to_the_bit_and_records_each_once",
        ),
    ),
    Fault(
        "a resumed run begins its learning rates anew",
        "python/distca/apps/train/checkpoint.py",
        'self.schedule.load_state_dict(state["schedule"])',
        "pass",
        (
            "tests/apps/test_train_checkpoint.py::test_a_resumed_run_takes_the_same_steps_to_the_bit_and_records_each_once",
        ),
    ),
    Fault(
        "the index of a checkpoint may call anything",
        "python/distca/apps/train/unpickling.py",
        "        if (module, name) not in _STANDS_FOR:\n",
        "        if (module, name) not in _STANDS_FOR:\n            return super().find_class(module, name)\n",
        ("tests/apps/test_train_untrusted.py",),
    ),
    Fault(
        "a value of a checkpoint may call anything",
        "python/distca/apps/train/unpickling.py",
        "torch.load(value, weights_only=True)",
        "torch.load(value, weights_only=False)",
        ("tests/apps/test_train_untrusted.py",),
    ),
    Fault(
        "the files of a checkpoint are not compared with its manifest",
        "python/distca/apps/train/checkpoint.py",
        "    check_digests(checkpoint, digests, names[dist.get_rank() :: dist.get_world_size()])\n",
        "",
        ("tests/apps/test_train_untrusted.py",),
    ),
    Fault(
        "dynamic RoPE keeps the frequencies of an earlier row",
        "python/distca/integrations/hf_rope.py",
        "    _forget_longest(module)\n",
        "",
        ("tests/integrations/test_hf_forward.py",),
    ),
    Fault(
        "a half of a layout has RoPE frequencies of its own",
        "python/distca/planner/halves.py",
        "half._longest_of_whole = layout.longest_document",
        "half._longest_of_whole = None",
        ("tests/integrations/test_hf_forward.py", "tests/integrations/test_hf_ping_pong.py"),
    ),
    Fault(
        "a recomputation loses the plan that is current",
        "python/distca/integrations/hf_forward.py",
        "run if here is None else functools.partial(_run, here, run)",
        "run",
        ("tests/integrations/test_hf_forward.py",),
    ),
    Fault(
        "tokens of other contents are taken from the cache",
        "python/distca/apps/train/corpus.py",
        "        content.update(of_file.digest())\n",
        "",
        ("tests/apps/test_train_corpus.py",),
    ),
    Fault(
        "tokens of another tokenizer are taken from the cache",
        "python/distca/apps/train/corpus.py",
        "{_content(source, cache)} {tokens_of} {kept_fraction!r}",
        "{_content(source, cache)} {kept_fraction!r}",
        ("tests/apps/test_train_corpus.py",),
    ),
]
