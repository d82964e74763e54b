"""Faults of runs whose processes share the model."""

from faults.fault import Fault

SPLIT = ("tests/apps/test_train_split.py",)
WEIGHTS = ("tests/apps/test_train_weights.py",)
STAGES = ("tests/apps/test_train_stages.py",)
MISTAKES = ("tests/apps/test_train_split_mistakes.py",)
RESUMED = ("tests/apps/test_train_split_resume.py",)

FAULTS = [
    # ---- gradients
    Fault(
        "gradients are not added up over the data ranks of a stage",
        "python/distca/apps/train/pipelined.py",
        """            add_up(whole, self.split.mesh.get_group("dp"))
""",
        "",
        SPLIT,
    ),
    Fault(
        "gradients of tied weights are not added up over the ends of a pipeline",
        "python/distca/apps/train/pipelined.py",
        """            add_up([self.model.get_input_embeddings().weight], ends)
""",
        "            pass\n",
        SPLIT,
    ),
    Fault(
        "each tensor rank has its own part of the gradient of a norm of single heads",
        "python/distca/apps/train/pipelined.py",
        """            add_up([of_names[name] for name in self.partial], self.split.mesh.get_group("tp"))
""",
        "            pass\n",
        SPLIT,
    ),
    Fault(
        "the norm of all gradients counts tied weights twice",
        "python/distca/apps/train/pipelined.py",
        "tied = self.model.get_input_embeddings() if self.is_tied and self.split.has_last else None",
        "tied = None",
        SPLIT,
    ),
    Fault(
        "the norm of all gradients counts copies of a gradient",
        "python/distca/apps/train/pipelined.py",
        "        return self.split.data * self.split.tensor // shards",
        "        return 1",
        SPLIT,
    ),
    Fault(
        "a split model is not clipped",
        "python/distca/apps/train/pipelined.py",
        "if one.grad is not None and factor < 1:",
        "if one.grad is not None and factor < 0:",
        SPLIT,
    ),
    Fault(
        "the mean of sharded gradients is taken for their sum",
        "python/distca/apps/train/pipelined.py",
        "(part.split.data if part.config.fsdp else 1) / max(num_targets, 1)",
        "1 / max(num_targets, 1)",
        SPLIT,
    ),
    Fault(
        "sharded gradients are added up in the first micro-batch alone",
        "python/distca/apps/train/pipelined.py",
        "module.set_requires_gradient_sync(tick.work.microbatch == last)",
        "module.set_requires_gradient_sync(tick.work.microbatch == 0)",
        SPLIT,
    ),
    # ---- losses
    Fault(
        "every tensor rank counts the loss",
        "python/distca/apps/train/pipelined.py",
        "            if self.split.place[2] == 0:\n",
        "            if True:\n",
        SPLIT,
    ),
    Fault(
        "an evaluation leaves out the micro-batches after the last whole step",
        "python/distca/apps/train/iterations.py",
        "        if not step:\n",
        "        if len(step) < self._size:\n",
        SPLIT,
    ),
    # ---- stages
    Fault(
        "a stage gets the layers of the stage after it",
        "python/distca/apps/train/split.py",
        "    begin = sum(layers[:stage])",
        "    begin = sum(layers) - sum(layers[stage:]) + layers[stage]",
        (*STAGES, *SPLIT),
    ),
    Fault(
        "the chunks of a stage follow each other",
        "python/distca/apps/train/split.py",
        "range(begin + chunk * sum(layers), begin + chunk * sum(layers) + layers[stage])",
        "range(begin + chunk * layers[stage], begin + (chunk + 1) * layers[stage])",
        STAGES,
    ),
    Fault(
        "layers are dealt as if the head cost nothing",
        "python/distca/apps/train/split.py",
        "        costs[-1] += head\n",
        "",
        STAGES,
    ),
    Fault(
        "all stages have the embedding",
        "python/distca/apps/train/stages.py",
        "        base.embed_tokens = None\n",
        "        pass\n",
        WEIGHTS,
    ),
    Fault(
        "the last stage has no embedding although it is tied to the head",
        "python/distca/apps/train/stages.py",
        "    if not (first or (last and tied)):\n",
        "    if not first:\n",
        (*WEIGHTS, *SPLIT),
    ),
    Fault(
        "every stage ends with the norm",
        "python/distca/apps/train/stages.py",
        "            setattr(base, norm_of(base), nn.Identity())\n        base.layers = nn.ModuleList(",
        "            pass\n        base.layers = nn.ModuleList(",
        SPLIT,
    ),
    Fault(
        "a stage takes the types of the first layers",
        "python/distca/apps/train/stages.py",
        "kinds = kinds_of(config)[layers.start : layers.stop]",
        "kinds = kinds_of(config)[: len(layers)]",
        ("tests/apps/test_train_split_forms.py",),
    ),
    Fault(
        "balance inside stages is that over all stages",
        "python/distca/pipeline/step_planner.py",
        "if self._across_stages else",
        "if True else",
        STAGES,
    ),
    # ---- weights
    Fault(
        "random weights depend on what was made before",
        "python/distca/apps/train/weights.py",
        """        torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little"))
""",
        "",
        WEIGHTS,
    ),
    Fault(
        "vectors that a constructor sets are made anew",
        "python/distca/apps/train/weights.py",
        "    if not tensor.is_meta:\n        return tensor\n",
        "",
        (*WEIGHTS, "tests/apps/every_split.py"),
    ),
    # ---- checkpoints and what is refused
    Fault(
        "a checkpoint numbers the entries of the optimizer",
        "python/distca/apps/train/checkpoint.py",
        "StateDictOptions(flatten_optimizer_state_dict=True)",
        "StateDictOptions()",
        RESUMED,
    ),
    Fault(
        "a resumed run has the default of micro-batches of its new stages",
        "python/distca/apps/train/resume.py",
        "saved = replace(saved, accumulate=saved.micro_batches)",
        "saved = replace(saved)",
        MISTAKES,
    ),
    Fault(
        "a model whose first layer does not get the embedding as it is may be cut",
        "python/distca/apps/train/stages.py",
        "return None if found.args[0] is rows else",
        "return None if True else",
        MISTAKES,
    ),
    Fault(
        "a tensor-parallel plan need not share the attention",
        "python/distca/apps/train/tensor_parallel.py",
        'style == "colwise" and "att" in name',
        'style == "colwise"',
        MISTAKES,
    ),
]
